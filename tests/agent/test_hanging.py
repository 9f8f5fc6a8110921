"""A check, a start or a stop that hangs keeps its own worker, and nothing else of its node."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

import pytest

from common.messages import OrderPhase, StopOrder, WorkerOrder, WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from tests.agent.agent_house import AgentHouse
from tests.agent.bench import key, lease, order
from tests.agent.models import ModelRunner, running
from tests.agent.node_house import House

P, R = WorkerPhase, NodeRole
SLACK_S = 0.5
"""What a step or a report may be late by: a few periods of a step."""
NEIGHBOUR = key(job="j2")
HANGING = (order(key(0), gpus=(0,)), order(key(1), gpus=(1,)))


class Stillborn(ModelRunner):
    """Whose shims never come to life."""

    async def start(self, order: WorkerOrder, *, endpoint: str) -> None:
        await self._call("start", order.key)
        raise OSError("its shim did not start")


@pytest.fixture
async def lent() -> AsyncGenerator[AgentHouse]:
    """A node on loan."""
    async with AgentHouse(inference=True) as house:
        await house.lend()
        yield house


@pytest.fixture
async def training() -> AsyncGenerator[AgentHouse]:
    """A node of the training pool."""
    async with AgentHouse() as house:
        await house.clock.advance(2.0)
        yield house


def stop(worker: WorkerKey, grace_s: float = 5.0) -> StopOrder:
    """An order to stop."""
    return StopOrder(key=worker, reason=StopReason.CANCEL, grace_s=grace_s)


def calls(house: AgentHouse, name: str, worker: WorkerKey) -> int:
    """How often a worker's runner was asked for something."""
    return house.runner.calls.count((name, worker))


def of_neighbour(phase: OrderPhase = OrderPhase.RUN) -> WorkerOrder:
    """An order for another job's worker, on the second GPU."""
    return order(NEIGHBOUR, gpus=(1,), phase=phase)


def longest_silence_s(house: AgentHouse, since_s: float) -> float:
    """Between two reports, and from the last one until now."""
    told_s = [report.sequence / 1000 for report in house.reports]
    told_s = [since_s, *(at_s for at_s in told_s if at_s >= since_s), house.clock.now_s()]
    return max(later - sooner for sooner, later in itertools.pairwise(told_s))


# --- the way home -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["check", "check of j1"])
async def test_a_node_turns_home_while_a_check_hangs(lent: AgentHouse, place: str) -> None:
    """Within a step of the order, and its service has it back long before the check is over."""
    lent.stall.begin(place)
    await lent.want(R.ON_LOAN, *HANGING, lease=lease())
    await lent.clock.advance(1.0)
    assert [lent.phase(one.key) for one in HANGING] == [P.RESERVING] * 2
    await lent.want(R.SERVING)
    await lent.clock.advance(lent.settings.step_period_s)
    assert lent.life.memory.role in (R.VACATING, R.WARMING)
    await lent.clock.advance(4.0)
    assert lent.report.role == R.SERVING
    assert [lent.phase(one.key) for one in HANGING] == [P.EXITED] * 2


async def test_a_lease_that_ends_while_a_check_hangs_turns_the_node_home(lent: AgentHouse) -> None:
    """Nobody has to ask for it."""
    lent.stall.begin("check")
    await lent.want(R.ON_LOAN, *HANGING, lease=lease())
    lent.renewal = lambda _: None
    left_s = (lent.life.lease_ends_at_s or 0.0) - lent.clock.now_s()
    await lent.clock.advance(left_s + lent.settings.report_period_s)
    assert lent.life.memory.lease is None
    assert lent.life.memory.role in (R.VACATING, R.WARMING, R.SERVING)


@pytest.mark.parametrize("place", ["check", "start", "stop"])
async def test_reports_and_renewals_go_on_while_something_hangs(
    lent: AgentHouse, place: str
) -> None:
    """A node that falls silent would be taken for lost, and its healthy jobs with it."""
    await lent.want(R.ON_LOAN, of_neighbour(), lease=lease())
    await lent.until_phase(NEIGHBOUR, P.RUNNING)
    lent.stall.begin(place)
    stops = (stop(NEIGHBOUR),) if place == "stop" else ()
    await lent.want(R.ON_LOAN, HANGING[0], of_neighbour(), lease=lease(), stops=stops)
    began_at_s, renewed = lent.clock.now_s(), len(lent.renewals)
    await lent.clock.advance(9.0)
    period_s = lent.settings.report_period_s
    assert longest_silence_s(lent, began_at_s) <= period_s + SLACK_S
    await lent.clock.advance(lease().ttl_s / 3)
    assert len(lent.renewals) > renewed
    assert lent.report.role == R.ON_LOAN


# --- its neighbours ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["check of j1", "start of j1"])
async def test_what_hangs_delays_no_other_job_of_its_node(training: AgentHouse, place: str) -> None:
    """Another one starts and stops as if it were alone."""
    training.stall.begin(place)
    await training.want(R.TRAINING, HANGING[0])
    await training.clock.advance(0.5)
    await training.want(R.TRAINING, HANGING[0], of_neighbour())
    await training.clock.advance(2 * training.settings.report_period_s)
    assert training.phase(NEIGHBOUR) == P.RUNNING
    await training.want(R.TRAINING, HANGING[0], of_neighbour(), stops=(stop(NEIGHBOUR),))
    await training.clock.advance(training.settings.report_period_s)
    assert training.phase(NEIGHBOUR) == P.EXITED


async def test_a_shim_that_does_not_take_its_stop_delays_no_other_stop(
    training: AgentHouse,
) -> None:
    """Each is told on its own."""
    await training.want(R.TRAINING, HANGING[0], of_neighbour())
    for worker in (key(), NEIGHBOUR):
        await training.until_phase(worker, P.RUNNING)
    training.stall.begin("stop of j1")
    await training.want(R.TRAINING, stops=(stop(key()), stop(NEIGHBOUR)))
    await training.clock.advance(training.settings.report_period_s)
    assert training.phase(NEIGHBOUR) == P.EXITED
    assert training.phase(key()) == P.RUNNING
    training.stall.end()
    await training.clock.advance(training.settings.report_period_s)
    assert training.phase(key()) == P.EXITED


async def test_files_whose_removal_hangs_are_removed_once(training: AgentHouse) -> None:
    """However many steps it takes."""
    await training.want(R.TRAINING, HANGING[0])
    await training.until_phase(key(), P.RUNNING)
    training.runner.end(key())
    await training.until_phase(key(), P.EXITED)
    training.stall.begin("forget")
    await training.want(R.TRAINING, acknowledged=(key(),))
    await training.clock.advance(5.0)
    assert calls(training, "forget", key()) == 1
    training.stall.end()
    await training.clock.advance(1.0)
    assert training.runner.known == {}


# --- what was withdrawn -----------------------------------------------------------------------


async def test_a_check_whose_order_was_withdrawn_is_dropped(training: AgentHouse) -> None:
    """Its answer would be nobody's, and whoever looks for it would look for ever."""
    training.stall.begin("check")
    await training.want(R.TRAINING, HANGING[0])
    await training.clock.advance(0.5)
    assert checks_under_way() == 1
    await training.want(R.TRAINING, stops=(stop(key()),))
    await training.clock.advance(0.5)
    assert checks_under_way() == 0
    assert training.phase(key()) == P.EXITED
    training.stall.end()
    await training.clock.advance(2.0)
    assert calls(training, "start", key()) == 0


def checks_under_way() -> int:
    """How many tasks of this test's loop look for somebody."""
    return sum(task.get_name() == "CheckReserve" for task in asyncio.all_tasks())


async def test_a_withdrawn_start_that_succeeds_late_leaves_no_worker(training: AgentHouse) -> None:
    """It has its GPUs until it is known not to run: nobody else gets them, nor hears of its end."""
    training.stall.begin("start of j1")
    await training.want(R.TRAINING, HANGING[0])
    await training.until(lambda: calls(training, "start", key()) == 1)
    rival = order(NEIGHBOUR, gpus=(0,))
    await training.want(R.TRAINING, rival, stops=(stop(key()),))
    await training.clock.advance(3.0)
    assert training.phase(key()) != P.EXITED
    assert training.phase(NEIGHBOUR) == P.RESERVING
    training.stall.end()
    await training.until_phase(key(), P.EXITED)
    assert training.runner.known[key()].phase == P.EXITED
    await training.until_phase(NEIGHBOUR, P.RUNNING)
    await training.want(R.TRAINING, rival, acknowledged=(key(),))
    await training.clock.advance(2.0)
    assert set(training.runner.known) == {NEIGHBOUR}
    assert calls(training, "start", key()) == 1


async def test_a_withdrawn_start_that_fails_late_is_a_stop_and_no_fault(
    training: AgentHouse,
) -> None:
    """Whoever ordered the stop has what was asked for."""
    training.runner = training.node.runner = Stillborn()
    training.runner.stall = training.stall
    training.stall.begin("start")
    await training.want(R.TRAINING, HANGING[0])
    await training.until(lambda: calls(training, "start", key()) == 1)
    await training.want(R.TRAINING, stops=(stop(key()),))
    await training.clock.advance(1.0)
    training.stall.end()
    await training.until_phase(key(), P.EXITED)
    said = training.worker(key())
    assert said is not None
    assert (said.stop_reason, said.error) == (StopReason.CANCEL, "")


async def test_no_server_starts_beside_a_worker_that_may_yet_come_to_life(
    lent: AgentHouse,
) -> None:
    """The node turns home at once, and its service gets it when that start is answered."""
    lent.stall.begin("start")
    await lent.want(R.ON_LOAN, HANGING[0], lease=lease())
    await lent.until(lambda: calls(lent, "start", key()) == 1)
    await lent.want(R.SERVING)
    await lent.clock.advance(lent.settings.step_period_s)
    assert lent.life.memory.role == R.VACATING
    await lent.clock.advance(8.0)
    assert lent.report.role == R.VACATING
    lent.machine.commands.clear()
    lent.stall.end()
    await lent.until_role(R.SERVING)
    assert lent.runner.known[key()].phase == P.EXITED
    assert lent.machine.commands == ["start", "route"]


async def test_a_start_that_was_withdrawn_before_it_began_is_never_made(
    training: AgentHouse,
) -> None:
    """The stop came while the ledger was written."""
    await training.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await training.until_phase(key(), P.READY)
    training.stall.begin("ledger")
    running_order = asyncio.create_task(training.want(R.TRAINING, order()))
    await training.clock.advance(0.5)
    stopping = asyncio.create_task(training.want(R.TRAINING, stops=(stop(key()),)))
    await training.clock.advance(0.5)
    training.stall.end()
    await training.until_phase(key(), P.EXITED)
    await asyncio.gather(running_order, stopping, return_exceptions=True)
    assert training.runner.known == {}


# --- a dead agent -----------------------------------------------------------------------------


async def died_while_a_check_hangs() -> AgentHouse:
    """The house of the next agent, for which it still does."""
    async with AgentHouse(inference=True) as first:
        await first.lend()
        first.stall.begin("check")
        await first.want(R.ON_LOAN, *HANGING, lease=lease())
        await first.clock.advance(1.0)
    after = AgentHouse(inference=True, before=first)
    after.stall.begin("check")
    return after


async def test_an_agent_that_dies_while_a_check_hangs_goes_on_alike() -> None:
    """The next one looks again, and begins each worker once."""
    async with await died_while_a_check_hangs() as after:
        began_at_s = after.clock.now_s()
        await after.clock.advance(4.0)
        assert calls(after, "check", key()) == 2
        assert longest_silence_s(after, began_at_s) <= after.settings.report_period_s + SLACK_S
        assert after.report.role == R.ON_LOAN
        after.stall.end()
        await after.until_phase(key(), P.RUNNING)
        assert calls(after, "start", key()) == 1


async def test_an_agent_whose_first_deed_is_a_check_that_hangs_comes_home() -> None:
    """As soon as it is asked to."""
    async with await died_while_a_check_hangs() as after:
        await after.clock.advance(1.0)
        await after.want(R.SERVING)
        await after.clock.advance(4.0)
        assert after.report.role == R.SERVING


async def test_a_start_that_outlives_its_agent_and_its_order_leaves_no_worker() -> None:
    """The ledger says that it was begun, so the next agent tells it to stop, seen or not."""
    async with AgentHouse() as first:
        first.stall.begin("start")
        await first.want(R.TRAINING, HANGING[0])
        await first.until(lambda: calls(first, "start", key()) == 1)
        memory = first.ledger.load()
        assert memory is not None
        assert memory.workers[str(key())].is_begun
    after = AgentHouse(before=first)
    after.stall.begin("start")
    async with after:
        await after.want(R.TRAINING, stops=(stop(key()),))
        await after.clock.advance(1.0)
        assert calls(after, "stop", key()) >= 1
        after.stall.end()
        after.runner.known[key()] = running(key())  # the shim that the dead agent began
        await after.clock.advance(2.0)
        assert after.runner.known[key()].phase == P.EXITED


# --- errors -----------------------------------------------------------------------------------


async def test_an_error_that_nobody_expects_ends_the_agent_loudly() -> None:
    """Beside its steps as well as in them: it starts anew, and nothing is left half done."""
    house = House()
    house.runner.failures = [RuntimeError("broken")]
    house.accept(R.TRAINING, HANGING[0])
    with pytest.raises(RuntimeError, match="broken"):
        await house.turn(3)
