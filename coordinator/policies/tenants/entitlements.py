"""Entitlements: what a guarantee owes a waiting job, its precedence, and why it still waits."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from msgspec import Struct

from common.model import JobId, Preemptibility
from coordinator.policies.contract.free_gpus import is_movable
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.contract.text import counted, number, some
from coordinator.policies.tenants.giveback import Seat
from coordinator.policies.tenants.queues import submission
from coordinator.policies.tenants.quota_guard import fewest_gpus
from coordinator.policies.tenants.tenancy import Tenancy

PATIENCE_S = 1800.0
"""The time for which a policy may leave a guaranteed job waiting beside free GPUs that it fits on:
longer than any round, lease, or locality wait with default settings.
"""

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


def covers(tenancy: Tenancy, job: JobView) -> list[str]:
    """The tenants whose guarantee covers a job that waits, the own one first."""
    wanted, views = fewest_gpus(job), tenancy.views
    return [
        name
        for name in tenancy.path(job)
        if tenancy.used[name] + wanted <= views[name].guarantee_gpus
    ]


def is_covered(tenancy: Tenancy, job: JobView) -> bool:
    """Whether a guarantee covers a job that waits."""
    return bool(covers(tenancy, job))


def behind(
    tenancy: Tenancy,
    waiting: Iterable[JobView],
    fits: Iterable[JobView],
    is_never: Callable[[JobView], bool],
) -> frozenset[JobId]:
    """Waiting jobs without guarantee, while a guaranteed job of an unrelated tenant fits on free
    GPUs; and infeasible jobs, guaranteed or not.

    The tenants above the guaranteed job may be beyond their guarantees because its siblings borrow.
    It still goes first, because no tenant has to give anything for it.

    fits: these jobs. Without them no job is behind.
    is_never: whether the present nodes could not run a job even if they were empty.
    """
    least: dict[str, JobView] = {}
    for job in fits:  # the smallest of a tenant is covered by whatever covers a larger one
        name = tenancy.leaf(job)
        if name not in least or fewest_gpus(job) < fewest_gpus(least[name]):
            least[name] = job
    if not least:
        return frozenset()
    covered = [(job, set(covers(tenancy, job))) for job in least.values()]
    found, borrows = set[JobId](), dict[str, bool]()
    for other in waiting:
        name = tenancy.leaf(other)
        if name not in borrows:
            borrows[name] = any(
                not covering.isdisjoint(tenancy.below_top(job, other)) for job, covering in covered
            )
        if borrows[name] and (not is_covered(tenancy, other) or is_never(other)):
            found.add(other.job_id)
    return frozenset(found)


def beside_idle(
    tenancy: Tenancy,
    waiting: Iterable[JobView],
    finds_gpus: Callable[[JobView], bool],
    is_never: Callable[[JobView], bool],
) -> list[JobView]:
    """Guaranteed jobs that wait although their tenant has room and they fit on free GPUs that no
    job needs which a policy's order may put before them.

    That other job is one before it by priority and submission, of its own tenant or guaranteed as
    well, that does not fit or is not guaranteed. It is not one that quotas keep out, whatever GPUs
    are free, nor an infeasible one. Demands other than GPUs are the policy's matter.

    waiting: all waiting jobs, except `blocked` ones.
    finds_gpus: whether a job fits on free GPUs, whatever its tenant may take.
    is_never: as for `behind`.
    """
    found: list[JobView] = []
    stuck = False
    of_tenants = set[str]()
    quotas = _Quotas(tenancy)
    for job in sorted(waiting, key=submission):
        covered = covers(tenancy, job)
        if not quotas.have_room(job) and (covered or finds_gpus(job) or quotas.never_have(job)):
            continue
        if not (covered and finds_gpus(job)):
            if is_never(job):
                continue
            stuck |= bool(covered)
            of_tenants.update(tenancy.path(job))
        elif not stuck and covered[-1] not in of_tenants and _asks_gpus_alone(job):
            found.append(job)
    return found


class _Quotas:
    """Whether tenants have room for their waiting jobs; computed once for alike jobs.

    Where a tenant does not lend all its guarantee, a borrower without room may lack nodes instead.
    Only a job that finds free GPUs, is owed them, or could never have them is certainly kept out by
    quotas.
    """

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._idle = tenancy.idle(tenancy.capacity)
        self._room: dict[str, float] = {}
        self._never: dict[tuple[str, int], bool] = {}

    def have_room(self, job: JobView) -> bool:
        """Now, if GPUs were free."""
        alike = self._tenancy.alike(job)
        if alike not in self._room:
            self._room[alike] = self._tenancy.room(job)
        return fewest_gpus(job) <= self._room[alike]

    def never_have(self, job: JobView) -> bool:
        """True if the quota forbids it even while no tenant uses anything."""
        alike = self._tenancy.leaf(job), fewest_gpus(job)
        if alike not in self._never:
            self._never[alike] = bool(self._idle.why_never(job.tenant, alike[1]))
        return self._never[alike]


def _asks_gpus_alone(job: JobView) -> bool:
    return not (job.cpus_per_worker or job.memory_bytes_per_worker)


def overdue(
    tenancy: Tenancy,
    waiting: Iterable[JobView],
    finds_gpus: Callable[[JobView], bool],
    is_never: Callable[[JobView], bool],
    now_s: float,
) -> tuple[list[JobView], float | None]:
    """Jobs that have waited long enough beside idle GPUs, and when the next will have; identified
    as for `beside_idle`.
    """
    late, wakes_s = list[JobView](), list[float]()
    for job in beside_idle(tenancy, waiting, finds_gpus, is_never):
        since_s = job.waiting_since_s
        if since_s is None:
            continue
        if since_s + PATIENCE_S > now_s:
            wakes_s.append(since_s + PATIENCE_S)
        else:
            late.append(job)
    return late, min(wakes_s, default=None)


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
    wanted, covered = fewest_gpus(job), covers(tenancy, job)
    if not covered:
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
    name = covered[0]
    guarantee = counted(tenancy.views[name].guarantee_gpus, "GPU")
    why = f"tenant {name} uses {number(tenancy.used[name])} of the {guarantee} of its guarantee; "
    if soon:
        why += f"borrowers that cannot be stopped yet: {_names(soon)}"
    elif never:
        why += f"borrowers that did not agree to be stopped: {_names(never)}"
    elif no_room := tenancy.why_not(job, wanted):
        why += no_room
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
    return some(sorted(job.job_id for job in jobs), MOST_NAMED)
