"""How large workers are where nodes differ in size and type."""

from __future__ import annotations

from msgspec import structs

from common.model import Pool
from coordinator.workloads.goodput import model_for, speedup_of
from coordinator.workloads.pools import Pools, node_sizes, pools_of
from coordinator.workloads.records import NodeGroup, TraceJob
from coordinator.workloads.scenarios import with_heterogeneous_share, with_ranges
from coordinator.workloads.shaping import (
    RuntimeModel,
    ShapeOptions,
    to_workload_jobs,
    with_elastic_share,
    with_fungible_share,
)
from coordinator.workloads.sizes import NodeSizes
from tests.tables import each_row


def group(count: int, gpus: int, gpu_type: str = "A100", *, serves: bool = False) -> NodeGroup:
    """Nodes that are alike."""
    pool = Pool.INFERENCE if serves else Pool.TRAINING
    return NodeGroup(count=count, gpus=gpus, gpu_type=gpu_type, home_pool=pool)


def job(gpus: int, *gpu_types: str) -> TraceJob:
    """One that tells no size of a worker."""
    return TraceJob(job_id="a", submit_s=0, duration_s=60, gpus=gpus, gpu_types=gpu_types)


MIXED = NodeSizes((group(8, 8), group(2, 16, "V100")))
THREE = (group(4, 8, "H100"), group(3, 8), group(2, 8, "V100"), group(6, 8, "L4", serves=True))


@each_row(
    ("nodes", "gpu_types", "gpus", "size"),
    [
        (MIXED, (), 16, 8),
        (MIXED, ("A100",), 16, 8),
        (MIXED, ("V100",), 16, 16),
        (MIXED, ("V100", "A100"), 16, 8),
        (MIXED, ("T4",), 16, 8),
        (MIXED, ("V100", "T4"), 16, 16),
        (NodeSizes((group(16, 8), group(1, 16))), (), 16, 8),
        (NodeSizes((group(1, 16), group(16, 8))), (), 16, 8),
        (NodeSizes((group(16, 8), group(1, 1, "T4"))), (), 16, 8),
        (NodeSizes((group(4, 8), group(2, 16))), (), 16, 8),
        (NodeSizes((group(2, 16), group(4, 8))), (), 16, 8),
        (NodeSizes((group(3, 8), group(5, 4), group(1, 16))), (), 16, 8),
    ],
)
def test_the_size_of_most_gpus_is_what_workers_are_made_for(
    nodes: NodeSizes, gpu_types: tuple[str, ...], gpus: int, size: int
) -> None:
    """Over the types that a job accepts; of two with as many the smaller, in any order."""
    assert nodes.worker_gpus(gpu_types, gpus) == size


@each_row(
    ("nodes", "gpus", "size"),
    [
        (NodeSizes((group(4, 16), group(7, 8, "V100"))), 48, 16),
        (NodeSizes((group(4, 16), group(7, 8))), 72, 8),
        (NodeSizes((group(4, 16), group(7, 8, "V100"))), 72, 12),
        (NodeSizes((group(4, 16), group(7, 8, "V100"))), 56, 14),
        (NodeSizes((group(3, 16), group(5, 8, "V100"))), 40, 8),
    ],
)
def test_a_job_that_would_have_no_room_is_cut_for_the_next_size(
    nodes: NodeSizes, gpus: int, size: int
) -> None:
    """On one type, as an attempt runs on one; where no size helps it is the usual one."""
    assert nodes.worker_gpus((), gpus) == size


def test_every_way_to_make_workers_goes_by_the_types_of_the_job() -> None:
    """Of jobs of 16 GPUs one for nodes of 8, one for nodes of 16: as they are, with half as base,
    with a range."""
    pair = (job(16, "A100"), structs.replace(job(16, "V100"), job_id="b"))
    made = to_workload_jobs(pair, ShapeOptions(nodes=MIXED))
    assert [each.spec.gpus_per_worker for each in made] == [8, 16]
    halved = with_elastic_share(
        [structs.replace(each, gpus=32) for each in pair], 1.0, 1, nodes=MIXED
    )
    assert [(each.gpus_per_worker, each.min_workers) for each in halved] == [(8, 2), (16, 1)]
    ranged = with_ranges(pair, 1.0, 1, nodes=MIXED)
    assert [(each.gpus_per_worker, each.max_workers) for each in ranged] == [(8, 4), (16, 2)]


def test_a_speed_that_depends_on_nodes_is_of_the_nodes_of_the_job() -> None:
    """Sixteen GPUs of the larger nodes are on one of them."""
    wide = structs.replace(
        job(16, "V100"), model="bert", gpus_per_worker=8, min_workers=1, max_workers=4
    )
    options = ShapeOptions(nodes=MIXED, runtime=RuntimeModel.GOODPUT)
    [made] = to_workload_jobs([wide], options)
    expected = [
        speedup_of(model_for("bert", "a"), made.spec.workers, 8, of_node, is_tuned=False)
        for of_node in (16, 8)
    ]
    assert expected[0] != expected[1]
    assert made.speedup == expected[0]


@each_row(
    ("asked", "plain", "both"),
    [
        ((), ("H100", "A100", "V100"), ("H100", "A100", "V100", "L4")),
        (("H100", "A100", "V100"), ("H100", "A100", "V100"), ("H100", "A100", "V100", "L4")),
        (("H100", "A100", "V100", "L4"), ("H100", "A100", "V100"), ("H100", "A100", "V100", "L4")),
        (("H100",), ("H100",), ("H100", "L4")),
        (("H100", "L4"), ("H100",), ("H100", "L4")),
        (("A100",), ("A100",), ("A100",)),
        (("L4",), ("L4",), ("L4",)),
    ],
)
def test_a_job_that_names_no_type_accepts_the_whole_training_pool(
    asked: tuple[str, ...], plain: tuple[str, ...], both: tuple[str, ...]
) -> None:
    """And where it is drawn the inference type beside; who names a type of its own keeps it."""
    training, inference = pools_of(THREE).training_gpus, pools_of(THREE).inference_gpu
    for share, types in ((0.0, plain), (1.0, both)):
        [made] = with_fungible_share(
            [job(8, *asked)],
            share,
            1,
            training_gpu=training[0],
            inference_gpu=inference,
            other_gpus=training[1:],
        )
        assert made.gpu_types == types


def test_who_spans_may_use_every_training_type_that_it_accepts() -> None:
    """One GPU of another training type stands for one, as many as the multiplier of inference."""
    jobs = [job(16), structs.replace(job(16, "A100", "H100"), job_id="b")]
    made = with_heterogeneous_share(jobs, 1.0, 1, pools_of(THREE))
    assert [each.gpu_types for each in made] == [
        ("H100", "A100", "V100", "L4"),
        ("H100", "A100", "L4"),
    ]
    options = ShapeOptions(
        nodes=node_sizes(THREE),
        training_gpus=("H100", "A100", "V100"),
        inference_gpus=("L4",),
        inference_multiplier=2,
    )
    asked = to_workload_jobs(made, options)[0].spec.gpu
    assert [asked.gpus_for_one(kind, "H100") for kind in ("A100", "V100", "L4")] == [1, 1, 2]
    assert asked.gpus_for_one("H100", "L4") is None


def test_workers_that_span_are_cut_from_those_for_the_job_s_own_nodes() -> None:
    """A job of 16 GPUs on nodes of 8 and 16, and inference nodes of 8 with two GPUs for one."""
    pools = pools_of((group(8, 8), group(2, 16, "V100"), group(8, 8, "T4", serves=True)))
    [made] = with_heterogeneous_share([job(16)], 1.0, 1, pools)
    assert (made.gpus_per_worker, made.min_workers) == (4, 4)
    pools = pools_of((group(8, 8), group(8, 8, "T4", serves=True), group(1, 64, "T4", serves=True)))
    [made] = with_heterogeneous_share([job(16)], 1.0, 1, pools)
    assert (made.gpus_per_worker, made.min_workers) == (4, 4)


def test_nobody_spans_inference_nodes_of_one_gpu() -> None:
    """Where two GPUs of a node stand for one: jobs stay whole, and need not be cut in vain."""
    pools = pools_of((group(8, 8), group(8, 1, "T4", serves=True)))
    assert with_heterogeneous_share([job(16)], 1.0, 1, pools) == (job(16),)


@each_row(
    ("training", "gpus"),
    [
        ((group(8, 8),), 8),
        ((group(8, 8), group(2, 4, "T4")), 4),
        ((group(8, 8), group(2, 4, "T4"), group(1, 64, "T4")), 64),
        ((group(16, 8), group(1, 16)), 8),
    ],
)
def test_without_inference_nodes_they_are_thought_like_training_nodes_of_their_type(
    training: tuple[NodeGroup, ...], gpus: int
) -> None:
    """And where there is none of it like those of the main type."""
    found = pools_of(training)
    assert found == Pools(
        training_gpus=found.training_gpus,
        inference_gpu="T4",
        training_nodes=NodeSizes(training),
        inference_node_gpus=gpus,
    )
    assert found.training_gpu in {"A100", "T4"}
