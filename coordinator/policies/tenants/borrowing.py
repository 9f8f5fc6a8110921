"""GPUs that a job may not borrow, because guarantees reclaimed them from it repeatedly.

The job may start where enough stays free for all that the owners of these guarantees could still
ask for, and on GPUs that its own guarantee covers.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted, listed
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.tree import WHOLE


def ends_at_s(snapshot: ClusterSnapshot, jobs: Iterable[JobView]) -> float | None:
    """When the first of some jobs may borrow again; None: none waits for that."""
    rests = (job.preemptions.back_off for job in jobs)
    waits = (rest.until_s for rest in rests if rest is not None)
    return min((until_s for until_s in waits if until_s > snapshot.now_s), default=None)


def why_not_borrowed(job: JobView, gpus: int, tenancy: Tenancy, now_s: float) -> str:
    """Why a job may not start on this number of GPUs, by the guarantees that reclaimed from it;
    empty if it may.

    tenancy: before its start.
    """
    rest = job.preemptions.back_off
    if rest is None or rest.until_s <= now_s:
        return ""
    used, views = tenancy.used, tenancy.views
    if any(used[name] + gpus <= views[name].guarantee_gpus for name in tenancy.path(job)):
        return ""
    idle = _idle_gpus(job, tenancy)
    left = tenancy.capacity - used[WHOLE] - gpus
    if left >= idle or not idle:
        return ""
    return (
        f"by their guarantee {listed(rest.tenants, 'has', 'have')} reclaimed it "
        f"{counted(rest.count, 'time')} in a row, the last {now_s - rest.since_s:.0f} s ago: for "
        f"{rest.until_s - now_s:.0f} s more it borrows nothing there, and beside that no "
        f"{counted(gpus, 'GPU')} are free"
    )


def _idle_gpus(job: JobView, tenancy: Tenancy) -> float:
    """GPUs that the owners could still ask for; of two nested owners the outer one counts."""
    rest = job.preemptions.back_off
    owners = {
        name
        for name in (() if rest is None else rest.tenants)
        if name in tenancy.views and name not in tenancy.path(job)
    }
    outer = [name for name in owners if owners.isdisjoint(tenancy.path_of(name)[1:])]
    return sum(
        max(0.0, float(tenancy.views[name].guarantee_gpus - tenancy.used[name])) for name in outer
    )
