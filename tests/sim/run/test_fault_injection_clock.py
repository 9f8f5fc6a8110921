"""The clock of a failure: it goes with the job's work, however its attempts are cut."""

from __future__ import annotations

from msgspec import structs

from common.messages import WorkerPhase
from common.model import JobState, NodeName
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Migrate, Placement, Resize
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.runtime import RunRules, Saves
from tests.sim.run.failing_jobs import (
    beside,
    fails_in,
    figures,
    harness,
    preempt,
    put_aside,
    take_up,
    with_pre_run,
)


def test_the_clock_stands_still_and_nothing_is_billed_while_a_job_is_suspended() -> None:
    """100 s of computing, 700 s aside, and the 200 s that are left."""
    made, job = harness(300.0)
    made.start(job, "t0")
    made.wait(100.0)
    other = put_aside(made, job)
    made.wait(700.0)
    assert figures(made).trials == 0
    take_up(made, job, other)
    fails_in(made, 200.0, 8 * 300.0)


def test_a_packed_job_comes_to_its_failure_at_its_pace_and_is_billed_its_part() -> None:
    """Two that are each busy for 0.616 go at 0.73 of their speed, on half of the GPUs each."""
    made, job = harness(292.0)
    profile = JobProfile(gpu_busy_ratio=0.616)
    job.spec = structs.replace(job.spec, profile=profile)
    made.start(job, "t0")
    made.wait(73.0)
    other = made.submit("other", work_s=1e4)
    other.spec = structs.replace(other.spec, profile=profile)
    made.decide(beside(other, job, is_packed=True))
    fails_in(made, 300.0, 8 * 73.0 + 4 * 300.0)


def test_the_clock_goes_on_after_a_preemption_that_saved() -> None:
    """What is left counts, and both attempts were on the way to the failure."""
    made, job = harness(300.0, path="/saves")
    made.start(job, "t0")
    made.wait(100.0)
    made.decide(preempt(job))
    made.wait(500.0)
    made.start(job, "t0")
    fails_in(made, 200.0, 8 * 300.0)


def test_a_moved_job_takes_its_clock_along() -> None:
    """It fails where it went, when it would have."""
    made, job = harness(300.0, path="/saves")
    made.start(job, "t0")
    made.wait(100.0)
    place = Placement(node=NodeName("t1"), worker_count=1)
    made.decide(Migrate(job_id=job.job_id, placements=(place,), reason="the test says so"))
    fails_in(made, 200.0, 8 * 300.0)


def test_the_clock_goes_back_to_the_last_regular_save() -> None:
    """Of 290 s 250 were saved: 50 s are left, and the 40 s are the preemption's loss."""
    rules = RunRules(saves=Saves.PERIODIC, save_period_s=250.0)
    made, job = harness(300.0, rules=rules)
    made.start(job, "t0")
    made.wait(290.0)
    made.decide(preempt(job))
    made.start(job, "t0")
    fails_in(made, 50.0, 8 * 300.0)


def test_a_fault_for_good_comes_at_the_same_point_of_the_program_again() -> None:
    """The second attempt goes on from the save at 250 s, and has 50 s to go."""
    rules = RunRules(saves=Saves.PERIODIC, save_period_s=250.0)
    made, job = harness(300.0, rules=rules)
    made.start(job, "t0")
    fails_in(made, 300.0, 8 * 300.0)
    made.start(job, "t0")
    fails_in(made, 50.0, 8 * 50.0)


def test_other_failures_come_so_long_after_the_start_as_was_drawn() -> None:
    """Wherever the attempt goes on from."""
    rules = RunRules(saves=Saves.PERIODIC, save_period_s=250.0)
    made, job = harness(300.0, 120.0, rules=rules)
    made.start(job, "t0")
    fails_in(made, 300.0, 8 * 300.0)
    made.start(job, "t1")
    fails_in(made, 120.0, 8 * 120.0)


def test_what_was_saved_spares_no_failure() -> None:
    """900 of 1,000 s are saved: a failure after 500 s comes after the 100 s that are left, as it
    comes where nobody had the job save.
    """
    made, job = harness(950.0, 500.0, path="/saves")
    made.start(job, "t0")
    made.wait(900.0)
    made.decide(preempt(job))
    made.start(job, "t0")
    fails_in(made, 50.0, 8 * 950.0)
    made.start(job, "t1")
    fails_in(made, 100.0, 8 * 100.0)
    made.start(job, "t0")
    made.wait(101.0)
    assert (job.state, figures(made).trials) == (JobState.SUCCEEDED, 2)


def test_an_attempt_s_time_has_its_own_warm_up_in_it_and_no_other_one() -> None:
    """60 s each: of the attempt that tries again they count, after a preemption they do not."""
    made, job = harness(300.0, 200.0, 40.0, rules=RunRules(restart_s=60.0), path="/saves")
    made.start(job, "t0")
    made.wait(100.0)
    made.decide(preempt(job))
    made.start(job, "t0")
    fails_in(made, 260.0, 8 * 360.0)
    made.start(job, "t1")
    fails_in(made, 200.0, 8 * 200.0)
    made.start(job, "t0")
    fails_in(made, 40.0, 8 * 40.0)


def test_a_faster_gang_is_sooner_at_the_point_and_saves_nothing_there() -> None:
    """Three workers for one: a third of the time, twice, though the two others could have saved."""
    made, job = harness(300.0, workers=(1, 3), gpus_per_worker=2, path="/saves")
    made.start(job, "t0", flexible=("t1", "t1"))
    fails_in(made, 100.0, 2 * 300.0)
    made.start(job, "t0", flexible=("t1", "t1"))
    fails_in(made, 100.0, 2 * 300.0)


def test_an_attempt_s_warm_up_makes_it_longer_for_its_failure_too() -> None:
    """60 s of warm-up and 1,000 s of work: it fails after 1,030 s, as it has not ended by then."""
    made, job = harness(300.0, 1030.0, rules=RunRules(restart_s=60.0))
    made.start(job, "t0")
    fails_in(made, 300.0, 8 * 300.0)
    made.start(job, "t1")
    fails_in(made, 1030.0, 8 * 1030.0)


def test_a_worker_that_begins_after_its_gang_failed_does_not_fail_again() -> None:
    """Its node had not heard that it should stop, and nobody computes with it."""
    made, job = harness(300.0, workers=(1, 3), gpus_per_worker=2, delays=Delays(start_s=5.0))
    made.start(job, "t0")
    made.wait(302.0)
    more = Placement(node=NodeName("t1"), worker_count=1)
    made.decide(Resize(job_id=job.job_id, added=(more,), reason="room"))
    made.toggle_deaf(NodeName("t1"))
    fails_in(made, 3.0, 2 * 300.0)
    made.wait(1000.0)
    assert len(made.sim.nodes[NodeName("t1")].keys(WorkerPhase.RUNNING)) == 1
    assert figures(made).trials == 1


def test_the_clock_stands_still_while_a_gang_meets_its_new_worker() -> None:
    """100 s of one worker, 30 s in which both stand, and 100 s of two of them."""
    made, job = harness(300.0, rules=RunRules(resize_s=30.0), workers=(1, 3), gpus_per_worker=2)
    made.start(job, "t0")
    made.wait(100.0)
    more = Placement(node=NodeName("t1"), worker_count=1)
    made.decide(Resize(job_id=job.job_id, added=(more,), reason="room"))
    fails_in(made, 130.0, 2 * 100.0 + 4 * 130.0)


def test_a_gang_that_computes_on_while_it_leaves_does_not_fail() -> None:
    """It cannot save, so that what it does then is lost anyhow; one of its nodes heard nothing."""
    made, job = harness(300.0, workers=(2, 2), work_s=2000.0, delays=Delays(stop_s=30.0))
    made.start(job, "t0", "t1")
    made.wait(290.0)
    made.toggle_deaf(NodeName("t1"))
    made.decide(preempt(job))
    made.wait(20.0)
    assert len(made.sim.nodes[NodeName("t1")].keys(WorkerPhase.RUNNING)) == 1
    assert figures(made).trials == 0
    made.toggle_deaf(NodeName("t1"))
    made.wait(30.0)
    assert job.counts.preemptions == 1
    made.start(job, "t0", "t1")
    fails_in(made, 300.0, 16 * 300.0 + 8 * 20.0)  # t1 was held longer than the gang was whole


def test_the_clock_of_a_pre_run_stands_still_while_it_is_suspended() -> None:
    """90 s on its one GPU, whenever it computed there."""
    made, job = with_pre_run(600.0, 90.0)
    made.start(job, "t0")
    made.wait(50.0)
    other = put_aside(made, job)
    made.wait(200.0)
    take_up(made, job, other)
    fails_in(made, 40.0, 90.0)


def test_a_pre_run_makes_no_headway_that_could_be_kept() -> None:
    """The next one begins anew, and nothing of the first is on the way to its failure."""
    made, job = with_pre_run(600.0, 90.0)
    made.start(job, "t0")
    made.wait(50.0)
    made.decide(preempt(job))
    made.start(job, "t0")
    fails_in(made, 90.0, 90.0)


def test_a_gang_s_clock_begins_after_its_pre_run() -> None:
    """100 s on one GPU that went well, and 300 s on all of them."""
    made, job = with_pre_run(100.0, 300.0)
    made.start(job, "t0")
    made.wait(100.0)
    made.start(job, "t0")
    fails_in(made, 300.0, 8 * 300.0)
