"""Whether a gang finds room on free GPUs, counted plainly. Must not know whose it is, nor why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import nlargest

from common.model import NodeName
from coordinator.policies.decisions import Placement
from coordinator.policies.snapshot import JobView, NodeView


def gang_on(
    free: Mapping[NodeName, int], nodes: Mapping[NodeName, NodeView], job: JobView, gpu_type: str
) -> tuple[Placement, ...]:
    """Its base gang on the fullest nodes that take a worker; empty where it does not fit.

    free: GPUs by node; others are not looked at. Nodes that the job avoids take none of it.
    """
    gang = Gang(free, nodes, job, gpu_type)
    return gang.placed(free) if gang.fits(free) else ()


class Gang:
    """The base gang of a job, and the nodes of one GPU type that may take a worker of it.

    free: GPUs by node, as for `gang_on`. count: workers. nodes: by name; those that it avoids are
    left out.
    """

    def __init__(
        self,
        free: Mapping[NodeName, int],
        nodes: Mapping[NodeName, NodeView],
        job: JobView,
        gpu_type: str,
    ) -> None:
        self._size = job.gpus_per_worker
        self.gpu_type = gpu_type
        self.count = job.workers_on(gpu_type).min
        self.nodes = frozenset(
            n for n in free if nodes[n].gpu_type == gpu_type and n not in job.avoid_nodes
        )

    def workers(self, gpus: Mapping[NodeName, int]) -> int:
        """So many of its workers find room on these GPUs."""
        return sum(
            max(0, count // self._size) for name, count in gpus.items() if name in self.nodes
        )

    def fits(self, free: Mapping[NodeName, int]) -> bool:
        """Whether all of it does."""
        return self.workers(free) >= self.count

    def lacks(self, free: Mapping[NodeName, int], there: Collection[NodeName]) -> int:
        """GPUs that have to come free at least on some nodes, beside all these, until it fits.

        On each node one worker may use what others leave there.
        """
        short = max(0, self.count - self.workers(free))
        parts = (max(0, free[name]) % self._size for name in self.nodes.intersection(there))
        return short * self._size - sum(nlargest(short, parts))

    def placed(
        self, free: Mapping[NodeName, int], first: Collection[NodeName] = ()
    ) -> tuple[Placement, ...]:
        """It, on the fullest nodes, some of them first; only where it fits."""
        left, found = self.count, list[Placement]()
        there = (name for name in self.nodes if free[name] >= self._size)
        for name in sorted(there, key=lambda name: (name not in first, free[name], name)):
            here = min(left, free[name] // self._size)
            if here > 0:
                found.append(Placement(node=name, worker_count=here))
                left -= here
        return tuple(sorted(found, key=lambda each: each.node))
