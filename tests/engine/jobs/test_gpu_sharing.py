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
from coordinator.service.api import explain
from coordinator.sim.run.cluster import Delays
from tests.engine.house import House, start, state
from tests.tables import each_row

DELAYS = Delays(report_s=0.5, ready_s=1.0, start_s=2.0, suspend_s=0.5, resume_s=0.5, stop_s=3.0)


def slow_house(training: int = 2) -> House:
    """Nodes that take their time, and have been heard."""
    house = House(training=training, delays=DELAYS)
    house.wait(2.0)
    return house


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


def in_turns(house: House, work_s: float = 1000.0) -> tuple[JobEntry, JobEntry]:
    """Two jobs on the same GPUs: the first is suspended and the second computes."""
    first = house.submit("first", work_s=work_s)
    house.start(first, "t0")
    house.wait(100.0)
    second = house.submit("second", work_s=work_s)
    house.decide(suspend(first), beside(second, first))
    house.wait(10.0)
    return first, second


def busy(house: House, job: JobEntry, ratio: float, memory_bytes: int | None = None) -> None:
    """Tell how busy a job keeps its GPUs."""
    profile = JobProfile(gpu_busy_ratio=ratio, gpu_memory_bytes=memory_bytes)
    job.spec = structs.replace(job.spec, profile=profile)
    house.sim.handle(
        ProgressReported(job_id=job.job_id, attempt=job.attempt.number)
    )  # it has changed


def test_a_suspended_job_makes_no_progress_and_keeps_its_gpus() -> None:
    """Its work stands still for as long as it is suspended, and no longer."""
    house = House()
    first, second = in_turns(house)
    assert (state(first), state(second)) == (JobState.SUSPENDED, JobState.RUNNING)
    assert gpus_of(first) == gpus_of(second)
    house.decide(suspend(second), resume(first))
    house.wait(1000.0)
    assert state(first) == JobState.SUCCEEDED
    assert first.finished_at_s == pytest.approx(100.0 + 10.0 + 900.0)
    assert first.suspension.total_s == pytest.approx(10.0)
    assert (first.counts.suspensions, first.counts.preemptions) == (1, 0)


def test_a_job_does_not_end_while_it_is_suspended() -> None:
    """However little it has left."""
    house = House()
    first, _ = in_turns(house, work_s=105.0)
    house.wait(90.0)
    assert state(first) == JobState.SUSPENDED


def test_a_gpu_is_charged_once_and_to_whoever_computes() -> None:
    """Turns are charged as they were taken, and the GPUs count as held once."""
    house = House()
    first, second = in_turns(house)
    house.decide()  # an event, up to which GPUs are counted
    now_s = house.engine.state.now_s
    assert estimates.attained_gpu_s(first, now_s) == pytest.approx(8 * 100.0)
    assert estimates.attained_gpu_s(second, now_s) == pytest.approx(8 * 10.0)
    counters = house.engine.state.counters
    assert counters.training_held_gpu_s == pytest.approx(8 * 110.0)


def test_packed_jobs_are_charged_half_each_and_slow_each_other_down() -> None:
    """By how busy they keep a GPU: two of 0.616 make 1.46 of one (Gandiva, section 4.2)."""
    house = House()
    first = house.submit("first", work_s=730.0)
    busy(house, first, 0.616)
    house.start(first, "t0")
    second = house.submit("second", work_s=730.0)
    busy(house, second, 0.616)
    house.decide(beside(second, first, is_packed=True))
    house.wait(999.0)
    now_s = house.sim.loop.now_s
    assert estimates.attained_gpu_s(first, now_s) == pytest.approx(4 * 999.0)
    assert (state(first), state(second)) == (JobState.RUNNING, JobState.RUNNING)
    house.wait(1.5)
    assert (state(first), state(second)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert first.clock.attained_gpu_s + second.clock.attained_gpu_s == pytest.approx(8 * 1000.0)


def test_whoever_is_left_alone_has_its_gpus_and_its_speed_again() -> None:
    """A companion's end changes both from that instant on."""
    house = House()
    first = house.submit("first", work_s=1000.0)
    house.start(first, "t0")
    second = house.submit("second", work_s=89.0)
    busy(house, first, 1.0)
    busy(house, second, 1.0)
    house.decide(beside(second, first, is_packed=True))
    house.wait(200.0)  # 0.445 of its speed alone each
    assert state(second) == JobState.SUCCEEDED
    assert [worker.share for worker in first.workers.values()] == [1.0]
    assert first.attempt.packed_speed_ratio == 1.0
    house.wait(1000.0)
    assert first.finished_at_s == pytest.approx(200.0 + 1000.0 - 89.0)


def test_who_comes_after_a_dead_worker_has_its_gpus_to_itself() -> None:
    """A process that dies computes no more; what it had not saved is lost, not slowed down."""
    house = House(training=1)
    job = house.submit(work_s=1000.0, max_restarts=1)
    house.start(job, "t0")
    house.wait(100.0)
    house.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 3)
    house.settle()
    assert state(job) == JobState.PENDING
    assert house.sim.runtime.lost_gpu_s == pytest.approx(8 * 100.0)
    house.start(job, "t0")
    house.wait(2000.0)
    assert job.finished_at_s == pytest.approx(100.0 + 1000.0)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_second_computes_there_only_if_it_may_be_packed(is_packed: bool) -> None:
    """Without that word a GPU has one that computes; with it two, and never three."""
    house = House()
    first = house.submit("first")
    house.start(first, "t0")
    second = house.submit("second")
    house.decide(beside(second, first, is_packed=is_packed))
    assert (state(second) == JobState.RUNNING) == is_packed
    third = house.submit("third")
    house.decide(beside(third, first, is_packed=is_packed))
    assert (state(third) == JobState.PENDING) == is_packed or not is_packed
    assert house.engine.state.counters.decisions_refused == (1 if is_packed else 2)


def test_packed_jobs_must_fit_into_the_memory_that_is_known() -> None:
    """What each holds on the device is told by its profile, what there is by its node."""
    house = House(gpu_memory_bytes=80)
    first, second = house.submit("first"), house.submit("second")
    busy(house, first, 0.1, memory_bytes=50)
    busy(house, second, 0.1, memory_bytes=31)
    house.start(first, "t0")
    house.decide(beside(second, first, is_packed=True))
    assert state(second) == JobState.PENDING
    busy(house, second, 0.1, memory_bytes=30)
    house.decide(beside(second, first, is_packed=True))
    assert state(second) == JobState.RUNNING


def test_a_turn_is_taken_only_when_it_was_given() -> None:
    """A suspended job does not go on while another computes on its GPUs."""
    house = House()
    first, second = in_turns(house)
    house.decide(resume(first))
    assert state(first) == JobState.SUSPENDED
    house.decide(suspend(second), resume(first))
    assert (state(first), state(second)) == (JobState.RUNNING, JobState.SUSPENDED)


@each_row("seconds", [0.2, 0.6, 1.2, 3.0])
def test_turns_may_change_faster_than_nodes_obey(seconds: float) -> None:
    """However orders overtake each other, one computes at a time and both end."""
    house = slow_house()
    first, second = in_turns(house, work_s=200.0)
    house.wait(20.0)
    now, later = second, first
    for _ in range(7):
        house.decide(suspend(now), resume(later))
        house.wait(seconds)
        now, later = later, now
    house.wait(300.0)
    house.decide(resume(later))
    house.wait(300.0)
    house.decide()
    assert (state(first), state(second)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


def test_a_suspended_job_can_be_preempted_and_its_place_is_the_others() -> None:
    """It queues again, and the one that computes stays where it is."""
    house = slow_house()
    first, second = in_turns(house)
    house.decide(Preempt(job_id=first.job_id, reason="test"))
    house.wait(20.0)
    assert (state(first), state(second)) == (JobState.PENDING, JobState.RUNNING)
    assert {slot.holder for slot in house.node("t0").gpus} == {
        worker.key for worker in second.workers.values()
    }


def test_time_suspended_is_not_work_that_is_lost() -> None:
    """A preemption throws away what was computed since the last save, not the waiting."""
    house = House()
    first, _ = in_turns(house)
    house.wait(490.0)
    house.decide(Preempt(job_id=first.job_id, reason="test"))
    assert first.lost_gpu_s == pytest.approx(8 * 100.0)


def test_a_crash_of_the_node_ends_both_and_nothing_is_shared_then() -> None:
    """Each of them waits again, free of charge."""
    house = slow_house(training=1)
    first, second = in_turns(house)
    house.sim.nodes[NodeName("t0")].crash()
    house.sim.nodes[NodeName("t0")].boot()
    house.wait(10.0)
    assert (state(first), state(second)) == (JobState.PENDING, JobState.PENDING)
    assert not house.engine.state.shared_nodes
    assert not house.engine.state.suspended_jobs


def test_a_lost_journal_finds_turns_as_they_were() -> None:
    """Ledgers tell who is suspended, so that nobody computes beside another by mistake."""
    house = slow_house()
    first, second = in_turns(house)
    house.lose_journal()
    house.wait(5.0)
    jobs = house.engine.state.jobs
    assert state(jobs[first.job_id]) == JobState.SUSPENDED
    assert state(jobs[second.job_id]) == JobState.RUNNING
    assert gpus_of(jobs[first.job_id]) == gpus_of(jobs[second.job_id])


def test_under_a_policy_that_takes_no_turns_a_suspended_job_goes_on() -> None:
    """As soon as nobody computes on its GPUs; else it would be forgotten."""
    house = House()
    first, second = in_turns(house)
    house.engine.policy = structs.replace(house.engine.policy, shares_gpus=False)
    house.decide()
    assert state(first) == JobState.SUSPENDED
    house.wait(2000.0)
    assert (state(first), state(second)) == (JobState.SUCCEEDED, JobState.SUCCEEDED)


def test_explain_says_since_when_and_for_whom_a_job_is_suspended() -> None:
    """Every decision explains itself, also to whoever waits for it to go on."""
    house = House()
    first, second = in_turns(house)
    house.decide()
    [said] = explain.job(house.engine, first)
    assert "suspended for 10 s" in said
    assert second.job_id in said


# --- moving -----------------------------------------------------------------------------------


def move(job: JobEntry, node: str) -> Migrate:
    """Move a job of one worker."""
    placement = Placement(node=NodeName(node), worker_count=1)
    return Migrate(job_id=job.job_id, placements=(placement,), reason="the test says so")


def test_a_moved_job_goes_on_elsewhere_from_its_save() -> None:
    """One decision: another attempt, no preemption, nothing lost, and its place was held."""
    house = slow_house()
    job = house.submit(path="/saves", work_s=1000.0)
    house.start(job, "t0")
    house.wait(103.5)
    house.decide(move(job, "t1"))
    assert all(slot.holder is not None for slot in house.node("t1").gpus)
    house.wait(10.0)
    assert state(job) == JobState.RUNNING
    assert [worker.node for worker in job.workers.values()] == ["t1"]
    assert (job.attempt.number, job.counts.preemptions, job.counts.migrations) == (2, 0, 1)
    counters = house.engine.state.counters
    assert (counters.migrations, counters.preemptions, counters.preemption_cost_gpu_s) == (1, 0, 0)
    assert counters.migration_cost_gpu_s == pytest.approx(0.0)
    house.wait(2000.0)
    assert job.finished_at_s == pytest.approx(1000.0, abs=20.0)


def test_a_moved_job_that_does_not_save_loses_what_it_did() -> None:
    """The loss is the migration's, and stands apart from what preemptions cost."""
    house = House()
    job = house.submit(work_s=1000.0)
    house.start(job, "t0")
    house.wait(100.0)
    house.decide(move(job, "t1"))
    counters = house.engine.state.counters
    assert counters.migration_cost_gpu_s == pytest.approx(800.0)
    assert counters.preemption_cost_gpu_s == 0.0
    seen = figures(house.engine.state)
    assert (seen.migrations, seen.preemptions, seen.lost_gpu_s) == (1, 0, 0)
    assert seen.migration_lost_gpu_s == pytest.approx(800.0)
    assert job.lost_gpu_s == pytest.approx(800.0)


def test_a_place_that_is_held_is_nobody_elses() -> None:
    """While the old attempt leaves, no other job is placed where it goes."""
    house = slow_house()
    job = house.submit("job")
    house.start(job, "t0")
    house.wait(10.0)
    other = house.submit("other")
    house.decide(move(job, "t1"), start(other, "t1"))
    assert state(other) == JobState.PENDING
    house.wait(20.0)
    assert [worker.node for worker in job.workers.values()] == ["t1"]


def test_a_cancelled_move_gives_its_place_back() -> None:
    """A job that ends meanwhile goes nowhere, and what was held for it is free."""
    house = slow_house()
    job = house.submit("job")
    house.start(job, "t0")
    house.wait(10.0)
    house.decide(move(job, "t1"))
    house.sim.handle(JobCancelRequested(job_id=job.job_id, by="test"))
    house.wait(20.0)
    assert state(job) == JobState.CANCELLED
    assert all(slot.holder is None for name in ("t0", "t1") for slot in house.node(name).gpus)


def test_a_move_to_a_node_that_fails_becomes_a_wait() -> None:
    """The job queues; what was held there is released."""
    house = slow_house()
    job = house.submit("job")
    house.start(job, "t0")
    house.wait(10.0)
    house.decide(move(job, "t1"))
    house.sim.handle(OperatorAsked(action=OperatorAction.CORDON, by="test", target="t1"))
    house.wait(20.0)
    assert state(job) == JobState.PENDING
    assert all(slot.holder is None for slot in house.node("t1").gpus)


def test_a_suspended_job_can_move_away_from_its_turns() -> None:
    """Both compute then, each alone."""
    house = slow_house()
    first, second = in_turns(house)
    house.decide(move(first, "t1"))
    house.wait(20.0)
    assert (state(first), state(second)) == (JobState.RUNNING, JobState.RUNNING)
    assert not house.engine.state.shared_nodes
