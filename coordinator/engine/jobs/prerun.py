"""Pre-runs: a gang whose command never succeeded is first tried on a few GPUs.

Most failures of gangs come in their first minutes, and one GPU shows them as well as many (Philly
study, ATC'19, section 5). During its pre-run a job counts everywhere as a job of a single worker.
Its spec says so, and also what it is afterwards, so that a lost journal loses neither. The pre-run
is over when the worker has computed for `prerun.time_s` or has a verified checkpoint. Then the
worker is preempted free of charge, and the gang waits for its turn. A fault during the pre-run is
the job's own, and leads to another pre-run.
"""

from __future__ import annotations

from common.job_state_table import JobEvent
from common.messages import WorkerPhase
from common.model import JobState, StopReason
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.jobs.prerun_spec import is_on
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import AfterVacating, JobEntry


def deadline_s(job: JobEntry) -> float | None:
    """When a computing pre-run is over; None for any other job, also for a suspended one."""
    time_s, ran_at_s = job.spec.prerun.time_s, job.attempt.ran_at_s
    if not is_on(job) or time_s is None or ran_at_s is None or job.after_vacating is not None:
        return None
    if job.state == JobState.SUSPENDED:
        return None  # as far off as the policy likes
    return ran_at_s + time_s + (job.suspension.total_s - job.suspension.before_attempt_s)


def time_is_up(ctx: Context, job: JobEntry) -> None:
    """It has computed for as long as was asked."""
    at_s = deadline_s(job)
    if at_s is not None and at_s <= ctx.now_s:
        passed(ctx, job, f"computed for {job.spec.prerun.time_s:g} s")


def passed(ctx: Context, job: JobEntry, why: str) -> None:
    """The pre-run is over, and well: the worker goes, and the whole gang waits for its turn."""
    if not is_on(job) or job.state != JobState.RUNNING or job.after_vacating is not None:
        return
    if any(worker.phase != WorkerPhase.RUNNING for worker in job.workers.values()):
        return  # it has ended by itself, well or not, and that is what counts
    job.retry.is_prerun_over = True
    jobs_lifecycle.fire(ctx, job, JobEvent.PREEMPT, f"its pre-run ended: {why}")
    job.after_vacating = AfterVacating.REQUEUE
    jobs_lifecycle.stop_workers(ctx, job, StopReason.PREEMPT)
    jobs_lifecycle.finish_attempt_if_empty(ctx, job)
