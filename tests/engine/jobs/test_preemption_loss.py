"""What a preemption really cost: settled when the last worker is gone, even if heard late."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import Checkpoint, JobState, NodeName, NodeRole, Progress, StopReason
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import JobCancelRequested, LeaderStarted
from coordinator.policies.contract.decisions import Placement, Reclaim, Resize
from tests.engine.stopped_jobs import (
    GRACE,
    RAN_S,
    SLOW,
    STOP_S,
    WHOLE,
    call_home,
    given_up,
    gone_report,
    lend,
    loan_of,
    lost,
    running,
    says,
    stop,
)
from tests.harness.cluster.engine import CHAT, EngineHarness, start, state


def test_a_job_that_saves_within_its_grace_loses_nothing() -> None:
    """The order puts all of its work at stake; the save in answer to it takes all of it back."""
    harness = EngineHarness(delays=SLOW)
    lend(harness, "i0")
    job = running(harness, "i0", path="/c")
    call_home(harness, "i0")
    assert state(job) == JobState.PREEMPTING
    harness.wait(STOP_S)
    assert (state(job), job.counts.preemptions, lost(harness, job)) == (JobState.PENDING, 1, 0.0)
    loan = loan_of(harness, "i0")
    assert (loan.realised_preemptions, loan.realised_cost_gpu_s) == (1, 0.0)


def test_a_job_that_does_not_save_loses_all_since_it_ran() -> None:
    """Booked when its last worker is gone and not before, with what it computed in its grace."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0", "t1")
    stop(harness, job)
    assert lost(harness, job) == 0.0
    harness.wait(STOP_S)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, 2 * (WHOLE + GRACE))
    assert harness.sim.runtime.lost_gpu_s == lost(harness, job)


def test_an_unverified_save_saves_nothing() -> None:
    """A claim that no shim has seen is no checkpoint."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    says(harness, job, 5, is_verified=False)
    harness.wait(STOP_S)
    assert lost(harness, job) == WHOLE + GRACE


def test_what_was_saved_before_the_order_is_not_lost() -> None:
    """Only the work since the last verified checkpoint is."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    says(harness, job, 5)
    harness.wait(4.0)
    stop(harness, job)
    harness.wait(STOP_S)
    assert lost(harness, job) == 4.0 * 8 + GRACE


def test_what_the_last_worker_says_with_its_end_counts() -> None:
    """The save may be heard with the very report that the worker is gone."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    checkpoint = Checkpoint(step=9, path="/c", is_verified=True)
    harness.sim.handle(
        gone_report(
            harness, job, "t0", exit_code=0, stop_reason=StopReason.PREEMPT, checkpoint=checkpoint
        )
    )
    assert (state(job), lost(harness, job)) == (JobState.PENDING, 0.0)


def test_what_is_computed_after_the_order_is_lost_too() -> None:
    """The order reached no node of the gang for a while, and it went on, all of it."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0", "t1")
    for name in ("t0", "t1"):
        harness.toggle_deaf(NodeName(name))
    stop(harness, job)
    harness.wait(5.0)
    for name in ("t0", "t1"):
        harness.toggle_deaf(NodeName(name))
    harness.wait(STOP_S)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, 2 * (WHOLE + 5.0 * 8 + GRACE))
    assert harness.sim.runtime.lost_gpu_s == lost(harness, job)


def test_a_gang_computes_until_its_first_base_worker_ends() -> None:
    """One of two nodes hears the order: when its grace is over the other one only waits for it."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0", "t1")
    harness.toggle_deaf(NodeName("t0"))
    stop(harness, job)
    harness.wait(50.0)
    harness.toggle_deaf(NodeName("t0"))
    harness.wait(STOP_S)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, 2 * (WHOLE + GRACE))
    assert harness.sim.runtime.lost_gpu_s == lost(harness, job)


def test_a_save_after_the_order_is_the_answer_to_it() -> None:
    """Nothing from before it is lost, and a job that has saved is on its way out."""
    harness = EngineHarness(delays=replace(SLOW, report_s=1.0))
    job = running(harness, "t0", "t1")
    stop(harness, job)
    harness.wait(0.5)
    says(harness, job, 7)
    harness.wait(STOP_S + 2.0)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, 0.0)


def test_a_job_that_says_again_what_it_has_saved_loses_nothing() -> None:
    """It did no step since its checkpoint, so that there was nothing new to save."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    says(harness, job, 5)
    harness.wait(4.0)
    stop(harness, job)
    says(harness, job, 5)
    harness.wait(STOP_S)
    assert lost(harness, job) == 0.0


def test_a_loan_that_came_home_before_the_job_was_gone_bears_the_cost() -> None:
    """The gang's other node holds its job up long after the lent one serves again."""
    harness = EngineHarness(delays=SLOW)
    lend(harness, "i0")
    job = running(harness, "i0", "t0")
    harness.toggle_deaf(NodeName("t0"))
    call_home(harness, "i0")
    harness.wait(40.0)
    loan = loan_of(harness, "i0")
    assert loan.returned_at_s is not None
    assert (state(job), loan.realised_cost_gpu_s) == (JobState.PREEMPTING, 0.0)
    harness.toggle_deaf(NodeName("t0"))
    harness.wait(STOP_S)
    assert (state(job), loan.realised_cost_gpu_s) == (JobState.PENDING, 2 * (WHOLE + GRACE))
    assert lost(harness, job) == 2 * (WHOLE + GRACE)


def test_the_prediction_stays_what_it_was() -> None:
    """A loan shows both: what its reclaim was thought to cost, and what it did."""
    harness = EngineHarness(delays=SLOW)
    lend(harness, "i0")
    running(harness, "i0", path="/c")
    predicted = Reclaim(
        node=NodeName("i0"),
        service=CHAT,
        deadline_s=60.0,
        reason="load rose",
        predicted_preemptions=1,
        predicted_cost_gpu_s=123.0,
    )
    harness.decide(predicted, lend=True)
    harness.wait(20.0)
    loan = loan_of(harness, "i0")
    assert (loan.predicted_cost_gpu_s, loan.realised_cost_gpu_s) == (123.0, 0.0)


def test_a_job_that_is_cancelled_in_its_grace_has_lost_its_work() -> None:
    """The preemption was ordered first; that the job then ends for good makes it no cheaper."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    harness.wait(STOP_S)
    assert (state(job), lost(harness, job)) == (JobState.CANCELLED, WHOLE + GRACE)


def test_the_books_are_closed_when_the_next_attempt_is_placed() -> None:
    """It began without what the last one may have saved, and says nothing of it."""
    harness = EngineHarness(delays=SLOW)
    job = given_up(harness)
    harness.start(job, "t0")
    says(harness, job, 9, attempt=1)
    says(harness, job, 3, attempt=2)
    assert lost(harness, job) == WHOLE


def test_work_at_stake_outlives_a_restart_of_the_coordinator() -> None:
    """It is in the state: a snapshot between the order and the end goes on as the original."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    copy = Engine(harness.engine.settings, decode_state(harness.engine.encode_state()))
    copy.policy = harness.engine.policy
    harness.sim.engine = copy
    harness.wait(STOP_S)
    assert copy.state.jobs[job.job_id].lost_gpu_s == WHOLE + GRACE
    assert copy.state.counters.preemption_cost_gpu_s == WHOLE + GRACE


def test_what_was_booked_stays_with_a_job_that_is_rebuilt_from_a_ledger() -> None:
    """The journal lost its end and a node holds a newer attempt: what was at stake is booked."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    old = decode_state(harness.engine.encode_state())
    harness.wait(STOP_S)
    harness.start(job, "t1")
    harness.wait(RAN_S)
    behind = Engine(harness.engine.settings, old)
    behind.policy = harness.engine.policy
    harness.sim.engine = behind
    harness.sim.handle(LeaderStarted(epoch=2, holder="new"))
    for node in harness.sim.nodes.values():
        node.report_soon()
    harness.wait(2.0)
    found = behind.state.jobs[job.job_id]
    assert (found.attempt.number, state(found)) == (2, JobState.RUNNING)
    assert (found.lost_gpu_s, behind.state.counters.preemption_cost_gpu_s) == (WHOLE, WHOLE)


def test_a_flexible_worker_that_leaves_first_stops_nobody_else() -> None:
    """Its node obeys, the base's does not yet: the base computes on without it."""
    harness = EngineHarness(delays=SLOW)
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    grow = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=grow, reason="room"))
    harness.wait(RAN_S)
    harness.toggle_deaf(NodeName("t0"))
    stop(harness, job)
    harness.wait(5.0)
    harness.toggle_deaf(NodeName("t0"))
    harness.wait(STOP_S)
    assert lost(harness, job) == 2 * (WHOLE + GRACE) + 5.0 * 8
    assert harness.sim.runtime.lost_gpu_s == lost(harness, job)


def test_a_job_that_grew_has_lost_what_it_computed_on_fewer_gpus_as_such() -> None:
    """By the GPUs that it had when, not by those that it has when it is stopped."""
    harness = EngineHarness(delays=SLOW)
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    harness.wait(100.0)
    grow = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=grow, reason="room"))
    harness.wait(RAN_S)
    stop(harness, job)
    harness.wait(STOP_S)
    assert lost(harness, job) == 100.0 * 8 + 2 * (WHOLE + GRACE)
    assert harness.sim.runtime.lost_gpu_s == lost(harness, job)


def test_a_packed_job_loses_its_part_of_its_gpus() -> None:
    """In its grace as well: whoever computes beside it has the other part until it has ended."""
    harness = EngineHarness(delays=SLOW)
    first = running(harness, "t0")
    [worker] = first.workers.values()
    second = harness.submit("second", work_s=1e6)
    place = Placement(node=worker.node, worker_count=1, gpu_uuids=worker.gpu_uuids)
    harness.decide(replace(start(second, "t0"), placements=(place,), is_packed=True))
    harness.wait(20.0)
    stop(harness, first)
    harness.wait(STOP_S)
    assert lost(harness, first) == WHOLE + 20.0 * 4 + STOP_S * 4
    assert harness.sim.runtime.lost_gpu_s == lost(harness, first)


def test_a_job_does_not_finish_in_its_grace() -> None:
    """It would be done a second after the order; it is preempted all the same, and starts anew."""
    harness = EngineHarness(delays=SLOW)
    job = harness.submit(work_s=RAN_S + 1.0)
    harness.start(job, "t0")
    harness.wait(RAN_S)
    stop(harness, job)
    harness.wait(STOP_S)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, WHOLE + GRACE)


def test_a_gang_that_lost_a_flexible_worker_in_its_grace_does_not_finish_either() -> None:
    """It is the same attempt, and its end is ordered."""
    harness = EngineHarness(delays=SLOW)
    job = harness.submit(workers=(1, 2), work_s=3 * RAN_S)
    harness.start(job, "t0")
    grow = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=grow, reason="room"))
    harness.wait(RAN_S)
    harness.toggle_deaf(NodeName("t0"))
    stop(harness, job)
    harness.wait(5 * RAN_S)
    assert state(job) == JobState.PREEMPTING
    harness.toggle_deaf(NodeName("t0"))
    harness.wait(STOP_S)
    assert state(job) == JobState.PENDING
    assert harness.sim.runtime.lost_gpu_s == lost(harness, job)


def test_each_attempt_loses_its_own_work_only() -> None:
    """What was lost or saved before is not lost again."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    harness.wait(STOP_S)
    harness.start(job, "t0")
    harness.wait(RAN_S)
    stop(harness, job)
    harness.wait(STOP_S)
    assert (job.counts.preemptions, lost(harness, job)) == (2, 2 * (WHOLE + GRACE))


# --- work that was finished meanwhile -----------------------------------------------------------


def test_a_job_that_finished_before_its_order_came_has_succeeded() -> None:
    """The order was on its way when the last worker left with 0: the job does not run again."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    harness.sim.handle(gone_report(harness, job, "t0", exit_code=0))
    assert (state(job), job.attempt.number) == (JobState.SUCCEEDED, 1)


def test_a_gang_that_finished_in_part_runs_again() -> None:
    """One worker was asked and left unfinished: the gang has not done its work."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0", "t1")
    stop(harness, job)
    harness.sim.handle(gone_report(harness, job, "t0", exit_code=0))
    reason = StopReason.PREEMPT
    harness.sim.handle(gone_report(harness, job, "t1", exit_code=0, stop_reason=reason))
    assert state(job) == JobState.PENDING


def test_a_cancel_holds_for_a_job_that_finished_meanwhile() -> None:
    """A person's word was taken first."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    harness.sim.handle(gone_report(harness, job, "t0", exit_code=0))
    assert state(job) == JobState.CANCELLED


def test_an_end_that_is_heard_late_counts_from_when_it_was() -> None:
    """Its node says how long ago that was, so that a slow or lost report costs nothing."""
    harness = EngineHarness(delays=replace(SLOW, report_s=5.0))
    harness.wait(5.0)
    job = running(harness, "t0")
    stop(harness, job)
    harness.wait(5.0)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, harness.sim.runtime.lost_gpu_s)
    assert harness.sim.runtime.lost_gpu_s > GRACE


def test_what_ended_before_the_order_computed_nothing_up_to_it() -> None:
    """A silent node had lost the worker long before it was ordered to stop it, and says so now."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    harness.sim.nodes[NodeName("t0")].is_up = False
    stop(harness, job)
    harness.wait(2.0)
    harness.sim.handle(gone_report(harness, job, "t0", ended_ago_s=6.0))
    assert (state(job), lost(harness, job)) == (JobState.PENDING, WHOLE - 4.0 * 8)


def test_a_lapse_that_is_heard_late_costs_what_was_done_until_it_happened() -> None:
    """The node went home by itself while nobody heard it; its loan bears no second of the silence
    after that."""
    harness = EngineHarness(delays=SLOW)
    lend(harness, "i0")
    job = running(harness, "i0", "t0")
    harness.wait(30.0)
    report = gone_report(harness, job, "i0", ended_ago_s=30.0, stop_reason=StopReason.PREEMPT)
    harness.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    harness.wait(STOP_S)
    loan = loan_of(harness, "i0")
    assert (loan.is_lapsed, loan.realised_cost_gpu_s) == (True, 2 * WHOLE)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, 2 * WHOLE)


def test_a_job_that_saved_all_before_its_node_went_home_has_lost_nothing() -> None:
    """It had its grace from its node, and its last save holds every step that it did."""
    harness = EngineHarness(delays=SLOW)
    lend(harness, "i0")
    job = running(harness, "i0")
    report = gone_report(
        harness,
        job,
        "i0",
        ended_ago_s=30.0,
        saved_ago_s=32.0,
        stop_reason=StopReason.PREEMPT,
        progress=Progress(step=9),
        checkpoint=Checkpoint(step=9, path="/c", is_verified=True),
    )
    harness.wait(35.0)
    harness.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    assert (state(job), job.counts.preemptions, lost(harness, job)) == (JobState.PENDING, 1, 0.0)


def test_a_save_counts_from_when_it_was_made() -> None:
    """What was computed between the save and the word of it is not in it."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    harness.wait(4.0)
    says(harness, job, 5, saved_ago_s=4.0)
    assert job.saves.at_s == RAN_S
    stop(harness, job)
    harness.wait(STOP_S)
    assert lost(harness, job) == 4.0 * 8 + GRACE


def test_a_save_from_before_the_order_that_is_heard_after_it_is_no_answer() -> None:
    """It takes back what it holds, and the job goes on computing for nothing."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    stop(harness, job)
    harness.wait(1.0)
    says(harness, job, 5, total_steps=9, at_step=7, saved_ago_s=3.0)
    harness.wait(STOP_S)
    assert (state(job), lost(harness, job)) == (JobState.PENDING, 2.0 * 8 + GRACE)


def test_a_save_from_before_the_order_takes_back_a_part_of_the_booking() -> None:
    """Heard of a node that was given up: the next attempt begins from there."""
    harness = EngineHarness(delays=SLOW)
    job = given_up(harness)
    harness.wait(1.0)
    says(harness, job, 5, total_steps=9, at_step=7, saved_ago_s=3.0)
    assert (lost(harness, job), loan_of(harness, "i0").realised_cost_gpu_s) == (2.0 * 8, 2.0 * 8)


def test_a_save_that_is_heard_late_takes_the_booking_back() -> None:
    """The job waits, and its next attempt will begin from there: job, loan and cell agree."""
    harness = EngineHarness(delays=SLOW)
    job = given_up(harness)
    says(harness, job, 9)
    assert (lost(harness, job), loan_of(harness, "i0").realised_cost_gpu_s) == (0.0, 0.0)
    says(harness, job, 10)
    assert lost(harness, job) == 0.0


def test_a_late_end_with_a_save_takes_the_booking_back() -> None:
    """The node was taken for dead, comes back and says how its worker ended."""
    harness = EngineHarness(delays=SLOW)
    job = given_up(harness)
    saved = Checkpoint(step=9, path="/c", is_verified=True)
    report = gone_report(
        harness, job, "i0", exit_code=0, stop_reason=StopReason.PREEMPT, checkpoint=saved
    )
    harness.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    assert lost(harness, job) == 0.0
    assert job.saves.checkpoint is not None
