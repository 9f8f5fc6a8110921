"""The pre-run pool: a few nodes, or part of one, on which only pre-runs start.

The Philly study (ATC'19, section 5) proposes to try each gang on a small pool first, so that a
mistake shows after minutes on one GPU and not after hours in the queue on all of them. The pool
gives way where a waiting gang would fit on the cell without the pool and not beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from common.model import JobState, NodeName
from coordinator.policies.contract.estimates import Source
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.parts.grants import Grant, begin


def is_prerun(job: JobView) -> bool:
    """Whether a job is in its pre-run, or waits for it."""
    return job.estimate.source == Source.PRERUN


class PrerunPool:
    """A number of free GPUs, on the last nodes by name; `floor` is left without them.

    floor: the pool's own. gpus: its size; smaller than requested where the cell is smaller, zero
        where it gives way.
    """

    def __init__(self, snapshot: ClusterSnapshot, floor: FreeGpus, gpus: int) -> None:
        kept = _last(floor.nodes, gpus)
        if any(_needs_all(job, floor.nodes, kept) for job in snapshot.jobs):
            kept = {}
        taken = dict.fromkeys(kept, 0)
        for job in filter(is_prerun, snapshot.jobs):
            for worker in job.placed:
                if worker.node in taken:
                    taken[worker.node] += worker.gpus
        self.gpus = sum(kept.values())
        self.floor = FreeGpus(snapshot)
        self.floor.nodes, self.floor.free = {}, {}
        for name, gpus in kept.items():
            node, rest = floor.nodes[name], floor.nodes[name].gpus - gpus
            idle = min(max(0, gpus - taken[name]), floor.free[name])
            # The pool is the last to lose the GPUs that no job can have.
            barred = min(node.barred_gpus, rest)
            mine = replace(node, gpus=gpus, barred_gpus=node.barred_gpus - barred)
            self.floor.nodes[name], self.floor.free[name] = mine, idle
            floor.nodes[name] = replace(node, gpus=rest, barred_gpus=barred)
            floor.free[name] -= idle

    @property
    def idle_gpus(self) -> int:
        """Its GPUs without a pre-run."""
        return self.floor.free_gpus()

    def has(self, job: JobView) -> bool:
        """Whether a job is a pre-run that stands here."""
        return is_prerun(job) and any(worker.node in self.floor.nodes for worker in job.placed)

    def begin(self, job: JobView, reason: str) -> Grant | None:
        """Give a pre-run that waits free GPUs of it; None where none are, or it is no pre-run."""
        self.floor.avoided = job.nodes.avoided
        return begin(self.floor, job, reason) if is_prerun(job) else None


def _last(nodes: Mapping[NodeName, NodeView], gpus: int) -> dict[NodeName, int]:
    """A number of GPUs by node, the last nodes first, so that the others stay whole."""
    kept: dict[NodeName, int] = {}
    for name in sorted(nodes, reverse=True):
        here = min(nodes[name].gpus, gpus)
        if here > 0:
            kept[name] = here
            gpus -= here
    return kept


def _needs_all(
    job: JobView, nodes: Mapping[NodeName, NodeView], kept: Mapping[NodeName, int]
) -> bool:
    """Whether a gang that waits fits on empty nodes, and no more on what a pool leaves of them."""
    if job.state != JobState.PENDING or is_prerun(job):
        return False
    return _fits(job, nodes, {}) and not _fits(job, nodes, kept)


def _fits(job: JobView, nodes: Mapping[NodeName, NodeView], kept: Mapping[NodeName, int]) -> bool:
    room, avoided = dict[str, int](), job.nodes.avoided
    for name, node in nodes.items():
        if job.accepts(node.gpu_type) and name not in avoided:
            well = node.gpus - node.barred_gpus
            workers = max(0, well - kept.get(name, 0)) // job.gpus_per_worker
            room[node.gpu_type] = room.get(node.gpu_type, 0) + workers
    return any(count >= job.workers_on(gpu_type).min for gpu_type, count in room.items())
