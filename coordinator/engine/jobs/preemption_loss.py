"""Preemption loss: what preemptions and resizes cost, in GPU-seconds.

A job ordered to stop has a grace period to save, so the order itself costs nothing yet. At stake is
the work since its last verified checkpoint, and what its gang computes until one of its base
workers has ended. Without that worker the gang makes no progress; a job that ignores the order
computes through its whole grace. A verified save made after the order clears the whole loss. A save
made before the order but reported after it clears only the work before the save. When the last
worker of the attempt has ended, the remaining loss is booked on the job, on the cell, and on the
loan whose end caused the stop. That loan may have ended before.

Only the time of an event counts, not the time of its report. A node reports how long ago a worker
ended or saved, by its own clock, and only these differences are used.

A node that was taken for dead may report a save late. While the job waits, its next attempt will
begin from that save, so the booking is reduced. Once the next attempt is placed, the loss of the
last one is final.
"""

from __future__ import annotations

from common.history import StoryKind
from common.messages import WorkerPhase
from common.model import StopReason
from coordinator.engine.jobs import estimates
from coordinator.engine.jobs.resize_costs import Price
from coordinator.engine.state import usage
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry, LoanEntry, LossEntry, WorkerEntry

COMPUTING = (WorkerPhase.RUNNING, WorkerPhase.STOPPING)
"""Phases in which a worker may compute: during its grace only the worker itself knows."""


def ordered(
    ctx: Context,
    job: JobEntry,
    loan: LoanEntry | None,
    stake: estimates.Stake | None = None,
    *,
    is_migration: bool = False,
    is_ordered: bool = False,
) -> None:
    """A job that had run is about to be stopped against its will.

    Call it before its workers get the order.

    loan: the loan whose end needs the stop; it bears the preemption and its cost.
    stake: work at stake; None: what its present workers have not saved.
    is_migration: it goes on elsewhere at once: the loss counts, the stop is no preemption.
    is_ordered: a person ordered it.
    """
    if not is_migration:
        job.counts.preemptions += 1
        job.preempted_at_s = ctx.now_s
        ctx.state.counters.preemptions += 1
    if loan is not None:
        loan.realised_preemptions += 1
    if stake is None:
        stake = estimates.stake(job, ctx.now_s, ctx.now_s)
    job.loss = LossEntry(
        gpu_s=stake.gpu_s,
        since_s=ctx.now_s if _is_whole(job) else None,
        ordered_at_s=stake.at_s,
        gpus=stake.gpus,
        lease_id=None if loan is None else loan.lease_id,
        cause="order" if is_ordered else _cause(ctx, loan, is_migration=is_migration),
        is_migration=is_migration,
        is_ordered=is_ordered,
    )


def _cause(ctx: Context, loan: LoanEntry | None, *, is_migration: bool) -> str:
    """Why a job is stopped, as in `LossRecord`."""
    if is_migration:
        return "migration"
    if loan is not None:
        return "reclaim"
    return "policy" if ctx.is_deciding else "node"


def _is_whole(job: JobEntry) -> bool:
    """True if all its base workers compute, as their nodes report."""
    base = [worker for worker in job.workers.values() if not worker.is_flexible]
    computing = sum(1 for worker in base if worker.phase in COMPUTING)
    return computing >= job.spec.workers_on(job.attempt.gpu_type or "").min


def ceased(job: JobEntry, worker: WorkerEntry, at_s: float) -> None:
    """A worker ended, or was suspended, at an instant: its work since the order counts."""
    loss = job.loss
    if loss is None or loss.since_s is None or worker.stop != StopReason.PREEMPT:
        return
    gpus = _gpus(worker)
    if not worker.is_flexible:
        gpus += sum(_gpus(other) for other in job.workers.values() if _computes(other))
    loss.after_gpu_s += gpus * (at_s - loss.since_s)
    if not worker.is_flexible:
        loss.since_s = None


def _gpus(worker: WorkerEntry) -> float:
    """Its part of the GPUs on which it computes."""
    return len(worker.gpu_uuids) * worker.share


def _computes(worker: WorkerEntry) -> bool:
    """True if it was computing at the order to stop, and its node has not reported otherwise."""
    return worker.phase in COMPUTING and worker.stop == StopReason.PREEMPT


def saved(ctx: Context, job: JobEntry, at_s: float) -> None:
    """A verified checkpoint was made: earlier work is safe, and during its grace the job leaves.

    at_s: when. A job that had no order yet computes on after a save, and that work is lost.
    """
    loss = job.loss
    if loss is None:
        return
    before_gpu_s = _lost(loss)
    loss.gpu_s = min(loss.gpu_s, loss.gpus * max(0.0, loss.ordered_at_s - at_s))
    if at_s >= loss.ordered_at_s:
        loss.after_gpu_s, loss.since_s = 0.0, None
    if loss.is_booked:
        _book(ctx, job, loss, _lost(loss) - before_gpu_s)


def _lost(loss: LossEntry) -> float:
    """The loss as far as it is known, in GPU-seconds."""
    return max(0.0, loss.gpu_s + loss.after_gpu_s)


def settle(ctx: Context, job: JobEntry) -> None:
    """The last worker is gone: unsaved work is lost."""
    loss = job.loss
    if loss is not None and not loss.is_booked:
        loss.is_booked = True
        _book(ctx, job, loss, _lost(loss))


def close(job: JobEntry) -> None:
    """The next attempt is placed: late news changes nothing any more."""
    job.loss = None


def resized(ctx: Context, job: JobEntry, price: Price) -> None:
    """A resize was measured: its pause and the repeated work are lost.

    That work is at stake no more, so no later preemption books it a second time. Work saved since
    the resize is covered already.
    """
    ctx.changed_jobs[job.job_id] = None
    job.lost_gpu_s += price.gpu_s
    ctx.state.counters.resize_cost_gpu_s += price.gpu_s
    if job.saves.attained_gpu_s <= price.since_gpu_s:
        at_stake_gpu_s = max(0.0, job.clock.attained_gpu_s - job.saves.attained_gpu_s)
        job.saves.attained_gpu_s += min(price.gpu_s, at_stake_gpu_s)
    ctx.log_event(
        job.job_id,
        "resize measured",
        f"its gang made no new work for {price.took_s:.1f} s, {price.gpu_s:.0f} GPU-seconds lost; "
        f"a resize of this job counts as {job.resizes.cost_s or 0.0:.1f} s from now on",
        detail=usage.lost(ctx, job, "resize", price.gpu_s),
    )


def _book(ctx: Context, job: JobEntry, loss: LossEntry, gpu_s: float) -> None:
    """The loan may be forgotten by now; the job and the cell count the loss all the same."""
    ctx.changed_jobs[job.job_id] = None
    job.lost_gpu_s += gpu_s
    if loss.is_migration:
        ctx.state.counters.migration_cost_gpu_s += gpu_s
    else:
        ctx.state.counters.preemption_cost_gpu_s += gpu_s
    loan = None if loss.lease_id is None else ctx.state.loans.get(loss.lease_id)
    if loan is not None:
        loan.realised_cost_gpu_s += gpu_s
    if gpu_s:
        service = "" if loan is None else loan.service
        record = usage.lost(ctx, job, loss.cause or "node", gpu_s, service=service)
        said = f"{gpu_s:.0f} GPU-seconds, by {record.cause}"
        ctx.log_event(job.job_id, "work lost", said, kind=StoryKind.LOSS, detail=record)
