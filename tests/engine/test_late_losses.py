"""What is heard late counts from when it happened, by the clock of the node where it did."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import Checkpoint, JobState, NodeName, NodeRole, Progress, StopReason
from tests.engine.house import CHAT, House, state
from tests.engine.stopped_jobs import (
    GRACE,
    RAN_S,
    SLOW,
    STOP_S,
    WHOLE,
    given_up,
    gone_report,
    lend,
    loan_of,
    lost,
    running,
    says,
    stop,
)


def test_an_end_that_is_heard_late_counts_from_when_it_was() -> None:
    """Its node says how long ago that was, so that a slow or lost report costs nothing."""
    house = House(delays=replace(SLOW, report_s=5.0))
    house.wait(5.0)
    job = running(house, "t0")
    stop(house, job)
    house.wait(5.0)
    assert (state(job), lost(house, job)) == (JobState.PENDING, house.sim.runtime.lost_gpu_s)
    assert house.sim.runtime.lost_gpu_s > GRACE


def test_what_ended_before_the_order_computed_nothing_up_to_it() -> None:
    """A silent node had lost the worker long before it was ordered to stop it, and says so now."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    house.sim.nodes[NodeName("t0")].is_up = False
    stop(house, job)
    house.wait(2.0)
    house.sim.handle(gone_report(house, job, "t0", ended_ago_s=6.0))
    assert (state(job), lost(house, job)) == (JobState.PENDING, WHOLE - 4.0 * 8)


def test_a_lapse_that_is_heard_late_costs_what_was_done_until_it_happened() -> None:
    """The node went home by itself while nobody heard it; its loan bears no second of the silence
    after that."""
    house = House(delays=SLOW)
    lend(house, "i0")
    job = running(house, "i0", "t0")
    house.wait(30.0)
    report = gone_report(house, job, "i0", ended_ago_s=30.0, stop_reason=StopReason.PREEMPT)
    house.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    house.wait(STOP_S)
    loan = loan_of(house, "i0")
    assert (loan.is_lapsed, loan.realised_cost_gpu_s) == (True, 2 * WHOLE)
    assert (state(job), lost(house, job)) == (JobState.PENDING, 2 * WHOLE)


def test_a_job_that_saved_all_before_its_node_went_home_has_lost_nothing() -> None:
    """It had its grace from its node, and its last save holds every step that it did."""
    house = House(delays=SLOW)
    lend(house, "i0")
    job = running(house, "i0")
    report = gone_report(
        house,
        job,
        "i0",
        ended_ago_s=30.0,
        saved_ago_s=32.0,
        stop_reason=StopReason.PREEMPT,
        progress=Progress(step=9),
        checkpoint=Checkpoint(step=9, path="/c", is_verified=True),
    )
    house.wait(35.0)
    house.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    assert (state(job), job.counts.preemptions, lost(house, job)) == (JobState.PENDING, 1, 0.0)


def test_a_save_counts_from_when_it_was_made() -> None:
    """What was computed between the save and the word of it is not in it."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    house.wait(4.0)
    says(house, job, 5, saved_ago_s=4.0)
    assert job.saves.at_s == RAN_S
    stop(house, job)
    house.wait(STOP_S)
    assert lost(house, job) == 4.0 * 8 + GRACE


def test_a_save_from_before_the_order_that_is_heard_after_it_is_no_answer() -> None:
    """It takes back what it holds, and the job goes on computing for nothing."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    stop(house, job)
    house.wait(1.0)
    says(house, job, 5, total_steps=9, at_step=7, saved_ago_s=3.0)
    house.wait(STOP_S)
    assert (state(job), lost(house, job)) == (JobState.PENDING, 2.0 * 8 + GRACE)


def test_a_save_from_before_the_order_takes_back_a_part_of_the_booking() -> None:
    """Heard of a node that was given up: the next attempt begins from there."""
    house = House(delays=SLOW)
    job = given_up(house)
    house.wait(1.0)
    says(house, job, 5, total_steps=9, at_step=7, saved_ago_s=3.0)
    assert (lost(house, job), loan_of(house, "i0").realised_cost_gpu_s) == (2.0 * 8, 2.0 * 8)


def test_a_save_that_is_heard_late_takes_the_booking_back() -> None:
    """The job waits, and its next attempt will begin from there: job, loan and cell agree."""
    house = House(delays=SLOW)
    job = given_up(house)
    says(house, job, 9)
    assert (lost(house, job), loan_of(house, "i0").realised_cost_gpu_s) == (0.0, 0.0)
    says(house, job, 10)
    assert lost(house, job) == 0.0


def test_a_late_end_with_a_save_takes_the_booking_back() -> None:
    """The node was taken for dead, comes back and says how its worker ended."""
    house = House(delays=SLOW)
    job = given_up(house)
    saved = Checkpoint(step=9, path="/c", is_verified=True)
    report = gone_report(
        house, job, "i0", exit_code=0, stop_reason=StopReason.PREEMPT, checkpoint=saved
    )
    house.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    assert lost(house, job) == 0.0
    assert job.saves.checkpoint is not None
