"""A coordinator of which one part broke ends: nobody may wait for what nobody does any more."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.errors import Unavailable
from coordinator.engine.state.events import PassDue
from coordinator.service.cancellation import beside, end, is_done_first
from coordinator.service.leadership.lease import LeaseValue
from tests.harness.cluster.coordinator import Cell
from tests.harness.fakes import MemoryKey


class DefectiveKey(MemoryKey):
    """A key whose client has a defect: the next write meets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_defective = False

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Raises once what no port may raise."""
        if self.is_defective:
            self.is_defective = False
            raise RuntimeError("a defect")
        return await super().put(value, last_revision=last_revision)


async def test_a_leader_whose_lease_is_kept_by_nobody_ends_and_gives_it_up() -> None:
    """It says what broke, answers who waits, and the next one need not wait for the TTL."""
    async with Cell() as cell:
        cell.key = key = DefectiveKey()
        coordinator = await cell.lead()
        leader = cell.leaders[0]
        key.is_defective = True
        await cell.until(leader.task.done)
        assert isinstance(leader.task.exception(), RuntimeError)
        assert not coordinator.is_leading
        assert key.entry is not None
        assert msgspec.msgpack.decode(key.entry.value, type=LeaseValue).is_released
        with pytest.raises(Unavailable):
            await coordinator.decider.record(PassDue())


async def test_a_standby_that_does_not_listen_any_more_ends() -> None:
    """It would judge the silence of nodes by what it never heard."""
    async with Cell() as cell:
        await cell.lead("one")
        fed: list[float] = []

        def feed() -> None:
            fed.append(cell.clock.now_s())
            if len(fed) > 3:
                raise RuntimeError("a defect")

        standby = cell.launch("two", progress=feed)
        await cell.until(standby.task.done)
        assert isinstance(standby.task.exception(), RuntimeError)


async def test_what_ends_a_task_hears_of_what_it_died_of() -> None:
    """Also where it died long before: a defect must show."""

    async def die() -> None:
        raise RuntimeError("a defect")

    task = asyncio.create_task(die())
    await asyncio.wait({task})
    with pytest.raises(RuntimeError, match="a defect"):
        await end(task)


async def test_what_breaks_beside_a_block_is_told_at_once_and_raised_at_its_end() -> None:
    """The block itself ends in good order."""
    told = asyncio.Event()

    async def die() -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        async with beside(die(), name="part", broke=told.set):
            await told.wait()


async def test_what_is_beside_a_block_ends_with_it_and_tells_nothing() -> None:
    """An end in good order is no defect."""
    told = asyncio.Event()
    ended: list[bool] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with beside(wait(), name="part", broke=told.set):
        await asyncio.sleep(0)
    assert ended == [True]
    assert not told.is_set()


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_deed_and_a_word_are_waited_for_together(is_told: bool) -> None:
    """Whichever comes first; only the deed says whether it is done."""
    told, done = asyncio.Event(), asyncio.Event()
    doing = asyncio.create_task(done.wait())
    (told if is_told else done).set()
    assert await is_done_first(doing, told=told) != is_told
    await end(doing)
