"""Two coordinators on a real nats-server, one of which does not know that its time is over.

Its clock stands still, as that of a frozen machine does, so its own lease never runs out for it.
The agent is the real one, on a model of its machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from agent.agent import Agent
from common.errors import Fenced, Unavailable
from common.model import JobId, NodeName
from coordinator.engine.record import decode_record
from coordinator.engine.state.events import JobSubmitted
from coordinator.service.api.handlers import Api
from coordinator.service.coordinator import Coordinator
from coordinator.service.leadership.lease import KeyEntry, KeyPort, LeaderLease
from coordinator.service.ports import LeasePort
from tests.harness.cluster.coordinator import make_settings, make_spec
from tests.harness.fakes import FakeClock
from tests.harness.node import life as life_harness
from tests.harness.node.agent import AgentHarness
from tests.harness.servers import running_nats
from tests.service.places import CELL, MARGIN_S, TTL_S, JetStream, opened, records

pytestmark = [pytest.mark.nats, pytest.mark.slow]

NODE = NodeName("n1")
PATIENCE_S = 30.0
# What it hears must not make the old one push by itself: each test says what it tries.
SETTINGS = msgspec.structs.replace(make_settings(), leader_ttl_s=TTL_S, push_retry_s=1000.0)


class WatchedKey:
    """The lease's key, which tells whether an answer of the server is owed: no clock of whoever
    waits for it may run meanwhile.

    A fake clock is many times as fast as a real server, so that a lease could run out by it while
    the server writes.
    """

    def __init__(self, key: KeyPort) -> None:
        self._key = key
        self.asked_count = 0

    async def get(self) -> KeyEntry | None:
        with self._asked():
            return await self._key.get()

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        with self._asked():
            return await self._key.put(value, last_revision=last_revision)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        self.asked_count += 1
        try:
            yield
        finally:
            self.asked_count -= 1


class Leader:
    """One coordinator on the place's JetStream and a clock of its own."""

    def __init__(
        self, coordinator: Coordinator, lease: LeasePort, key: WatchedKey, clock: FakeClock
    ) -> None:
        self.coordinator = coordinator
        self.lease = lease
        self.key = key
        self.clock = clock
        self.task = asyncio.create_task(coordinator.run(Api(coordinator).serve))


class Scene:
    """A node's agent and the coordinators that want to lead it."""

    def __init__(self, place: JetStream, stack: AsyncExitStack) -> None:
        self.place = place
        self.harness = AgentHarness(cell=CELL, node=NODE)
        self.clock = self.harness.clock
        """Everybody's but the old leader's."""
        self._leaders: list[Leader] = []
        self._stack = stack

    async def start_agent(self) -> None:
        """The real agent, on a connection of its own."""
        agent = Agent(
            self.harness.node,
            bus=await self.place.bus(),
            clock=self.clock,
            last_resort=self.harness.last_resort,
            instance="one",
        )
        self._stack.push_async_callback(_end, asyncio.create_task(agent.run()))

    async def launch(self, name: str, clock: FakeClock) -> Leader:
        """Start a coordinator; it may have to stand by."""
        key = WatchedKey(await self.place.key())
        lease = LeaderLease(key, clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S, nonce=name)
        coordinator = Coordinator(
            SETTINGS,
            holder=name,
            clock=clock,
            bus=await self.place.bus(),
            journal=await self.place.journal(),
            snapshots=await self.place.snapshots(),
            lease=lease,
        )
        leader = Leader(coordinator, lease, key, clock)
        self._leaders.append(leader)
        self._stack.push_async_callback(_end, leader.task)
        return leader

    def epoch(self) -> int:
        """The one that the agent obeys."""
        return self.harness.life.memory.epoch

    async def until(self, condition: Callable[[], bool], *clocks: FakeClock) -> None:
        """Let these clocks and the real server run until something is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                waiting = [each.clock for each in self._leaders if each.key.asked_count]
                for clock in clocks:
                    if clock not in waiting:
                        await clock.advance(0.1)
                await asyncio.sleep(0.001)  # the server's turn; nothing is measured by it

    async def writers(self) -> list[str]:
        """Who wrote each record of the journal."""
        found = await records(await opened(self.place))
        return [decode_record(data, sequence=sequence).writer for sequence, data in found]


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def two_leaders(directory: Path) -> AsyncIterator[tuple[Scene, Leader, Leader]]:
    """(the scene, the one that believes that it leads, the one that does)."""
    async with running_nats(directory) as server, AsyncExitStack() as stack:
        scene = Scene(JetStream(server, stack), stack)
        await scene.start_agent()
        frozen = FakeClock()
        old = await scene.launch("old", frozen)
        await scene.until(
            lambda: old.coordinator.is_leading and scene.epoch() == 1, frozen, scene.clock
        )
        # From a renewal on: the next one is far off by a clock that hardly moves any more.
        valid_until_s = old.lease.valid_until_s
        await scene.until(lambda: old.lease.valid_until_s > valid_until_s, frozen, scene.clock)
        new = await scene.launch("new", scene.clock)
        await scene.until(lambda: new.coordinator.is_leading and scene.epoch() == 2, scene.clock)
        assert old.coordinator.may_act()
        yield scene, old, new


def job(name: str) -> JobSubmitted:
    """A job that wants in."""
    return JobSubmitted(job_id=JobId(name), spec=make_spec(), tenant="a", user="b")


async def test_a_leader_that_was_replaced_cannot_append(tmp_path: Path) -> None:
    """The stream refuses its next record: nobody is told otherwise, and it ends."""
    async with two_leaders(tmp_path / "nats") as (scene, old, new):
        count = len(await scene.writers())
        trying = asyncio.ensure_future(old.coordinator.record(job("jx")))
        await asyncio.sleep(0)
        await old.clock.advance(SETTINGS.coalesce_s)
        await scene.until(old.task.done)
        with pytest.raises(Fenced, match=r"journal: record \d+ was written by another program"):
            old.task.result()
        with pytest.raises(Unavailable):
            await trying
        adding = asyncio.ensure_future(new.coordinator.record(job("jy")))
        await scene.until(adding.done, scene.clock)
        assert list(new.coordinator.engine.state.jobs) == ["jy"]
        added = (await scene.writers())[count:]
        assert added
        assert set(added) == {"new"}


async def test_a_leader_that_was_replaced_cannot_command(tmp_path: Path) -> None:
    """The agent obeys a higher epoch: it refuses an order to run a worker, and the sender ends."""
    async with two_leaders(tmp_path / "nats") as (scene, old, new):
        desired = old.coordinator.engine.desired(NODE)
        assert desired.epoch == 1
        order = life_harness.order()
        forged = msgspec.structs.replace(
            desired, generation=desired.generation + 1000, workers=(order,)
        )
        old.coordinator.dispatcher.push(forged)
        await scene.until(lambda: not old.coordinator.is_leading)
        await old.clock.advance(SETTINGS.coalesce_s)
        await scene.until(old.task.done)
        with pytest.raises(Fenced, match="node n1 has epoch 2, ours is 1"):
            old.task.result()
        assert old.coordinator.dispatcher.refusals == 1
        assert new.coordinator.is_leading
        assert scene.epoch() == 2
        assert scene.harness.runner.calls == []
        assert not scene.harness.life.memory.workers
