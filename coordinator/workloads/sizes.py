"""The size of one worker of a job on the nodes that the job may use."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from coordinator.workloads.records import NodeGroup


def worker_size(gpus: int, gpus_per_node: int) -> int:
    """GPUs of one worker of an inelastic job: all on one node, or whole nodes.

    Sizes that are neither fall to the largest divisor that fits a node: 12 GPUs are two of 6.
    """
    if gpus <= gpus_per_node:
        return gpus
    return next(size for size in range(gpus_per_node, 0, -1) if gpus % size == 0)


def usual_gpus(groups: tuple[NodeGroup, ...]) -> list[int]:
    """GPUs of a node, in every size that there is: first the one that most GPUs are in.

    Of two sizes with as many GPUs the smaller is first, as its workers fit nodes of both.
    """
    counts: dict[int, int] = {}
    for group in groups:
        counts[group.gpus] = counts.get(group.gpus, 0) + group.count * group.gpus
    return sorted(counts, key=lambda gpus: (-counts[gpus], gpus))


class NodeSizes(Struct, frozen=True):
    """The nodes that say how large workers are: those of the training pool.

    groups: one or more.
    """

    groups: tuple[NodeGroup, ...]

    def gpus_for(self, gpu_types: tuple[str, ...], gpus: int) -> int:
        """GPUs of the node that workers of a job are made for.

        It is the size that most GPUs are in, over all nodes of the types that the job accepts: one
        node that is larger or smaller than the others decides nothing. Only where the job would
        then have no room in the empty cluster the next size is tried that it has room with.

        Args:
            gpu_types: that the job accepts; none: all. Where no node has one of them, as for none.
            gpus: of the job.
        """
        groups = tuple(each for each in self.groups if each.gpu_type in gpu_types) or self.groups
        usual = usual_gpus(groups)
        if len(usual) == 1:
            return usual[0]
        fitting = (size for size in usual if _has_room(groups, gpus, worker_size(gpus, size)))
        return next(fitting, usual[0])

    def worker_gpus(self, gpu_types: tuple[str, ...], gpus: int) -> int:
        """GPUs of one worker of a job that states no size of its own; see `gpus_for`."""
        return worker_size(gpus, self.gpus_for(gpu_types, gpus))


def _has_room(groups: tuple[NodeGroup, ...], gpus: int, size: int) -> bool:
    """True if this number of GPUs in workers of a size fits the nodes of one GPU type."""
    return any(room >= gpus for room in _rooms(groups, size))


def _rooms(groups: tuple[NodeGroup, ...], size: int) -> Iterator[int]:
    for gpu_type in dict.fromkeys(group.gpu_type for group in groups):
        of_type = (group for group in groups if group.gpu_type == gpu_type)
        yield sum(group.count * (group.gpus // size) * size for group in of_type)


def nodes_of(gpus_per_node: int) -> NodeSizes:
    """Nodes of one size, whatever their type."""
    return NodeSizes((NodeGroup(count=1, gpus=gpus_per_node, gpu_type="any"),))
