"""Backoff for borrowers: a job that guarantees reclaimed repeatedly borrows from them later.

The owner of an idle guarantee reclaims its GPUs and so stops the job that borrows them. Where the
owner asks every few minutes, a job that saves nothing would start and stop for ever. After a number
of stops in a row it therefore waits before it borrows there again, twice as long after each stop.
It may use GPUs outside all guarantees meanwhile; `policies.tenants.borrowing` says which those are.

A stop ends the row if the attempt had a verified save before the order to stop, because then the
job makes progress. Stops more than a day apart are not in a row.
"""

from __future__ import annotations

from coordinator.engine.jobs import estimates
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.job_groups import BackOff

FREE_COUNT = 2
"""This number of stops in a row brings no wait: the next one may find the owner quiet."""

FIRST_S = 600.0
"""The wait after the first stop beyond that; each further stop doubles it."""

MOST_S = 4 * 3600.0
"""No wait is longer: idle GPUs are then tried again at least six times a day."""

APART_S = 86_400.0
"""Stops so far apart are not in a row."""


def called_back(ctx: Context, job: JobEntry, tenant: str) -> None:
    """A job is about to be stopped for a tenant's guarantee. A gang that has not run yet lost
    nothing, and does not count."""
    if job.attempt.ran_at_s is None:
        return
    before = job.back_off
    if before is not None and _did_well(job, before, ctx.now_s):
        before = None
    tenants = {tenant} if before is None else {tenant, *before.tenants}
    count = 1 if before is None else before.count + 1
    job.back_off = BackOff(
        tenants=tuple(sorted(tenants)),
        count=count,
        since_s=ctx.now_s,
        until_s=ctx.now_s + _wait_s(count),
    )
    ctx.changed_jobs[job.job_id] = None


def _did_well(job: JobEntry, before: BackOff, now_s: float) -> bool:
    return estimates.has_saved(job) or now_s - before.since_s > APART_S


def _wait_s(count: int) -> float:
    """Seconds that a job waits after a number of stops in a row."""
    if count <= FREE_COUNT:
        return 0.0
    doublings = min(count - FREE_COUNT - 1, 32)
    return min(MOST_S, FIRST_S * 2.0**doublings)
