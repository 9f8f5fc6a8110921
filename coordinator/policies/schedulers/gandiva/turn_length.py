"""The length of a turn that ends by preemption, and its start.

The stops of other jobs and the job's own start take time in which no job computes. A turn must last
a multiple of that time to be of use. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.policies.contract.snapshot import JobView

Handed = Mapping[JobId, float]
"""When jobs that have a place were given it: the instants of the decisions."""


def fresh(
    jobs: Mapping[JobId, JobView], handed_at_s: Handed, ratio: float, now_s: float
) -> set[JobId]:
    """Jobs whose turn is still too short to be worth its handover.

    ratio: a turn is no shorter than this many times the time from the decision until the gang ran.
    """
    found = set[JobId]()
    for job_id, at_s in handed_at_s.items():
        job = jobs.get(job_id)
        if job is not None and job.attempt.started_at_s is not None and job.placed:
            cost_s = max(0.0, job.attempt.started_at_s - at_s)
            if now_s < job.attempt.started_at_s + ratio * cost_s:
                found.add(job_id)
    return found


def handed(
    jobs: Mapping[JobId, JobView], before: Handed, decisions: Iterable[Decision], now_s: float
) -> dict[JobId, float]:
    """The same after these decisions: of those that have a place or are given one."""
    kept = {
        job_id: at_s
        for job_id, at_s in before.items()
        if job_id in jobs and jobs[job_id].state != JobState.PENDING
    }
    return kept | {made.job_id: now_s for made in decisions if isinstance(made, Start)}
