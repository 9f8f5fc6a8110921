"""What the engine forgets: a cell lives for years. Must not know how things end.

The oldest go first and what is live stays. Room for as many again is left before the next look
through all of them, so that an end costs nothing most times.
"""

from __future__ import annotations

from coordinator.engine.context import Context


def forget_jobs(ctx: Context) -> None:
    """Keep the newest ended jobs only."""
    kept = ctx.settings.finished_jobs_kept
    if len(ctx.state.jobs) <= 2 * kept:
        return
    ended = [job for job in ctx.state.jobs.values() if job.finished_at_s is not None]
    for job in ended[: max(0, len(ended) - kept)]:
        del ctx.state.jobs[job.job_id]


def forget_loans(ctx: Context) -> None:
    """Keep the newest of the loans that came home only."""
    kept = ctx.settings.ended_loans_kept
    if len(ctx.state.loans) <= 2 * kept:
        return
    ended = [loan for loan in ctx.state.loans.values() if loan.returned_at_s is not None]
    for loan in ended[: max(0, len(ended) - kept)]:
        del ctx.state.loans[loan.lease_id]
