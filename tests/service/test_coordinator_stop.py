"""A coordinator that is told to end does so soon, whatever does not answer it; virtual time."""

from __future__ import annotations

import asyncio

import msgspec

from common.errors import Fenced
from coordinator.engine.state.events import PassDue
from coordinator.service.coordinator import STOP_S, Coordinator
from coordinator.service.leadership.lease import KeyEntry, LeaseValue
from tests.harness.cluster.coordinator import Cell, Leader, submit
from tests.harness.fakes import MemoryJournal, MemoryKey, MemorySnapshots
from tests.tables import each_row


class Stall:
    """Whether a port answers."""

    def __init__(self) -> None:
        self.is_on = False
        self.waiting = 0

    async def here(self) -> None:
        """Return, or never."""
        if self.is_on:
            self.waiting += 1
            await asyncio.Event().wait()


class StalledJournal(MemoryJournal):
    """A journal that takes a record and never answers."""

    def __init__(self, records: list[bytes], stall: Stall) -> None:
        super().__init__(records)
        self._stall = stall

    async def append(self, record: bytes) -> int:
        """Not while it stalls."""
        await self._stall.here()
        return await super().append(record)


class StalledSnapshots(MemorySnapshots):
    """Snapshots that are never saved."""

    def __init__(self, stall: Stall) -> None:
        super().__init__()
        self._stall = stall

    async def save(self, sequence: int, data: bytes) -> None:
        """Not while it stalls."""
        await self._stall.here()
        await super().save(sequence, data)


class StalledKey(MemoryKey):
    """A leader lease that is neither read nor written."""

    def __init__(self, stall: Stall) -> None:
        super().__init__()
        self._stall = stall

    async def get(self) -> KeyEntry | None:
        """Not while it stalls."""
        await self._stall.here()
        return await super().get()

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Not while it stalls."""
        await self._stall.here()
        return await super().put(value, last_revision=last_revision)


class StalledCell(Cell):
    """A cell whose NATS can stop to answer the coordinator, in one part or in all."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls = {name: Stall() for name in ("journal", "snapshot", "lease")}
        self.snapshots = StalledSnapshots(self.stalls["snapshot"])
        self.key = StalledKey(self.stalls["lease"])

    async def __aenter__(self) -> StalledCell:
        await super().__aenter__()
        return self

    async def leader(self) -> tuple[Leader, Coordinator]:
        """A coordinator that leads."""
        journal = StalledJournal(self.records, self.stalls["journal"])
        coordinator = await self.lead(journal=journal)
        return self.leaders[-1], coordinator


@each_row("stalled", ["journal", "snapshot", "lease", "journal snapshot lease"])
async def test_a_coordinator_that_is_told_to_stop_ends_although_nats_hangs(stalled: str) -> None:
    """Within `STOP_S`, in good order, with a batch in hand or without one."""
    async with StalledCell() as cell:
        leader, coordinator = await cell.leader()
        for name in stalled.split():
            cell.stalls[name].is_on = True
        if "journal" in stalled:
            coordinator.decider.post(PassDue())
            await cell.until(lambda: cell.stalls["journal"].waiting == 1)
        coordinator.stop()
        await cell.clock.advance(STOP_S)
        assert leader.task.done()
        assert leader.task.exception() is None
        assert sum(cell.stalls[name].waiting for name in stalled.split()) > 0


async def test_the_lease_is_given_up_although_the_snapshot_hangs() -> None:
    """A snapshot makes the next start shorter; a lease that is kept makes it wait for the TTL."""
    async with StalledCell() as cell:
        leader, coordinator = await cell.leader()
        cell.stalls["snapshot"].is_on = True
        coordinator.stop()
        await cell.clock.advance(STOP_S)
        assert leader.task.done()
        assert cell.stalls["snapshot"].waiting == 1
        assert cell.key.entry is not None
        assert msgspec.msgpack.decode(cell.key.entry.value, type=LeaseValue).is_released


async def test_a_coordinator_that_lost_its_lease_ends_although_the_journal_hangs() -> None:
    """It says that it was fenced, and is there to be started anew as soon as one told to stop."""
    async with StalledCell() as cell:
        leader, coordinator = await cell.leader()
        cell.stalls["journal"].is_on = leader.key.is_cut = True
        coordinator.decider.post(PassDue())
        await cell.until(lambda: not coordinator.may_act())
        await cell.clock.advance(2 * STOP_S)
        assert leader.task.done()
        assert isinstance(leader.task.exception(), Fenced)


async def test_a_stop_that_is_answered_is_whole() -> None:
    """Snapshot saved, lease given up, and an acknowledged job is there for the next one."""
    async with StalledCell() as cell:
        leader, coordinator = await cell.leader()
        job_id = await submit(cell)
        coordinator.stop()
        await cell.clock.advance(STOP_S)
        assert leader.task.done()
        saved = await cell.snapshots.load()
        assert saved is not None
        assert saved[0] == len(cell.records)
        other = cell.launch("two").coordinator
        await cell.until(lambda: other.is_leading)
        assert job_id in other.engine.state.jobs
