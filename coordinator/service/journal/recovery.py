"""Rebuilds the state at a coordinator's start: the newest snapshot, then later journal records."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from common.decoding import UNREADABLE
from common.errors import ConfigError, ProtocolError
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.nodes.lost_records import span
from coordinator.engine.record import Record, decode_record, follow, replay
from coordinator.engine.state.events import RecordsLost
from coordinator.engine.state.settings import EngineSettings
from coordinator.service.ports import JournalPort, Lost, SnapshotsPort

log = logging.getLogger(__name__)


class Saved(Struct, frozen=True, kw_only=True):
    """A snapshot: the state, and the settings that decided it until then.

    Those settings decided the records after it too, whatever the file contains by now.
    """

    settings: EngineSettings
    state: msgspec.Raw
    journal: str
    """The identity of the journal that its sequence counts in."""
    number: int
    """Number of the last record that is in it."""


class Rebuilt(Struct, frozen=True, kw_only=True):
    """The engine after the last record."""

    engine: Engine
    records: int
    """Number of journal records taken: those after the newest snapshot."""
    snapshot_sequence: int
    """Sequence of the last record in that snapshot; 0: there was none."""
    number: int
    """Number of the last record in the engine."""
    last_number: int
    """Number of the last record known to be written."""
    losses: tuple[RecordsLost, ...] = ()
    """Records that are gone; the state lacks their effects."""


class _Base(Struct, frozen=True):
    """Where replay begins."""

    engine: Engine
    sequence: int = 0
    number: int = 0
    is_of_this_journal: bool = True
    """Whether records after this sequence are the records after this number."""


class _Replaying:
    """The engine during replay of the journal, and the missing records so far."""

    def __init__(self, base: _Base, journal: JournalPort, progress: Callable[[], None]) -> None:
        self.engine = base.engine
        self.number = base.number
        self.records = self.mismatches = self.first_mismatch = 0
        self.losses: list[RecordsLost] = []
        self._progress = progress
        self._journal = journal
        self._gone: Lost | None = None

    async def run(self, from_sequence: int) -> None:
        """Replay every record from a sequence on that is later than the last one taken."""
        if from_sequence < self._journal.first_sequence and self._journal.first_sequence > 1:
            self._gone = Lost(from_sequence, self._journal.first_sequence - 1)
        async for found in self._journal.read(from_sequence):
            if isinstance(found, Lost):
                first = found.first if self._gone is None else self._gone.first
                self._gone = Lost(first, found.last)
                continue
            self._take(*found)
            self._progress()
            await asyncio.sleep(0)  # the lease must be renewed meanwhile: an expired one is lost

    def end(self, last_number: int) -> None:
        """Note the records that are gone behind the last readable one.

        last_number: of a record known to be written; 0: of none.
        """
        gone = 0 if self._gone is None else 1 + self._gone.last - self._gone.first
        last = max(last_number, self.number + gone)
        if last > self.number:
            self.lose(self.number + 1, last, None)

    def _take(self, sequence: int, data: bytes) -> None:
        record = _decoded(data, sequence)
        number = record.number
        if number <= self.number:
            self._gone = None  # earlier missing records are in the snapshot too
            return  # in the snapshot, or written twice
        at_s = record.entries[0].now_s if record.entries else None
        is_gap = self._gone is not None or record.after > self.number
        if is_gap and not _tells_of(record, self.number + 1):
            self.lose(self.number + 1, max(record.after, number - 1), at_s)
        self._gone = None
        with _decided_by_what_is_here(f"journal record {sequence}"):
            if self.losses:
                follow(self.engine, record)
            elif not replay(self.engine, record):
                self.mismatches += 1
                self.first_mismatch = self.first_mismatch or sequence
        self.number = number
        self.records += 1

    def lose(self, first: int, last: int, until_s: float | None) -> None:
        """Note that records are gone."""
        from_s = self.engine.state.now_s
        self.losses.append(RecordsLost(first=first, last=last, from_s=from_s, until_s=until_s))


async def rebuild(
    journal: JournalPort,
    snapshots: SnapshotsPort,
    *,
    progress: Callable[[], None],
    last_number: int = 0,
) -> Rebuilt:
    """Rebuild from the newest snapshot and the tail of an opened journal.

    Damaged and missing records are skipped and reported: the nodes know what runs.

    Args:
        progress: called after the snapshot and after each record.
        last_number: of a record known to be written; 0: of none.

    Raises:
        ConfigError: a record was decided by a policy that no longer exists here; names both.
        ProtocolError: a record of a coordinator cannot be read; names its sequence. Or records were
            dropped, and the snapshot that has them is of another version.
        Unavailable: the journal does not answer.
    """
    base = await _from_snapshot(journal, snapshots)
    progress()
    replaying = _Replaying(base, journal, progress)
    await replaying.run(base.sequence + 1 if base.is_of_this_journal else journal.first_sequence)
    replaying.end(last_number)
    log.info("rebuilt from snapshot %d and %d records", base.sequence, replaying.records)
    if replaying.mismatches:
        told = "%d of these records lead to other decisions now, journal record %d first"
        log.warning(told, replaying.mismatches, replaying.first_mismatch)
    for one in replaying.losses:
        log.error("%s", lost_in_words(one))
    return Rebuilt(
        engine=replaying.engine,
        records=replaying.records,
        snapshot_sequence=base.sequence,
        number=replaying.number,
        last_number=max(replaying.number, last_number, *(one.last for one in replaying.losses)),
        losses=tuple(replaying.losses),
    )


def _tells_of(record: Record, first: int) -> bool:
    """True if its writer began without the records from a number on: it decided as replay does."""
    lost = [entry.event for entry in record.entries if isinstance(entry.event, RecordsLost)]
    return any(one.first == first and not one.is_state_whole for one in lost)


def lost_in_words(one: RecordsLost) -> str:
    """The missing records, their time and the effect, as text."""
    until = "the end" if one.until_s is None else _instant(one.until_s)
    when = f"from {_instant(one.from_s) if one.from_s else 'the beginning'} to {until}"
    if one.is_state_whole:
        return (
            f"journal {span(one)} lost ({when}). This leader has their effect in "
            "memory and saved it: no job or order is lost"
        )
    return (
        f"journal {span(one)} lost ({when}). Jobs submitted and orders given in them "
        "are forgotten. A job that runs is taken over from its node's ledger. Every other job "
        "waits until all nodes have reported; one that ended in these records starts again"
    )


def _instant(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _decoded(data: bytes, sequence: int) -> Record:
    try:
        return decode_record(data, sequence=sequence)
    except ProtocolError as error:
        raise ProtocolError(
            f"{error}; a coordinator wrote it, so it cannot be skipped: start the version that "
            "wrote it (docs/runbook.md says what else can be done)"
        ) from error


async def _from_snapshot(journal: JournalPort, snapshots: SnapshotsPort) -> _Base:
    """The base of a snapshot: before the first record nothing is configured.

    Records carry their settings.
    """
    loaded = await snapshots.load()
    if loaded is None:
        return _Base(Engine(EngineSettings()))
    sequence, data = loaded
    try:
        saved = msgspec.msgpack.decode(data, type=Saved)
        state = decode_state(bytes(saved.state))
    except (ProtocolError, *UNREADABLE) as error:
        if journal.first_sequence > 1:
            # Its checksum is right, so it is no damage: without it jobs would be lost unseen.
            raise ProtocolError(
                f"journal: records before {journal.first_sequence} were dropped "
                f"(journal_kept_days) and no snapshot of them can be used ({error}): start the "
                "version that wrote the last one, or put back a backup of NATS's store "
                "(docs/runbook.md says what else can be done)"
            ) from error
        # A journal that keeps all records only takes longer without the snapshot.
        log.warning("snapshot %d cannot be read: %s", sequence, error)
        return _Base(Engine(EngineSettings()))
    number = saved.number
    last = await journal.last_record()
    record = None if last is None else _decoded(last[1], last[0])
    is_newer = record is not None and record.entries and record.entries[-1].now_s > state.now_s
    if record is not None and is_newer and record.number <= number:
        log.error(
            "snapshot %d not used: the journal was created again since, and its last record is "
            "later than the snapshot; running workers are recovered from the nodes' ledgers",
            sequence,
        )
        return _Base(Engine(EngineSettings()))
    with _decided_by_what_is_here(f"snapshot {sequence}"):
        engine = Engine(saved.settings, state)
    is_whole = saved.journal == journal.identity and sequence <= journal.last_sequence
    if not is_whole:
        log.error("snapshot %d is later than the end of the journal", sequence)
    return _Base(engine, sequence, number, is_whole)


@contextlib.contextmanager
def _decided_by_what_is_here(what: str) -> Generator[None]:
    """Name the journal, not the settings, in the error about an unknown policy or knob.

    Raises:
        ConfigError: names it and the remedy: a skipped record would lose its content.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{what} was decided by a policy that is not installed: {error}; install it again, or "
            "start the version that wrote this, until a later snapshot is written"
        ) from error
