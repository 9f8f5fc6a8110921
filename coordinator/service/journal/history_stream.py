"""The history on JetStream: a stream with a subject for each job, node and service."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

import msgspec
import nats.js.errors
from nats.js import JetStreamContext, api

from common import streams, subjects
from common.bus import NatsBus
from common.decoding import UNREADABLE
from common.errors import Unavailable
from common.history import HistoryLine
from common.natscalls import jetstream_as_unavailable
from coordinator.service.journal.history import Tail
from coordinator.service.journal.jetstream import (
    CONSUMER_IDLE_S,
    FETCH_COUNT,
    TIMEOUT_S,
    StreamMessage,
    read_in_order,
)


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
        found = [message async for message in self._messages(begin, until)]
        return Tail(identity, first, last, found, max(until, sequence - 1))

    async def _messages(self, begin: int, until: int) -> AsyncGenerator[bytes]:
        """Messages between two sequences, without those that the server has lost or dropped."""
        if begin > until:
            return
        reading = read_in_order(
            self._bus, self._stream, subjects.history(self._cell), begin, to_sequence=until
        )
        async with contextlib.aclosing(reading):
            async for found in reading:
                if isinstance(found, StreamMessage):
                    yield found.data

    async def _filtered(
        self, stream: JetStreamContext, filters: list[str], begin: int
    ) -> AsyncGenerator[tuple[HistoryLine, int]]:
        config = _reading(begin, filters or None)
        options: dict[str, Any] = {"stream": self._stream, "config": config}
        with jetstream_as_unavailable("history", are_api_errors_too=True):
            consumer = await stream.pull_subscribe("", **options)
            try:
                pending, count = (await consumer.consumer_info()).num_pending or 0, 0
                while pending > count:
                    try:
                        most = min(FETCH_COUNT, pending - count)
                        batch = await consumer.fetch(most, timeout=TIMEOUT_S)
                    except TimeoutError:
                        delivered = (await consumer.consumer_info()).delivered
                        if delivered is not None and delivered.consumer_seq > count:
                            raise Unavailable("history: a part did not arrive") from None
                        return  # damaged, or dropped by its age meanwhile
                    for message in batch:
                        row = _story_row(message.data)
                        if row is not None:
                            yield row, len(message.data)
                    count += len(batch)
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
        inactive_threshold=CONSUMER_IDLE_S,
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
