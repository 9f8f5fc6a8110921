"""The two pools of a cluster as jobs are shaped for them: GPU types and sizes of nodes.

A generator that draws jobs that grow, move or span asks here. A cluster of other types or of
smaller nodes then gets jobs of its own kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from common.model import Pool
from coordinator.workloads.records import NodeGroup
from coordinator.workloads.shaping import INFERENCE_GPU, TRAINING_GPU, ShapeOptions
from coordinator.workloads.sizes import NodeSizes, usual_gpus


class Pools(Struct, frozen=True, kw_only=True):
    """For each pool the type of most of its GPUs, and the size of its nodes.

    training_gpus: all types of the training pool, that of most GPUs first.
    training_nodes: the nodes that workers are sized for.
    inference_node_gpus: of the nodes that most inference GPUs of that type are in.
    """

    training_gpus: tuple[str, ...]
    inference_gpu: str
    training_nodes: NodeSizes
    inference_node_gpus: int

    @property
    def training_gpu(self) -> str:
        """The type of most GPUs of the training pool."""
        return self.training_gpus[0]

    @property
    def gpus_for_one(self) -> int:
        """GPUs of the inference type that stand for one of training: one where both have it."""
        if self.inference_gpu in self.training_gpus:
            return 1
        return ShapeOptions().inference_multiplier


def pools_of(groups: Sequence[NodeGroup]) -> Pools:
    """The pools of a cluster that has training nodes.

    Without inference nodes these are of their default type. They have the size of the training
    nodes of this type, and if there are none that of the main type.
    """
    training, inference = gpu_types(groups)
    inference = inference or INFERENCE_GPU
    like = (
        _nodes(groups, Pool.INFERENCE, inference)
        or _nodes(groups, Pool.TRAINING, inference)
        or _nodes(groups, Pool.TRAINING, training[0])
    )
    return Pools(
        training_gpus=training,
        inference_gpu=inference,
        training_nodes=node_sizes(groups),
        inference_node_gpus=usual_gpus(like)[0],
    )


def node_sizes(groups: Sequence[NodeGroup]) -> NodeSizes:
    """The node sizes that limit workers: a worker never spans nodes."""
    return NodeSizes(_of(groups, Pool.TRAINING))


def gpu_types(groups: Sequence[NodeGroup]) -> tuple[tuple[str, ...], str]:
    """The types of training GPUs, that of most first, and the type of most inference GPUs, which is
    empty where there are none."""
    training = _types(groups, Pool.TRAINING)
    return training or (TRAINING_GPU,), next(iter(inference_types(groups)), "")


def inference_types(groups: Sequence[NodeGroup]) -> tuple[str, ...]:
    """All types of inference GPUs, that of most first; empty where there are none."""
    return _types(groups, Pool.INFERENCE)


def _types(groups: Sequence[NodeGroup], pool: Pool) -> tuple[str, ...]:
    """Among types with as many GPUs the first by name is first."""
    counts: dict[str, int] = {}
    for group in _of(groups, pool):
        counts[group.gpu_type] = counts.get(group.gpu_type, 0) + group.count * group.gpus
    return tuple(sorted(counts, key=lambda kind: (-counts[kind], kind)))


def _nodes(groups: Sequence[NodeGroup], pool: Pool, gpu_type: str) -> tuple[NodeGroup, ...]:
    return tuple(each for each in _of(groups, pool) if each.gpu_type == gpu_type)


def _of(groups: Sequence[NodeGroup], pool: Pool) -> tuple[NodeGroup, ...]:
    return tuple(group for group in groups if group.home_pool == pool)
