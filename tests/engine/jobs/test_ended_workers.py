"""When a job's workers ended and what they computed by then, where the end is heard late."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, StopReason, WorkerKey
from common.profile import JobProfile
from coordinator.engine.jobs.ended_workers import HEARD_LATE_S, left, waits_since_s
from coordinator.engine.jobs.estimates import attained_gpu_s, attempt_worker_s
from coordinator.engine.state.job_groups import WaitEntry
from coordinator.engine.state.tables import JobEntry, WorkerEntry
from coordinator.policies.contract.decisions import Placement, Preempt, Resize
from coordinator.sim.run.cluster import Delays
from tests.engine.stopped_jobs import gone_report
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, state
from tests.tables import each_row

T0, T1 = NodeName("t0"), NodeName("t1")
GPUS = 8


@each_row("end", ["success", "failure", "home"])
@each_row(
    ("ended_ago_s", "counted_s"), [(200.0, 200.0), (HEARD_LATE_S, 385.0), (14.0, 400.0), (1e6, 0.0)]
)
def test_a_job_computed_until_its_worker_ended_however_late_that_was_heard(
    end: str, ended_ago_s: float, counted_s: float
) -> None:
    """Nobody led, or its node was cut off: for whom it counts what a job has had, and for the next
    estimate, that time was no computing. A report is always a little late."""
    harness = EngineHarness()
    job = harness.submit(work_s=1e6, max_restarts=1)
    harness.start(job, T0)
    harness.wait(5.0)
    assert job.attempt.ran_at_s is not None
    harness.wait(400.0 - (harness.sim.loop.now_s - job.attempt.ran_at_s))
    ends: dict[str, dict[str, Any]] = {
        "success": {"exit_code": 0},
        "failure": {"exit_code": 1},
        "home": {"stop_reason": StopReason.PREEMPT},
    }
    ran_s = harness.sim.loop.now_s - job.attempt.ran_at_s
    harness.sim.handle(gone_report(harness, job, T0, ended_ago_s=ended_ago_s, **ends[end]))
    assert state(job) == (JobState.SUCCEEDED if end == "success" else JobState.PENDING)
    assert job.clock.attained_gpu_s == pytest.approx(GPUS * (counted_s + ran_s - 400.0), abs=1e-6)
    assert job.clock.worker_s == pytest.approx(counted_s + ran_s - 400.0, abs=1e-6)
    assert harness.engine.check() == []


@pytest.mark.parametrize("exit_code", [0, 1])
def test_of_a_gang_it_is_taken_back_once_for_each_worker(exit_code: int) -> None:
    """The first end stops the others, which had ended then, too: they are told one by one."""
    harness = EngineHarness()
    job = harness.submit(workers=(2, 2), work_s=1e6, max_restarts=1)
    harness.start(job, T0, T1)
    harness.wait(400.0)
    assert job.attempt.ran_at_s is not None
    ran_s = harness.sim.loop.now_s - job.attempt.ran_at_s
    for name in (T0, T1):
        gone = gone_report(harness, job, name, ended_ago_s=200.0, exit_code=exit_code)
        harness.engine.handle(gone, now_s=harness.sim.loop.now_s)
    assert state(job) == (JobState.PENDING if exit_code else JobState.SUCCEEDED)
    assert job.clock.attained_gpu_s == pytest.approx(2 * GPUS * (ran_s - 200.0), abs=1e-6)
    if not exit_code:
        assert job.clock.worker_s == pytest.approx(2 * (ran_s - 200.0), abs=1e-6)
    assert harness.engine.check() == []


def test_what_a_worker_did_not_compute_before_its_stop_is_taken_back_and_no_more() -> None:
    """From the order to stop on nothing was counted for it, so that nothing is taken back."""
    harness = EngineHarness(delays=Delays(stop_s=1e6))
    job = harness.submit(workers=(1, 2), work_s=1e6, stop_after_s=1e6)
    harness.start(job, T0)
    added = (Placement(node=T1, worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    harness.wait(200.0)
    assert job.running_workers == 2
    [index] = [worker.key.worker_index for worker in job.workers.values() if worker.node == T1]
    harness.decide(Resize(job_id=job.job_id, removed_workers=(index,), reason="room"))
    harness.wait(100.0)
    was_gpu_s = attained_gpu_s(job, harness.sim.loop.now_s)
    gone = gone_report(harness, job, T1, ended_ago_s=150.0, stop_reason=StopReason.RELEASE)
    harness.engine.handle(gone, now_s=harness.sim.loop.now_s)
    taken_back_gpu_s = was_gpu_s - attained_gpu_s(job, harness.sim.loop.now_s)
    assert taken_back_gpu_s == pytest.approx(GPUS * 50.0, abs=1e-6)
    assert harness.engine.check() == []


def with_one_told_to_stop(
    speedup: tuple[tuple[int, float], ...],
) -> tuple[EngineHarness, JobEntry, float]:
    """A job that computed for 200 s with two workers, and for 100 s since the flexible one on T1
    was told to stop, which is not over; with its worker-seconds."""
    harness = EngineHarness(delays=Delays(stop_s=1e6))
    job = harness.submit(workers=(1, 2), work_s=1e6, stop_after_s=1e6)
    job.spec = replace(job.spec, profile=JobProfile(speedup=speedup))
    harness.start(job, T0, flexible=(T1,))
    harness.wait(200.0)
    [index] = [worker.key.worker_index for worker in job.workers.values() if worker.node == T1]
    harness.decide(Resize(job_id=job.job_id, removed_workers=(index,), reason="room"))
    harness.wait(100.0)
    was_s = attempt_worker_s(job, harness.sim.loop.now_s)
    return harness, job, was_s


@pytest.mark.parametrize("speedup", [(), ((1, 1.0), (2, 1.5))])
def test_work_of_a_released_worker_is_taken_back_from_its_end_to_its_stop(
    speedup: tuple[tuple[int, float], ...],
) -> None:
    """Nobody heard that it had ended before it was told to stop; what the job did meanwhile is what
    those after it are estimated by, and it did it at the pace of one worker."""
    harness, job, was_s = with_one_told_to_stop(speedup)
    gone = gone_report(harness, job, T1, ended_ago_s=150.0, stop_reason=StopReason.RELEASE)
    harness.engine.handle(gone, now_s=harness.sim.loop.now_s)
    flexible_pace = speedup[-1][1] - 1.0 if speedup else 1.0
    taken_back_s = was_s - attempt_worker_s(job, harness.sim.loop.now_s)
    assert taken_back_s == pytest.approx(50.0 * flexible_pace, abs=1e-6)
    assert harness.engine.check() == []


@pytest.mark.parametrize("speedup", [(), ((1, 1.0), (2, 1.5))])
def test_work_of_a_gang_that_had_ended_before_its_stop_is_taken_back_once(
    speedup: tuple[tuple[int, float], ...],
) -> None:
    """All of it was ordered to stop at once; its ends, reported one by one, together take back the
    pace of the gang, however it scales."""
    harness = EngineHarness(delays=Delays(stop_s=1e6))
    job = harness.submit(workers=(2, 2), work_s=1e6)
    job.spec = replace(job.spec, profile=JobProfile(speedup=speedup))
    harness.start(job, T0, T1)
    harness.wait(200.0)
    harness.decide(Preempt(job_id=job.job_id, reason="test"))
    was_s = attempt_worker_s(job, harness.sim.loop.now_s)
    for name in (T0, T1):
        gone = gone_report(harness, job, name, ended_ago_s=50.0, stop_reason=StopReason.PREEMPT)
        harness.engine.handle(gone, now_s=harness.sim.loop.now_s)
    assert state(job) == JobState.PENDING
    assert was_s - job.clock.worker_s == pytest.approx(50.0 * 2, abs=1e-6)
    assert harness.engine.check() == []


def test_a_worker_that_was_told_to_stop_before_that_time_has_no_part_in_it() -> None:
    """The one that goes on alone had the pace of one, though the other is still there."""
    harness, job, was_s = with_one_told_to_stop(((1, 1.0), (2, 1.5)))
    gone = gone_report(harness, job, T0, ended_ago_s=50.0, stop_reason=StopReason.PREEMPT)
    harness.engine.handle(gone, now_s=harness.sim.loop.now_s)
    assert was_s - attempt_worker_s(job, harness.sim.loop.now_s) == pytest.approx(50.0, abs=1e-6)
    assert harness.engine.check() == []


def test_an_earlier_end_that_is_heard_later_moves_nothing_back() -> None:
    """A node that was cut off tells of an end long ago: the gang was not gone before its last
    worker was, and the job has waited since then."""
    job = JobEntry(
        job_id=JobId("j1"),
        spec=make_spec("train", workers=(2, 2)),
        tenant="t",
        user="u",
        submitted_at_s=0.0,
        wait=WaitEntry(pending_since_s=0.0),
    )
    for index, ended_at_s in enumerate((100.0, 50.0)):
        key = WorkerKey(job.job_id, 1, index)
        worker = WorkerEntry(key=key, node=NodeName("n1"), gpu_uuids=(), is_flexible=False)
        left(job, worker, ended_at_s)
    assert job.ended.at_s == 100.0
    now_s = 100.0 + 2 * HEARD_LATE_S
    job.attempt.ran_at_s = 10.0
    assert waits_since_s(job, now_s) == 100.0
