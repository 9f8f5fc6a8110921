"""Journal and snapshots on JetStream, which survive a coordinator.

Streams are created when they are missing and never changed. A site that wants three replicas sets
`journal_replicas` before the first start, or edits the streams with NATS's own tools.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, cast

import msgspec
import nats.js.errors
from nats.js import JetStreamContext, api

from common import natsrules, streams, subjects
from common.bus import NatsBus
from common.clock import Clock
from common.decoding import UNREADABLE
from common.errors import ConfigError, Fenced, Unavailable
from common.history import HistoryLine
from common.natscalls import jetstream_as_unavailable
from coordinator.service.journal.history import Tail
from coordinator.service.journal.snapshot_chunks import Chunk, join, split
from coordinator.service.ports import Lost, Wounded

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""One JetStream call; longer than most elections, so a write rarely stays ambiguous."""
NewName = Callable[[], str]
"""Makes a name that no other save has: two coordinators may save at once."""
WRITER_HEADER = "Aryl-Writer"
"""Every record has it; a coordinator wrote no message without it."""
_TAKES_NOTHING = "JetStream is there and stores nothing: if its disk was full, restart nats-server"
"""The server keeps the error of a disk that filled up, and writes nothing when there is space
again."""
CHECKSUM_HEADER = "Aryl-Checksum"
"""CRC-32 of a record: one that was changed on its way to the disk and back is no record."""
_FETCH_COUNT = 500
_FETCH_BYTES = 16 * 1024 * 1024
_WRONG_LAST_SEQUENCE = 10071
_CONSUMER_IDLE_S = 30.0
_MOST_TRIES = 100
"""Tries of one append, where foreign messages keep coming first."""


class Journal:
    """`JournalPort` on one stream: file storage, writes are fenced, no single record is removed.

    Args:
        writer: the writer's name; a message without one is no record.
        replicas: of a stream that is created here.
        is_shortened: whether its start may be dropped; the server can then no longer prevent
            dropping all.
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
    def server(self) -> str:
        """The run of the connected nats-server."""
        return self._bus.server_id

    @property
    def identity(self) -> str:
        """When the stream was created; a recreated stream of the same name has another time."""
        return self._identity

    @property
    def first_sequence(self) -> int:
        """Sequence of the first record that is still there; 1 if none was dropped."""
        return self._first_sequence

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record known here; 0 for an empty journal."""
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
            log.warning(
                "journal_kept_days: stream %s was created to keep all records, and does",
                self._stream,
            )
            self._is_shortened = False
        natsrules.check_max_payload(self._bus.max_payload_bytes)
        self._first_sequence = max(1, info.state.first_seq)
        self._last_sequence = info.state.last_seq
        self._identity = "" if info.created is None else info.created.isoformat()

    async def append(self, record: bytes) -> int:
        """Write one record after the last one known here; returns its sequence.

        The message at the record's place settles both a lost answer and a refused sequence: the
        same bytes (they name their writer) mean that it was written. Messages there that no
        coordinator wrote fence nothing: the record goes after them, whatever their number.

        Raises:
            ConfigError: the server's `max_payload` is smaller than the record.
            Fenced: another coordinator wrote in between.
            Unavailable: not known to be written.
            Wounded: the stream is gone, or ends before records that were acknowledged.
        """
        natsrules.check_fits("journal record", len(record), self._bus.max_payload_bytes)
        for _ in range(_MOST_TRIES):
            before = self._last_sequence
            if await self._is_written(record):
                return self._last_sequence
            log.debug("journal: foreign messages at %d to %d", before + 1, self._last_sequence)
        raise Unavailable(f"journal: foreign messages came first {_MOST_TRIES} times")

    async def _is_written(self, record: bytes) -> bool:
        """Write it, or skip the foreign messages at its place; True if it is written."""
        headers = {
            api.Header.EXPECTED_STREAM.value: self._stream,
            api.Header.EXPECTED_LAST_SEQUENCE.value: str(self._last_sequence),
            WRITER_HEADER: self._writer,
            CHECKSUM_HEADER: _checksum(record),
        }
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("journal"):
                ack = await self._while_connected(
                    stream.publish(self._subject, record, headers=headers)
                )
        except Unavailable as error:
            return await self._settle(record, Unavailable(f"{error}; {_TAKES_NOTHING}"))
        except nats.js.errors.APIError as error:
            if error.err_code != _WRONG_LAST_SEQUENCE:
                raise Unavailable(f"journal: {error.description}") from error
            return await self._settle(record, Unavailable("journal: refused, and nothing is there"))
        if ack.seq != self._last_sequence + 1:
            # A server that notices only at a write that its last block is damaged.
            raise Wounded(f"record {self._last_sequence + 1} was stored as {ack.seq}")
        self._last_sequence = ack.seq
        return True

    async def _while_connected(self, publishing: Awaitable[api.PubAck]) -> api.PubAck:
        """The acknowledgement, unless the connection ends first: it would never arrive.

        Raises:
            Unavailable: the connection was lost.
        """
        acked, cut = asyncio.ensure_future(publishing), asyncio.ensure_future(self._bus.cut_off())
        try:
            await asyncio.wait((acked, cut), return_when=asyncio.FIRST_COMPLETED)
            if not acked.done():
                raise Unavailable("journal: the connection was lost")
            return acked.result()
        finally:
            for task in (acked, cut):
                task.cancel()
            await asyncio.gather(acked, cut, return_exceptions=True)

    async def mend(self) -> None:
        """After `Wounded`: create the stream if it is gone, and find its present end.

        Nothing is removed: the server still checks the predecessor of the next append.

        Raises:
            Unavailable: JetStream does not answer.
        """
        await self.open()

    async def holds(self, sequence: int, record: bytes) -> bool:
        """True if a record can be read back; a server may acknowledge records that it cannot read.

        Raises:
            Unavailable: JetStream does not answer.
        """
        found = await self._message(sequence)
        return found is not None and (found.data or b"") == record

    async def last_record(self) -> tuple[int, bytes] | None:
        """The last readable record of a coordinator, and its sequence.

        Raises:
            Unavailable: JetStream does not answer.
        """
        end = self._last_sequence
        while end >= self._first_sequence:
            begin = max(self._first_sequence, end - _FETCH_COUNT + 1)
            last: tuple[int, bytes] | None = None
            async for found in self._read(begin, to_sequence=end):
                if isinstance(found, _Message) and found.is_record:
                    last = found.sequence, found.data
            if last is not None:
                return last
            end = begin - 1
        return None

    async def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes] | Lost]:
        """Records from a sequence on, to the present end; foreign messages are left out.

        Raises:
            Unavailable: JetStream does not answer.
        """
        foreign: list[int] = []
        async for found in self._read(from_sequence):
            if isinstance(found, Lost):
                yield found
            elif found.is_record:
                yield found.sequence, found.data
            else:
                foreign.append(found.sequence)
        self._pass_over(foreign)

    async def _read(
        self, from_sequence: int, *, to_sequence: int | None = None
    ) -> AsyncIterator[_Message | Lost]:
        """The content of the stream, and its missing sequences."""
        begin = max(from_sequence, self._first_sequence)
        async for found in _read(
            self._bus, self._stream, self._subject, begin, to_sequence=to_sequence
        ):
            if isinstance(found, _Message) and found.is_record and not found.is_sound:
                yield Lost(found.sequence, found.sequence)
            else:
                yield found

    async def shorten(self, up_to: int, *, kept_s: float) -> None:
        """Drop records up to a sequence, as far as they are more than `kept_s` older than the last.

        Ages are by one clock, the server's. The last record always stays, and so does all of a
        stream that was created to keep it.

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

    async def _settle(self, record: bytes, otherwise: Unavailable) -> bool:
        """True if a record is at its place; foreign messages there are skipped.

        Raises:
            Fenced: another coordinator's record is there.
            Unavailable: `otherwise`, where nothing is there and nothing was lost.
            Wounded: nothing is there, and records before it are gone.
        """
        sequence = self._last_sequence + 1
        # Not a direct get: a lagging replica would report nothing there.
        found = await self._message(sequence)
        if found is None:
            await self._check_end(otherwise)
        elif _is_ours(_headers(found)):
            if (found.data or b"") != record:
                raise Fenced(f"journal: record {sequence} was written by another program")
            self._last_sequence = sequence
            return True
        foreign: list[int] = []
        standing = _read(self._bus, self._stream, self._subject, sequence)
        async with contextlib.aclosing(standing):
            async for one in standing:
                if isinstance(one, Lost):
                    raise Wounded(f"records {one.first} to {one.last} are gone")
                if one.is_record:
                    break  # the next try finds it there, and judges it
                foreign.append(one.sequence)
        if not foreign:
            raise otherwise
        # They took the place of the record, whose own write can therefore never succeed.
        self._pass_over(foreign)
        self._last_sequence = foreign[-1]
        return False

    async def _check_end(self, otherwise: Unavailable) -> None:
        """Raise the reason why the next record's place is empty.

        Returns when more follows behind it.
        """
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("journal"):
                state = (await stream.stream_info(self._stream)).state
        except nats.js.errors.NotFoundError:
            raise Wounded(f"the stream {self._stream} is gone") from None
        if state.last_seq < self._last_sequence:
            raise Wounded(
                f"it ends at {state.last_seq}, and record {self._last_sequence} was acknowledged"
            )
        if state.last_seq == self._last_sequence:
            raise otherwise

    async def _message(self, sequence: int) -> api.RawStreamMsg | None:
        """The message at a sequence; None: there is none, or no stream."""
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("journal"):
                return await stream.get_msg(self._stream, seq=sequence)
        except nats.js.errors.NotFoundError:
            return None
        except nats.js.errors.APIError as error:
            raise Unavailable(f"journal: {error.description}") from error

    def _pass_over(self, sequences: list[int]) -> None:
        """Count a message that no coordinator wrote, and log that once."""
        new = [sequence for sequence in sequences if sequence > self._foreign_until]
        if new:
            self._foreign_until = new[-1]
            self.foreign_count += len(new)
            what = "journal: ignored %d foreign messages on %s, sequences %d to %d"
            log.warning(what, len(new), self._subject, new[0], new[-1])


class Snapshots:
    """`SnapshotsPort` on a stream of chunks; an unfinished save counts as never begun."""

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
        """The start in the stream of the newest known whole snapshot; 0: none."""

    async def save(self, sequence: int, data: bytes) -> None:
        """Write the state after the record with this sequence; the one before stays, none older.

        Raises:
            Unavailable: not known to be whole; the earlier ones are still there.
        """
        config = _stream_config(self._stream, self._subject, self._replicas)
        await _ensure_stream(self._bus, config)
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        first = 0
        with jetstream_as_unavailable("snapshot", are_api_errors_too=True):
            for chunk in split(sequence, data, name=self._new_name()):
                ack = await stream.publish(self._subject, msgspec.msgpack.encode(chunk))
                first = first or ack.seq
            # A recreated stream begins at 1: a purge up to more than its end empties it.
            kept_from = self._newest_from if 0 < self._newest_from < first else first
            await stream.purge_stream(self._stream, seq=kept_from)
        self._newest_from = first

    async def load(self) -> tuple[int, bytes] | None:
        """The last whole snapshot and its sequence.

        Raises:
            Unavailable: JetStream does not answer.
        """
        chunks: list[Chunk] = []
        begins: dict[str, int] = {}
        async for message in _read(self._bus, self._stream, self._subject, 1):
            if isinstance(message, Lost):
                continue
            with contextlib.suppress(*UNREADABLE):  # then its set is not whole
                chunks.append(msgspec.msgpack.decode(message.data, type=Chunk))
                begins.setdefault(chunks[-1].snapshot, message.sequence)
        found = join(chunks)
        if found is None:
            return None
        self._newest_from = begins[found.name]
        return found.sequence, found.data


class History:
    """`HistoryPort` on a stream with a subject for each job, node and service.

    Args:
        kept_s: older lines are dropped; 0: none ever.
    """

    def __init__(self, bus: NatsBus, *, cell: str, kept_s: float, replicas: int = 1) -> None:
        self._bus = bus
        self._cell = cell
        self._stream = streams.history(cell)
        self._kept_s = kept_s
        self._replicas = replicas
        self._last_sequence = 0

    @property
    def server(self) -> str:
        """The run of the connected nats-server."""
        return self._bus.server_id

    async def open(self) -> int:
        """Create missing parts; the number of the last line, 0 for an empty history.

        Raises:
            Unavailable: JetStream does not answer.
        """
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        config = self._config()
        with jetstream_as_unavailable("history", are_api_errors_too=True):
            try:
                info = await stream.stream_info(self._stream)
            except nats.js.errors.NotFoundError:
                info = await stream.add_stream(config)  # pyright: ignore[reportUnknownMemberType]
            if (info.config.max_age or 0.0) != config.max_age:
                config.num_replicas = info.config.num_replicas
                info = await stream.update_stream(config)  # pyright: ignore[reportUnknownMemberType]
        self._last_sequence = info.state.last_seq
        number = 0
        for sequence in range(info.state.last_seq, info.state.first_seq - 1, -1):
            row = await self._row(sequence)
            if row is not None:
                number = row.number
                break
        return number

    def _config(self) -> api.StreamConfig:
        return api.StreamConfig(
            name=self._stream,
            subjects=[subjects.history(self._cell)],
            description="Aryl: what happened, for `aryl explain` and `aryl events`",
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.OLD,
            max_age=self._kept_s,
            num_replicas=self._replicas,
            # An answer does not wait for the disk; lost lines are copied again.
            persist_mode=api.PersistMode.ASYNC if self._replicas == 1 else None,
        )

    async def write(self, lines: Sequence[HistoryLine]) -> None:
        """Append lines, in their order, after the last one known here.

        Raises:
            Unavailable: not known to be written, or only the first ones, or another is the last.
        """
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        calls = [
            stream.publish(
                subjects.history(self._cell, line.subject),
                msgspec.msgpack.encode(line),
                headers={
                    api.Header.EXPECTED_STREAM.value: self._stream,
                    api.Header.EXPECTED_LAST_SEQUENCE.value: str(self._last_sequence + index),
                },
            )
            for index, line in enumerate(lines)
        ]
        with jetstream_as_unavailable("history", are_api_errors_too=True):
            results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        self._last_sequence += len(lines)

    async def read(
        self, words: Collection[str], *, after: int, before: int, most_bytes: int, newest: bool
    ) -> tuple[list[HistoryLine], bool]:
        """Lines between two numbers, both ends excluded, and whether more of them are there.

        Raises:
            Unavailable: JetStream does not answer.
        """
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("history"):
                state = (await stream.stream_info(self._stream)).state
        except nats.js.errors.NotFoundError:
            return [], False
        begin = await self._first_after(after, state.first_seq, state.last_seq)
        filters = [subjects.history(self._cell, word) for word in sorted(words)]
        found: deque[HistoryLine] = deque()
        size_bytes, last = 0, after
        reading = self._filtered(stream, filters, begin)
        async with contextlib.aclosing(reading):
            async for row, row_bytes in reading:
                if row.number >= before:
                    break
                if row.number <= last:
                    continue  # written twice
                if size_bytes + row_bytes > most_bytes and found:
                    if not newest:
                        return list(found), True
                    found.popleft()
                else:
                    size_bytes += row_bytes
                found.append(row)
                last = row.number
        return list(found), False

    async def tail(self, sequence: int, *, most: int) -> Tail:
        """Up to `most` messages from a sequence on, as they are.

        Raises:
            Unavailable: JetStream does not answer.
        """
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("history"):
                info = await stream.stream_info(self._stream)
        except nats.js.errors.NotFoundError:
            return Tail("", 1, 0, [], sequence - 1)
        identity = "" if info.created is None else info.created.isoformat()
        first, last = info.state.first_seq, info.state.last_seq
        begin = max(sequence, first)
        until = min(last, begin + most - 1)
        found: list[bytes] = []
        if begin <= until:
            found, until = await self._raw(stream, begin, until)
        return Tail(identity, first, last, found, max(until, sequence - 1))

    async def _raw(
        self, stream: JetStreamContext, begin: int, until: int
    ) -> tuple[list[bytes], int]:
        """Messages from a sequence on, and the last sequence that was read; missing ones are passed
        over, and some behind `until` may be among them.
        """
        found: list[bytes] = []
        options: dict[str, Any] = {"stream": self._stream, "config": _reading(begin, None)}
        with jetstream_as_unavailable("history", are_api_errors_too=True):
            consumer = await stream.pull_subscribe("", **options)
            try:
                sequence = begin - 1
                while sequence < until:
                    count = min(_FETCH_COUNT, until - sequence)
                    try:
                        batch = await consumer.fetch(count, timeout=TIMEOUT_S)
                    except TimeoutError:
                        return found, until  # damaged, or dropped by its age meanwhile
                    found += [message.data for message in batch]
                    sequence = batch[-1].metadata.sequence.stream
            finally:
                await consumer.unsubscribe()
        return found, max(sequence, until)

    async def _filtered(
        self, stream: JetStreamContext, filters: list[str], begin: int
    ) -> AsyncGenerator[tuple[HistoryLine, int]]:
        config = _reading(begin, filters or None)
        options: dict[str, Any] = {"stream": self._stream, "config": config}
        with jetstream_as_unavailable("history", are_api_errors_too=True):
            consumer = await stream.pull_subscribe("", **options)
            try:
                pending = (await consumer.consumer_info()).num_pending or 0
                while pending > 0:
                    try:
                        batch = await consumer.fetch(min(_FETCH_COUNT, pending), timeout=TIMEOUT_S)
                    except TimeoutError:
                        return  # damaged, or dropped by its age meanwhile
                    for message in batch:
                        row = _story_row(message.data)
                        if row is not None:
                            yield row, len(message.data)
                    pending -= len(batch)
            finally:
                await consumer.unsubscribe()

    async def _first_after(self, number: int, low: int, high: int) -> int:
        """The first sequence whose line has a higher number; numbers grow with sequences."""
        high += 1
        while low < high and number > 0:
            middle = (low + high) // 2
            row = await self._row(middle)
            if row is None or row.number <= number:
                low = middle + 1
            else:
                high = middle
        return low

    async def _row(self, sequence: int) -> HistoryLine | None:
        stream = self._bus.jetstream(timeout_s=TIMEOUT_S)
        try:
            with jetstream_as_unavailable("history"):
                found = await stream.get_msg(self._stream, seq=sequence)
        except nats.js.errors.APIError:
            return None
        return _story_row(found.data or b"")


def _reading(begin: int, filters: list[str] | None) -> api.ConsumerConfig:
    """A consumer of the history that begins at a sequence."""
    return api.ConsumerConfig(
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=max(1, begin),
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=_CONSUMER_IDLE_S,
        mem_storage=True,
        num_replicas=1,
        filter_subjects=filters,
    )


def _story_row(data: bytes) -> HistoryLine | None:
    """The row of a message; None for one that no coordinator wrote."""
    try:
        return msgspec.msgpack.decode(data, type=HistoryLine)
    except UNREADABLE:
        return None


# --- streams --------------------------------------------------------------------------------


def _stream_config(name: str, subject: str, replicas: int) -> api.StreamConfig:
    return api.StreamConfig(
        name=name,
        subjects=[subject],
        description="Aryl: do not edit; docs/operate.md says how to back it up",
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
    is_sound: bool
    """Its checksum is right."""


def _is_ours(headers: Mapping[str, str] | None) -> bool:
    return headers is not None and WRITER_HEADER in headers


def _headers(message: api.RawStreamMsg) -> Mapping[str, str] | None:
    return cast("Mapping[str, str] | None", message.headers)  # pyright: ignore[reportUnknownMemberType]


def _checksum(record: bytes) -> str:
    return f"{binascii.crc32(record):08x}"


def _message(sequence: int, data: bytes, headers: Mapping[str, str] | None) -> _Message:
    expected = (headers or {}).get(CHECKSUM_HEADER)
    is_sound = expected == _checksum(data)
    return _Message(sequence, data, _is_ours(headers), is_sound)


async def _read(
    bus: NatsBus,
    name: str,
    subject: str,
    from_sequence: int,
    *,
    to_sequence: int | None = None,
) -> AsyncGenerator[_Message | Lost]:
    """Messages of a stream in order, to its end at the time of the call; none of a missing stream.

    A sequence that does not arrive is requested once more by itself: it is `Lost` if the server has
    nothing there, as after damage to a file of the stream.

    Raises:
        Unavailable: JetStream did not answer, or an existing message did not arrive.
    """
    stream = bus.jetstream(timeout_s=TIMEOUT_S)
    try:
        with jetstream_as_unavailable(name):
            state = (await stream.stream_info(name)).state
    except nats.js.errors.NotFoundError:
        return
    sequence = max(from_sequence, state.first_seq)
    end = state.last_seq if to_sequence is None else min(to_sequence, state.last_seq)
    count = max(1, min(_FETCH_COUNT, _FETCH_BYTES * state.messages // max(1, state.bytes)))
    while sequence <= end:
        there = await _next_sequence(stream, name, subject, sequence, end=end)
        if there > sequence:
            yield Lost(sequence, there - 1)
            sequence = there
            continue
        delivered = _delivered(stream, name, subject, sequence, end=end, count=count)
        async with contextlib.aclosing(delivered):
            async for message in delivered:
                if message.sequence != sequence:
                    break  # missing messages are requested
                yield message
                sequence += 1
        if sequence == there:
            # A connection that broke in between; the caller starts again.
            raise Unavailable(f"{name}: message {there} did not arrive")


async def _delivered(
    stream: JetStreamContext, name: str, subject: str, sequence: int, *, end: int, count: int
) -> AsyncGenerator[_Message]:
    """The deliveries of a consumer from a sequence on; ends where nothing more arrives in time."""
    first = sequence
    with jetstream_as_unavailable(name, are_api_errors_too=True):
        consumer = await _consumer(stream, name, subject, sequence)
        try:
            while sequence <= end:
                try:
                    batch = await consumer.fetch(min(count, end - sequence + 1), timeout=TIMEOUT_S)
                except TimeoutError:
                    if sequence == first:
                        raise  # it is there, and does not arrive
                    return
                for message in batch:
                    sequence = message.metadata.sequence.stream + 1
                    yield _message(sequence - 1, message.data, message.headers)
        finally:
            await consumer.unsubscribe()


async def _next_sequence(
    stream: JetStreamContext, name: str, subject: str, sequence: int, *, end: int
) -> int:
    """The first sequence from this one on that has a message; `end + 1`: none up to there."""
    try:
        with jetstream_as_unavailable(name):
            found = await stream.get_msg(name, seq=sequence, next=True, subject=subject)
    except nats.js.errors.NotFoundError:
        return end + 1
    except nats.js.errors.APIError as error:
        raise Unavailable(f"{name}: {error.description}") from error
    return min(found.seq or sequence, end + 1)


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
