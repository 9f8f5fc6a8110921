"""Sentences on promises: why a job is refused, has its workers, or waits for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from common.model import JobId
from coordinator.policies.contract.decisions import Reject
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.parts.grants import Why
from coordinator.policies.schedulers.qos.minimum_shares import now_of
from coordinator.policies.schedulers.qos.timeline import Plan

UNLESS = "unless a promised deadline needs it"
"""When a job that a stop would set back goes all the same."""


def refusal(job: JobView, deadline_at_s: float, earliest_at_s: float, tenant: str) -> Reject:
    """The refusal of a newcomer, with the earliest date that could be promised; inf: there is none.

    tenant: within whose quota; empty: none.
    """
    asked_s = deadline_at_s - job.submitted_at_s
    earliest_s = earliest_at_s - job.submitted_at_s
    within = f" or within what tenant {tenant} may be promised" if tenant else ""
    which = f"at all: its base gang never fits{within}"
    if earliest_s < inf:
        earliest_s = float(round(earliest_s))  # it is whole, but for sums of floats
        which = (
            f"without breaking a promise to another job{within}; the earliest that can be "
            f"promised is {earliest_s:.0f} s after submission"
        )
    return Reject(
        job_id=job.job_id,
        earliest_s=earliest_s if earliest_s < inf else None,
        reason=f"its deadline {asked_s:.0f} s after submission cannot be met {which}",
    )


def grant_reason(job: JobView, workers: int, plan: Plan | None, now_s: float) -> str:
    """Why it has this number of workers now. None: it has no plan."""
    if plan is None:
        return f"{workers} now: without a promise, on what the promised shares leave"
    share = counted(now_of(plan, now_s), "worker")
    early_s = (job.deadline_at_s or 0.0) - plan[-1].end_s
    if job.behind is not None:
        most = counted(max(piece.workers for piece in plan), "worker")
        return f"its pre-run; {most} of its gang are planned, {early_s:.0f} s before its deadline"
    return f"{workers} now: minimum share {share}, {early_s:.0f} s before its deadline"


def waiting_reason(plan: Plan | None, now_s: float) -> str:
    """Why it has none now."""
    if not plan:
        return "promised shares and those before it leave no room for its base gang"
    first = plan[0]
    return (
        f"it was promised its deadline and starts in {first.start_s - now_s:.0f} s at "
        f"the latest, with {counted(first.workers, 'worker')}; until then others need the "
        "GPUs more"
    )


def unanswered(before: int) -> str:
    """Why it has no answer on its deadline yet.

    before: number of others that wait for theirs, too, and get it first.
    """
    first = f", {counted(before, 'job')} before it" if before else ""
    return f"one of the next passes decides whether its deadline can be promised{first}"


def stopped_for(snapshot: ClusterSnapshot) -> Why:
    """The reason for a stopped job: the first deadline of those that take its GPUs."""
    deadlines = {job.job_id: job.deadline_at_s for job in snapshot.jobs}

    def why(takers: Sequence[JobId]) -> str:
        dated = [(at_s, name) for name in takers if (at_s := deadlines.get(name)) is not None]
        if not dated:
            return "jobs with deadlines leave it no room"
        at_s, name = min(dated)
        left_s = at_s - snapshot.now_s
        when = f"in {left_s:.0f} s" if left_s >= 0 else f"{-left_s:.0f} s ago"
        return f"for the deadline of {name} {when}"

    return why
