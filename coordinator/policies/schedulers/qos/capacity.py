"""The GPUs that plans may use, and what quotas leave of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from common.model import JobId
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.schedulers.qos.admission import NO_QUOTAS
from coordinator.policies.schedulers.qos.applicants import fixed_gpus
from coordinator.policies.schedulers.qos.quotas import Quotas, has_quotas, quotas_beside
from coordinator.policies.schedulers.qos.timeline import Plan
from coordinator.policies.schedulers.qos.type_choice import Kinds
from coordinator.policies.tenants.tenancy import Tenancy


class Capacity:
    """The cell's GPUs for planned jobs, by GPU type.

    gpu_types: all, including those of which no node takes workers now. kinds: on which each job is
        planned.
    tenancy: None: no tenant has a rule that plans would have to heed.

    Args:
        let_in: jobs with a promised deadline, met or not. before: on which types.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, let_in: Container[str], before: Mapping[str, str]
    ) -> None:
        self._snapshot = snapshot
        self._floor = FreeGpus(snapshot)
        self.kinds = Kinds(snapshot, self._floor, let_in, before)
        self.gpu_types = sorted({*self._floor.gpu_types, *self.kinds.of.values()})
        self.tenancy = _whole_tree(snapshot) if has_quotas(snapshot.tenants) else None

    @property
    def nodes(self) -> Iterable[NodeView]:
        """Nodes on which a job may be started now."""
        return self._floor.nodes.values()

    def jobs(self, kind: str) -> list[JobView]:
        """The jobs planned on a type."""
        kinds = self.kinds.of
        return [job for job in self._snapshot.jobs if kinds.get(job.job_id) == kind]

    def gpus(self, kind: str, jobs: Sequence[JobView]) -> int:
        """GPUs of a type, without those of its jobs that are part of no plan."""
        return self._floor.total_gpus(kind) + self._held_outside(jobs) - sum(map(fixed_gpus, jobs))

    def quotas(self, here: Container[JobId], plans: Mapping[str, Plan], now_s: float) -> Quotas:
        """What tenants leave to some jobs beside all others, which run as they were planned."""
        if self.tenancy is None:
            return NO_QUOTAS
        elsewhere = [job for job in self._snapshot.jobs if job.job_id not in here]
        gpus = self._floor.total_gpus() + self._held_outside(self._snapshot.jobs)
        return quotas_beside(self.tenancy, gpus, elsewhere, plans, now_s, kinds=self.kinds.of)

    def _held_outside(self, jobs: Iterable[JobView]) -> int:
        """GPUs of nodes on which no job is started now, lost or cordoned: a job that runs there
        goes on there, and needs none of the others for that.
        """
        placed = (worker for job in jobs for worker in job.placed if not worker.is_leaving)
        return sum(worker.gpus for worker in placed if worker.node not in self._floor.nodes)


def _whole_tree(snapshot: ClusterSnapshot) -> Tenancy:
    """Tenants, and for each with tenants below it a share for jobs of its own.

    Without that job this part of its guarantee would be promised to those below it, and taken
    back from them when one arrives.
    """
    return Tenancy(snapshot, (view.name for view in snapshot.tenants))
