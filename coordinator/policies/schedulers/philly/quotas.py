"""Quotas that others use while they are idle: which tenants are within theirs, and which beyond.

The Philly study (ATC'19, section 2.3): a virtual cluster's quota is lent while its owner does not
use it. GPUs that a waiting gang holds count as use of its quota, but stop no job: only running jobs
count for being beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.model import JobId
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.tree import WHOLE


def held_gpus(job: JobView) -> int:
    """GPUs of all its workers, also of those that are leaving."""
    return sum(worker.gpus for worker in job.placed)


class QuotasInUse:
    """The certain quota of each tenant, and its use as a pass goes on.

    A job is within quota if its tenant is, or any tenant that contains it. What the others there
    leave of theirs is its own before it is any other's. Between two tenants this is computed below
    the point where they part.

    gpus: by tenant: its guarantee, and its weight's part of what its parent's quota has beyond
        those; of the whole cell where no tenant has one. Only tenants with jobs have parts by
        weight.
    held: by tenant, GPUs that gangs of it and of all below it hold and do not run on.
    """

    def __init__(self, snapshot: ClusterSnapshot, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self.gpus: dict[str, float] = {}
        self.held: dict[str, int] = dict.fromkeys(tenancy.used, 0)
        are_promised = any(view.guarantee_gpus for view in snapshot.tenants)
        present = {name for job in snapshot.jobs for name in tenancy.path(job)}
        for parent in (WHOLE, *tenancy.views):
            views = [tenancy.views[name] for name in tenancy.children[parent]]
            if parent == WHOLE:
                over = 0.0 if are_promised else float(tenancy.capacity)
            else:
                over = self.gpus[parent] - sum(view.guarantee_gpus for view in views)
            each = max(0.0, over) / (sum(v.weight for v in views if v.name in present) or 1.0)
            self.gpus |= {view.name: view.guarantee_gpus + view.weight * each for view in views}

    def part_in_use(self, name: str) -> float:
        """The used fraction of a tenant's quota; more than 1 where it uses idle ones of others."""
        return (self._tenancy.used[name] + self.held[name]) / max(1.0, self.gpus[name])

    def leaf(self, job: JobView) -> str:
        """The tenant where its GPUs are counted first."""
        return self._tenancy.leaf(job)

    def hold(self, job: JobView, gpus: int) -> None:
        """The job's gang holds this number of further GPUs; a negative number releases them."""
        for name in self._tenancy.path(job):
            self.held[name] += gpus

    def room(self, job: JobView) -> int:
        """GPUs that its gang may hold: the most that any level leaves of its quota, of those whose
        quota the whole gang does not exceed. At least the gang's, if and only if it is within."""
        gpus = job.base_gpus
        names = (name for name in self._tenancy.path(job) if gpus <= self.gpus[name])
        return max(0, int(max(map(self._left, names), default=0.0)))

    def told(self, job: JobView, own: int) -> str:
        """As text: the use of its tenant's quota, for a waiting job.

        own: GPUs that it holds itself.
        """
        leaf = self.leaf(job)
        uses = f"uses {counted(self._tenancy.used[leaf], 'GPU')} of its quota of"
        others = self.held[leaf] - own
        keeps = f"other gangs of it that wait keep {others}, " if others else ""
        return f"tenant {leaf} {uses} {self.gpus[leaf]:.0f}, {keeps}the job needs {job.base_gpus}"

    def is_within(self, job: JobView) -> bool:
        """Whether it is, with the base gang of a job that waits, at any level."""
        return self._is_within(self._tenancy.path(job), job)

    def _is_within(self, names: Iterable[str], job: JobView) -> bool:
        gpus = job.base_gpus
        return any(gpus <= self._left(name) for name in names)

    def _left(self, name: str) -> float:
        """GPUs of a tenant's quota that are neither used nor held; below 0 where it has more."""
        return float(self.gpus[name] - self._tenancy.used[name] - self.held[name])

    def beyond(self, jobs: Iterable[JobView], job: JobView) -> list[JobView]:
        """Jobs of tenants beyond their quota at each level beside a job that is within its own
        there, the lowest priority first, of these the youngest.
        """
        used, below = self._tenancy.used, self._tenancy.below_top
        found = [
            other
            for other in jobs
            if self._is_within(below(job, other), job)
            and all(used[name] > self.gpus[name] for name in below(other, job))
        ]
        return sorted(found, key=_first_to_go)

    def is_used_without(self, other: JobView, job: JobView) -> bool:
        """Whether its tenant has all of its quota in use without a job that runs, too, at each
        level beside the job that it would make room for."""
        used, gpus = self._tenancy.used, held_gpus(other)
        return all(
            used[name] - gpus >= self.gpus[name] for name in self._tenancy.below_top(other, job)
        )


def _first_to_go(job: JobView) -> tuple[int, float, JobId]:
    return job.priority, -(job.attempt.started_at_s or 0.0), job.job_id
