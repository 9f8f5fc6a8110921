"""The journal on JetStream, which survives a coordinator.

Its stream is created when it is missing and never changed. A site that wants three replicas sets
`journal_replicas` before the first start, or edits the stream with NATS's own tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable

import nats.js.errors
from nats.js import api

from common import natsrules, streams, subjects
from common.bus import NatsBus
from common.clock import Clock
from common.errors import Fenced, Unavailable
from common.natscalls import jetstream_as_unavailable
from coordinator.service.journal.jetstream import (
    CHECKSUM_HEADER,
    FETCH_COUNT,
    TIMEOUT_S,
    WRITER_HEADER,
    StreamMessage,
    checksum,
    ensure_stream,
    headers_of,
    is_ours,
    read_in_order,
    stream_config,
)
from coordinator.service.ports import Lost, Wounded

log = logging.getLogger(__name__)

_TAKES_NOTHING = "JetStream is there and stores nothing: if its disk was full, restart nats-server"
"""The server keeps the error of a disk that filled up, and writes nothing when there is space
again."""
_WRONG_LAST_SEQUENCE = 10071
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
        config = stream_config(self._stream, self._subject, self._replicas)
        config.deny_delete = True
        config.deny_purge = not self._is_shortened
        info = await ensure_stream(self._bus, config)
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
            CHECKSUM_HEADER: checksum(record),
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
            begin = max(self._first_sequence, end - FETCH_COUNT + 1)
            last: tuple[int, bytes] | None = None
            async for found in self._read(begin, to_sequence=end):
                if isinstance(found, StreamMessage) and found.is_record:
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
    ) -> AsyncIterator[StreamMessage | Lost]:
        """The content of the stream, and its missing sequences."""
        begin = max(from_sequence, self._first_sequence)
        async for found in read_in_order(
            self._bus, self._stream, self._subject, begin, to_sequence=to_sequence
        ):
            if isinstance(found, StreamMessage) and found.is_record and not found.is_sound:
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
        elif is_ours(headers_of(found)):
            if (found.data or b"") != record:
                raise Fenced(f"journal: record {sequence} was written by another program")
            self._last_sequence = sequence
            return True
        foreign: list[int] = []
        standing = read_in_order(self._bus, self._stream, self._subject, sequence)
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
