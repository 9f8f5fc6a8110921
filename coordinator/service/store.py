"""Journal and snapshots on JetStream: what survives a coordinator.

Must not know what a record or a snapshot holds. Streams are made when they are missing and never
changed: a site that wants three replicas says so in `journal_replicas` before the first start, or
edits the streams with NATS's own tools.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, cast

import msgspec
import nats.js.errors
from nats.js import JetStreamContext, api

from common import natsrules, streams, subjects
from common.bus import NatsBus
from common.clock import Clock
from common.decoding import UNREADABLE
from common.errors import ConfigError, Fenced, Unavailable
from common.natscalls import jetstream_as_unavailable
from coordinator.service.chunks import Chunk, join, split

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""One JetStream call; longer than most elections, so a write rarely stays ambiguous."""
NewName = Callable[[], str]
"""A name that no save of anybody has: two coordinators may save at once."""
WRITER_HEADER = "Aryl-Writer"
"""Every record has it; a message without it was published by somebody else."""
_TAKES_NOTHING = "JetStream is there and stores nothing: if its disk was full, restart nats-server"
"""It keeps the error of a disk that filled up, and writes nothing when there is space again."""
_FETCH_COUNT = 500
_FETCH_BYTES = 16 * 1024 * 1024
_WRONG_LAST_SEQUENCE = 10071
_CONSUMER_IDLE_S = 30.0


class Journal:
    """`JournalPort` on one stream: file storage, writes are fenced, no single record is taken out.

    Args:
        writer: who writes; a message that names nobody is no record.
        replicas: of a stream that is made here.
        is_shortened: whether its begin may be dropped; nobody can then be kept from dropping all.
    """

    def __init__(
        self,
        bus: NatsBus,
        *,
        cell: str,
        writer: str,
        clock: Clock,
        replicas: int = 1,
        is_shortened: bool = False,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._stream = streams.journal(cell)
        self._subject = subjects.journal(cell)
        self._writer = writer
        self._replicas = replicas
        self._is_shortened = is_shortened
        self._first_sequence = 1
        self._last_sequence: int = 0
        self._identity = ""
        self._foreign_until = 0
        self.foreign_count = 0
        """Messages met here that no coordinator wrote, each counted once."""

    @property
    def identity(self) -> str:
        """When the stream was made; a stream of the same name that is made again has another."""
        return self._identity

    @property
    def first_sequence(self) -> int:
        """Sequence of the first record that is still there; 1 if none was dropped."""
        return self._first_sequence

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record known here; 0 of an empty journal."""
        return self._last_sequence

    async def open(self) -> None:
        """Create the stream if it is missing and find the end.

        Raises:
            ConfigError: the stream may forget records, or the server's `max_payload` is too small.
            Unavailable: JetStream does not answer.
        """
        config = _stream_config(self._stream, self._subject, self._replicas)
        config.deny_delete = True
        config.deny_purge = not self._is_shortened
        info = await _ensure_stream(self._bus, config)
        if self._is_shortened and info.config.deny_purge:
            # NATS never takes that back, so it is no setting of a stream that is there.
            log.warning("journal_kept_days: %s was made to keep all, and does", self._stream)
            self._is_shortened = False
        natsrules.check_max_payload(self._bus.max_payload_bytes)
        self._first_sequence = max(1, info.state.first_seq)
        self._last_sequence = info.state.last_seq
        self._identity = "" if info.created is None else info.created.isoformat()

    async def append(self, record: bytes) -> int:
        """Write one record after the last one known here; returns its sequence.

        A lost answer and a refused sequence are both settled by what stands at the place of the
        record: the same bytes (they name their writer) mean that it was written. A message there
        that no coordinator wrote fences nobody: the next try comes after it.

        Raises:
            ConfigError: the server's `max_payload` is smaller than the record.
            Fenced: another coordinator wrote in between.
            Unavailable: not known to be written.
        """
        natsrules.check_fits("journal record", len(record), self._bus.max_payload_bytes)
        headers = {
            api.Header.EXPECTED_STREAM.value: self._stream,
            api.Header.EXPECTED_LAST_SEQUENCE.value: str(self._last_sequence),
            WRITER_HEADER: self._writer,
        }
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("journal"):
                ack = await stream.publish(self._subject, record, headers=headers)
            self._last_sequence = ack.seq
        except Unavailable as error:
            await self._settle(record, Unavailable(f"{error}; {_TAKES_NOTHING}"))
        except nats.js.errors.APIError as error:
            if error.err_code != _WRONG_LAST_SEQUENCE:
                raise Unavailable(f"journal: {error.description}") from error
            await self._settle(record, Unavailable("journal: refused, and nothing is there"))
        return self._last_sequence

    async def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes]]:
        """Records from a sequence on, to the end as it is now; foreign messages are left out.

        Raises:
            Unavailable: JetStream does not answer, or a record is missing.
        """
        expected = max(from_sequence, self._first_sequence)
        foreign: list[int] = []
        async for message in _read(self._bus, self._stream, self._subject, expected):
            if message.sequence != expected:
                # A connection that broke in between; whoever reads starts again.
                raise Unavailable(f"journal: record {expected} did not arrive")
            if message.is_record:
                yield message.sequence, message.data
            else:
                foreign.append(message.sequence)
            expected = message.sequence + 1
        self._pass_over(foreign)

    async def shorten(self, up_to: int, *, kept_s: float) -> None:
        """Drop records up to a sequence, as far as they are more than `kept_s` older than the last.

        Ages are by one clock, the server's. The last record always stays, and so does all of a
        stream that was made to keep it.

        Raises:
            Unavailable: not known to be dropped.
        """
        low, high = self._first_sequence, min(up_to + 1, self._last_sequence)
        if not self._is_shortened or low >= high:
            return
        now_s = await self._written_at_s(self._last_sequence)
        while low < high:  # the first one to keep is no lower than low, and no higher than high
            middle = (low + high) // 2
            if now_s - await self._written_at_s(middle) > kept_s:
                low = middle + 1
            else:
                high = middle
        if low > self._first_sequence:
            with jetstream_as_unavailable("journal", are_api_errors_too=True):
                stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
                await stream.purge_stream(self._stream, seq=low)
            log.info("journal: dropped records %d to %d", self._first_sequence, low - 1)
            self._first_sequence = low

    async def _written_at_s(self, sequence: int) -> float:
        """When a record was written, by the server's clock."""
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        with jetstream_as_unavailable("journal", are_api_errors_too=True):
            found = await stream.get_msg(self._stream, seq=sequence)
        if found.time is None:
            raise Unavailable(f"journal: record {sequence} has no time")
        return found.time.timestamp()

    async def _settle(self, record: bytes, otherwise: Unavailable) -> None:
        sequence = self._last_sequence + 1
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("journal"):
                # Not a direct get: a replica that lags would say that nothing is there.
                found = await stream.get_msg(self._stream, seq=sequence)
        except nats.js.errors.NotFoundError:
            raise otherwise from None
        if not _is_ours(cast("Mapping[str, str] | None", found.headers)):  # pyright: ignore[reportUnknownMemberType]
            # It took the place of the record, whose own write can therefore never come true.
            self._pass_over([sequence])
            self._last_sequence = sequence
            raise Unavailable(f"journal: a foreign message stands at {sequence}")
        if (found.data or b"") != record:
            raise Fenced(f"journal: record {sequence} was written by somebody else")
        self._last_sequence = sequence

    def _pass_over(self, sequences: list[int]) -> None:
        """Count what no coordinator wrote, and say so once."""
        new = [sequence for sequence in sequences if sequence > self._foreign_until]
        if new:
            self._foreign_until = new[-1]
            self.foreign_count += len(new)
            what = "journal: passed over %d messages of no coordinator on %s, sequences %d to %d"
            log.warning(what, len(new), self._subject, new[0], new[-1])


class Snapshots:
    """`SnapshotsPort` on a stream of chunks; a save that did not end is as if never begun."""

    def __init__(
        self, bus: NatsBus, *, cell: str, clock: Clock, new_name: NewName, replicas: int = 1
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._stream = streams.snapshots(cell)
        self._subject = subjects.snapshots(cell)
        self._new_name = new_name
        self._replicas = replicas
        self._newest_from = 0
        """Where in the stream the newest whole snapshot that is known here begins; 0: nowhere."""

    async def save(self, sequence: int, data: bytes) -> None:
        """Write the state after the record with this sequence; the one before stays, none older.

        Raises:
            Unavailable: not known to be whole; those before are still there.
        """
        config = _stream_config(self._stream, self._subject, self._replicas)
        await _ensure_stream(self._bus, config)
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        first = 0
        with jetstream_as_unavailable("snapshot", are_api_errors_too=True):
            for chunk in split(sequence, data, name=self._new_name()):
                ack = await stream.publish(self._subject, msgspec.msgpack.encode(chunk))
                first = first or ack.seq
            await stream.purge_stream(self._stream, seq=self._newest_from or first)
        self._newest_from = first

    async def load(self) -> tuple[int, bytes] | None:
        """The last whole snapshot and its sequence.

        Raises:
            Unavailable: JetStream does not answer.
        """
        chunks: list[Chunk] = []
        begins: dict[str, int] = {}
        async for message in _read(self._bus, self._stream, self._subject, 1):
            with contextlib.suppress(*UNREADABLE):  # then its set is not whole
                chunks.append(msgspec.msgpack.decode(message.data, type=Chunk))
                begins.setdefault(chunks[-1].snapshot, message.sequence)
        found = join(chunks)
        if found is None:
            return None
        self._newest_from = begins[found.name]
        return found.sequence, found.data


# --- streams --------------------------------------------------------------------------------


def _stream_config(name: str, subject: str, replicas: int) -> api.StreamConfig:
    return api.StreamConfig(
        name=name,
        subjects=[subject],
        description="Aryl: do not edit; docs/operations.md says how to back it up",
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        num_replicas=replicas,
        allow_direct=False,
    )


async def _ensure_stream(bus: NatsBus, config: api.StreamConfig) -> api.StreamInfo:
    assert config.name is not None
    stream = bus.jetstream(timeout_s=TIMEOUT_S)
    with jetstream_as_unavailable(config.name, are_api_errors_too=True):
        try:
            info = await stream.stream_info(config.name)
        except nats.js.errors.NotFoundError:
            info = await stream.add_stream(config)  # pyright: ignore[reportUnknownMemberType]
    _check_keeps(info.config)
    return info


def _check_keeps(config: api.StreamConfig) -> None:
    limits = {
        "max_age": config.max_age,
        "max_msgs": config.max_msgs,
        "max_msgs_per_subject": config.max_msgs_per_subject,
    }
    bad = [f"{key} = {value}" for key, value in limits.items() if value and value > 0]
    if config.storage != api.StorageType.FILE:
        bad.append(f"storage = {config.storage}")
    if config.discard != api.DiscardPolicy.NEW:
        bad.append(f"discard = {config.discard}")
    if bad:
        raise ConfigError(f"stream {config.name}: {', '.join(bad)}: it would forget records")


class _Message(NamedTuple):
    sequence: int
    data: bytes
    is_record: bool


def _is_ours(headers: Mapping[str, str] | None) -> bool:
    return headers is not None and WRITER_HEADER in headers


async def _read(
    bus: NatsBus, name: str, subject: str, from_sequence: int
) -> AsyncIterator[_Message]:
    """Messages of a stream in order, to its end at the time of the call; none of a missing one.

    Raises:
        Unavailable: JetStream did not answer.
    """
    stream = bus.jetstream(timeout_s=TIMEOUT_S)
    try:
        with jetstream_as_unavailable(name):
            state = (await stream.stream_info(name)).state
    except nats.js.errors.NotFoundError:
        return
    sequence = max(from_sequence, state.first_seq)
    if state.messages == 0 or sequence > state.last_seq:
        return
    count = max(1, min(_FETCH_COUNT, _FETCH_BYTES * state.messages // max(1, state.bytes)))
    with jetstream_as_unavailable(name, are_api_errors_too=True):
        consumer = await _consumer(stream, name, subject, sequence)
        try:
            while sequence <= state.last_seq:
                batch = await consumer.fetch(
                    min(count, state.last_seq - sequence + 1), timeout=TIMEOUT_S
                )
                for message in batch:
                    found = message.metadata.sequence.stream
                    yield _Message(found, message.data, _is_ours(message.headers))
                    sequence = found + 1
        finally:
            await consumer.unsubscribe()


async def _consumer(
    stream: JetStreamContext, name: str, subject: str, sequence: int
) -> JetStreamContext.PullSubscription:
    config = api.ConsumerConfig(
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=sequence,
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=_CONSUMER_IDLE_S,
        mem_storage=True,
        num_replicas=1,
    )
    options: dict[str, Any] = {"stream": name, "config": config}
    return await stream.pull_subscribe(subject, **options)
