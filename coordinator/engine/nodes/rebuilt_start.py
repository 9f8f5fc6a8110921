"""The start of an attempt that is rebuilt from ledgers: the earliest one that its nodes report.

Each node reports on its own clock for how long its workers have run. So the time limit of a job,
and all else that counts from its start, goes on as if the journal had not been lost. Where no node
reports a start, they begin again with the rebuild.
"""

from __future__ import annotations

from common.messages import WorkerOrder
from common.model import NodeName
from coordinator.engine.jobs import estimates
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry

APART_S = 1.0
"""Workers of one gang begin about as far apart; a start that is earlier by more gets a line."""


def known(
    ctx: Context, job: JobEntry, order: WorkerOrder, node: NodeName, began_ago_s: float | None
) -> str:
    """Count an attempt from the start of its first worker that was found; returns the reason."""
    if began_ago_s is None:
        again = "" if job.spec.time_limit_s is None else ", so its time limit counts from now"
        return f"{node} does not report its start{again}"
    _take(ctx, job, order, began_ago_s)
    return f"{node} reports its start {began_ago_s:.0f} s ago"


def known_later(
    ctx: Context, job: JobEntry, order: WorkerOrder, node: NodeName, began_ago_s: float
) -> None:
    """Another worker of a running attempt was found: it may have begun before the others."""
    was_s = job.attempt.ran_at_s
    _take(ctx, job, order, began_ago_s)
    if was_s is not None and was_s - ctx.ago(began_ago_s) > APART_S:
        why = f"{node} reports its start {began_ago_s:.0f} s ago"
        ctx.log_event(job.job_id, "began earlier", why)


def _take(ctx: Context, job: JobEntry, order: WorkerOrder, began_ago_s: float) -> None:
    """Take a worker's start for that of its attempt if it is earlier, and count its work since.

    A worker on shared GPUs may have been suspended for any part of that time. The time limit counts
    suspended time; the work and a pre-run, which do not, begin again.
    """
    was_s = job.attempt.ran_at_s
    if was_s is None:
        return
    job.started_at_s = job.attempt.ran_at_s = at_s = min(was_s, ctx.ago(began_ago_s))
    if order.is_sharing or order.is_suspended:
        job.suspension.total_s += was_s - at_s
    else:
        estimates.worked_before(job, job.workers[order.key.worker_index], began_ago_s)
