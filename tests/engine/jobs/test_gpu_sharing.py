"""GPUs that several jobs have: turns, packing, moving, and what is charged."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import GpuUuid, JobState, NodeName
from common.profile import JobProfile
from coordinator.engine.jobs import estimates
from coordinator.engine.state.accounting import figures
from coordinator.engine.state.events import (
    JobCancelRequested,
    OperatorAction,
    OperatorAsked,
    ProgressReported,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import (
    Migrate,
    Placement,
    Preempt,
    Resume,
    Start,
    Suspend,
)
from coordinator.service.api import explain_job
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, start, state
from tests.tables import each_row

DELAYS = Delays(report_s=0.5, ready_s=1.0, start_s=2.0, suspend_s=0.5, resume_s=0.5, stop_s=3.0)


def slow_harness(training: int = 2) -> EngineHarness:
    """Nodes that take their time, and have been heard."""
    harness = EngineHarness(training=training, delays=DELAYS)
    harness.wait(2.0)
    return harness


def gpus_of(job: JobEntry) -> tuple[GpuUuid, ...]:
    """All GPUs of a job."""
    return tuple(uuid for worker in job.workers.values() for uuid in worker.gpu_uuids)


def beside(job: JobEntry, host: JobEntry, *, is_packed: bool = False) -> Start:
    """Start a job on the GPUs of another one."""
    [worker] = host.workers.values()
    placement = Placement(
        node=worker.node,
        worker_count=len(worker.gpu_uuids) // job.spec.gpus_per_worker,
        gpu_uuids=worker.gpu_uuids[: job.spec.gpus_per_worker],
    )
    return structs.replace(start(job, "t0"), placements=(placement,), is_packed=is_packed)


def suspend(job: JobEntry) -> Suspend:
    """Suspend a job."""
    return Suspend(job_id=job.job_id, reason="the test says so")


def resume(job: JobEntry, *, is_packed: bool = False) -> Resume:
    """Resume a job."""
    return Resume(job_id=job.job_id, is_packed=is_packed, reason="the test says so")


def in_turns(harness: EngineHarness, work_s: float = 1000.0) -> tuple[JobEntry, JobEntry]:
    """Two jobs on the same GPUs: the first is suspended and the second computes."""
    first = harness.submit("first", work_s=work_s)
    harness.start(first, "t0")
    harness.wait(100.0)
    second = harness.submit("second", work_s=work_s)
    harness.decide(suspend(first), beside(second, first))
    harness.wait(10.0)
    return first, second


def busy(
    harness: EngineHarness, job: JobEntry, ratio: float, memory_bytes: int | None = None
) -> None:
    """Tell how busy a job keeps its GPUs."""
    profile = JobProfile(gpu_busy_ratio=ratio, gpu_memory_bytes=memory_bytes)
    job.spec = structs.replace(job.spec, profile=profile)
    harness.sim.handle(
        ProgressReported(job_id=job.job_id, attempt=job.attempt.number)
    )  # it has changed


def test_a_suspended_job_makes_no_progress_and_keeps_its_gpus() -> None:
    """Its work stands still for as long as it is suspended, and no longer."""
    harness = EngineHarness()
    first, second = in_turns(harness)
    assert (state(first), state(second)) == (JobState.SUSPENDED, JobState.RUNNING)
    assert gpus_of(first) == gpus_of(second)
    harness.decide(suspend(second), resume(first))
    harness.wait(1000.0)
    assert state(first) == JobState.SUCCEEDED
    assert first.finished_at_s == pytest.approx(100.0 + 10.0 + 900.0)
    assert first.suspension.total_s == pytest.approx(10.0)
    assert (first.counts.suspensions, first.counts.preemptions) == (1, 0)


def test_a_job_does_not_end_while_it_is_suspended() -> None:
    """However little it has left."""
    harness = EngineHarness()
    first, _ = in_turns(harness, work_s=105.0)
    harness.wait(90.0)
    assert state(first) == JobState.SUSPENDED


def test_a_gpu_is_charged_once_and_to_whoever_computes() -> None:
    """Turns are charged as they were taken, and the GPUs count as held once."""
    harness = EngineHarness()
    first, second = in_turns(harness)
    harness.decide()  # an event, up to which GPUs are counted
    now_s = harness.engine.state.now_s
    assert estimates.attained_gpu_s(first, now_s) == pytest.approx(8 * 100.0)
    assert estimates.attained_gpu_s(second, now_s) == pytest.approx(8 * 10.0)
    counters = harness.engine.state.counters
    assert counters.training_held_gpu_s == pytest.approx(8 * 110.0)


def test_packed_jobs_are_charged_half_each_and_slow_each_other_down() -> None:
    """By how busy they keep a GPU: two of 0.616 make 1.46 of one (Gandiva, section 4.2)."""
    harness = EngineHarness()
    first = harness.submit("first", work_s=730.0)
    busy(harness, first, 0.616)
    harness.start(first, "t0")
    second = harness.submit("second", work_s=730.0)
    busy(harness, second, 0.616)
    harness.decide(beside(second, first, is_packed=True))
    harness.wait(999.0)
    now_s = harness.sim.loop.now_s
    assert estimates.attained_gpu_s(first, now_s) == pytest.approx(4 * 999.0)
    assert (state(first), state(second)) == (JobState.RUNNING, JobState.RUNNING)
    harness.wait(1.5)
    assert (state(first), state(second)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert first.clock.attained_gpu_s + second.clock.attained_gpu_s == pytest.approx(8 * 1000.0)


def test_whoever_is_left_alone_has_its_gpus_and_its_speed_again() -> None:
    """A companion's end changes both from that instant on."""
    harness = EngineHarness()
    first = harness.submit("first", work_s=1000.0)
    harness.start(first, "t0")
    second = harness.submit("second", work_s=89.0)
    busy(harness, first, 1.0)
    busy(harness, second, 1.0)
    harness.decide(beside(second, first, is_packed=True))
    harness.wait(200.0)  # 0.445 of its speed alone each
    assert state(second) == JobState.SUCCEEDED
    assert [worker.share for worker in first.workers.values()] == [1.0]
    assert first.attempt.packed_speed_ratio == 1.0
    harness.wait(1000.0)
    assert first.finished_at_s == pytest.approx(200.0 + 1000.0 - 89.0)


def test_who_comes_after_a_dead_worker_has_its_gpus_to_itself() -> None:
    """A process that dies computes no more; what it had not saved is lost, not slowed down."""
    harness = EngineHarness(training=1)
    job = harness.submit(work_s=1000.0, max_restarts=1)
    harness.start(job, "t0")
    harness.wait(100.0)
    harness.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 3)
    harness.settle()
    assert state(job) == JobState.PENDING
    assert harness.sim.runtime.lost_gpu_s == pytest.approx(8 * 100.0)
    harness.start(job, "t0")
    harness.wait(2000.0)
    assert job.finished_at_s == pytest.approx(100.0 + 1000.0)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_second_computes_there_only_if_it_may_be_packed(is_packed: bool) -> None:
    """Without that word a GPU has one that computes; with it two, and never three."""
    harness = EngineHarness()
    first = harness.submit("first")
    harness.start(first, "t0")
    second = harness.submit("second")
    harness.decide(beside(second, first, is_packed=is_packed))
    assert (state(second) == JobState.RUNNING) == is_packed
    third = harness.submit("third")
    harness.decide(beside(third, first, is_packed=is_packed))
    assert (state(third) == JobState.PENDING) == is_packed or not is_packed
    assert harness.engine.state.counters.decisions_refused == (1 if is_packed else 2)


def test_packed_jobs_must_fit_into_the_memory_that_is_known() -> None:
    """What each holds on the device is told by its profile, what there is by its node."""
    harness = EngineHarness(gpu_memory_bytes=80)
    first, second = harness.submit("first"), harness.submit("second")
    busy(harness, first, 0.1, memory_bytes=50)
    busy(harness, second, 0.1, memory_bytes=31)
    harness.start(first, "t0")
    harness.decide(beside(second, first, is_packed=True))
    assert state(second) == JobState.PENDING
    busy(harness, second, 0.1, memory_bytes=30)
    harness.decide(beside(second, first, is_packed=True))
    assert state(second) == JobState.RUNNING


def test_a_turn_is_taken_only_when_it_was_given() -> None:
    """A suspended job does not go on while another computes on its GPUs."""
    harness = EngineHarness()
    first, second = in_turns(harness)
    harness.decide(resume(first))
    assert state(first) == JobState.SUSPENDED
    harness.decide(suspend(second), resume(first))
    assert (state(first), state(second)) == (JobState.RUNNING, JobState.SUSPENDED)


@each_row("seconds", [0.2, 0.6, 1.2, 3.0])
def test_turns_may_change_faster_than_nodes_obey(seconds: float) -> None:
    """However orders overtake each other, one computes at a time and both end."""
    harness = slow_harness()
    first, second = in_turns(harness, work_s=200.0)
    harness.wait(20.0)
    now, later = second, first
    for _ in range(7):
        harness.decide(suspend(now), resume(later))
        harness.wait(seconds)
        now, later = later, now
    harness.wait(300.0)
    harness.decide(resume(later))
    harness.wait(300.0)
    harness.decide()
    assert (state(first), state(second)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


def test_a_suspended_job_can_be_preempted_and_its_place_is_the_others() -> None:
    """It queues again, and the one that computes stays where it is."""
    harness = slow_harness()
    first, second = in_turns(harness)
    harness.decide(Preempt(job_id=first.job_id, reason="test"))
    harness.wait(20.0)
    assert (state(first), state(second)) == (JobState.PENDING, JobState.RUNNING)
    assert {slot.holder for slot in harness.node("t0").gpus} == {
        worker.key for worker in second.workers.values()
    }


def test_time_suspended_is_not_work_that_is_lost() -> None:
    """A preemption throws away what was computed since the last save, not the waiting."""
    harness = EngineHarness()
    first, _ = in_turns(harness)
    harness.wait(490.0)
    harness.decide(Preempt(job_id=first.job_id, reason="test"))
    assert first.lost_gpu_s == pytest.approx(8 * 100.0)


def test_a_crash_of_the_node_ends_both_and_nothing_is_shared_then() -> None:
    """Each of them waits again, free of charge."""
    harness = slow_harness(training=1)
    first, second = in_turns(harness)
    harness.sim.nodes[NodeName("t0")].crash()
    harness.sim.nodes[NodeName("t0")].boot()
    harness.wait(10.0)
    assert (state(first), state(second)) == (JobState.PENDING, JobState.PENDING)
    assert not harness.engine.state.shared_nodes
    assert not harness.engine.state.suspended_jobs


def test_a_lost_journal_finds_turns_as_they_were() -> None:
    """Ledgers tell who is suspended, so that nobody computes beside another by mistake."""
    harness = slow_harness()
    first, second = in_turns(harness)
    harness.lose_journal()
    harness.wait(5.0)
    jobs = harness.engine.state.jobs
    assert state(jobs[first.job_id]) == JobState.SUSPENDED
    assert state(jobs[second.job_id]) == JobState.RUNNING
    assert gpus_of(jobs[first.job_id]) == gpus_of(jobs[second.job_id])


def test_under_a_policy_that_takes_no_turns_a_suspended_job_goes_on() -> None:
    """As soon as nobody computes on its GPUs; else it would be forgotten."""
    harness = EngineHarness()
    first, second = in_turns(harness)
    harness.engine.policy = structs.replace(harness.engine.policy, shares_gpus=False)
    harness.decide()
    assert state(first) == JobState.SUSPENDED
    harness.wait(2000.0)
    assert (state(first), state(second)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


def test_explain_says_since_when_and_for_whom_a_job_is_suspended() -> None:
    """Every decision explains itself, also to whoever waits for it to go on."""
    harness = EngineHarness()
    first, second = in_turns(harness)
    harness.decide()
    [said] = explain_job.reasons(harness.engine, first)
    assert "suspended for 10 s" in said
    assert second.job_id in said


# --- moving -----------------------------------------------------------------------------------


def move(job: JobEntry, node: str) -> Migrate:
    """Move a job of one worker."""
    placement = Placement(node=NodeName(node), worker_count=1)
    return Migrate(job_id=job.job_id, placements=(placement,), reason="the test says so")


def test_a_moved_job_goes_on_elsewhere_from_its_save() -> None:
    """One decision: another attempt, no preemption, nothing lost, and its place was held."""
    harness = slow_harness()
    job = harness.submit(path="/saves", work_s=1000.0)
    harness.start(job, "t0")
    harness.wait(103.5)
    harness.decide(move(job, "t1"))
    assert all(slot.holder is not None for slot in harness.node("t1").gpus)
    harness.wait(10.0)
    assert state(job) == JobState.RUNNING
    assert [worker.node for worker in job.workers.values()] == ["t1"]
    assert (job.attempt.number, job.counts.preemptions, job.counts.migrations) == (2, 0, 1)
    counters = harness.engine.state.counters
    assert (counters.migrations, counters.preemptions, counters.preemption_cost_gpu_s) == (1, 0, 0)
    assert counters.migration_cost_gpu_s == pytest.approx(0.0)
    harness.wait(2000.0)
    assert job.finished_at_s == pytest.approx(1000.0, abs=20.0)


def test_a_moved_job_that_does_not_save_loses_what_it_did() -> None:
    """The loss is the migration's, and stands apart from what preemptions cost."""
    harness = EngineHarness()
    job = harness.submit(work_s=1000.0)
    harness.start(job, "t0")
    harness.wait(100.0)
    harness.decide(move(job, "t1"))
    counters = harness.engine.state.counters
    assert counters.migration_cost_gpu_s == pytest.approx(800.0)
    assert counters.preemption_cost_gpu_s == 0.0
    seen = figures(harness.engine.state)
    assert (seen.migrations, seen.preemptions, seen.lost_gpu_s) == (1, 0, 0)
    assert seen.migration_lost_gpu_s == pytest.approx(800.0)
    assert job.lost_gpu_s == pytest.approx(800.0)


def test_a_place_that_is_held_is_nobody_elses() -> None:
    """While the old attempt leaves, no other job is placed where it goes."""
    harness = slow_harness()
    job = harness.submit("job")
    harness.start(job, "t0")
    harness.wait(10.0)
    other = harness.submit("other")
    harness.decide(move(job, "t1"), start(other, "t1"))
    assert state(other) == JobState.PENDING
    harness.wait(20.0)
    assert [worker.node for worker in job.workers.values()] == ["t1"]


def test_a_cancelled_move_gives_its_place_back() -> None:
    """A job that ends meanwhile goes nowhere, and what was held for it is free."""
    harness = slow_harness()
    job = harness.submit("job")
    harness.start(job, "t0")
    harness.wait(10.0)
    harness.decide(move(job, "t1"))
    harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="test"))
    harness.wait(20.0)
    assert state(job) == JobState.CANCELLED
    assert all(slot.holder is None for name in ("t0", "t1") for slot in harness.node(name).gpus)


def test_a_move_to_a_node_that_fails_becomes_a_wait() -> None:
    """The job queues; what was held there is released."""
    harness = slow_harness()
    job = harness.submit("job")
    harness.start(job, "t0")
    harness.wait(10.0)
    harness.decide(move(job, "t1"))
    harness.sim.handle(OperatorAsked(action=OperatorAction.CORDON, by="test", target="t1"))
    harness.wait(20.0)
    assert state(job) == JobState.PENDING
    assert all(slot.holder is None for slot in harness.node("t1").gpus)


def test_a_suspended_job_can_move_away_from_its_turns() -> None:
    """Both compute then, each alone."""
    harness = slow_harness()
    first, second = in_turns(harness)
    harness.decide(move(first, "t1"))
    harness.wait(20.0)
    assert (state(first), state(second)) == (JobState.RUNNING, JobState.RUNNING)
    assert not harness.engine.state.shared_nodes
