"""A check, a start or a stop that hangs keeps its own worker, and nothing else of its node."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.settings import ServerSettings
from common.clock import Clock
from common.errors import Unavailable
from common.messages import OrderPhase, StopOrder, WorkerOrder, WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from tests.harness.node.agent import AgentHarness, NodeHarness
from tests.harness.node.life import key, lease, order
from tests.harness.node.models import ModelRunner, running

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
async def lent() -> AsyncGenerator[AgentHarness]:
    """A node on loan."""
    async with AgentHarness(inference=True) as harness:
        await harness.lend()
        yield harness


@pytest.fixture
async def training() -> AsyncGenerator[AgentHarness]:
    """A node of the training pool."""
    async with AgentHarness() as harness:
        await harness.clock.advance(2.0)
        yield harness


def stop(worker: WorkerKey, grace_s: float = 5.0) -> StopOrder:
    """An order to stop."""
    return StopOrder(key=worker, reason=StopReason.CANCEL, grace_s=grace_s)


def calls(harness: AgentHarness, name: str, worker: WorkerKey) -> int:
    """How often a worker's runner was asked for something."""
    return harness.runner.calls.count((name, worker))


def of_neighbour(phase: OrderPhase = OrderPhase.RUN) -> WorkerOrder:
    """An order for another job's worker, on the second GPU."""
    return order(NEIGHBOUR, gpus=(1,), phase=phase)


def longest_silence_s(harness: AgentHarness, since_s: float) -> float:
    """Between two reports, and from the last one until now."""
    told_s = [report.sequence / 1000 for report in harness.reports]
    told_s = [since_s, *(at_s for at_s in told_s if at_s >= since_s), harness.clock.now_s()]
    return max(later - sooner for sooner, later in itertools.pairwise(told_s))


# --- the way home -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["check", "check of j1"])
async def test_a_node_turns_home_while_a_check_hangs(lent: AgentHarness, place: str) -> None:
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


async def test_a_lease_that_ends_while_a_check_hangs_turns_the_node_home(
    lent: AgentHarness,
) -> None:
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
    lent: AgentHarness, place: str
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
async def test_what_hangs_delays_no_other_job_of_its_node(
    training: AgentHarness, place: str
) -> None:
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
    training: AgentHarness,
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


async def test_files_whose_removal_hangs_are_removed_once(training: AgentHarness) -> None:
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


async def test_a_check_whose_order_was_withdrawn_is_dropped(training: AgentHarness) -> None:
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


async def test_a_withdrawn_start_that_succeeds_late_leaves_no_worker(
    training: AgentHarness,
) -> None:
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
    training: AgentHarness,
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
    lent: AgentHarness,
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
    training: AgentHarness,
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


async def died_while_a_check_hangs() -> AgentHarness:
    """The harness of the next agent, for which it still does."""
    async with AgentHarness(inference=True) as first:
        await first.lend()
        first.stall.begin("check")
        await first.want(R.ON_LOAN, *HANGING, lease=lease())
        await first.clock.advance(1.0)
    after = AgentHarness(inference=True, before=first)
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
    async with AgentHarness() as first:
        first.stall.begin("start")
        await first.want(R.TRAINING, HANGING[0])
        await first.until(lambda: calls(first, "start", key()) == 1)
        memory = first.ledger.load()
        assert memory is not None
        assert memory.workers[str(key())].is_begun
    after = AgentHarness(before=first)
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
    harness = NodeHarness()
    harness.runner.failures = [RuntimeError("broken")]
    harness.accept(R.TRAINING, HANGING[0])
    with pytest.raises(RuntimeError, match="broken"):
        await harness.turn(3)


LIMIT_S = 20.0


OVER = (P.EXITED, P.REFUSED)


class Shims(ModelRunner):
    """Workers whose shims are on their way until a test lets them live, whoever asked for them.

    One that holds its lock is about to run its worker and can only be told; the others find what a
    stop has left in their place, as in `agent.workers.lost`.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.on_their_way: dict[WorkerKey, bool] = {}
        """By key: whether it has its lock."""
        self.told: set[WorkerKey] = set()
        self.births: Counter[WorkerKey] = Counter()
        self._clock = clock

    async def start(self, order: WorkerOrder, *, endpoint: str) -> None:
        await self._call("start", order.key)
        if order.key not in self.known:
            self.on_their_way.setdefault(order.key, False)
        until_s = self._clock.now_s() + LIMIT_S
        while order.key not in self.known:
            if self._clock.now_s() >= until_s:
                raise Unavailable("its shim did not start")
            await self._clock.sleep(0.1)

    async def stop(self, key: WorkerKey, reason: StopReason, grace_s: float) -> None:
        has_lock = self.on_their_way.get(key)
        if has_lock:
            self.told.add(key)
        elif has_lock is not None:
            del self.on_their_way[key]
            self.end(key, reason=reason)
        elif self.is_alive(key):
            await super().stop(key, reason, grace_s)

    async def forget(self, key: WorkerKey) -> None:
        if self.on_their_way.get(key):
            raise Unavailable(f"{key}: cannot be forgotten, its shim lives")
        self.on_their_way.pop(key, None)
        await super().forget(key)

    def lock(self) -> None:
        """Those on their way are too far to be called back."""
        self.on_their_way = dict.fromkeys(self.on_their_way, True)

    def live(self) -> None:
        """Those on their way run their workers; whoever was ordered to stop does so at once."""
        for worker in self.on_their_way:
            self.births[worker] += 1
            self.known[worker] = running(worker)
            if worker in self.told:
                self.end(worker, reason=StopReason.PREEMPT)
        self.on_their_way.clear()

    def is_alive(self, key: WorkerKey) -> bool:
        """Whether it could use its GPUs."""
        return key in self.known and self.known[key].phase not in OVER


class Quiet:
    """A machine on which nobody else computes."""

    def free_port(self) -> int:
        return 4711

    def listening_ports(self) -> frozenset[int]:
        return frozenset()

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        return set()

    def beside_server(self, pids: Iterable[int], server: ServerSettings) -> set[int] | None:
        return set()

    def owner(self, pid: int) -> str:
        return ""


class Play:
    """A lent node, what its coordinator wants, and the moves that change either."""

    def __init__(self) -> None:
        self.harness = NodeHarness(inference=True, world=Quiet())
        self.shims = Shims(self.harness.clock)
        self.harness.runner = self.harness.node.runner = self.shims
        self.shims.stall = self.harness.stall
        self.orders: dict[WorkerKey, WorkerOrder] = {}
        self.stops: dict[WorkerKey, StopOrder] = {}
        self.role = R.ON_LOAN
        self.is_hanging = self.has_died = False

    async def move(self, name: str) -> None:
        """One of `MOVES`, then time for a step."""
        await getattr(self, f"_{name}")()
        self.harness.machine.pids = {
            int(gpu.removeprefix("GPU-")): 4000
            for worker, one in self.orders.items()
            if self.shims.is_alive(worker)
            for gpu in one.gpu_uuids
        }
        await self.harness.turn(after_s=0.25)
        self.check()

    def _tell(self) -> None:
        self.harness.accept(
            self.role,
            *(one for one in self.orders.values() if self.role == R.ON_LOAN),
            stops=tuple(self.stops.values()),
            is_lent=self.role == R.ON_LOAN,
        )

    async def _reserve(self) -> None:
        self._order(OrderPhase.RESERVE)

    async def _order_one(self) -> None:
        self._order(OrderPhase.RUN)

    def _order(self, phase: OrderPhase) -> None:
        index = len(self.orders)
        worker = key(job=f"j{index}")
        self.orders[worker] = order(worker, gpus=(index % 2,), phase=phase)
        self._tell()

    async def _run(self) -> None:
        for worker, one in self.orders.items():
            self.orders[worker] = structs.replace(one, phase=OrderPhase.RUN)
        self._tell()

    async def _stop(self) -> None:
        for worker in self.orders:
            if worker not in self.stops:
                self.stops[worker] = StopOrder(key=worker, reason=StopReason.CANCEL, grace_s=1.0)
                break
        self._tell()

    async def _reclaim(self) -> None:
        self.role = R.SERVING
        self._tell()

    async def _hang(self) -> None:
        self.is_hanging = not self.is_hanging
        if self.is_hanging:
            self.harness.stall.begin("check")
        else:
            self.harness.stall.end()

    async def _lock(self) -> None:
        self.shims.lock()

    async def _live(self) -> None:
        self.shims.live()

    async def _wait(self) -> None:
        await self.harness.turn()

    async def _die(self) -> None:
        before, self.has_died = self.harness, True
        await before.node.close()
        self.harness = NodeHarness(inference=True, world=Quiet(), before=before)
        if self.is_hanging:
            self.harness.stall.begin("check")

    def check(self) -> None:
        """What holds after every step."""
        shims, node = self.shims, self.harness
        assert max(shims.births.values(), default=0) <= 1
        alive = [worker for worker in self.orders if shims.is_alive(worker)]
        if self.role == R.SERVING:
            assert node.role() != R.ON_LOAN
        if self.has_died:  # what a dead agent began may show itself a step late
            return
        used = Counter(gpu for worker in alive for gpu in self.orders[worker].gpu_uuids)
        assert max(used.values(), default=0) <= 1
        over = {said.key for said in node.life.workers.reports() if said.phase in OVER}
        assert not over & {*alive, *shims.on_their_way}
        if node.role() in (R.WARMING, R.SERVING):
            assert not (alive or shims.on_their_way)

    async def finish(self) -> None:
        """Everything gets on, and everything that was ordered is stopped."""
        if self.is_hanging:
            await self._hang()
        self.shims.lock()
        await self._live()
        for worker in self.orders:
            self.stops.setdefault(
                worker, StopOrder(key=worker, reason=StopReason.CANCEL, grace_s=1.0)
            )
        self._tell()
        for _ in range(4):
            await self.move("live")
        for _ in range(4):
            await self.move("wait")
        assert not [worker for worker in self.orders if self.shims.is_alive(worker)]
        said = {one.key: one.phase for one in self.harness.life.workers.reports()}
        assert all(said.get(worker, P.EXITED) in OVER for worker in self.orders)
        assert self.harness.role() == (R.SERVING if self.role == R.SERVING else R.ON_LOAN)
        await self.harness.node.close()


OFTEN = ("order_one", "order_one", "order_one", "stop", "stop", "lock", "live", "wait", "wait")


MOVES = ("reserve", "run", "reclaim", "hang", "die", *OFTEN)


@settings(max_examples=400, deadline=None)
@given(moves=st.lists(st.sampled_from(MOVES), min_size=6, max_size=24))
def test_no_order_of_events_leaves_a_worker_that_nobody_holds(moves: list[str]) -> None:
    """At most one process per worker, one worker per GPU, none where a server is, none forgotten,
    and a node that is wanted back has turned home with its next step."""

    async def play() -> None:
        played = Play()
        await played.harness.lend_with()
        for name in moves:
            await played.move(name)
        await played.finish()

    asyncio.run(play())
