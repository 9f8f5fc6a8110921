"""The order of waiting jobs within a priority: shortest first, or first in, first out.

Shortest job first is phase 1 of Lyra, EuroSys'23, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from common.model import JobState
from coordinator.policies.contract.estimates import fastest_s
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView

OrderKey = Callable[[JobView], tuple[float, ...]]


def submission_key(job: JobView) -> tuple[float, ...]:
    """First in, first out, within a priority."""
    return (-job.priority, job.submitted_at_s)


def shortest_key(job: JobView) -> tuple[float, ...]:
    """Shortest job first, within a priority.

    The key is the minimum running time T_min, at the most workers: the paper's text names it as
    the job's running-time information, although the base gang alone takes w_max / w_min as long.
    It is linear whatever a profile states. Where there is an order to speak of, room is short and
    jobs run with their base gangs; by the time at the best size, which few reach, those that scale
    well would go before shorter ones (docs/simulate.md has figures).
    """
    return (-job.priority, fastest_s(job, trusts_profiles=False), job.submitted_at_s)


def waiting(snapshot: ClusterSnapshot, key: OrderKey) -> list[JobView]:
    """Jobs that wait, in order; ties by job id."""
    if snapshot.index is not None:
        pending = list(chain.from_iterable(snapshot.index.lines))
    else:
        pending = [job for job in snapshot.jobs if job.state == JobState.PENDING]
    return sorted(pending, key=lambda job: (key(job), job.job_id))
