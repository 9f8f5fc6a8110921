"""Orders of people about a job after its submission: hold, release, requeue. Changes: `changes`;
of a whole array: `array_orders`.

A driver asks `why_not_*` before it passes an order in, and refuses it in these words. An order that
no longer fits when it comes to the engine changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from common.model import FINAL_JOB_STATES, JobState
from coordinator.engine.jobs import changes, start_gate
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import JobChanged, JobsHeld, JobsReleased, JobsRequeued
from coordinator.engine.state.tables import AfterVacating, JobEntry


def why_not_held(job: JobEntry) -> str:
    """Why a job cannot be held, as a sentence; empty when it can."""
    if job.state == JobState.PENDING or _waits_again(job):
        return ""
    if why := _why_over(job):
        return why
    return (
        f"job {job.job_id} is {job.state} and does not wait: aryl job requeue {job.job_id} --hold "
        "stops and holds it"
    )


def why_not_released(job: JobEntry) -> str:
    """Why the hold of a job cannot be ended, as a sentence; empty when it can."""
    if job.state in FINAL_JOB_STATES:
        return f"job {job.job_id} is {job.state}"
    return "" if job.gate.held_by else f"job {job.job_id} is not held"


def why_not_requeued(job: JobEntry, *, is_held: bool) -> str:
    """Why a job cannot be requeued, as a sentence; empty when it can."""
    if job.state in FINAL_JOB_STATES:
        return f"job {job.job_id} is {job.state}: submit it again"
    if job.state == JobState.PENDING:
        hint = f": aryl job hold {job.job_id} holds it" if is_held else ""
        return f"job {job.job_id} is pending and waits already{hint}"
    if _waits_again(job):
        return "" if is_held else f"job {job.job_id} stops already, and waits again then"
    return _why_over(job)


def _waits_again(job: JobEntry) -> bool:
    """Whether its workers leave, and it waits again then."""
    return job.state == JobState.PREEMPTING and job.after_vacating == AfterVacating.REQUEUE


def _why_over(job: JobEntry) -> str:
    if job.state in FINAL_JOB_STATES:
        return f"job {job.job_id} is {job.state}"
    is_ending = job.after_vacating not in (None, AfterVacating.REQUEUE)
    return f"job {job.job_id} is ending" if is_ending else ""


def act(ctx: Context, event: JobsHeld | JobsReleased | JobsRequeued | JobChanged) -> None:
    """Carry out one order for each of its jobs that it still fits."""
    match event:
        case JobsHeld():
            _each(ctx, event, why_not_held, lambda job: hold(ctx, job, event.by))
        case JobsReleased():
            give = start_gate.release
            _each(ctx, event, why_not_released, lambda job: give(ctx, job, event.by))
        case JobsRequeued():
            _each(
                ctx,
                event,
                lambda job: why_not_requeued(job, is_held=event.is_held),
                lambda job: requeue(ctx, job, event),
            )
        case JobChanged():
            job = ctx.job(event.job_id)
            if job is not None and changes.why_not(ctx.state, job, event.change) is None:
                changes.carry_out(ctx, job, event.change, event.by)


def _each(
    ctx: Context,
    event: JobsHeld | JobsReleased | JobsRequeued,
    why_not: Callable[[JobEntry], str],
    give: Callable[[JobEntry], None],
) -> None:
    for job_id in dict.fromkeys(event.job_ids):
        job = ctx.job(job_id)
        if job is not None and not why_not(job):
            give(job)


def hold(ctx: Context, job: JobEntry, by: str) -> None:
    """Hold a job that waits; its wait by kind is settled."""
    if job.wait.kind:
        jobs_lifecycle.settle(job, ctx.now_s)
    start_gate.hold(ctx, job, by)


def requeue(ctx: Context, job: JobEntry, event: JobsRequeued) -> None:
    """Stop a job with its grace. Its checkpoint stays, and no budget of it is charged."""
    if event.is_held:
        start_gate.hold(ctx, job, event.by)
    jobs_lifecycle.preempt(ctx, job, f"requeued by {event.by}", is_ordered=True)
