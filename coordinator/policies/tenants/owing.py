"""What a guarantee owes a job that waits, and why nobody gives it back yet. Knows no policy.

Must not know who decided, nor the engine.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from msgspec import Struct

from common.model import JobId, Preemptibility
from coordinator.policies.floor import is_movable
from coordinator.policies.snapshot import JobView
from coordinator.policies.tenants.seats import Seat
from coordinator.policies.tenants.tenancy import Tenancy, base_gpus
from coordinator.policies.words import counted

MOST_NAMED = 3
"""Borrowers that an explanation names; the others are counted."""


def is_owed(tenancy: Tenancy, job: JobView, other: JobView, wanted: int) -> bool:
    """Whether the guarantee that covers a job is of a tenant that the other job is no part of.

    wanted: GPUs of the job.
    """
    mine = tenancy.below_top(job, other)
    if not mine:
        return False
    top = tenancy.views[mine[-1]]
    return tenancy.used[top.name] + wanted <= top.guarantee_gpus


class Shortage(Struct, frozen=True, kw_only=True):
    """Why a job gets nothing back; empty where no guarantee covers it.

    is_soon: borrowers that agreed to be stopped start, resize or move, or something else was
        decided about them; of those that rest it is known until when.
    """

    why: str = ""
    is_soon: bool = False


def shortage_of(
    tenancy: Tenancy, seats: Iterable[Seat], busy: Container[JobId], job: JobView
) -> Shortage:
    """The shortage of a job that waits and for which not enough could be taken back.

    busy: jobs that something was decided about in this pass.
    """
    wanted = base_gpus(job)
    covers = [
        name
        for name in tenancy.path(job)
        if tenancy.used[name] + wanted <= tenancy.views[name].guarantee_gpus
    ]
    if not covers:
        return Shortage()
    held = [seat for seat in seats if _is_beyond(tenancy, seat, job, wanted)]
    never = [each for seat in held for each in seat.jobs if not _agreed(each)]
    soon = [
        each
        for seat in held
        if all(map(_agreed, seat.jobs))
        for each in seat.jobs
        if each.job_id in busy or not is_movable(each)
    ]
    name = covers[0]
    guarantee = counted(tenancy.views[name].guarantee_gpus, "GPU")
    why = f"tenant {name} uses {tenancy.used[name]} of the {guarantee} of its guarantee; "
    if soon:
        why += f"borrowers that cannot be stopped yet: {_names(soon)}"
    elif never:
        why += f"borrowers that did not agree to be stopped: {_names(never)}"
    else:
        why += "what others borrow is not enough for this job, or not where it can go"
    return Shortage(why=why, is_soon=not all(each.is_resting for each in soon))


def _is_beyond(tenancy: Tenancy, seat: Seat, job: JobView, wanted: int) -> bool:
    """Whether those on a seat borrow what the job is owed."""
    other = seat.jobs[0]
    return is_owed(tenancy, job, other, wanted) and all(
        tenancy.used[name] > tenancy.views[name].guarantee_gpus
        for name in tenancy.below_top(other, job)
    )


def _agreed(job: JobView) -> bool:
    return job.preemptibility == Preemptibility.FULL


def _names(jobs: Sequence[JobView]) -> str:
    names = sorted(job.job_id for job in jobs)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
