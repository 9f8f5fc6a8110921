"""A named workload on other numbers of nodes: its rare GPU types stay, in proportion."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import Pool
from coordinator.sim.inputs.inputs import parse_cluster, read_workload
from coordinator.sim.inputs.sweep import sweep
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.compare import Task
from coordinator.workloads.named import named
from coordinator.workloads.paper import RARE_GPU, PaperParameters, nodes
from coordinator.workloads.proportions import in_proportion
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.tables import each_row

OWN = nodes(PaperParameters())
RARE = TraceJob(job_id="r", submit_s=0.0, duration_s=60.0, gpus=8, gpu_types=(RARE_GPU,))


def counts(cluster: str, *jobs: TraceJob) -> dict[str, int]:
    """Nodes by GPU type."""
    found = in_proportion(OWN, parse_cluster(cluster), jobs)
    assert len({group.gpu_type for group in found}) == len(found)
    return {group.gpu_type: group.count for group in found}


@pytest.fixture(scope="module")
def paper() -> Workload:
    """`paper-1` by name."""
    found = named("paper-1")
    assert found is not None
    return found


@pytest.mark.slow
def test_the_paper_s_numbers_are_the_paper_s_cluster(paper: Workload) -> None:
    """`443x8+520x8` changes nothing: the same workload to the byte, and so the same run."""
    asked = read_workload("paper-1", cluster="443x8+520x8")
    assert asked.nodes == OWN
    assert asked == paper


@pytest.mark.slow
def test_the_paper_may_be_swept_over_clusters(paper: Workload) -> None:
    """On each of them the widest jobs and those of the rare type fit."""
    hard = tuple(job for job in paper.jobs if RARE_GPU in job.gpu_types or job.gpus > 500)
    task = Task(workload="paper-1", seed=None, options=RunOptions(policy="fifo"))
    rare: list[int] = []
    for each in sweep([task], ["cluster=300x8+100x8,900x8"]):
        groups = in_proportion(paper.nodes, parse_cluster(each.cluster or ""), paper.jobs)
        Stage(structs.replace(paper, jobs=hard, nodes=groups), each.options)
        rare += [group.count for group in groups if group.gpu_type == RARE_GPU]
    assert rare == [2, 6]


@each_row(
    ("cluster", "expected"),
    [
        ("443x8+520x8", {"V100": 440, RARE_GPU: 3, "T4": 520}),
        ("886x8", {"V100": 880, RARE_GPU: 6}),
        ("300x8+5x4", {"V100": 298, RARE_GPU: 2, "T4": 5}),
        ("20x8", {"V100": 19, RARE_GPU: 1}),
        ("20x4", {"V100": 18, RARE_GPU: 2}),
        ("1x64", {RARE_GPU: 1}),
    ],
)
def test_a_rare_type_is_on_its_part_of_the_nodes_and_on_as_many_as_a_job_needs(
    cluster: str, expected: dict[str, int]
) -> None:
    """3 of 443 nodes; a job of eight GPUs needs one node of eight or two of four."""
    assert counts(cluster, RARE) == expected


def test_nodes_keep_the_size_and_the_racks_that_were_asked_for() -> None:
    """Types come from the workload, all else from what a person wrote."""
    found = in_proportion(OWN, parse_cluster("443x4/8+6x2/3"), [])
    assert found == (
        NodeGroup(count=440, gpus=4, gpu_type="V100", nodes_per_rack=8),
        NodeGroup(count=3, gpus=4, gpu_type=RARE_GPU, nodes_per_rack=8),
        NodeGroup(count=6, gpus=2, gpu_type="T4", home_pool=Pool.INFERENCE, nodes_per_rack=3),
    )


def test_a_trace_that_brings_no_nodes_gets_what_was_asked_for() -> None:
    """It names no types either."""
    asked = parse_cluster("4x8+2x8")
    assert in_proportion((), asked, [RARE]) == asked
