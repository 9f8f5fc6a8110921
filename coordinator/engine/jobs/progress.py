"""Progress of jobs as their workers report it: steps, fractions and saves."""

from __future__ import annotations

from common.messages import OrderPhase
from common.model import Checkpoint, JobState
from coordinator.engine.jobs import (
    estimates,
    preemption_loss,
    prerun,
)
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import ProgressReported, WorkerFact
from coordinator.engine.state.job_groups import SaveEntry
from coordinator.engine.state.tables import JobEntry

SAVES_KEPT = 32
"""The number of a job's latest checkpoints that are kept for its time line."""


def reported(ctx: Context, event: ProgressReported) -> None:
    """A running attempt says how far it is; a stale attempt's word is dropped."""
    job = ctx.job(event.job_id)
    if job is None or event.attempt != job.attempt.number:
        return
    ctx.changed_jobs[job.job_id] = None
    _word(ctx, job, event)
    if event.progress is not None:
        if job.attempt.ran_at_s is not None and job.progress is not None:
            resumed_below = event.progress.step < job.attempt.start_step
            if resumed_below:  # the checkpoint was worse than claimed: no credit
                job.attempt.start_step = event.progress.step
        job.progress = event.progress
        estimates.measure(job, ctx.now_s)
        job.clock.progress_gpu_s = job.clock.attained_gpu_s
    if event.checkpoint is not None:
        _checkpoint(ctx, job, event.checkpoint, ctx.ago(event.saved_ago_s))


def _word(ctx: Context, job: JobEntry, event: ProgressReported) -> None:
    """News of its steps or saves: it is not stalled, and a resize may be measured by it.

    The same again, as to a new leader, is no news.
    """
    is_step = event.progress is not None and event.progress != job.progress
    is_save = event.checkpoint is not None and event.checkpoint != job.saves.checkpoint
    if job.attempt.ran_at_s is None or not (is_step or is_save):
        return
    at_s = max(ctx.ago(event.told_ago_s), job.attempt.ran_at_s)
    if job.gaps.stalled_since_s is not None:
        jobs_lifecycle.stall_over(
            ctx, job, "it reported a step" if is_step else "it reported a save"
        )
    job.gaps.told(at_s, attempt=job.attempt.number)
    if event.progress is None or not is_step or job.state == JobState.PREEMPTING:
        return
    estimates.settle_work(job, ctx.now_s)
    price = job.resizes.told(
        event.progress.step,
        at_s,
        attempt=job.attempt.number,
        is_settled=job.state == JobState.RUNNING and _is_settled(job),
        now_s=ctx.now_s,
        attained_gpu_s=job.clock.attained_gpu_s,
    )
    if price is not None:
        preemption_loss.resized(ctx, job, price)


def _is_settled(job: JobEntry) -> bool:
    """Whether all its workers compute, and have their GPUs for themselves."""
    run = OrderPhase.RUN
    return all(
        worker.stop is None and worker.order == run and worker.share == 1.0
        for worker in job.workers.values()
    )


def _checkpoint(ctx: Context, job: JobEntry, checkpoint: Checkpoint, saved_at_s: float) -> None:
    """A job reported a save, new or repeated. It has nothing else if it made no step since.

    Work between the save and its report is not in the save.
    """
    is_new = checkpoint != job.saves.checkpoint
    if is_new:
        job.saves.checkpoint = checkpoint
        job.saves.at_s = saved_at_s
        _keep(job, SaveEntry(saved_at_s, checkpoint.step, checkpoint.is_verified))
        if checkpoint.is_verified:
            estimates.saved(job, ctx.now_s, saved_at_s)
    if checkpoint.is_verified:
        is_all = estimates.is_all_saved(job)
        if is_new or is_all:
            preemption_loss.saved(ctx, job, ctx.now_s if is_all else saved_at_s)
        prerun.passed(ctx, job, "it has saved a checkpoint")


def _keep(job: JobEntry, save: SaveEntry) -> None:
    """Remember a save; one of the same step is the same save, which is verified now."""
    if job.saves.kept and job.saves.kept[-1].step == save.step:
        save = SaveEntry(job.saves.kept[-1].at_s, save.step, save.is_verified)
        job.saves.kept.pop()
    job.saves.kept.append(save)
    del job.saves.kept[:-SAVES_KEPT]


def last_word(ctx: Context, job: JobEntry, fact: WorkerFact) -> None:
    """The progress with which a worker ended; the job's end comes later than the last regular
    report.

    A worker that lagged behind its gang takes nothing back.
    """
    step = job.progress.step if job.progress is not None else -1
    saved = job.saves.checkpoint.step if job.saves.checkpoint is not None else -1
    progress, checkpoint = fact.progress, fact.checkpoint
    event = ProgressReported(
        job_id=job.job_id,
        attempt=fact.key.attempt,
        progress=progress if progress is not None and progress.step > step else None,
        checkpoint=checkpoint if checkpoint is not None and checkpoint.step >= saved else None,
        saved_ago_s=fact.saved_ago_s,
    )
    if event.progress is not None or event.checkpoint is not None:
        reported(ctx, event)
