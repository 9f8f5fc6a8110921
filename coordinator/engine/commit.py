"""Commit decisions: re-check each against the present state, then carry it out.

A policy may be stale or wrong. A decision that no longer fits is refused with a reason, and changes
nothing.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import structs

from common.job_state_table import JobEvent
from common.model import JobState, StopReason
from coordinator.engine.jobs import (
    borrower_backoff,
    gang_start,
    gpu_sharing,
    migration,
)
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.loans import (
    delayed_reclaim,
    shadow_mode,
)
from coordinator.engine.loans import (
    lifecycle as loans_lifecycle,
)
from coordinator.engine.state.commands import Refused
from coordinator.engine.state.context import Context
from coordinator.policies.contract import cooldown
from coordinator.policies.contract.decisions import (
    Decision,
    Loan,
    Migrate,
    Placement,
    Preempt,
    Reclaim,
    Recommend,
    Reject,
    Resize,
    Resume,
    Start,
    Suspend,
    placed_count,
)


def commit(ctx: Context, decision: Decision) -> None:
    """Carry out one decision, or refuse it."""
    ctx.is_deciding = True
    why = _try(ctx, decision)
    ctx.is_deciding = False
    if why:
        ctx.refused.append(Refused(decision=decision, why=why))
        ctx.state.counters.decisions_refused += 1
    else:
        ctx.decisions.append(decision)


def _try(ctx: Context, decision: Decision) -> str:  # noqa: C901 - one flat table
    match decision:
        case Start():
            return gang_start.start(ctx, decision)
        case Resize():
            return _resize(ctx, decision)
        case Preempt():
            return _preempt(ctx, decision)
        case Suspend():
            return gpu_sharing.suspend(ctx, decision)
        case Resume():
            return gpu_sharing.resume(ctx, decision)
        case Migrate():
            return migration.migrate(ctx, decision)
        case Loan():
            return loans_lifecycle.lend(ctx, decision)
        case Reclaim():
            return _reclaim(ctx, decision)
        case Reject():
            return _reject(ctx, decision)
        case Recommend():
            return shadow_mode.take(ctx, decision)
        case _:
            assert_never(decision)


def _reclaim(ctx: Context, decision: Reclaim) -> str:
    """As a policy decided it, which looked at the load; an operator's order comes another way."""
    loan = ctx.loan_of(decision.node)
    is_first = loan is not None and loan.reclaim_ordered_at_s is None
    take_back = delayed_reclaim.begin if decision.wait_s > 0 else loans_lifecycle.reclaim
    why = take_back(ctx, decision)
    if loan is not None and is_first and not why:
        loan.decide_s = loans_lifecycle.load_age_s(ctx, loan)
    return why


def _reject(ctx: Context, decision: Reject) -> str:
    job = ctx.job(decision.job_id)
    if job is None or job.state != JobState.PENDING:
        return f"{decision.job_id} does not wait"
    if job.attempt.number > 0:
        return f"{decision.job_id} was started before: it is no longer refused"
    job.error, job.is_rejected = decision.reason, True
    ctx.state.counters.jobs_rejected += 1
    jobs_lifecycle.end(ctx, job, JobEvent.REJECT, decision.reason)
    return ""


def _resize(ctx: Context, decision: Resize) -> str:
    job = ctx.job(decision.job_id)
    if job is None or job.state not in (JobState.RUNNING, JobState.RESIZING):
        return f"{decision.job_id} does not run"
    if job.state == JobState.RESIZING and decision.added:
        return f"{decision.job_id} is already resizing"
    if job.after_vacating is not None:
        return f"{decision.job_id} is ending"
    for index in decision.removed_workers:
        worker = job.workers.get(index)
        if worker is None or not worker.is_flexible or worker.stop is not None:
            return f"worker {index} is not a flexible worker that can be released"
    grown = job.running_workers - len(decision.removed_workers)
    grown += placed_count(decision.added)
    if job.attempt.gpu_type is None or grown > job.spec.workers_on(job.attempt.gpu_type).max:
        return f"{grown} workers are more than it can use"
    why = gang_start.does_not_fit(ctx, job, job.attempt.gpu_type, decision.added)
    if why:
        return why
    jobs_lifecycle.stop_workers(ctx, job, StopReason.RELEASE, only=decision.removed_workers)
    gang_start.add(ctx, job, (_as_flexible(p) for p in decision.added))
    if decision.added:
        job.attempt.gang_deadline_s = ctx.now_s + ctx.settings.gang_ready_timeout_s
    job.resized_at_s = ctx.now_s
    ctx.changed_jobs[job.job_id] = None
    job.counts.resizes += 1
    ctx.state.counters.resizes += 1
    jobs_lifecycle.fire(ctx, job, JobEvent.RESIZE, decision.reason)
    jobs_lifecycle.end_resize_when_done(ctx, job)
    return ""


def _as_flexible(placement: Placement) -> Placement:
    """Workers beyond the base gang are flexible, whatever the policy wrote."""
    return structs.replace(placement, is_flexible=True)


def _preempt(ctx: Context, decision: Preempt) -> str:
    job = ctx.job(decision.job_id)
    if (
        job is None
        or job.state not in jobs_lifecycle.ACTIVE_JOB_STATES
        or job.after_vacating is not None
    ):
        return f"{decision.job_id} cannot be preempted now"
    if decision.node is None and job.preempted_at_s is not None:
        # A node that a service wants back is an outside event; another job's turn is not.
        # To the bit as `cooldown` reckons it, which says when to ask again: at that very instant.
        least_s = ctx.settings.min_runtime_s
        until_s = cooldown.rest_ends_s(job.preempted_at_s, job.attempt.ran_at_s, least_s)
        if until_s > ctx.now_s:
            since_s = ctx.now_s - job.preempted_at_s
            return f"{decision.job_id} was preempted {since_s:.0f} s ago"
    if decision.guarantee:
        borrower_backoff.called_back(ctx, job, decision.guarantee)
    jobs_lifecycle.preempt(ctx, job, decision.reason, loan=ctx.loan_of(decision.node))
    return ""
