"""Vectors of GPUs, CPUs and memory: capacity of nodes, demand of workers, and the rest.

A job that declares no CPUs or memory is taken to want the same part of a node's CPUs and memory as
of its GPUs. Shares of the whole cluster use the mean node. Where no node reports CPUs or memory,
only GPUs count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from common.model import NodeName
from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.free_gpus import FreeGpus, accepted_types
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    WorkerView,
)

SLACK = 1e-9
"""Parts of a node are compared with this tolerance: sums of thirds are not whole."""


NEVER = "can never run here: its CPUs and memory do not fit on the nodes that have its GPUs"
"""Why a job waits whose gang would not fit on empty nodes, open or not."""

NOT_OPEN = "its gang would not fit even if the nodes open to workers were empty"
"""Why a job waits whose gang would fit on empty nodes if all were open."""


class Vector(NamedTuple):
    """Amounts of each resource."""

    gpus: float = 0.0
    cpus: float = 0.0
    memory_bytes: float = 0.0

    def plus(self, other: Vector, times: float = 1.0) -> Vector:
        """The sum with a multiple of another."""
        return Vector(
            self.gpus + times * other.gpus,
            self.cpus + times * other.cpus,
            self.memory_bytes + times * other.memory_bytes,
        )

    def over(self, whole: Vector) -> Vector:
        """The parts of a whole; of what the whole has none of, none."""
        return Vector(
            self.gpus / whole.gpus if whole.gpus else 0.0,
            self.cpus / whole.cpus if whole.cpus else 0.0,
            self.memory_bytes / whole.memory_bytes if whole.memory_bytes else 0.0,
        )

    def dot(self, other: Vector) -> float:
        """The scalar product."""
        return (
            self.gpus * other.gpus + self.cpus * other.cpus + self.memory_bytes * other.memory_bytes
        )


def wanted(job: JobView, whole: Vector) -> Vector:
    """The demand of one worker on a node, or on a mean node, with that much capacity."""
    gpus = float(job.gpus_per_worker)
    part = gpus / whole.gpus if whole.gpus else 0.0
    return Vector(
        gpus,
        float(job.cpus_per_worker) if job.cpus_per_worker else whole.cpus * part,
        float(job.memory_bytes_per_worker)
        if job.memory_bytes_per_worker
        else whole.memory_bytes * part,
    )


def _has(node: NodeView) -> Vector:
    return Vector(float(node.gpus), float(node.cpus), float(node.memory_bytes))


def total_of(nodes: Iterable[NodeView]) -> Vector:
    """The total resources of these nodes, used or not."""
    total = Vector()
    for node in nodes:
        total = total.plus(_has(node))
    return total


def _room(job: JobView, whole: Vector, free: Vector) -> int:
    """Workers of a job that fit in the free part of a node; none on one without GPUs."""
    if not whole.gpus:
        return 0
    parts = zip(free, wanted(job, whole), whole, strict=True)
    return max(0, min(int((f + SLACK * w) / o) for f, o, w in parts if o > 0 and w > 0))


def _fits_empty(job: JobView, nodes: Iterable[NodeView]) -> list[str]:
    """GPU types of these nodes that would hold a job's gang if they were empty."""
    rooms: Counter[str] = Counter()
    for node in nodes:
        whole = _has(node)
        rooms[node.gpu_type] += _room(job, whole, whole)
    return [kind for kind in job.gpu.types or rooms if rooms[kind] >= job.workers_on(kind).min]


class Bins:
    """Nodes with the free part of each; `take` and `give` change it.

    whole: by node.
    free: by node; GPUs from the snapshot, the rest less what workers want.
    total: of all nodes.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.floor = FreeGpus(snapshot)
        self._all = snapshot.nodes
        self.whole = {name: _has(node) for name, node in self.floor.nodes.items()}
        self.total = total_of(self.floor.nodes.values())
        self.free: dict[NodeName, Vector] = {
            name: whole._replace(gpus=float(self.floor.free[name]))
            for name, whole in self.whole.items()
        }
        for job in snapshot.jobs:
            for worker in job.placed:
                if worker.node in self.free:
                    mine = wanted(job, self.whole[worker.node])._replace(gpus=0.0)
                    self.free[worker.node] = self.free[worker.node].plus(mine, -1.0)

    def room(self, job: JobView, name: NodeName) -> int:
        """Workers of a job that a node can take; none on one that the job leaves alone."""
        return 0 if name in job.nodes.avoided else _room(job, self.whole[name], self.free[name])

    def hosts(self, job: JobView) -> list[str]:
        """GPU types on whose open nodes its gang would fit if they were empty."""
        return _fits_empty(job, self.floor.nodes.values())

    def why_not_alone(self, job: JobView) -> str:
        """Why its gang would not fit though all open nodes were empty; empty where it would."""
        if self.hosts(job):
            return ""
        return NOT_OPEN if _fits_empty(job, self._all) else NEVER

    def move(self, job: JobView, placements: Iterable[Placement], sign: float = -1.0) -> None:
        """Workers come, or with sign 1 go."""
        for placement in placements:
            name = placement.node
            one = wanted(job, self.whole[name])
            self.free[name] = self.free[name].plus(one, sign * placement.worker_count)

    def vacate(self, job: JobView, workers: Iterable[WorkerView], sign: float = 1.0) -> None:
        """Running workers go, or with sign -1 stay after all."""
        for worker in workers:
            if worker.node in self.free and not worker.is_leaving:
                one = wanted(job, self.whole[worker.node])
                one = one._replace(gpus=one.gpus - (worker.gpus - worker.freed_gpus))
                self.free[worker.node] = self.free[worker.node].plus(one, sign)

    def goes_on(self, job: JobView, workers: Sequence[WorkerView]) -> bool:
        """Workers that were to leave stay after all, if their resources were given to no job."""
        self.vacate(job, workers, -1.0)
        nodes = {worker.node for worker in workers} & self.free.keys()
        parts = (zip(self.free[name], self.whole[name], strict=True) for name in nodes)
        if all(free >= -SLACK * whole for free, whole in chain.from_iterable(parts) if whole > 0):
            return True
        self.vacate(job, workers)
        return False

    def pick(
        self, job: JobView, gpu_type: str, count: int, order: Callable[[NodeName], object]
    ) -> tuple[Placement, ...]:
        """Nodes for `count` workers, the least by `order` first; empty where not all fit."""
        rooms = {
            name: room
            for name, node in self.floor.nodes.items()
            if node.gpu_type == gpu_type and (room := self.room(job, name))
        }
        found: list[Placement] = []
        for name in sorted(rooms, key=lambda name: (order(name), name)):
            here = min(count, rooms[name])
            if here:
                found.append(Placement(node=name, worker_count=here))
                count -= here
        return tuple(found) if count == 0 else ()

    def fullest(self, name: NodeName) -> float:
        """For `pick`: nodes with the fewest free GPUs first."""
        return self.free[name].gpus

    def kinds(self, job: JobView) -> list[str]:
        """GPU types that a job may start on, in its own order."""
        return accepted_types(job, self.floor)
