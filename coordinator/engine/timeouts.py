"""What time alone does to a job: a gang that is not ready, a limit that is reached. Must not know
who keeps the time.
"""

from __future__ import annotations

from common.lifecycle import JobEvent
from common.messages import OrderPhase
from common.model import JobState, StopReason
from coordinator.engine import doubting, jobs, lost_orders, prerun, retrying, stores
from coordinator.engine.context import Context
from coordinator.engine.state import AfterVacating, JobEntry, WorkerEntry


def deadline_s(job: JobEntry) -> float | None:
    """The next instant at which time alone changes something about a job."""
    if job.gang_deadline_s is not None:
        return job.gang_deadline_s
    retry_s = retrying.deadline_s(job)
    if job.state == JobState.PENDING:
        return retry_s
    # A limit may be over before the pre-run is.
    found = (retry_s, prerun.deadline_s(job), _limit_s(job))
    return min((at_s for at_s in found if at_s is not None), default=None)


def _limit_s(job: JobEntry) -> float | None:
    """When a job runs into its own limit."""
    limit_s, ran_at_s = job.spec.time_limit_s, job.attempt_ran_at_s
    if limit_s is None or ran_at_s is None or job.after_vacating is not None:
        return None
    return ran_at_s + limit_s


def time_is_up(ctx: Context, job: JobEntry) -> None:
    """A job's deadline is over: its gang was not ready in time, or it ran into its own limit."""
    if job.gang_deadline_s is not None and job.gang_deadline_s <= ctx.now_s:
        _gang_timeout(ctx, job)
    retrying.time_is_up(ctx, job)
    prerun.time_is_up(ctx, job)
    limit_s = _limit_s(job)
    if limit_s is None or job.state not in jobs.ACTIVE_JOB_STATES:
        return
    if limit_s <= ctx.now_s:
        lost_orders.at_time_limit(job)
        jobs.stop_workers(ctx, job, StopReason.TIME_LIMIT)


def _gang_timeout(ctx: Context, job: JobEntry) -> None:
    """A gang or a resize was not ready in time; free of charge.

    While it may run unseen, its deadline stays: a pass looks again when its nodes were heard.
    """
    if doubting.may_run_unseen(ctx.state, job):
        return
    job.gang_deadline_s = None
    ctx.changed_jobs[job.job_id] = None
    if job.state == JobState.STARTING:
        ctx.state.counters.gang_timeouts += 1
        late = [worker for worker in job.workers.values() if not jobs.is_ready(worker)]
        waiting = [_not_ready(worker) for worker in late]
        if job.store is not None and not stores.is_ready(job):
            late.append(job.store)
            waiting.append(f"the rendezvous store on {_not_ready(job.store)}")
        job.error = f"not ready: {', '.join(waiting)}"
        retrying.not_ready(ctx, job, {worker.node for worker in late})
        jobs.fire(ctx, job, JobEvent.GANG_TIMEOUT, job.error)
        job.after_vacating = AfterVacating.REQUEUE
        jobs.stop_workers(ctx, job, StopReason.GANG_TIMEOUT)
        jobs.conclude_if_vacated(ctx, job)
    elif job.state == JobState.RESIZING:
        added = {
            index: worker
            for index, worker in job.workers.items()
            if worker.order == OrderPhase.RESERVE and worker.stop is None
        }
        late = [worker for worker in added.values() if not jobs.is_ready(worker)]
        if not late:
            return  # it has grown, or does not: what it released is still in its grace
        ctx.tell(job.job_id, "does not grow", f"not ready: {', '.join(map(_not_ready, late))}")
        retrying.left_for_now(ctx, job, {worker.node for worker in late})
        jobs.stop_workers(ctx, job, StopReason.GANG_TIMEOUT, only=tuple(added))


def _not_ready(worker: WorkerEntry) -> str:
    """The node of a worker that was not ready in time, and what it waits for, if it said so."""
    return f"{worker.node} ({worker.waits_for})" if worker.waits_for else str(worker.node)
