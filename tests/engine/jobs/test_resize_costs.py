"""What a resize costs a job: measured by its words, booked once, kept, and seen by policies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model import JobState, NodeName, Progress, StopReason
from coordinator.engine.engine import decode_state
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.jobs.resize_costs import RECENT_PRICES, ResizeCosts
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import ProgressReported
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Preempt, Resize
from tests.harness.cluster.engine import EngineHarness, state

PACE_S = 0.5
EVERY_S = 10.0


class Teller:
    """A gang that tells its step at each instant, with a pause and steps that it does again."""

    def __init__(self, costs: ResizeCosts) -> None:
        self.costs = costs
        self.now_s = 0.0
        self.step = 0

    def computes(self, seconds: float, *, pace_s: float = PACE_S, is_settled: bool = True) -> None:
        """It computes for a while, and tells its step each `EVERY_S`."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + EVERY_S)
            self.step += round(EVERY_S / pace_s)
            self.costs.told(
                self.step,
                self.now_s,
                attempt=1,
                is_settled=is_settled,
                now_s=self.now_s,
                attained_gpu_s=4 * self.now_s,
            )

    def resized(self, *, after_s: float, pause_s: float, again: int, pace_s: float) -> None:
        """Its gang changes; it goes on for a while, then restarts and does some steps again."""
        self.costs.changes(self.now_s, 4 * self.now_s, attempt=1)
        self.computes(after_s)
        self.now_s += pause_s
        self.step -= again
        self.computes(200.0, pace_s=pace_s)


@given(
    after_s=st.sampled_from([0.0, 10.0, 30.0]),
    pause_s=st.integers(0, 60).map(float),
    again=st.integers(0, 100),
    pace_s=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_a_resize_costs_its_pause_and_the_steps_done_again(
    after_s: float, pause_s: float, again: int, pace_s: float
) -> None:
    """Whenever the restart comes and whatever pace follows: the pause, and the steps at that pace.

    Steps that the old gang did since the change count at the new pace: that is what they are worth.
    """
    costs = ResizeCosts()
    teller = Teller(costs)
    teller.computes(100.0)
    teller.resized(after_s=after_s, pause_s=pause_s, again=again, pace_s=pace_s)
    ahead_s = after_s - after_s / PACE_S * pace_s
    expected_s = max(0.0, pause_s + again * pace_s + ahead_s)
    assert costs.cost_s == pytest.approx(expected_s, abs=1e-6)
    assert costs.lost_gpu_s == pytest.approx(4 * expected_s, abs=1e-4)


def test_one_odd_resize_does_not_make_the_cost() -> None:
    """The cost is the median of the latest resizes."""
    costs = ResizeCosts()
    teller = Teller(costs)
    teller.computes(100.0)
    for pause_s in (20.0, 22.0, 60.0, 21.0, 24.0, 23.0):
        teller.resized(after_s=0.0, pause_s=pause_s, again=0, pace_s=PACE_S)
    assert len(costs.recent_s) == RECENT_PRICES
    assert costs.cost_s == pytest.approx(23.0)


@pytest.mark.parametrize("every_s", [130.0, 400.0])
def test_words_that_come_rarely_measure_nothing(every_s: float) -> None:
    """Words minutes apart cannot tell a pause from a pace; the assumed cost stays."""
    costs = ResizeCosts()
    for number in range(20):
        at_s = number * every_s
        if number == 5:
            costs.changes(at_s - 1.0, at_s - 1.0, attempt=1)
        costs.told(number, at_s, attempt=1, is_settled=True, now_s=at_s, attained_gpu_s=at_s)
    assert (costs.cost_s, costs.since_s) == (None, None)


@pytest.mark.parametrize("interruption", ["attempt", "forget"])
def test_an_interrupted_measurement_counts_nothing(interruption: str) -> None:
    """An attempt that ends, or a job that is suspended, breaks what was being measured."""
    costs = ResizeCosts()
    teller = Teller(costs)
    teller.computes(100.0)
    costs.changes(teller.now_s, 4 * teller.now_s, attempt=1)
    teller.now_s += 30.0
    if interruption == "attempt":
        costs.told(0, teller.now_s, attempt=2, is_settled=True, now_s=130.0, attained_gpu_s=520.0)
        costs.attempt = 1
    else:
        costs.forget()
    teller.computes(300.0)
    assert (costs.cost_s, costs.lost_gpu_s) == (None, 0.0)


# --- with the engine ----------------------------------------------------------------------------


def tells(
    harness: EngineHarness, job: JobEntry, seconds: float, *, step: int, pace_s: float = PACE_S
) -> int:
    """A job computes for a while and tells its step each `EVERY_S`; the last step."""
    for _ in range(round(seconds / EVERY_S)):
        harness.wait(EVERY_S)
        step += round(EVERY_S / pace_s)
        harness.sim.handle(
            ProgressReported(
                job_id=job.job_id, attempt=job.attempt.number, progress=Progress(step=step)
            )
        )
    return step


def resized(harness: EngineHarness, *, pause_s: float = 23.0) -> tuple[JobEntry, int]:
    """A job of one to two workers of 8 GPUs that has grown, with a pause, and told enough since."""
    job = harness.submit("j", workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    step = tells(harness, job, 60.0, step=0)
    grows = Placement(node=NodeName("t1"), worker_count=1, is_flexible=True)
    harness.decide(Resize(job_id=job.job_id, added=(grows,), reason="test"))
    assert state(job) == JobState.RUNNING
    harness.wait(pause_s)
    return job, tells(harness, job, 150.0, step=step)


def test_a_measured_resize_is_booked_shown_and_seen_by_policies() -> None:
    """All GPUs of the gang stood still: job, cell and story say so, and a policy sees the cost."""
    harness = EngineHarness(training=2, inference=0)
    job, _ = resized(harness)
    assert job.resizes.cost_s == pytest.approx(23.0)
    assert job.lost_gpu_s == pytest.approx(16 * 23.0)
    assert harness.engine.state.counters.resize_cost_gpu_s == job.lost_gpu_s
    assert harness.engine.state.counters.preemption_cost_gpu_s == 0.0
    told = [line for line in harness.engine.state.stories if line.what == "resize measured"]
    assert [line.subject for line in told] == [job.job_id]
    assert "23.0 s, 368 GPU-seconds lost" in told[0].reason
    [seen] = harness.engine.snapshot().jobs
    assert seen.resizes.cost_s == pytest.approx(23.0)
    # of its stops, as the policies that weigh those know it
    assert seen.preemptions.wasted_gpu_s == 0.0


def test_what_a_resize_lost_is_not_lost_again_with_the_attempt() -> None:
    """A preemption later books all that was computed but what the resize has booked already."""
    harness = EngineHarness(training=2, inference=0)
    job, _ = resized(harness)
    by_resize_gpu_s = job.lost_gpu_s
    harness.decide(Preempt(job_id=job.job_id, reason="test"))
    harness.wait(60.0)
    assert state(job) == JobState.PENDING
    assert by_resize_gpu_s > 0
    assert job.lost_gpu_s == pytest.approx(job.clock.attained_gpu_s, rel=0.02)


def test_a_released_worker_is_a_resize_as_well() -> None:
    """A reclaim that takes a flexible worker restarts the gang like any resize."""
    harness = EngineHarness(training=2, inference=0)
    job, _step = resized(harness)
    harness.sim.engine.state.counters.resize_cost_gpu_s = 0.0
    [flexible] = [index for index, worker in job.workers.items() if worker.is_flexible]
    ctx = Context(harness.engine.state, harness.engine.settings, harness.sim.loop.now_s)
    jobs_lifecycle.stop_workers(ctx, job, StopReason.RELEASE, only=(flexible,))
    assert job.resizes.since_s == ctx.now_s
    since_s = ctx.now_s
    jobs_lifecycle.stop_workers(ctx, job, StopReason.RELEASE, only=(flexible,))
    assert job.resizes.since_s == since_s


def test_a_job_without_words_keeps_the_assumed_cost() -> None:
    """Nothing is measured, nothing booked, and the view is what it was."""
    harness = EngineHarness(training=2, inference=0)
    job = harness.submit("j", workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    harness.wait(60.0)
    grows = Placement(node=NodeName("t1"), worker_count=1, is_flexible=True)
    harness.decide(Resize(job_id=job.job_id, added=(grows,), reason="test"))
    harness.wait(600.0)
    assert (job.resizes.cost_s, job.lost_gpu_s) == (None, 0.0)
    [seen] = harness.engine.snapshot().jobs
    assert seen.resizes.cost_s is None


def test_the_cost_outlives_its_coordinator() -> None:
    """A snapshot holds what was measured."""
    harness = EngineHarness(training=2, inference=0)
    job, _ = resized(harness)
    blob = harness.engine.encode_state()
    assert decode_state(blob).jobs[job.job_id].resizes == job.resizes
