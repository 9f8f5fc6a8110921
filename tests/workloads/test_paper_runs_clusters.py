"""The paper's runs on clusters that are not the paper's: other GPU types, other and mixed nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.play import Run, play
from coordinator.workloads.paper_runs import find_scene
from coordinator.workloads.records import Workload
from tests.sim.small import small
from tests.tables import each_row

PLAYED = ("advanced", "heterogeneous", "ideal", "naive-ideal", "elastic-40", "checkpoint-50")
NAMES = (*PLAYED, "baseline", "basic", "wrong-20", "bootstrap-ideal-1", "elasticflow-8a")
"""Scenarios that shape jobs in different ways; others differ from these by a share or a policy."""

Group = tuple[int, int, str, str]
"""Count, GPUs of a node, GPU type, pool."""

LENT: Group = (4, 8, "T4", "inference")
MIXED: dict[str, tuple[Group, ...]] = {
    "larger nodes of a second type": (
        (8, 8, "A100", "training"),
        (2, 16, "V100", "training"),
        LENT,
    ),
    "smaller nodes of a second type": (
        (4, 8, "A100", "training"),
        (4, 4, "V100", "training"),
        LENT,
    ),
    "one larger node": ((4, 8, "A100", "training"), (1, 16, "A100", "training"), LENT),
    "three types": (
        (4, 8, "H100", "training"),
        (3, 8, "A100", "training"),
        (2, 8, "V100", "training"),
        LENT,
    ),
    "a type in both pools": (
        (4, 8, "A100", "training"),
        (2, 4, "T4", "training"),
        LENT,
    ),
    "mixed inference nodes": (
        (4, 8, "A100", "training"),
        LENT,
        (1, 16, "T4", "inference"),
        (2, 4, "A100", "inference"),
    ),
    "inference nodes of one GPU": (
        (4, 8, "A100", "training"),
        (32, 1, "T4", "inference"),
    ),
}


def on_groups(directory: Path, groups: Sequence[Group], *, jobs: int = 40) -> Workload:
    """A stretch of the slice on a cluster, as a file has it."""
    file = directory / "cluster.toml"
    file.write_text(
        "".join(
            f'[[nodes]]\ncount = {count}\ngpus = {gpus}\ngpu_type = "{gpu_type}"\n'
            f'home_pool = "{pool}"\n'
            for count, gpus, gpu_type, pool in groups
        )
    )
    # Ranges are drawn anew: what a trace tells of its workers is for nodes of its own.
    found = small(jobs)
    plain = tuple(
        structs.replace(job, gpus_per_worker=None, min_workers=None, max_workers=None)
        for job in found.jobs
    )
    return structs.replace(found, jobs=plain, nodes=parse_cluster(str(file)))


def on(
    directory: Path, training: str, inference: str, *, gpus: int = 8, jobs: int = 40
) -> Workload:
    """The same on 32 GPUs of each pool."""
    count = 32 // gpus
    groups = ((count, gpus, training, "training"), (count, gpus, inference, "inference"))
    return on_groups(directory, groups, jobs=jobs)


def played(workload: Workload, name: str) -> Run:
    """A scenario without delays, checked after every event."""
    scene = find_scene(name)
    options = RunOptions(policy=scene.policy, has_delays=False, check=True)
    return play(scene.shape(workload, 1), options, clock=SystemClock())


@each_row("name", NAMES)
@each_row(
    ("training", "inference", "gpus"),
    [("H100", "L4", 8), ("V100", "T4", 4), ("H100", "L4", 4), ("H100", "H100", 8)],
)
def test_every_scenario_fits_a_cluster_of_other_types_and_sizes(
    tmp_path: Path, name: str, training: str, inference: str, gpus: int
) -> None:
    """No job asks for a GPU or for a worker that no node has: the trace named neither."""
    a_day = structs.replace(on(tmp_path, training, inference, gpus=gpus), length_s=86_400.0)
    made = find_scene(name).shape(a_day, 1)
    kinds = {gpu_type for job in made.jobs for gpu_type in job.gpu_types}
    assert kinds <= {training, inference}
    assert all((job.gpus_per_worker or 1) <= gpus for job in made.jobs)
    Stage(made, RunOptions(policy=find_scene(name).policy, has_delays=False))


@each_row("name", NAMES)
@each_row("cluster", MIXED)
def test_every_scenario_fits_a_cluster_of_mixed_nodes(
    tmp_path: Path, name: str, cluster: str
) -> None:
    """No job is refused, and none that named no type loses a training type that others keep."""
    groups = MIXED[cluster]
    a_day = structs.replace(on_groups(tmp_path, groups), length_s=86_400.0)
    made = find_scene(name).shape(a_day, 1)
    training = {gpu_type for *_, gpu_type, pool in groups if pool == "training"}
    assert all(training <= set(job.gpu_types) for job in made.jobs if job.gpu_types)
    Stage(made, RunOptions(policy=find_scene(name).policy, has_delays=False))


@each_row("gpus", [8, 16, 32])
@each_row("cluster", MIXED)
def test_a_trace_that_names_a_type_runs_on_its_nodes(
    tmp_path: Path, cluster: str, gpus: int
) -> None:
    """Under plain FIFO, whatever size the nodes of the other types are."""
    workload = on_groups(tmp_path, MIXED[cluster], jobs=3)
    first = workload.jobs[0]
    for count, each, gpu_type, pool in MIXED[cluster]:
        if pool == "training" and count * each >= gpus:
            typed = structs.replace(first, gpus=gpus, gpu_types=(gpu_type,))
            found = Stage(structs.replace(workload, jobs=(typed,)), RunOptions(policy="fifo"))
            assert found.jobs[0].spec.base_demand_gpus == gpus


def test_one_larger_node_changes_no_job(tmp_path: Path) -> None:
    """A gang of two nodes stays one, and does not wait for the single node that holds it whole."""
    few, one_more = ((4, 8, "A100", "training"),), ((1, 16, "A100", "training"),)
    shaped = []
    for groups in (few, (*few, *one_more), (*one_more, *few)):
        workload = on_groups(tmp_path, groups)
        shaped.append(Stage(workload, RunOptions(policy="fifo")).jobs)
    assert max(job.spec.workers.min for job in shaped[0]) > 1
    assert shaped[0] == shaped[1] == shaped[2]


def test_a_range_is_looked_at_with_the_workers_of_the_job_s_types(tmp_path: Path) -> None:
    """Sixteen GPUs are one worker on nodes of sixteen, and two on those of eight."""
    workload = on_groups(tmp_path, MIXED["larger nodes of a second type"], jobs=3)
    job = structs.replace(workload.jobs[0], gpus=16, min_workers=1, max_workers=1)
    for gpu_type, is_right in (("V100", True), ("A100", False)):
        typed = structs.replace(workload, jobs=(structs.replace(job, gpu_types=(gpu_type,)),))
        if is_right:
            assert Stage(typed, RunOptions(policy="fifo")).jobs[0].spec.gpus_per_worker == 16
        else:
            with pytest.raises(ConfigError, match=r"16 GPUs are 2 x 8 on nodes of 8, expected 1"):
                Stage(typed, RunOptions(policy="fifo"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heterogeneous", "ideal", "elastic-40"])
@pytest.mark.parametrize("cluster", MIXED)
def test_every_job_ends_on_mixed_nodes(tmp_path: Path, name: str, cluster: str) -> None:
    """And none is turned away, under the policy that the paper plays the scenario with."""
    found = played(on_groups(tmp_path, MIXED[cluster]), name)
    assert found.result.jobs_rejected == found.result.jobs_failed == 0
    assert len(found.rows) == found.result.jobs > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_the_name_of_a_gpu_decides_nothing(tmp_path: Path, name: str) -> None:
    """Clusters that differ in the names of both pools give the same lives of the same jobs."""
    paper = played(on(tmp_path, "V100", "T4"), name)
    other = played(on(tmp_path, "H100", "L4"), name)
    assert other.fingerprint == paper.fingerprint != ""
    assert other.result.reclaims == paper.result.reclaims
    assert other.result.on_loan_jobs == paper.result.on_loan_jobs
    if not name.startswith("elastic"):
        assert paper.result.on_loan_jobs.jobs > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_smaller_nodes_lend_as_well(tmp_path: Path, name: str) -> None:
    """On nodes of four GPUs every job ends, and jobs run on lent ones."""
    found = played(on(tmp_path, "H100", "L4", gpus=4), name).result
    assert found.jobs_rejected == found.jobs_failed == 0
    if not name.startswith("elastic"):
        assert found.on_loan_jobs.jobs > 0
