"""Where coordinators of one cell keep things: JetStream, or the fakes in memory."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from common import subjects
from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import Unavailable
from coordinator.demo.nats_server import NatsServer
from coordinator.service.journal.journal_stream import Journal
from coordinator.service.journal.snapshot_stream import Snapshots
from coordinator.service.leadership import jetstream_key
from coordinator.service.leadership.lease import KeyPort
from coordinator.service.ports import JournalPort, LeasePort, Lost, SnapshotsPort
from tests.harness.fakes import (
    FakeClock,
    Foreign,
    MemoryJournal,
    MemoryKey,
    MemorySnapshots,
    memory_lease,
)
from tests.harness.inbox import PATIENCE_S

CELL = "c"
TTL_S = 8.0
MARGIN_S = 1.0

T = TypeVar("T")


class Place(Protocol):
    """Where coordinators of one cell keep things; each call is another coordinator."""

    is_shortened: bool
    """Whether a stream that is made for a journal from now on may lose its begin."""

    async def journal(self) -> JournalPort:
        """A journal that was not opened yet."""
        ...

    async def snapshots(self) -> SnapshotsPort:
        """Snapshots."""
        ...

    async def lease(self, clock: FakeClock) -> LeasePort:
        """A lease that nobody asked for yet."""
        ...

    async def key(self) -> KeyPort:
        """The lease's key."""
        ...

    async def stray(self, data: bytes) -> None:
        """Somebody who is no coordinator publishes on the journal's subject."""
        ...


class Memory:
    """The fakes."""

    is_shortened = False

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._snapshots = MemorySnapshots()
        self._key = MemoryKey()

    async def journal(self) -> JournalPort:
        return MemoryJournal(self._records)

    async def snapshots(self) -> SnapshotsPort:
        return self._snapshots

    async def lease(self, clock: FakeClock) -> LeasePort:
        return memory_lease(self._key, clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S)

    async def key(self) -> KeyPort:
        return self._key

    async def stray(self, data: bytes) -> None:
        self._records.append(Foreign(data))


class JetStream:
    """A real nats-server; every coordinator has a connection of its own."""

    is_shortened = False

    def __init__(self, server: NatsServer, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack
        self._count = 0

    async def bus(self) -> NatsBus:
        """One connection more."""
        self._count += 1
        bus = await connect_nats(self._server.url, identity=f"c{self._count}", clock=SystemClock())
        self._stack.push_async_callback(bus.close)
        return bus

    async def journal(self) -> JournalPort:
        bus = await self.bus()
        return Journal(
            bus,
            cell=CELL,
            writer=f"w{self._count}",
            clock=SystemClock(),
            is_shortened=self.is_shortened,
        )

    async def snapshots(self) -> SnapshotsPort:
        return Snapshots(
            await self.bus(),
            cell=CELL,
            clock=SystemClock(),
            new_name=lambda: secrets.token_hex(8),
        )

    async def lease(self, clock: FakeClock) -> LeasePort:
        return jetstream_key.leader_lease(
            await self.bus(),
            cell=CELL,
            clock=clock,
            ttl_s=TTL_S,
            margin_s=MARGIN_S,
            nonce=secrets.token_hex(8),
        )

    async def key(self) -> KeyPort:
        return jetstream_key.NatsKey(await self.bus(), cell=CELL, timeout_s=PATIENCE_S)

    async def stray(self, data: bytes) -> None:
        stranger = (await self.bus()).jetstream(timeout_s=PATIENCE_S)
        await stranger.publish(subjects.journal(CELL), data)


async def opened(place: Place) -> JournalPort:
    """A journal at its end."""
    journal = await place.journal()
    await journal.open()
    return journal


async def records(journal: JournalPort, from_sequence: int = 1) -> list[tuple[int, bytes]]:
    """All there is."""
    found = [record async for record in journal.read(from_sequence)]
    return [record for record in found if not isinstance(record, Lost)]


async def lost(journal: JournalPort, from_sequence: int = 1) -> list[tuple[int, int]]:
    """First and last sequence of each span that is gone."""
    found = [span async for span in journal.read(from_sequence)]
    return [(span.first, span.last) for span in found if isinstance(span, Lost)]


async def written(journal: JournalPort, record: bytes) -> int:
    """Append as a leader does: what is not known to be written is tried again."""
    async with asyncio.timeout(PATIENCE_S * 3):
        while True:
            with contextlib.suppress(Unavailable):
                return await journal.append(record)
            await asyncio.sleep(0.02)  # a server that is away must get its turn to come back


async def while_time_passes(clock: FakeClock, awaitable: Awaitable[T]) -> T:
    """The result of something that waits for virtual time and, on JetStream, for a real server.

    No time passes while everybody waits for the server: on a busy machine it would be seconds.
    """
    task = asyncio.ensure_future(awaitable)
    async with asyncio.timeout(PATIENCE_S * 3):
        while not task.done():
            if clock.next_deadline_s is not None:
                await clock.advance(0.25)
            await asyncio.sleep(0.001)  # the server's turn; nothing is measured by it
    return await task
