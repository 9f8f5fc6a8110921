"""Two inference GPUs stand for one of training, and in no other case.

GPUs of the training pool stand for themselves, and so do those of a job that names no type of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from common.model import Pool
from coordinator.sim.inputs.inputs import Shares, read_workload
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.play import play
from coordinator.workloads.pools import pools_of
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from coordinator.workloads.scenarios import with_heterogeneous_share
from tests.sim.small import SLICE, day_load, small
from tests.tables import each_row

SJF = RunOptions(policy="sjf", has_delays=False)


def group(count: int, gpu_type: str, *, serves: bool = False) -> NodeGroup:
    """Nodes of eight GPUs."""
    pool = Pool.INFERENCE if serves else Pool.TRAINING
    return NodeGroup(count=count, gpus=8, gpu_type=gpu_type, home_pool=pool)


BOTH = (group(5, "H100"), group(4, "A100"), group(4, "A100", serves=True))
"""Training has the inference type, too."""
TWO = (group(4, "V100"), group(8, "T4", serves=True))
THREE = (group(4, "V100"), group(2, "P100"), group(8, "T4", serves=True))
FEW_P4, MANY_P4 = (
    (group(4, "V100"), group(5, "T4", serves=True), group(count, "P4", serves=True))
    for count in (4, 6)
)
"""Lent nodes of two types, of which either has more GPUs."""
ALONE = (group(3, "V100"), group(1, "T4"))
"""Nobody serves."""


def asked(gpus: int, *gpu_types: str, job_id: str = "a") -> TraceJob:
    """A job that runs for 1,000 s from the first instant on."""
    return TraceJob(job_id=job_id, submit_s=0, duration_s=1000, gpus=gpus, gpu_types=gpu_types)


def workload(nodes: Sequence[NodeGroup], *jobs: TraceJob) -> Workload:
    """Those jobs on those nodes, of which any that serve have a load."""
    lends = any(each.home_pool == Pool.INFERENCE for each in nodes)
    loads = (day_load(),) if lends else ()
    return Workload(name="w", jobs=jobs, loads=loads, nodes=tuple(nodes), length_s=1000.0)


@each_row(
    ("nodes", "gpu_types", "workers"),
    [
        (TWO, ("V100", "T4"), {"V100": 2, "T4": 4}),
        (TWO, ("T4",), {"T4": 2}),
        (TWO, ("T4", "K80"), {"T4": 2, "K80": 2}),
        (BOTH, ("A100",), {"A100": 2}),
        (BOTH, ("H100", "A100"), {"H100": 2, "A100": 2}),
        (THREE, ("V100", "T4"), {"V100": 2, "T4": 4}),
        (THREE, ("P100", "T4"), {"P100": 2, "T4": 4}),
        (FEW_P4, ("V100", "P4"), {"V100": 2, "P4": 4}),
        (FEW_P4, ("V100", "T4"), {"V100": 2, "T4": 4}),
        (MANY_P4, ("V100", "P4"), {"V100": 2, "P4": 4}),
        (MANY_P4, ("V100", "T4", "P4"), {"V100": 2, "T4": 4, "P4": 4}),
        (MANY_P4, ("T4", "P4"), {"T4": 2, "P4": 2}),
        (ALONE, ("T4",), {"T4": 2}),
        (ALONE, ("V100", "T4"), {"V100": 2, "T4": 2}),
    ],
)
def test_only_a_lent_gpu_of_another_type_counts_half(
    nodes: Sequence[NodeGroup], gpu_types: tuple[str, ...], workers: dict[str, int]
) -> None:
    """Workers of eight GPUs of a job of sixteen, on each type that it accepts; a type that both
    pools have is one for one in both."""
    spare = group(1, "T4") if nodes is ALONE else group(1, "K80", serves=True)
    here = workload((*nodes, spare), asked(16, *gpu_types))
    [job] = Stage(here, SJF).jobs
    assert {kind: job.spec.workers_on(kind).min for kind in gpu_types} == workers


def test_a_job_may_have_all_of_the_training_pool_s_gpus_of_its_type() -> None:
    """Thirty-two A100 are there for one that asks for these, and it needs no lent ones."""
    run = play(workload(BOTH, asked(32, "A100")), SJF, clock=SystemClock())
    assert run.result.makespan_s == 1000.0


def test_training_holds_the_gpus_that_were_asked_for() -> None:
    """Eight of the A100 alone and eight of either type are sixteen GPUs, of seventy-two."""
    jobs = asked(8, "A100"), asked(8, "H100", "A100", job_id="b")
    run = play(workload(BOTH, *jobs), SJF, clock=SystemClock())
    assert run.result.training_gpu_ratio * 72 == pytest.approx(16)


def test_the_only_node_of_a_type_is_room_for_a_job_of_its_size() -> None:
    """Without inference nodes no type is theirs: one worker on the one T4 node of training."""
    run = play(workload(ALONE, asked(8, "T4")), SJF, clock=SystemClock())
    assert run.result.training_gpu_ratio * 32 == pytest.approx(8)


def test_who_spans_two_types_of_training_has_one_for_one() -> None:
    """And whole nodes as workers, as none has to hold twice its GPUs on a node that is lent."""
    made = with_heterogeneous_share([asked(16)], 1.0, 1, pools_of(BOTH))
    assert [(job.gpus_per_worker, job.min_workers) for job in made] == [(8, 2)]
    [job] = Stage(workload(BOTH, *made), SJF).jobs
    assert job.spec.gpu.gpus_for_one("A100", "H100") == 1


def test_who_never_lends_does_not_mind_of_which_type_nodes_serve() -> None:
    """Jobs for both types of training run as they would if no node served with one of these."""
    found = small(60)
    jobs = tuple(structs.replace(job, gpu_types=("H100", "A100")) for job in found.jobs)
    with_them, without = (
        play(structs.replace(found, jobs=jobs, nodes=nodes), SJF, clock=SystemClock()).rows
        for nodes in (BOTH, BOTH[:2])
    )
    assert with_them == without


def test_without_inference_nodes_nobody_is_made_to_accept_their_type() -> None:
    """All of the jobs drawn as fungible keep to the types that there are."""
    found = read_workload(str(SLICE), cluster="4x8", shares=Shares(fungible=1.0))
    assert {job.gpu_types for job in found.jobs} == {("V100",)}


def test_one_of_anything_is_no_plural(tmp_path: Path) -> None:
    """Of what a job asks for, and of the cluster in which it never fits."""
    file = tmp_path / "t.csv"
    file.write_text("submit_s,duration_s,gpus,gpu_types\n0,9,1,T4\n")
    with pytest.raises(ConfigError) as raised:
        Stage(read_workload(str(file), cluster="1x8"), SJF)
    said = "1 worker of 1 GPU (T4) can never fit this cluster, which has 1 node of 8 V100"
    assert str(raised.value).endswith(said)


def test_a_job_that_never_fits_is_told_with_its_workers_on_each_type(tmp_path: Path) -> None:
    """Where it needs more of one type than of another; they are what the nodes are too few for."""
    file = tmp_path / "t.csv"
    file.write_text("submit_s,duration_s,gpus,gpu_types\n0,9,24,V100|T4\n")
    with pytest.raises(ConfigError) as raised:
        Stage(read_workload(str(file), cluster="2x8+4x8"), SJF)
    assert str(raised.value).endswith(
        "job 1: workers of 8 GPUs, 6 on T4 or 3 on V100 (V100 or T4) can never fit this cluster, "
        "which has 4 nodes of 8 T4, 2 nodes of 8 V100"
    )
