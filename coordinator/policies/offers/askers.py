"""Who asks for offers: lines of waiting jobs without those that could never run.

Offers for one of those would be kept for ever, and the jobs behind it would wait with it; so they
would for one that only absent nodes could hold. Must not know who is asked first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.model import JobId
from coordinator.policies.never import Fleet, wish_of
from coordinator.policies.snapshot import JobView


def askers(
    waiting: Mapping[str, Iterable[JobView]], fleet: Fleet
) -> tuple[dict[str, list[JobView]], dict[JobId, tuple[str, ...]]]:
    """Lines of those that could run on the nodes that are there, in their order, and why each of
    the others could not.

    A line of which nobody could run is left out.
    """
    left: dict[str, list[JobView]] = {}
    never: dict[JobId, tuple[str, ...]] = {}
    for name, line in waiting.items():
        for job in line:
            if fleet.is_never(job):
                never[job.job_id] = fleet.why_never(wish_of(job))
            elif absent := fleet.why_absent(wish_of(job)):
                never[job.job_id] = absent
            else:
                left.setdefault(name, []).append(job)
    return left, never
