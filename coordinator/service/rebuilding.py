"""What a coordinator knows when it starts: the newest snapshot, and the journal's records after it.

Must not know who leads, what agents report, or how records come about.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator

import msgspec
from msgspec import Struct

from common.decoding import UNREADABLE
from common.errors import ConfigError, ProtocolError
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.record import Record, decode_record, replay
from coordinator.engine.settings import EngineSettings
from coordinator.service.ports import JournalPort, SnapshotsPort

log = logging.getLogger(__name__)


class Saved(Struct, frozen=True, kw_only=True):
    """A snapshot: the state, and the settings that it was decided by until then.

    The records after it were decided by those settings too, whatever the file says by now.
    """

    settings: EngineSettings
    state: msgspec.Raw
    journal: str = ""
    """The identity of the journal that its sequence counts in."""


class Rebuilt(Struct, frozen=True, kw_only=True):
    """An engine as it was after the last record."""

    engine: Engine
    records: int
    """How many of the journal it took: those after the newest snapshot."""
    snapshot_sequence: int
    """Of the last record that is in that snapshot; 0: there was none."""


async def rebuild(
    journal: JournalPort, snapshots: SnapshotsPort, *, progress: Callable[[], None]
) -> Rebuilt:
    """Newest snapshot + journal tail, of a journal that was opened.

    Args:
        progress: called after the snapshot and after each record.

    Raises:
        ConfigError: a record was decided by a policy that is not here any more; names both.
        ProtocolError: a record of a coordinator cannot be read; names its sequence. Or records were
            dropped that no snapshot has.
        Unavailable: the journal does not answer.
    """
    engine, after = await _from_snapshot(journal, snapshots)
    progress()
    _check_reaches(after, journal)
    records = mismatches = first_mismatch = 0
    async for sequence, data in journal.read(after + 1):
        record = _decoded(data, sequence)
        with _decided_by_what_is_here(f"journal record {sequence}"):
            is_same = replay(engine, record)
        if not is_same:
            mismatches += 1
            first_mismatch = first_mismatch or sequence
        records += 1
        progress()
        await asyncio.sleep(0)  # the lease must be renewed meanwhile: one that ran out is lost
    log.info("rebuilt from snapshot %d and %d records", after, records)
    if mismatches:
        told = "%d of these records are decided otherwise now, journal record %d first"
        log.warning(told, mismatches, first_mismatch)
    return Rebuilt(engine=engine, records=records, snapshot_sequence=after)


def _check_reaches(after: int, journal: JournalPort) -> None:
    """Without the records between a snapshot and the first one left, jobs would be lost unseen."""
    if after + 1 < journal.first_sequence:
        raise ProtocolError(
            f"journal: records before {journal.first_sequence} were dropped (journal_kept_days) "
            "and no snapshot of them can be used: start the version that wrote the last one, or "
            "put back a backup of NATS's store (docs/operations.md says what else can be done)"
        )


def _decoded(data: bytes, sequence: int) -> Record:
    try:
        return decode_record(data, sequence=sequence)
    except ProtocolError as error:
        raise ProtocolError(
            f"{error}; a coordinator wrote it, so it is not passed over: start the version that "
            "wrote it (docs/operations.md says what else can be done)"
        ) from error


async def _from_snapshot(journal: JournalPort, snapshots: SnapshotsPort) -> tuple[Engine, int]:
    """Before the first record nothing is configured: records carry the settings they had."""
    loaded = await snapshots.load()
    if loaded is None:
        return Engine(EngineSettings()), 0
    sequence, data = loaded
    try:
        saved = msgspec.msgpack.decode(data, type=Saved)
        why_not = _why_not(saved, sequence, journal)
        if not why_not:
            state = decode_state(bytes(saved.state))
            with _decided_by_what_is_here(f"snapshot {sequence}"):
                return Engine(saved.settings, state), sequence
        log.error("snapshot %d is left aside: %s", sequence, why_not)
    except (ProtocolError, *UNREADABLE) as error:
        # A journal that forgets nothing only takes longer without the snapshot.
        log.warning("snapshot %d cannot be read: %s", sequence, error)
    return Engine(EngineSettings()), 0


def _why_not(saved: Saved, sequence: int, journal: JournalPort) -> str:
    """Why a snapshot is not of this journal; empty when it is.

    What happened after it is lost with the old journal: jobs that it calls running may have
    ended, and would run twice. Agents know what runs, so the state is rebuilt from them, as
    when all is lost; what only waited must be submitted again.
    """
    if saved.journal and saved.journal != journal.identity:
        why = f"it is of another journal ({saved.journal}, this one is {journal.identity})"
    elif sequence > journal.last_sequence:
        why = f"the journal ends before it, at {journal.last_sequence}"
    else:
        return ""
    return (
        f"{why}; only this journal counts. If that one was lost, jobs that only waited are "
        "lost with it, and those on nodes are taken from their ledgers"
    )


@contextlib.contextmanager
def _decided_by_what_is_here(what: str) -> Generator[None]:
    """Say of an unknown policy or knob that it is the journal that names it, not the settings.

    Raises:
        ConfigError: says what, and what to do: to skip it would lose what it tells.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{what} was decided by what is not here any more: {error}; install it again, or "
            "start the version that wrote this, until a later snapshot is written"
        ) from error
