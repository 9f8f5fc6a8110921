"""Whether a gang finds room on free GPUs, counted plainly. Must not know whose it is, nor why."""

from __future__ import annotations

from collections.abc import Mapping

from common.model import NodeName
from coordinator.policies.decisions import Placement
from coordinator.policies.snapshot import JobView, NodeView


def gang_on(
    free: Mapping[NodeName, int], nodes: Mapping[NodeName, NodeView], job: JobView, gpu_type: str
) -> tuple[Placement, ...]:
    """Its base gang on the fullest nodes that take a worker; empty where it does not fit.

    free: GPUs by node; others are not looked at. Nodes that the job avoids take none of it.
    """
    size, left = job.gpus_per_worker, job.workers_on(gpu_type).min
    found: list[Placement] = []
    there = (n for n in free if nodes[n].gpu_type == gpu_type and n not in job.avoid_nodes)
    for name in sorted(there, key=lambda name: (free[name], name)):
        here = min(left, free[name] // size)
        if here > 0:
            found.append(Placement(node=name, worker_count=here))
            left -= here
    return tuple(sorted(found, key=lambda each: each.node)) if left <= 0 else ()
