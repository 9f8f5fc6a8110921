"""The paper's scenarios change what they say and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from common.model import Pool
from coordinator.workloads.pools import Pools, pools_of
from coordinator.workloads.records import LoadSeries, LoadUnit, NodeGroup, TraceJob, Workload
from coordinator.workloads.scenarios import (
    Scenario,
    bootstrapped,
    scenario,
    with_heterogeneous_share,
    with_ranges,
    with_wrong_estimates,
)
from coordinator.workloads.shaping import with_elastic_share, with_fungible_share
from coordinator.workloads.sizes import NodeSizes, nodes_of
from tests.sim.small import paper
from tests.tables import each_row

DAY_S = 86_400
PAPER_POOLS = Pools(
    training_gpus=("V100",), inference_gpu="T4", training_nodes=nodes_of(8), inference_node_gpus=8
)
RARE = TraceJob(job_id="rare", submit_s=1, duration_s=9, gpus=8, gpu_types=("V100-32GB",))


def make_workload() -> Workload:
    """Two hundred jobs over four days, 5 % elastic, 21 % fungible, and one bound to a rare type."""
    jobs = tuple(
        TraceJob(job_id=f"j{n:03d}", submit_s=n * DAY_S / 50, duration_s=60.0 + n, gpus=8)
        for n in range(200)
    )
    jobs = with_fungible_share(with_elastic_share(jobs, 0.05, 1), 0.21, 1)
    hours = tuple((hour % 24 + 24 * (hour // 24)) / 100 for hour in range(96))
    load = LoadSeries(name="inference", step_s=3600, values=hours, unit=LoadUnit.BUSY)
    return Workload(
        name="small",
        jobs=(*jobs, RARE),
        loads=(load,),
        nodes=(NodeGroup(count=4, gpus=8, gpu_type="V100"),),
        length_s=4 * DAY_S,
    )


SMALL = make_workload()


def count(workload: Workload) -> dict[str, int]:
    """How many jobs are of which kind."""
    return {
        "elastic": sum(job.is_elastic for job in workload.jobs),
        "fungible": sum(
            "T4" in job.gpu_types and not job.heterogeneous_speed_ratio for job in workload.jobs
        ),
        "heterogeneous": sum(job.heterogeneous_speed_ratio > 0 for job in workload.jobs),
    }


@each_row(
    ("name", "elastic", "fungible", "heterogeneous"),
    [
        (Scenario.BASIC, 10, 42, 0),
        (Scenario.ADVANCED, 10, 39, 20),
        (Scenario.HETEROGENEOUS, 10, 0, 20),
        (Scenario.IDEAL, 201, 0, 200),
    ],
)
def test_a_scenario_is_what_section_7_1_says(
    name: Scenario, elastic: int, fungible: int, heterogeneous: int
) -> None:
    """Shares of jobs by kind; sizes, times and running times stay."""
    found = scenario(SMALL, name, seed=1)
    assert count(found) == {
        "elastic": elastic,
        "fungible": fungible,
        "heterogeneous": heterogeneous,
    }
    assert [(job.submit_s, job.duration_s, job.gpus) for job in found.jobs] == [
        (job.submit_s, job.duration_s, job.gpus) for job in SMALL.jobs
    ]


def test_a_job_bound_to_a_rare_type_runs_nowhere_else() -> None:
    """Not even in Ideal; else the cause of the long tail would go with the scenario."""
    [rare] = [job for job in scenario(SMALL, Scenario.IDEAL, seed=1).jobs if job.job_id == "rare"]
    assert (rare.gpu_types, rare.heterogeneous_speed_ratio) == (("V100-32GB",), 0.0)


def test_jobs_without_a_range_get_twice_their_request_in_ideal() -> None:
    """And those with one keep it; speed is full across types."""
    before = {job.job_id: job for job in SMALL.jobs}
    for job in scenario(SMALL, Scenario.IDEAL, seed=1).jobs:
        old = before[job.job_id]
        assert (job.min_workers, job.max_workers, job.gpus_per_worker) != (None, None, None)
        size, most = job.gpus_per_worker or 0, job.max_workers or 0
        if old.is_elastic:
            assert size * most == (old.gpus_per_worker or 0) * (old.max_workers or 0)
        else:
            assert size * most == 2 * old.gpus
            assert size * (job.min_workers or 0) == old.gpus
        assert job.heterogeneous_speed_ratio in {0.0, 1.0}


@each_row(
    ("gpus", "size", "workers"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (8, 4, 2), (16, 4, 4), (12, 3, 4)],
)
def test_a_worker_of_a_heterogeneous_job_fits_a_node_of_either_type(
    gpus: int, size: int, workers: int
) -> None:
    """On the second type it has twice the GPUs, so it has at most half a node; two can be apart."""
    job = TraceJob(job_id="a", submit_s=0, duration_s=1, gpus=gpus)
    [made] = with_heterogeneous_share([job], 1.0, 1, PAPER_POOLS)
    assert (made.gpus_per_worker, made.min_workers, made.max_workers) == (size, workers, workers)
    assert made.gpu_types == ("V100", "T4")


@each_row(
    ("training", "inference", "gpus", "size"),
    [(4, 4, 8, 2), (4, 4, 4, 2), (8, 4, 8, 2), (4, 8, 8, 4), (16, 16, 16, 8), (8, 2, 4, 1)],
)
def test_workers_are_as_large_as_the_nodes_of_both_pools_let_them_be(
    training: int, inference: int, gpus: int, size: int
) -> None:
    """On nodes of the first type whole, on those of the second in twice as many GPUs."""
    job = TraceJob(job_id="a", submit_s=0, duration_s=1, gpus=gpus)
    pools = structs.replace(
        PAPER_POOLS, training_nodes=nodes_of(training), inference_node_gpus=inference
    )
    [made] = with_heterogeneous_share([job], 1.0, 1, pools)
    assert (made.gpus_per_worker, (made.min_workers or 0) * size) == (size, gpus)


def test_jobs_grow_in_workers_that_fit_a_node() -> None:
    """Eight GPUs are two workers on nodes of four, and may become four of them."""
    [made] = with_ranges(SMALL.jobs[:1], 1.0, 1, nodes=nodes_of(4))
    assert not SMALL.jobs[0].is_elastic
    assert (made.gpus_per_worker, made.min_workers, made.max_workers) == (4, 2, 4)


@each_row(
    ("asked", "spans"),
    [
        ((), True),
        (("H100",), True),
        (("H100", "L4"), True),
        (("L4", "H100"), True),
        (("L4",), False),
        (("V100",), False),
        (("V100", "T4"), False),
        (("H100", "A100"), False),
    ],
)
def test_who_spans_takes_the_types_of_the_cluster_and_none_that_it_did_not_ask_for(
    asked: tuple[str, ...], *, spans: bool
) -> None:
    """Of H100 and L4: who asks for another type keeps it, as does who asks for L4 alone."""
    job = TraceJob(job_id="a", submit_s=0, duration_s=1, gpus=8, gpu_types=asked)
    pools = structs.replace(PAPER_POOLS, training_gpus=("H100",), inference_gpu="L4")
    [made] = with_heterogeneous_share([job], 1.0, 1, pools)
    assert made.gpu_types == (("H100", "L4") if spans else asked)
    assert made.heterogeneous_speed_ratio == (0.7 if spans else 0.0)


def test_pools_of_one_type_have_nothing_to_span() -> None:
    """Every job runs in both of them as it is."""
    pools = structs.replace(PAPER_POOLS, inference_gpu="V100")
    plain = tuple(structs.replace(job, gpu_types=()) for job in SMALL.jobs)
    assert with_heterogeneous_share(plain, 1.0, 1, pools) == plain


def test_shares_of_elastic_jobs_are_nested_and_keep_those_that_are() -> None:
    """20 % of the jobs elastic are part of 60 %; below the present share some lose their range."""
    shares = {
        share: {
            job.job_id
            for job in with_ranges(SMALL.jobs, share, 1, nodes=nodes_of(8))
            if job.is_elastic
        }
        for share in (0.0, 0.02, 0.2, 0.6, 1.0)
    }
    assert [len(found) for found in shares.values()] == [0, 4, 40, 121, 201]
    assert {job.job_id for job in SMALL.jobs if job.is_elastic} <= shares[0.2]
    assert shares[0.02] <= shares[0.2] <= shares[0.6] <= shares[1.0]


def test_a_job_that_loses_its_range_keeps_its_base() -> None:
    """The fewest workers are what its trace gave it."""
    for old, new in zip(
        SMALL.jobs, with_ranges(SMALL.jobs, 0.0, 1, nodes=nodes_of(8)), strict=True
    ):
        assert new.min_workers == old.min_workers
        assert new.max_workers == old.min_workers


def test_heterogeneous_jobs_are_a_share_at_a_speed() -> None:
    """Asking again replaces what was; a share of 0 takes it away."""
    jobs = with_heterogeneous_share(SMALL.jobs, 0.5, 1, PAPER_POOLS)
    assert sum(job.heterogeneous_speed_ratio == 0.7 for job in jobs) == 100
    none = with_heterogeneous_share(jobs, 0.0, 1, PAPER_POOLS)
    assert not any(job.heterogeneous_speed_ratio for job in none)


def test_wrong_estimates_are_off_by_a_quarter_at_most() -> None:
    """So many are wrong; right ones are exact; a job's error does not depend on the share."""
    few = with_wrong_estimates(SMALL.jobs, 0.2, 1)
    many = with_wrong_estimates(SMALL.jobs, 0.6, 1)
    wrong = [job for job in few if job.estimate_s != job.duration_s]
    assert len(wrong) == 40
    errors = [abs((job.estimate_s or 0) / job.duration_s - 1) for job in many]
    assert 0.2 < max(errors) <= 0.25
    by_id = {job.job_id: job.estimate_s for job in many}
    assert all(by_id[job.job_id] == job.estimate_s for job in wrong)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wrong_estimates_are_too_long_as_often_as_too_short(seed: int) -> None:
    """Errors are even between -25 % and +25 % (Table 9): a fifth of them in each tenth of a unit,
    within what 201 draws scatter, and none on average."""
    jobs = with_wrong_estimates(SMALL.jobs, 1.0, seed)
    errors = [(job.estimate_s or 0) / job.duration_s - 1 for job in jobs]
    fifths = Counter(int((error + 0.25) / 0.1) for error in errors)
    assert len(errors) == 201
    assert set(fifths) == set(range(5))
    assert all(20 <= count <= 62 for count in fifths.values())  # 40 each, +- 4 deviations of 5.7
    assert abs(sum(errors) / len(errors)) < 0.04  # 4 deviations of 0.0102


def test_a_bootstrapped_trace_is_made_of_whole_days() -> None:
    """Each day is one of the source, jobs and load together, and every id is one job."""
    found = bootstrapped(SMALL, days=6, seed=3)
    assert found.length_s == 6 * DAY_S
    assert len({job.job_id for job in found.jobs}) == len(found.jobs)
    assert [job.submit_s for job in found.jobs] == sorted(job.submit_s for job in found.jobs)
    source = {job.job_id: job for job in SMALL.jobs}
    days = []
    for place in range(6):
        jobs = [job for job in found.jobs if job.submit_s // DAY_S == place]
        [day] = {source[job.job_id.rpartition("-")[0]].submit_s // DAY_S for job in jobs}
        same = [job for job in SMALL.jobs if job.submit_s // DAY_S == day]
        assert len(jobs) == len(same)
        assert found.loads[0].values[24 * place] == SMALL.loads[0].values[24 * int(day)]
        days.append(day)
    assert len(set(days)) > 1
    assert bootstrapped(SMALL, days=6, seed=3) == found
    assert bootstrapped(SMALL, days=6, seed=4) != found


def test_after_its_last_day_a_bootstrapped_load_begins_again() -> None:
    """Jobs that run on need a load; one shorter than the source is repeated to its length."""
    found = bootstrapped(SMALL, days=2, seed=1)
    values = found.loads[0].values
    assert len(values) == 96
    assert values[:48] == values[48:]


def test_what_was_at_work_before_the_trace_comes_once_and_is_no_part_of_a_day() -> None:
    """However often day 0 is drawn, its initial jobs come at their time on the first day alone."""
    source = structs.replace(SMALL, initial_jobs=frozenset({"j001", "j030"}))
    when = {job.job_id: job.submit_s for job in SMALL.jobs}
    draws_of_day_0: set[int] = set()
    for seed in range(12):
        found = bootstrapped(source, days=6, seed=seed)
        came = {job.job_id: job.submit_s for job in found.jobs}
        initial = {job_id for job_id in came if job_id.startswith(("j001-", "j030-"))}
        assert {job_id: came[job_id] for job_id in initial} == {
            "j001-0": when["j001"],
            "j030-0": when["j030"],
        }
        assert found.initial_jobs == initial
        assert [job.submit_s for job in found.jobs] == sorted(came.values())
        rest = structs.replace(
            source, jobs=tuple(job for job in SMALL.jobs if job.job_id not in source.initial_jobs)
        )
        others = [job for job in found.jobs if job.job_id not in initial]
        assert others == list(bootstrapped(rest, days=6, seed=seed).jobs)
        draws_of_day_0.add(sum(job.job_id.startswith("j002-") for job in found.jobs))
    assert {0, 1} < draws_of_day_0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper-1", "paper-4", "paper-overload"])
def test_every_draw_of_days_asks_for_as_much_as_the_source(name: str) -> None:
    """GPU-seconds of any ten days drawn are within 5 % of those of the source's first ten."""
    source, days = paper(name), 10
    offered_gpu_s = sum(job.gpu_s for job in source.jobs if job.submit_s < days * DAY_S)

    def ratio(workload: Workload, seed: int) -> float:
        drawn = bootstrapped(workload, days=days, seed=seed)
        return sum(job.gpu_s for job in drawn.jobs) / offered_gpu_s

    short = by_days(source)
    assert ratio(short, 0) == pytest.approx(ratio(source, 0))
    ratios = [ratio(short, seed) for seed in range(40)]
    assert 0.95 < min(ratios) < max(ratios) < 1.05


def by_days(workload: Workload) -> Workload:
    """All that is asked for in a day as one job: what days add up to takes no longer to draw.

    What was at work before the first day stays as it is, job by job.
    """
    whole: dict[int, float] = {}
    initial: list[TraceJob] = []
    for job in workload.jobs:
        if job.job_id in workload.initial_jobs:
            initial.append(job)
        else:
            day = int(job.submit_s // DAY_S)
            whole[day] = whole.get(day, 0.0) + job.gpu_s
    days = [
        TraceJob(job_id=f"day{day}", submit_s=float(day * DAY_S), duration_s=gpu_s, gpus=1)
        for day, gpu_s in sorted(whole.items())
    ]
    return structs.replace(workload, jobs=(*initial, *days))


def test_the_pools_of_a_cluster_are_told_by_their_main_types() -> None:
    """Most GPUs, not most nodes; of that type the node that most of them are in; without the second
    pool its nodes would be like those of the first."""
    training = (
        NodeGroup(count=5, gpus=1, gpu_type="A"),
        NodeGroup(count=1, gpus=4, gpu_type="B"),
        NodeGroup(count=1, gpus=2, gpu_type="B"),
        NodeGroup(count=1, gpus=5, gpu_type="C"),
    )
    inference = (NodeGroup(count=2, gpus=2, gpu_type="D", home_pool=Pool.INFERENCE),)
    both = pools_of(training + inference)
    assert both == Pools(
        training_gpus=("B", "A", "C"),
        inference_gpu="D",
        training_nodes=NodeSizes(training),
        inference_node_gpus=2,
    )
    assert (both.training_gpu, both.training_nodes.gpus_for(("B",), 1)) == ("B", 4)
    assert pools_of(training) == structs.replace(both, inference_gpu="T4", inference_node_gpus=4)


def test_less_than_a_day_cannot_be_bootstrapped() -> None:
    """There is no whole day to draw."""
    with pytest.raises(ValueError, match="no whole day"):
        bootstrapped(structs.replace(SMALL, length_s=3600.0), days=2, seed=1)
