"""Free GPUs by node during a pass, placement rules, and the shapes of gangs.

Policies that decide jointly place here. Those made of rules use `aryl.placement` instead, where
lent nodes have groups of their own. The shape of a gang is what decides where it has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from common.model import GpuUuid, JobState, NodeName, NodeRole, Preemptibility
from coordinator.policies.contract.decisions import Placement, placed_count
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    WorkerView,
)

GangShape = tuple[object, ...]


def gang_shape(job: JobView) -> GangShape:
    """Two jobs of equal shape both have room on given GPUs on nodes of one type, or neither has."""
    multipliers = job.gpu.worker_multiplier
    factors = tuple(sorted(multipliers.items())) if multipliers else ()
    return job.gpus_per_worker, job.workers.min, job.gpu.types, factors, job.nodes.avoided


Place = Callable[["FreeGpus", JobView, str, int], tuple[Placement, ...]]
"""(floor, job, GPU type, workers) -> nodes for these workers, for fewer where no more fit."""


class FreeGpus:
    """GPUs per node that this pass can give away.

    takes_lent: also those of lent nodes; else the lending code fills and empties them.
    """

    def __init__(self, snapshot: ClusterSnapshot, *, takes_lent: bool = False) -> None:
        self.nodes: dict[NodeName, NodeView] = {
            node.name: node
            for node in snapshot.nodes
            if node.gpus and node.is_schedulable and (takes_lent or node.role == NodeRole.TRAINING)
        }
        self.free: dict[NodeName, int] = {name: node.free_gpus for name, node in self.nodes.items()}
        self._jobs = snapshot.jobs
        self._staying: dict[GpuUuid, int] | None = None
        self.avoided: tuple[NodeName, ...] = ()
        """Nodes without room for the job that is being placed."""

    @cached_property
    def gpu_types(self) -> list[str]:
        """The types that are there."""
        return sorted({node.gpu_type for node in self.nodes.values()})

    def total_gpus(self, gpu_type: str | None = None) -> int:
        """GPUs of its nodes that workers have or could be given."""
        return sum(
            gpus_of(node) for node in self.nodes.values() if gpu_type in (None, node.gpu_type)
        )

    def free_gpus(self, gpu_type: str | None = None) -> int:
        """GPUs that can still be given away."""
        return sum(
            gpus for name, gpus in self.free.items()
            if gpu_type in (None, self.nodes[name].gpu_type)
        )  # fmt: skip

    @property
    def _sharers(self) -> dict[GpuUuid, int]:
        """Workers that stay, by GPU, of those that several had; none where no job takes turns."""
        if self._staying is None:
            counts: Counter[GpuUuid] = Counter()
            if any(
                j.state == JobState.SUSPENDED or j.attempt.is_packed or j.held for j in self._jobs
            ):
                for job in self._jobs:
                    for worker in (*job.placed, *job.held):
                        counts.update(() if worker.is_leaving else worker.gpu_uuids)
                        for uuid in worker.barred_uuids:
                            del counts[uuid]  # it stays barred when it comes free
            self._staying = {uuid: count for uuid, count in counts.items() if count > 1}
        return self._staying

    def vacate(self, workers: Iterable[WorkerView]) -> None:
        """Workers leave: GPUs that they free here can be given away, shared ones with the last
        worker.
        """
        sharers = self._sharers
        for worker in workers:
            if worker.node in self.free and not worker.is_leaving:
                for uuid in worker.gpu_uuids if sharers else ():
                    if uuid in sharers:
                        sharers[uuid] -= 1
                self.free[worker.node] += self._alone(worker)

    def stay(self, workers: Iterable[WorkerView]) -> None:
        """The opposite of `vacate`."""
        sharers = self._sharers
        for worker in workers:
            if worker.node in self.free and not worker.is_leaving:
                self.free[worker.node] -= self._alone(worker)
                for uuid in worker.gpu_uuids if sharers else ():
                    if uuid in sharers:
                        sharers[uuid] += 1

    def _alone(self, worker: WorkerView) -> int:
        """GPUs that a leaving worker frees and that no staying worker shares."""
        if not self._sharers:
            return worker.freed_gpus
        return worker.freed_gpus - sum(self._sharers.get(uuid, 0) > 0 for uuid in worker.gpu_uuids)

    def needed(self, workers: Iterable[WorkerView]) -> dict[NodeName, int]:
        """GPUs by node that workers of one job which were to go would take again here."""
        held: dict[NodeName, int] = {}
        for worker in workers:
            if worker.node in self.free and not worker.is_leaving:
                held[worker.node] = held.get(worker.node, 0) + self._alone(worker)
        return held

    def goes_on(self, workers: Sequence[WorkerView]) -> bool:
        """Workers that were to leave stay after all, if their GPUs were given to no job."""
        if any(self.free[name] < gpus for name, gpus in self.needed(workers).items()):
            return False
        self.stay(workers)
        return True

    def take(self, placements: Iterable[Placement], gpus_per_worker: int) -> None:
        """Give GPUs away."""
        for placement in placements:
            self.free[placement.node] -= placement.worker_count * gpus_per_worker

    def give(self, placements: Iterable[Placement], gpus_per_worker: int) -> None:
        """The opposite of `take`."""
        for placement in placements:
            self.free[placement.node] += placement.worker_count * gpus_per_worker

    def rooms(self, gpu_type: str, gpus_per_worker: int) -> dict[NodeName, int]:
        """Workers that each node of a type has room for, where it has any."""
        return {
            name: gpus // gpus_per_worker
            for name, gpus in self.free.items()
            if gpus >= gpus_per_worker
            and self.nodes[name].gpu_type == gpu_type
            and name not in self.avoided
        }


def gpus_of(node: NodeView) -> int:
    """GPUs of a node, without those that stay barred and have no holder."""
    if not node.barred_gpus:
        return node.gpus
    stay = (worker for worker in node.workers if not worker.is_leaving)
    held = sum(worker.gpus - worker.freed_gpus for worker in stay)
    return node.gpus - max(0, node.barred_gpus - held)


def takers(floor: FreeGpus, job: JobView, gpus: Mapping[NodeName, int]) -> set[NodeName]:
    """Nodes that can take a worker of a job, among those with a number of GPUs."""
    kinds, avoided = job.gpu.types or floor.gpu_types, job.nodes.avoided
    return {
        name
        for name, free in gpus.items()
        if free >= job.gpus_per_worker
        and floor.nodes[name].gpu_type in kinds
        and name not in avoided
    }


def best_fit(floor: FreeGpus, job: JobView, gpu_type: str, count: int) -> tuple[Placement, ...]:
    """The fullest nodes that take a worker first: whole nodes stay whole."""
    rooms = floor.rooms(gpu_type, job.gpus_per_worker)
    return fill(rooms, sorted(rooms, key=lambda name: (floor.free[name], name)), count)


def consolidated(floor: FreeGpus, job: JobView, gpu_type: str, count: int) -> tuple[Placement, ...]:
    """The fewest nodes: the fullest one that takes all; else the emptiest, and so on."""
    rooms = floor.rooms(gpu_type, job.gpus_per_worker)
    left, order = count, list[NodeName]()
    free = dict(floor.free)
    while left > 0 and len(order) < len(rooms):
        rest = [name for name in rooms if name not in order]
        whole = [name for name in rest if rooms[name] >= left]
        if whole:
            order.append(min(whole, key=lambda name: (free[name], name)))
            break
        order.append(min(rest, key=lambda name: (-rooms[name], name)))
        left -= rooms[order[-1]]
    return fill(rooms, order, count)


def fewest_nodes(floor: FreeGpus, job: JobView, gpu_type: str, count: int) -> tuple[Placement, ...]:
    """On as few nodes as it would have on empty ones that it may have, or not at all."""
    sizes = [
        (node.gpus - node.barred_gpus) // job.gpus_per_worker
        for name, node in floor.nodes.items()
        if node.gpu_type == gpu_type and name not in floor.avoided
    ]
    found = consolidated(floor, job, gpu_type, count)
    return found if len(found) <= nodes_needed(sizes, count) else ()


def nodes_needed(sizes: Iterable[int], count: int) -> int:
    """The fewest nodes for all workers, each taking the given number; else all nodes."""
    needed = 0
    for size in sorted(sizes, reverse=True):
        if count <= 0:
            break
        count -= size
        needed += 1
    return needed


def accepted_types(job: JobView, floor: FreeGpus) -> list[str]:
    """GPU types that are there and that a job takes, in its order."""
    there = floor.gpu_types
    return [kind for kind in dict.fromkeys(job.gpu.types or there) if kind in there]


def first_fit(
    floor: FreeGpus, job: JobView, place: Place = best_fit, kinds: Sequence[str] | None = None
) -> tuple[str, tuple[Placement, ...]] | None:
    """Nodes for a whole base gang, of the first GPU type that has room for it; none it avoids.

    kinds: the types to look at; None: all that it accepts.
    """
    others, floor.avoided = floor.avoided, job.nodes.avoided
    found = _first_fit(floor, job, place, accepted_types(job, floor) if kinds is None else kinds)
    floor.avoided = others
    return found


def _first_fit(
    floor: FreeGpus, job: JobView, place: Place, kinds: Iterable[str]
) -> tuple[str, tuple[Placement, ...]] | None:
    for gpu_type in kinds:
        count = job.workers_on(gpu_type).min
        found = place(floor, job, gpu_type, count)
        if placed_count(found) == count:
            return gpu_type, found
    return None


def fill(
    rooms: Mapping[NodeName, int], order: Iterable[NodeName], count: int
) -> tuple[Placement, ...]:
    """Up to `count` workers on nodes in this order, as many on each as it has room for."""
    placements: list[Placement] = []
    for name in order:
        if count <= 0:
            break
        here = min(count, rooms[name])
        placements.append(Placement(node=name, worker_count=here))
        count -= here
    return tuple(placements)


def is_movable(job: JobView) -> bool:
    """True if a policy may stop the job for others: it runs, agreed to it, and no change is under
    way.

    A suspended job also counts as running. A job stopped recently is in its cooldown. A gang that
    still starts may be the nominee of GPUs that are being vacated: stopping it would free them for
    no job yet.
    """
    runs = job.state in (JobState.RUNNING, JobState.SUSPENDED) and not job.is_resting
    return runs and job.preemptibility == Preemptibility.FULL


def present_workers(job: JobView) -> int:
    """Its workers that were not ordered to stop."""
    return sum(not worker.is_leaving for worker in job.placed)


def can_grow(job: JobView) -> bool:
    """Whether it runs with fewer workers than it could use, and can have more."""
    gpu_type = job.gpu_type if job.is_resizable else None
    return gpu_type is not None and present_workers(job) < job.workers_on(gpu_type).max


def spare_workers(job: JobView) -> tuple[WorkerView, ...]:
    """Workers that the job can spare and may give now, the newest first."""
    if not job.is_resizable:
        return ()
    flexible = (worker for worker in job.placed if worker.is_flexible and not worker.is_leaving)
    return tuple(sorted(flexible, key=lambda worker: -worker.worker_index))


def barred_gpus(job: JobView) -> int:
    """GPUs of its staying workers that stay barred when freed: the job goes on with them, or not at
    all.
    """
    return sum(each.gpus - each.freed_gpus for each in job.placed if not each.is_leaving)
