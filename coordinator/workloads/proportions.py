"""The nodes of a named workload in another number, in the same proportions.

A workload whose jobs name rare GPU types brings nodes that have them. A count of nodes and GPUs
alone names no types, so each pool keeps the types of its own nodes, in their proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from coordinator.workloads.records import NodeGroup, TraceJob
from coordinator.workloads.sizes import worker_size


def in_proportion(
    own: Sequence[NodeGroup], asked: Sequence[NodeGroup], jobs: Iterable[TraceJob]
) -> tuple[NodeGroup, ...]:
    """`asked`, with the GPU types that each pool has in `own`, in the order of `own`.

    A type other than the pool's main one is on as large a part of the nodes as before, rounded, and
    on at least as many as the widest job needs that runs on it alone. All other nodes have the main
    type, the most frequent one. `asked` gives the number, the size and the racks of nodes.

    Args:
        own: none, or none of a pool: `asked` stays as it is.
        asked: one group for each pool.
    """
    every = tuple(jobs)
    return tuple(part for group in asked for part in _parts(group, own, every))


def _parts(group: NodeGroup, own: Sequence[NodeGroup], jobs: Sequence[TraceJob]) -> list[NodeGroup]:
    like = [each for each in own if each.home_pool == group.home_pool]
    if not like:
        return [group]
    main = max(like, key=lambda each: each.count)
    total = sum(each.count for each in like)
    rare = {
        each.gpu_type: max(
            round(group.count * each.count / total), _least(each.gpu_type, group.gpus, jobs)
        )
        for each in like
        if each is not main
    }
    counts = {**rare, main.gpu_type: max(0, group.count - sum(rare.values()))}
    return [
        structs.replace(group, gpu_type=each.gpu_type, count=counts[each.gpu_type])
        for each in like
        if counts[each.gpu_type]
    ]


def _least(gpu_type: str, gpus_per_node: int, jobs: Sequence[TraceJob]) -> int:
    """Nodes that the widest base gang needs, of the jobs that accept this type only."""
    return max(
        (_nodes(job, gpus_per_node) for job in jobs if job.gpu_types == (gpu_type,)), default=0
    )


def _nodes(job: TraceJob, gpus_per_node: int) -> int:
    size = job.gpus_per_worker or worker_size(job.gpus, gpus_per_node)
    workers = job.min_workers or max(1, job.gpus // size)
    return -(-workers // max(1, gpus_per_node // size))
