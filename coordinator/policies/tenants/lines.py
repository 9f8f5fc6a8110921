"""Jobs that wait, one line for each tenant: priority first, then submission. Knows no policy.

Must not know which line is served next.
"""

from __future__ import annotations

from collections.abc import Callable

from common.model import JobState
from coordinator.policies.snapshot import ClusterSnapshot, JobView


def submission(job: JobView) -> tuple[float, float, str]:
    """Key of the order in a line."""
    return (-job.priority, job.submitted_at_s, job.job_id)


def by_tenant(job: JobView) -> str:
    """Whose job it is."""
    return job.tenant


def line(snapshot: ClusterSnapshot) -> list[JobView]:
    """All in one."""
    return sorted((j for j in snapshot.jobs if j.state == JobState.PENDING), key=submission)


def lines(
    snapshot: ClusterSnapshot, whose: Callable[[JobView], str] = by_tenant
) -> dict[str, list[JobView]]:
    """One by tenant, or by whoever else a job is counted for."""
    found: dict[str, list[JobView]] = {}
    for job in line(snapshot):
        found.setdefault(whose(job), []).append(job)
    return found
