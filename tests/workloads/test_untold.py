"""A named scenario has the shares that its description says, also on a trace that tells nothing."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec import structs

from common.errors import ConfigError
from common.model import Pool
from coordinator.sim.inputs.inputs import Shares
from coordinator.sim.inputs.tasks import refuse_idle
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import Task
from coordinator.workloads.paper_runs import FAMILIES, SCENES, find_scene
from coordinator.workloads.pools import pools_of
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from coordinator.workloads.scenarios import with_heterogeneous_share, with_ranges
from tests.sim.small import CLUSTER, SLICE, paper
from tests.tables import each_row

DAY_S = 86_400
ONE, TWO = ("V100",), ("V100", "T4")
OF_THE_PAPER = sorted(
    {*SCENES, *(f"{family}-20" for family in FAMILIES if not family.startswith("bootstrap"))}
    - {"elasticflow-8a"}
)
SCENARIOS = sorted({*SCENES, *(f"{family}-{n}" for family in FAMILIES for n in (0, 20, 100))})
SETS_TYPES = [name for name in SCENARIOS if "fungible" in find_scene(name).sets]
SETS_SAVING = [name for name in SCENARIOS if "checkpoint-share" in find_scene(name).sets]
CLUSTERS = (CLUSTER, "8x8+64x1", "8x8+16x4", "4x4+8x2", "1x8+1x8", "8x8")
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


@each_row("seed", [1, 2])
@each_row("name", LIKE_BASIC)
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


@each_row("name", OF_THE_PAPER)
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
    with pytest.raises(ConfigError, match=r"^elastic: 0\.5 cannot be given, as scenario ideal"):
        if is_read:
            overruled.read()
        else:
            refuse_idle([task("basic", Shares(elastic=0.5)), overruled])


@cache
def over_a_day(cluster: str, shares: Shares, seed: int) -> Workload:
    """The slice with shares, as long as a bootstrap needs."""
    plain = structs.replace(task(None, shares, seed=seed), cluster=cluster).read()
    return structs.replace(plain, length_s=max(plain.length_s, 2 * DAY_S))


@pytest.mark.slow
@each_row("seed", [1, 7])
@each_row("cluster", CLUSTERS)
@each_row("name", SETS_TYPES)
def test_a_scenario_that_sets_who_is_fungible_has_the_same_jobs_whoever_was(
    name: str, cluster: str, seed: int
) -> None:
    """Nobody asked, nobody or all: on every cluster, also on one where nobody can span types."""
    scene = find_scene(name)
    made, *others = (
        scene.of(over_a_day(cluster, Shares(fungible=share), seed), seed).jobs
        for share in (None, 0.0, 0.5, 1.0)
    )
    assert others == 3 * [made]


@each_row("cluster", CLUSTERS)
@each_row("name", SETS_SAVING)
def test_a_scenario_that_sets_who_saves_has_the_same_jobs_whoever_did(
    name: str, cluster: str
) -> None:
    """Nobody asked, nobody or all."""
    scene = find_scene(name)
    made, *others = (
        scene.of(over_a_day(cluster, Shares(checkpoint=share), 1), 1).jobs
        for share in (None, 0.0, 0.5, 1.0)
    )
    assert others == 3 * [made]


@each_row("name", SETS_TYPES)
def test_where_nobody_can_span_types_nobody_accepts_both(name: str) -> None:
    """On inference nodes of one GPU: the scenario alone says who accepts their type, and no draw of
    what the trace does not tell is left that nobody was told of."""
    made = find_scene(name).of(over_a_day("8x8+64x1", Shares(), 1), 1)
    assert set(types(made).values()) == {ONE}
    assert not any(job.heterogeneous_speed_ratio for job in made.jobs)


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


@pytest.mark.slow
def test_ideal_on_the_paper_s_own_cluster_is_every_job_that_can_grown_and_spanning() -> None:
    """To drop the fungible share first is felt only where nobody can span types: here a job that
    accepts both is one that spans them, in workers of the same size."""
    told = paper("paper-1")
    pools = pools_of(told.nodes)
    grown = with_ranges(told.jobs, 1.0, 1, nodes=pools.training_nodes)
    spanning = with_heterogeneous_share(grown, 1.0, 1, pools, speed_ratio=1.0)
    assert find_scene("ideal").of(told, 1).jobs == spanning
