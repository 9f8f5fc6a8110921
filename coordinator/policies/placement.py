"""Which nodes take the workers: best fit, groups on lent nodes. Must not know order or value.

Rules (Lyra, EuroSys'23, section 5.3): a worker goes to the fullest node that still fits it, an
empty node is opened last; base and flexible workers of elastic jobs go to separate groups of lent
nodes, so that the flexible group can go home without a preemption.

Deviation: the paper puts elastic base demand on lent nodes first. A base worker there is the only
source of preemptions, so by default it goes to training nodes while they fit
(`elastic_base_prefers_loan` restores the paper's rule).
"""

from __future__ import annotations

from collections.abc import Iterable

from common.model import JobId, NodeName, NodeRole, Preemptibility, ServiceName
from coordinator.policies.decisions import Placement
from coordinator.policies.snapshot import ClusterSnapshot, JobView, NodeView, Trial, WorkerView

Saved = tuple[
    dict[NodeName, int], dict[NodeName, int], dict[NodeName, int], dict[NodeName, list[WorkerView]]
]


class Room(Trial):
    """Free GPUs of the nodes that take workers, and the flexible workers that could give more.

    `flexible` lists, per node, the workers that may be taken back: flexible, not leaving, of jobs
    that can be resized now. Tags follow what is placed: a lent node is of the base group while a
    base worker is on it, of the flexible group while only flexible ones are.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        *,
        elastic_base_prefers_loan: bool = False,
        has_flexible: bool = True,
    ) -> None:
        super().__init__(snapshot.nodes)
        self.elastic_base_prefers_loan = elastic_base_prefers_loan
        self.services = {service.name: service for service in snapshot.services}
        self.nodes = {name: node for name, node in self.nodes.items() if self._is_usable(node)}
        self.free = {name: self.free[name] for name in self.nodes}
        self.flexible: dict[NodeName, list[WorkerView]] = {}
        self.base_count: dict[NodeName, int] = {}
        self.flexible_count: dict[NodeName, int] = {}
        self.by_type: dict[str, list[NodeName]] = {}
        self.home_types = {
            node.gpu_type for node in self.nodes.values() if node.role == NodeRole.TRAINING
        }
        resizable = {
            job.job_id
            for job in snapshot.jobs
            if has_flexible and job.is_resizable and job.gpu_type is not None
        }
        for name, node in self.nodes.items():
            self._count(name, node, resizable)

    def _count(self, name: NodeName, node: NodeView, resizable: set[JobId]) -> None:
        stay = [worker for worker in node.workers if not worker.is_leaving]
        self.flexible_count[name] = sum(1 for worker in stay if worker.is_flexible)
        self.base_count[name] = len(stay) - self.flexible_count[name]
        self.by_type.setdefault(node.gpu_type, []).append(name)
        mine = [worker for worker in stay if worker.is_flexible and worker.job_id in resizable]
        if mine:
            self.flexible[name] = sorted(mine, key=lambda w: (w.job_id, w.worker_index))

    def _is_usable(self, node: NodeView) -> bool:
        if node.role == NodeRole.TRAINING:
            return True
        if node.role != NodeRole.ON_LOAN or node.is_reclaimed or node.service is None:
            return False
        service = self.services.get(node.service)
        return service is not None and not service.is_recalled

    def save(self) -> Saved:
        """All that changes in a pass, to go back to with `restore`."""
        flexible = {name: list(workers) for name, workers in self.flexible.items()}
        return dict(self.free), dict(self.base_count), dict(self.flexible_count), flexible

    def restore(self, saved: Saved) -> None:
        """Go back to what `save` saw; good for one time."""
        self.free, self.base_count, self.flexible_count, self.flexible = saved

    def available(self, name: NodeName) -> int:
        """GPUs of a node that base demand could get: free, or held by flexible workers."""
        return self.free[name] + sum(worker.gpus for worker in self.flexible.get(name, ()))

    def hold(self, placements: Iterable[Placement], gpus_per_worker: int) -> None:
        """Take the GPUs of placements; their nodes are tagged by it."""
        for placement in placements:
            self.take(placement.node, placement.worker_count * gpus_per_worker)
            count = self.flexible_count if placement.is_flexible else self.base_count
            count[placement.node] += placement.worker_count

    def release(self, worker: WorkerView) -> None:
        """A flexible worker goes: its GPUs are free."""
        self.flexible[worker.node].remove(worker)
        self.give(worker.node, worker.gpus)
        self.flexible_count[worker.node] -= 1

    def keep(self, worker: WorkerView) -> None:
        """A released worker stays after all; the caller has looked that its GPUs are free."""
        self.take(worker.node, worker.gpus)
        self.flexible[worker.node].append(worker)
        self.flexible_count[worker.node] += 1

    def may_host(self, job: JobView, name: NodeName, *, is_flexible: bool) -> bool:
        """Whether the rules let a worker of the job run on a node, free GPUs aside."""
        node = self.nodes[name]
        if node.role != NodeRole.ON_LOAN:
            return True
        if job.preemptibility == Preemptibility.NON:
            return False
        if job.preemptibility == Preemptibility.SEMI and not is_flexible:
            return False
        return job.grace_s <= self.max_grace_s(node.service)

    def max_grace_s(self, service: ServiceName | None) -> float:
        """Longest grace on lent nodes of a service; below zero when nobody may run there."""
        if service is None or service not in self.services:
            return -1.0
        return self.services[service].max_grace_s

    def hosts(
        self, job: JobView, gpu_type: str, *, is_flexible: bool, free_gpus: int = 0
    ) -> list[NodeName]:
        """Nodes of a GPU type that may host workers of the job and have that many GPUs free."""
        return [
            name
            for name in self.by_type.get(gpu_type, ())
            if self.free[name] >= free_gpus and self.may_host(job, name, is_flexible=is_flexible)
        ]

    def rank(self, job: JobView, name: NodeName, *, is_flexible: bool) -> int:
        """Which kind of node a worker prefers; lower is better.

        Flexible: flexible group, empty lent node, training, base group.
        Base: training, base group, empty lent node, flexible group; with
        `elastic_base_prefers_loan` training comes after the empty lent nodes for elastic jobs.
        """
        if self.nodes[name].role != NodeRole.ON_LOAN:
            prefers_loan = self.elastic_base_prefers_loan and job.is_elastic
            return 4 if is_flexible or prefers_loan else 0
        if self.base_count[name]:
            return 5 if is_flexible else 1
        if self.flexible_count[name]:
            return 1 if is_flexible else 6
        return 3

    def is_empty(self, name: NodeName) -> bool:
        """Whether nothing runs there."""
        return not self.base_count[name] and not self.flexible_count[name]


def fill(
    room: Room, job: JobView, gpu_type: str, worker_count: int, *, is_flexible: bool = False
) -> tuple[Placement, ...]:
    """Where up to `worker_count` workers go by best fit; nothing is held yet.

    All workers of a job are equally large, so filling the nodes in order of best fit is the same
    as placing worker by worker.
    """
    size = job.gpus_per_worker
    fits = room.hosts(job, gpu_type, is_flexible=is_flexible, free_gpus=size)
    fits.sort(
        key=lambda name: (
            room.rank(job, name, is_flexible=is_flexible),
            room.is_empty(name),
            room.free[name],
            name,
        )
    )
    left = worker_count
    placements: list[Placement] = []
    for name in fits:
        if left <= 0:
            break
        count = min(left, room.free[name] // size)
        placements.append(Placement(node=name, worker_count=count, is_flexible=is_flexible))
        left -= count
    return tuple(placements)


def placed_count(placements: Iterable[Placement]) -> int:
    """Workers in all."""
    return sum(placement.worker_count for placement in placements)


def merge(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """One placement per node and kind, base first, nodes in order of name."""
    counts: dict[tuple[bool, NodeName], int] = {}
    for placement in placements:
        key = (placement.is_flexible, placement.node)
        counts[key] = counts.get(key, 0) + placement.worker_count
    return tuple(
        Placement(node=name, worker_count=counts[is_flexible, name], is_flexible=is_flexible)
        for is_flexible, name in sorted(counts)
    )


def types_in_order(room: Room, job: JobView) -> list[str]:
    """GPU types to try: the job's own order; for a fungible job, types of training nodes first.

    Among equals the type that needs fewer workers comes first, then the name decides.
    """
    if job.gpu.types:
        return list(dict.fromkeys(job.gpu.types))
    return sorted(
        room.by_type,
        key=lambda gpu_type: (
            gpu_type not in room.home_types,
            job.gpu.worker_multiplier.get(gpu_type, 1),
            gpu_type,
        ),
    )
