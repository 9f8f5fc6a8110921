"""A named scenario has the shares that its description says, also on a trace that tells nothing."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.errors import ConfigError
from common.model import Pool
from coordinator.sim.asked import refuse_idle
from coordinator.sim.compare import Task
from coordinator.sim.inputs import Shares
from coordinator.sim.stage import RunOptions
from coordinator.workloads.paper_runs import FAMILIES, SCENES, find_scene
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.sim.small import CLUSTER, SLICE
from tests.workloads.papers import paper

ONE, TWO = ("V100",), ("V100", "T4")
OF_THE_PAPER = sorted(
    {*SCENES, *(f"{family}-20" for family in FAMILIES if not family.startswith("bootstrap"))}
    - {"elasticflow-8a"}
)
LIKE_BASIC = sorted(
    {name for name, scene in SCENES.items() if scene.shape is SCENES["basic"].shape} | {"baseline"}
)


def task(scenario: str | None, shares: Shares | None = None, *, seed: int = 1) -> Task:
    """A run on the packaged slice, which names no GPU type and no range."""
    return Task(
        workload=str(SLICE),
        cluster=CLUSTER,
        seed=seed,
        scenario=scenario,
        shares=shares or Shares(),
        options=RunOptions(policy="fifo", seed=seed),
    )


def types(workload: Workload) -> dict[str, tuple[str, ...]]:
    """What each job accepts."""
    return {job.job_id: job.gpu_types for job in workload.jobs}


def elastic(workload: Workload) -> list[TraceJob]:
    """Jobs with a range."""
    return [job for job in workload.jobs if job.is_elastic]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LIKE_BASIC)
def test_a_fifth_is_fungible_and_a_twentieth_elastic(name: str, seed: int) -> None:
    """The same jobs that `--fungible 0.21` and `--elastic 0.05` draw, each range from what was
    asked for to twice that."""
    made = task(name, seed=seed).read()
    drawn_alike = task(None, Shares(fungible=0.21, elastic=0.05), seed=seed).read()
    assert types(made) == types(drawn_alike)
    assert set(types(made).values()) == {ONE, TWO}
    assert [job.job_id for job in elastic(made)] == [job.job_id for job in elastic(drawn_alike)]
    for job in elastic(made):
        assert job.gpus_per_worker is not None
        assert job.min_workers is not None
        assert job.max_workers is not None
        assert job.min_workers * job.gpus_per_worker == job.gpus
        assert job.max_workers == 2 * job.min_workers


def test_who_names_no_type_accepts_every_type_of_training() -> None:
    """Which of these it runs on was no choice of its own, fungible or not."""
    nodes = tuple(
        NodeGroup(count=count, gpus=8, gpu_type=kind, home_pool=pool)
        for count, kind, pool in (
            (4, "V100", Pool.TRAINING),
            (2, "P100", Pool.TRAINING),
            (6, "T4", Pool.INFERENCE),
        )
    )
    made = find_scene("basic").of(structs.replace(task(None).read(), nodes=nodes), 1)
    assert set(types(made).values()) == {("V100", "P100"), ("V100", "P100", "T4")}


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_no_job_of_a_scenario_is_without_a_type(name: str) -> None:
    """So that the rows of one call compare jobs that are alike: none has lent GPUs one for one."""
    assert all(job.gpu_types for job in task(name).read().jobs)


def test_advanced_is_basic_with_a_tenth_that_spans() -> None:
    """Whoever spans no types is as in basic; of heterogeneous nobody else accepts both."""
    basic, advanced, heterogeneous = (
        task(name).read() for name in ("basic", "advanced", "heterogeneous")
    )
    spanning = {job.job_id for job in advanced.jobs if job.heterogeneous_speed_ratio}
    assert len(spanning) == round(0.1 * len(advanced.jobs))
    rest = types(basic).items() - types(advanced).items()
    assert {job_id for job_id, _ in rest} <= spanning
    both = {job_id for job_id, asked in types(heterogeneous).items() if asked == TWO}
    assert both == spanning


@pytest.mark.parametrize("name", ["basic", "loan-aryl", "wrong-20"])
def test_shares_that_are_given_win(name: str) -> None:
    """Also a share of none."""
    given = Shares(fungible=0.5, elastic=0.0)
    made, asked = task(name, given).read(), task(None, given).read()
    assert types(made) == types(asked)
    assert not elastic(made)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_share_that_the_scenario_sets_is_an_error_before_and_when_it_is_read(
    *, is_read: bool
) -> None:
    """Whichever of the runs it is of: who only looks at what is asked for reads no later one."""
    overruled = task("ideal", Shares(elastic=0.5))
    with pytest.raises(ConfigError, match=r"^elastic: 0\.5 changes nothing, as scenario ideal"):
        if is_read:
            overruled.read()
        else:
            refuse_idle([task("basic", Shares(elastic=0.5)), overruled])


def test_what_a_trace_tells_stays() -> None:
    """Types of those that name some; and nobody gets a range where one job has one."""
    plain = task(None).read()
    first, second, *rest = plain.jobs
    told = (
        structs.replace(first, gpu_types=("T4",)),
        structs.replace(second, gpu_types=ONE, gpus_per_worker=1, min_workers=1, max_workers=64),
        *rest,
    )
    made = find_scene("basic").of(structs.replace(plain, jobs=told), 1)
    assert made.jobs[:2] == told[:2]
    assert elastic(made) == [told[1]]
    fungible = sum(job.gpu_types == TWO for job in made.jobs[2:])
    assert fungible == round(0.21 * len(rest))


@pytest.mark.parametrize("name", ["paper-1", "paper-overload"])
def test_the_paper_s_own_traces_tell_everything(name: str) -> None:
    """Nothing is drawn of their jobs."""
    for scenario in ("baseline", "basic"):
        assert find_scene(scenario).of(paper(name), 1).jobs == paper(name).jobs
