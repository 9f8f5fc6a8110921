"""When a gang of changing size fails, and what it has held: each worker while it was there."""

from __future__ import annotations

import pytest

from common.failure_rules import read_rules
from common.model import JobId, NodeName, WorkerRange
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Preempt, Resize
from coordinator.sim.inputs.failure_table import Trouble
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.fault_injection import Failing, FailureFigures
from tests.harness.cluster.engine import EngineHarness

REASON = "cuda_failure"
AFTER_S = 300.0


def failing_harness(delays: Delays | None = None) -> tuple[EngineHarness, JobEntry]:
    """A job of one worker of two GPUs and up to three more, which fails after 300 s of one."""
    harness = EngineHarness(training=2, inference=0, delays=delays)
    trouble = Trouble(reason=REASON, trials=1, times_s=(AFTER_S,))
    troubles = {JobId("j"): trouble}
    sim = harness.sim
    rules, runs_s = read_rules(), {JobId("j"): 1e6}
    sim.failing = Failing(troubles, rules.failure, sim.loop, sim.nodes, sim.runtime, runs_s)
    job = harness.submit("j", workers=(1, 4), gpus_per_worker=2, work_s=1e6)
    assert job.spec.workers == WorkerRange(min=1, max=4)
    return harness, job


def figures(harness: EngineHarness) -> FailureFigures:
    """What has failed up to now."""
    assert harness.sim.failing is not None
    return harness.sim.failing.figures()


def grow(job: JobEntry) -> Resize:
    """One worker more."""
    more = Placement(node=NodeName("t1"), worker_count=1)
    return Resize(job_id=job.job_id, added=(more,), reason="room")


def shrink(job: JobEntry, *removed: int) -> Resize:
    """These workers less."""
    return Resize(job_id=job.job_id, removed_workers=removed, reason="needed")


def test_a_worker_given_back_is_not_held_any_more() -> None:
    """Three workers of two GPUs for 50 s, one for 150 s: 600 GPU-seconds, not 1200."""
    harness, job = failing_harness()
    harness.start(job, "t0", flexible=("t1", "t1"))
    harness.wait(50.0)
    harness.decide(shrink(job, 1, 2))
    harness.wait(149.0)
    assert figures(harness).trials == 0
    harness.wait(1.0)
    assert figures(harness).trials == 1
    assert figures(harness).gpu_s == pytest.approx(6 * 50.0 + 2 * 150.0)


def test_a_worker_that_joins_counts_from_then_on() -> None:
    """One worker for 100 s, two for 50 s and one again for 100 s, when the point is reached."""
    harness, job = failing_harness()
    harness.start(job, "t0")
    harness.wait(100.0)
    harness.decide(grow(job))
    harness.wait(50.0)
    harness.decide(shrink(job, 1))
    harness.wait(99.0)
    assert figures(harness).trials == 0
    harness.wait(1.0)
    assert figures(harness).gpu_s == pytest.approx(2 * 250.0 + 2 * 50.0)


def test_gpus_are_held_until_a_worker_has_ended() -> None:
    """One that was ordered to stop holds its GPUs for the 30 s that this takes."""
    harness, job = failing_harness(Delays(stop_s=30.0))
    harness.start(job, "t0", flexible=("t1",))
    harness.wait(100.0)
    harness.decide(shrink(job, 1))
    harness.wait(100.0)
    assert figures(harness).gpu_s == pytest.approx(2 * 200.0 + 2 * 130.0)


def test_a_node_that_dies_takes_its_flexible_worker() -> None:
    """The gang goes on without it, more slowly, and fails at its point."""
    harness, job = failing_harness()
    harness.start(job, "t0", flexible=("t1",))
    harness.wait(100.0)
    harness.sim.nodes[NodeName("t1")].crash()
    harness.wait(99.0)
    assert figures(harness).trials == 0
    harness.wait(1.0)
    assert figures(harness).gpu_s == pytest.approx(2 * 200.0 + 2 * 100.0)


def test_an_attempt_that_was_stopped_does_not_fail() -> None:
    """Nothing was saved: the next attempt has all the way to go again, and that is what counts."""
    harness, job = failing_harness()
    harness.start(job, "t0", flexible=("t1",))
    harness.wait(100.0)
    harness.decide(Preempt(job_id=job.job_id, reason="others first"))
    harness.wait(400.0)
    harness.start(job, "t0")
    harness.wait(299.0)
    assert figures(harness).trials == 0
    harness.wait(1.0)
    assert figures(harness).gpu_s == pytest.approx(2 * 300.0)
