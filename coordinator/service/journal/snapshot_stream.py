"""Snapshots on JetStream: a stream of chunks, of which the two newest whole sets are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from common import streams, subjects
from common.bus import NatsBus
from common.clock import Clock
from common.decoding import UNREADABLE
from common.natscalls import jetstream_as_unavailable
from coordinator.service.journal.jetstream import (
    TIMEOUT_S,
    ensure_stream,
    read_in_order,
    stream_config,
)
from coordinator.service.journal.snapshot_chunks import Chunk, join, split
from coordinator.service.ports import Lost

NewName = Callable[[], str]
"""Makes a name that no other save has: two coordinators may save at once."""


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
        config = stream_config(self._stream, self._subject, self._replicas)
        await ensure_stream(self._bus, config)
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
        async for message in read_in_order(self._bus, self._stream, self._subject, 1):
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
