"""How many jobs of each tenant wait, and what they wait for, in seconds by kind, as their policy
says from pass to pass. Must not know any kind, nor why it is said.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.model import JobId, JobState
from coordinator.engine.state import ClusterState, JobEntry
from coordinator.policies.waits import Wait


class Line:
    """How many jobs of each tenant wait; derived from the state, never saved.

    It is kept up job by job, so that a submission costs the same however many jobs wait.
    """

    def __init__(self, state: ClusterState) -> None:
        self._tenant_of: dict[JobId, str] = {}
        self.count_by_tenant: dict[str, int] = {}
        """Tenants of which a job waits, and of how many."""
        self.note(state, state.live_jobs)

    def note(self, state: ClusterState, changed: Iterable[JobId]) -> None:
        """Learn which jobs an event changed."""
        counts = self.count_by_tenant
        for job_id in changed:
            job = state.jobs.get(job_id)
            waits = job is not None and job.state == JobState.PENDING
            if waits == (job_id in self._tenant_of):
                continue
            if job is not None and waits:
                self._tenant_of[job_id] = job.tenant
                counts[job.tenant] = counts.get(job.tenant, 0) + 1
                continue
            tenant = self._tenant_of.pop(job_id)
            counts[tenant] -= 1
            if not counts[tenant]:
                del counts[tenant]


def told(state: ClusterState, waits: Iterable[Wait], now_s: float) -> bool:
    """Learn what each waiting job waits for from now on; of jobs not named nothing is said.

    Returns whether of any job something is said now.
    """
    kinds: dict[JobId, str] = {job_id: wait.kind for wait in waits for job_id in wait.jobs}
    is_any = False
    for job_id in state.live_jobs:
        job = state.jobs[job_id]
        kind = kinds.get(job_id, "") if job.state == JobState.PENDING else ""
        if kind != job.wait.kind:
            settle(job, now_s, kind)
        is_any |= bool(kind)
    return is_any


def settle(job: JobEntry, now_s: float, kind: str = "") -> None:
    """Count what it has waited up to now; from now on it waits for `kind`, or for nothing."""
    wait = job.wait
    if wait.kind:
        wait.spent_s[wait.kind] = wait.spent_s.get(wait.kind, 0.0) + now_s - wait.since_s
    wait.kind, wait.since_s = kind, now_s


def spent_s(job: JobEntry, now_s: float) -> dict[str, float]:
    """Seconds by kind, up to now."""
    wait, spent = job.wait, dict(job.wait.spent_s)
    if wait.kind:
        spent[wait.kind] = spent.get(wait.kind, 0.0) + max(0.0, now_s - wait.since_s)
    return spent
