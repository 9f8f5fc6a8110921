"""The driver: when passes happen, what a lossy wire and crashes cost, how load comes in."""

from __future__ import annotations

from itertools import count

import pytest

from common.model import (
    JobId,
    JobState,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    ServiceName,
)
from coordinator.engine.state.accounting import figures
from coordinator.engine.state.events import Event, LoadMeasured, LoanPassDue, PassDue
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.runtime import RunRules, Saves
from coordinator.sim.run.simulation import Passes, Simulation, Submission
from coordinator.sim.run.wire import WireRules
from tests.harness.builders import make_spec

CHAT = ServiceName("chat")
MOST_EVENTS = 100_000

SLOW = Delays(
    report_s=0.5, ready_s=1.0, start_s=2.0, stop_s=1.0, drain_s=2.0, device_free_s=1.0, warm_up_s=5
)


def nodes(training: int = 2, inference: int = 0) -> list[NodeSpec]:
    """Nodes of 8 GPUs, t0.. and i0.."""
    return [
        NodeSpec(
            name=NodeName(f"{'i' if index >= training else 't'}{index}"),
            home_pool=Pool.INFERENCE if index >= training else Pool.TRAINING,
            gpu_type="H100",
            gpus=8,
            service=CHAT if index >= training else None,
        )
        for index in range(training + inference)
    ]


def job(name: str, at_s: float, work_s: float = 100.0, gpus: int = 8) -> Submission:
    """One worker's work."""
    spec = make_spec(name, gpus_per_worker=gpus, expected_runtime_s=work_s)
    return Submission(at_s=at_s, job_id=JobId(name), spec=spec, work_s=work_s)


class Watched(Simulation):
    """Notes each event with its instant."""

    seen: list[tuple[float, Event]]

    def handle(self, event: Event) -> None:
        """As the simulation, and remember it."""
        if not hasattr(self, "seen"):
            self.seen = []
        self.seen.append((self.loop.now_s, event))
        super().handle(event)

    def passes(self) -> list[float]:
        """Instants of scheduling passes."""
        return [at_s for at_s, event in self.seen if isinstance(event, PassDue)]


def sim(
    *,
    policy: str = "fifo",
    delays: Delays | None = None,
    passes: Passes | None = None,
    wire: WireRules | None = None,
    training: int = 2,
    inference: int = 0,
) -> Watched:
    """A small checked cluster."""
    service = ServiceSettings(
        name=CHAT, capacity_per_node=1.0, mode=Mode.ACT, hold_off_s=0.0, min_serving=0
    )
    return Watched(
        EngineSettings(policy=policy, services=(service,) if inference else ()),
        nodes(training, inference),
        delays=delays,
        rules=RunRules(saves=Saves.ON_REQUEST),
        passes=passes,
        wire=wire,
        check=True,
    )


def to_the_end(run: Simulation) -> None:
    """Until the last job ended; a run that goes round in circles is a failure, not a wait."""

    def look() -> None:
        assert run.loop.events < MOST_EVENTS, "the run does not end"

    run.run_jobs(look)


def ended(run: Simulation) -> dict[str, float | None]:
    """When each job ended."""
    jobs = run.engine.state.jobs.values()
    return {job.job_id: job.finished_at_s for job in jobs if job.state == JobState.SUCCEEDED}


# --- crashes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("down_s", "is_lost"), [(14.0, False), (16.0, True), (60.0, True)])
def test_a_node_that_is_down_for_a_quarter_of_a_minute_is_lost(
    down_s: float, is_lost: bool
) -> None:
    """Fifteen seconds after it fell silent, as in a live cell by default, and not before; one that
    is back by then never was."""
    run = sim(delays=SLOW)
    run.submit([job("a", 10_000.0)])
    run.crash([Crash(node=NodeName("t0"), at_s=100.0, down_s=down_s)])
    roles: list[NodeRole] = []

    def look() -> None:
        roles.append(run.engine.state.nodes[NodeName("t0")].role)

    for at_s in (99.0, 114.9, 115.1):
        run.loop.at(at_s, look)
    run.run(until_s=116.0)
    assert [role == NodeRole.LOST for role in roles] == [False, False, is_lost]


# --- passes -------------------------------------------------------------------------------------


def test_one_pass_sees_all_facts_of_an_instant() -> None:
    """Three jobs that come together are decided on together."""
    run = sim()
    run.submit([job("a", 50.0), job("b", 50.0), job("c", 50.0)])
    to_the_end(run)
    assert run.passes().count(50.0) == 1


def test_nothing_happens_while_nothing_changes() -> None:
    """No pass falls between a job's start and its end a day later."""
    run = sim()
    run.submit([job("a", 10.0, work_s=86_400.0)])
    to_the_end(run)
    assert [at_s for at_s in run.passes() if 10.0 < at_s < 86_410.0] == []


def test_facts_are_gathered_for_the_coalescing_time() -> None:
    """A pass comes that much after the first fact, and takes the later ones with it."""
    run = sim(passes=Passes(coalesce_s=5.0))
    run.submit([job("a", 50.0), job("b", 53.0)])
    to_the_end(run)
    assert [at_s for at_s in run.passes() if 50.0 <= at_s <= 60.0] == [55.0]


def test_a_grid_puts_passes_off_to_its_multiples() -> None:
    """With a grid of 70 s a job that comes at 71 s starts at 140 s."""
    run = sim(passes=Passes(grid_s=70.0))
    run.submit([job("a", 71.0)])
    to_the_end(run)
    assert run.engine.state.jobs[JobId("a")].started_at_s == 140.0
    assert all(at_s % 70.0 == 0.0 for at_s in run.passes())
    assert len(set(run.passes())) == len(run.passes())


def test_what_a_pass_itself_brings_about_waits_for_the_next_one_of_the_grid() -> None:
    """A node that is lent at once could take a job in the pass's own instant: it starts one period
    later, as under a scheduler that looks once a period."""
    run = sim(policy="aryl-loan", passes=Passes(grid_s=70.0), training=1, inference=3)
    run.load(CHAT, ((250.0 * step, 0.1) for step in count()))
    run.submit([job("first", 1.0, work_s=3000.0), job("second", 301.0)])
    to_the_end(run)
    jobs = run.engine.state.jobs
    assert [jobs[JobId(name)].started_at_s for name in ("first", "second")] == [70.0, 420.0]
    assert len(set(run.passes())) == len(run.passes())


def test_periodic_passes_come_only_when_asked_for_and_only_with_jobs() -> None:
    """A period of 30 s makes a pass each 30 s of a job's life and none after it."""
    run = sim(passes=Passes(period_s=30.0))
    run.submit([job("a", 10.0, work_s=100.0)])
    run.run()
    assert [at_s for at_s in run.passes() if at_s > 10.0] == [40.0, 70.0, 100.0, 110.0, 130.0]


def test_the_engine_is_woken_when_time_alone_changes_something() -> None:
    """A gang that never becomes ready is given up at its deadline, without any other event."""
    run = sim(delays=Delays(ready_s=10_000.0), training=1)
    run.submit([job("a", 0.0)])
    run.begin()
    run.loop.run(400.0)
    assert run.engine.state.counters.gang_timeouts == 1


# --- load and loans -----------------------------------------------------------------------------


def test_load_may_go_on_for_ever() -> None:
    """Samples are drawn one by one, so a run ends with its jobs and not with its load."""
    run = sim(inference=2)
    run.load(CHAT, ((300.0 * step, 0.5) for step in count()))
    run.submit([job("a", 0.0, work_s=1000.0)])
    to_the_end(run)
    assert ended(run) == {"a": 1000.0}
    assert sum(isinstance(event, LoadMeasured) for _, event in run.seen) == 4


def test_a_loan_pass_comes_with_the_work_once_a_period() -> None:
    """As in the live coordinator: whenever something happens and the last one is a period ago."""
    run = sim(inference=2)
    run.load(CHAT, [(0.0, 2.0)])
    run.submit([job("a", 0.0), job("b", 100.0), job("c", 301.0), job("d", 302.0)])
    to_the_end(run)
    at_s = [at_s for at_s, event in run.seen if isinstance(event, LoanPassDue)]
    assert sorted(set(at_s)) == [0.0, 301.0]


def test_a_lent_node_runs_jobs_and_comes_home_when_the_load_rises() -> None:
    """The loop is closed: low load lends, high load takes back, late never."""
    run = sim(policy="aryl-loan", delays=SLOW, training=1, inference=3)
    loads = ((300.0 * step, 0.1 if step < 4 else 2.5) for step in count())
    run.load(CHAT, loads)
    run.submit([job(name, 10.0, work_s=3000.0) for name in "abc"])
    to_the_end(run)
    found = figures(run.engine.state)
    assert found.jobs_finished == 3
    assert found.loans >= 1
    assert found.reclaims >= 1
    assert found.reclaims_late == 0


# --- losses and crashes -------------------------------------------------------------------------


@pytest.mark.parametrize("delays", [None, SLOW])
def test_lost_messages_cost_time_and_no_job(delays: Delays | None) -> None:
    """With a third of all messages lost every job still ends, later than without losses."""
    ends: list[float] = []
    for loss_ratio in (0.0, 0.33):
        run = sim(delays=delays, wire=WireRules(loss_ratio=loss_ratio, seed=3))
        run.submit([job(f"j{index}", 10.0 * index) for index in range(8)])
        to_the_end(run)
        assert len(ended(run)) == 8
        ends.append(run.loop.now_s)
    assert run.wire.lost > 0
    assert ends[1] > ends[0]


def test_a_seed_loses_the_same_messages() -> None:
    """Two runs of one seed are the same event by event; another seed differs."""

    def play(seed: int) -> list[tuple[float, Event]]:
        run = sim(delays=SLOW, wire=WireRules(loss_ratio=0.3, seed=seed))
        run.submit([job(f"j{index}", 10.0 * index) for index in range(4)])
        to_the_end(run)
        return run.seen

    assert play(1) == play(1)
    assert play(1) != play(2)


def test_a_wire_that_loses_all_is_refused() -> None:
    """Nothing would ever happen on it."""
    with pytest.raises(ValueError, match="loss_ratio 1"):
        WireRules(loss_ratio=1.0)


def test_a_job_outlives_the_crash_of_its_node() -> None:
    """Its attempt is a node fault; it runs again, from the start as nobody could ask it to save."""
    run = sim(delays=SLOW, training=1)
    run.submit([job("a", 0.0, work_s=500.0)])
    run.crash([Crash(node=NodeName("t0"), at_s=200.0, down_s=60.0)])
    to_the_end(run)
    found = run.engine.state.jobs[JobId("a")]
    assert found.counts.node_faults == 1
    assert ended(run)["a"] == pytest.approx(260.0 + 500.0, abs=20.0)
    assert run.runtime.lost_gpu_s == pytest.approx(8 * 200.0, abs=8 * 10.0)


def test_a_node_that_is_told_while_it_is_down_hears_it_after_its_boot() -> None:
    """What was pushed to a dead node is pushed again when its report shows that it lags."""
    run = sim(delays=SLOW, training=1)
    run.submit([job("a", 199.0, work_s=100.0)])
    run.crash([Crash(node=NodeName("t0"), at_s=199.4, down_s=10.0)])
    to_the_end(run)
    assert set(ended(run)) == {"a"}


def test_what_was_about_to_start_never_does_on_a_dead_node() -> None:
    """A worker that was ready when power went does not compute while the node is down."""
    run = sim(delays=Delays(ready_s=1.0, start_s=10.0), training=1)
    run.submit([job("a", 0.0, work_s=100.0)])
    run.crash([Crash(node=NodeName("t0"), at_s=5.0, down_s=1000.0)])
    run.begin()
    run.loop.run(500.0)
    assert run.nodes[NodeName("t0")].keys() == []
    assert ended(run) == {}
