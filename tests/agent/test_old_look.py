"""A look at the workers that was begun before something came of a start says nothing against it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection

import pytest

from agent.core.state import StopWorker
from agent.workers.runner import WorkerStatus
from common.faults import Fault
from common.messages import OrderPhase, StopOrder, WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from tests.agent.agent_house import AgentHouse
from tests.agent.bench import Bench, key, order
from tests.agent.models import ModelRunner

P, R = WorkerPhase, NodeRole


class LongLook(ModelRunner):
    """Which takes its time between what it sees and what it says, as for another worker's log."""

    async def statuses(self, started: Collection[WorkerKey] = ()) -> tuple[WorkerStatus, ...]:
        seen = tuple(self.known[worker] for worker in sorted(self.known))
        await self.stall.at("statuses")
        return seen


@pytest.fixture
async def training() -> AsyncGenerator[AgentHouse]:
    """A node of the training pool whose looks take as long as a test says."""
    async with AgentHouse() as house:
        house.runner = house.node.runner = LongLook()
        house.runner.stall = house.stall
        await house.clock.advance(2.0)
        yield house


async def begin_beside_a_look(house: AgentHouse) -> None:
    """A start is answered while a look is under way that was begun before its worker was there."""
    house.stall.begin("start")
    await house.want(R.TRAINING, order())
    await house.until(lambda: ("start", key()) in house.runner.calls)
    starting = house.stall
    house.stall = house.runner.stall = type(starting)()
    house.runner.stall.begin("statuses")
    await house.clock.advance(2.0)
    starting.end()
    await house.clock.advance(0.1)
    assert key() in house.runner.known


async def test_a_worker_that_came_to_life_beside_a_look_is_not_lost(training: AgentHouse) -> None:
    """Its whole gang would be stopped for it, and its node blamed."""
    await begin_beside_a_look(training)
    training.runner.stall.end()
    await training.clock.advance(3.0)
    assert training.phase(key()) == P.RUNNING
    assert training.runner.stops == []


async def test_a_worker_that_is_stopped_as_it_comes_to_life_beside_a_look_was_stopped(
    training: AgentHouse,
) -> None:
    """That is no fault of its node, nor over before its shim says so."""
    await begin_beside_a_look(training)
    stop = StopOrder(key=key(), reason=StopReason.CANCEL, grace_s=5.0)
    await training.want(R.TRAINING, stops=(stop,))
    training.runner.stall.end()
    await training.until_phase(key(), P.EXITED)
    said = training.worker(key())
    assert said is not None
    assert (said.stop_reason, said.error) == (StopReason.CANCEL, "")


def test_a_worker_of_which_the_next_look_sees_nothing_is_lost() -> None:
    """One look is older than the answer to its start, no more."""
    bench = Bench(inference=False)
    bench.want(R.TRAINING, order(phase=OrderPhase.RUN))
    bench.step()
    bench.life.workers.checked(key(), endpoint="n1:29500", refusal=None)
    bench.step()
    bench.life.workers.started(key(), error="")
    bench.step()
    assert [report.phase for report in bench.life.workers.reports()] == [P.RUNNING]
    actions = bench.step()
    [report] = bench.life.workers.reports()
    assert (report.phase, report.fault) == (P.EXITED, Fault.SHIM_LOST)
    assert report.error == "the worker and its supervisor are gone"
    assert not any(isinstance(action, StopWorker) for action in actions)
