"""The generator: what the paper states holds whatever the seed; the named ones are frozen."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from math import isclose

import numpy as np
import pytest
from msgspec import structs

from common.errors import ConfigError
from common.model import Pool
from coordinator.workloads.formats import parse_jobs
from coordinator.workloads.named import (
    checksum,
    inference_load,
    inference_week,
    named,
    to_jobs,
)
from coordinator.workloads.own import job_lines
from coordinator.workloads.paper import (
    EARLY_S,
    JOBS,
    LENGTH_S,
    RARE_GPU,
    TRAINING_GPUS,
    Drawn,
    PaperParameters,
    draw,
    with_fastest_reading,
)
from coordinator.workloads.records import LoadUnit, TraceJob
from coordinator.workloads.shaping import to_workload_jobs
from tests.sim.small import paper
from tests.tables import each_row

PARAMETERS = PaperParameters()

FROZEN = {
    "paper-1": "dd2164fdc0d19c38f54df16a547eaab3d8a7611df70c0b268150614e1fc526f1",
    "paper-2": "082769d57616a36d72330b53cb03dbacc957c63ec3cd5f082337bde35cb0fc8b",
    "paper-3": "c5530f9a979ede225046d45444f1292d6660f5ec43878a1533fcfd9e0e6ab703",
    "paper-4": "90ea3815c3ef0efb29fc50e6bb9a9e5bc67ec8f27a5b34b009e6c930c285089d",
    "paper-5": "53aa0ab61d8619376e6339d163bb70b01a58304d01e8fe330ae33b2382b6ccd0",
    "paper-overload": "5a97161864d0da7461084b0091bbc57546e71b62e73be7f365c8856276884917",
}


def jobs_of(name: str) -> tuple[TraceJob, ...]:
    """The jobs of a named workload."""
    return paper(name).jobs


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FROZEN))
def test_a_named_trace_never_changes(name: str) -> None:
    """SHA-256 of its bytes in our CSV; a change of the generator needs new names."""
    assert checksum(jobs_of(name)) == FROZEN[name]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_seed_has_what_the_paper_states(seed: int) -> None:
    """Jobs, days, mean running time, 5 % elastic of 14.2 h that hold 36 % of the GPU time."""
    drawn = draw(PARAMETERS, seed)
    gpu_s = drawn.duration_s * drawn.gpus
    assert len(drawn.gpus) == JOBS
    assert 0 <= drawn.submit_s[0] <= drawn.submit_s[-1] < LENGTH_S
    assert np.all(np.diff(drawn.submit_s) >= 0)
    assert drawn.duration_s.mean() == pytest.approx(13_538, rel=0.01)
    assert drawn.is_elastic.mean() == pytest.approx(0.05, abs=1e-4)
    assert drawn.duration_s[drawn.is_elastic].mean() == pytest.approx(14.2 * 3600, rel=0.01)
    assert gpu_s[drawn.is_elastic].sum() / gpu_s.sum() == pytest.approx(0.36, abs=1e-3)
    assert gpu_s.sum() / (TRAINING_GPUS * LENGTH_S) == pytest.approx(PARAMETERS.load, abs=1e-4)
    assert drawn.is_rare.sum() == PARAMETERS.rare_jobs


@pytest.mark.slow
def test_running_times_have_two_modes() -> None:
    """Half of the jobs end within twelve minutes and a quarter run for hours; few in between."""
    duration_s = draw(PARAMETERS, 3).duration_s
    assert np.quantile(duration_s, 0.5) < 720
    assert np.quantile(duration_s, 0.77) > 5 * 3600
    between = (duration_s > 3600) & (duration_s < 5 * 3600)
    assert between.mean() < 0.02


@pytest.mark.slow
def test_long_jobs_come_evenly() -> None:
    """No day has 15 % more or less than its part of the long jobs' GPU time, but the first."""
    drawn = draw(PARAMETERS, 4)
    is_long = drawn.duration_s >= PARAMETERS.long_s
    gpu_s = (drawn.duration_s * drawn.gpus)[is_long]
    day = (drawn.submit_s[is_long] // 86_400).astype(int)
    by_day = np.bincount(day, weights=gpu_s)
    assert by_day[0] > 1.2 * by_day[1:].mean()
    assert np.all(np.abs(by_day[1:] / by_day[1:].mean() - 1) < 0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper-2", "paper-overload"])
def test_a_paper_trace_names_the_jobs_that_were_at_work_before_it(name: str) -> None:
    """They are long and of the first two hours, and without them day 0 is a day like any other."""
    workload = paper(name)
    initial = [job for job in workload.jobs if job.job_id in workload.initial_jobs]
    assert len(initial) == len(workload.initial_jobs)
    assert all(job.submit_s < EARLY_S for job in initial)
    assert all(job.duration_s >= 0.9 * PARAMETERS.long_s for job in initial)
    by_day = [0.0] * 15
    for job in workload.jobs:
        if job.job_id not in workload.initial_jobs:
            by_day[int(job.submit_s // 86_400)] += job.gpu_s
    others = by_day[1:]
    assert min(others) <= by_day[0] <= max(others)
    assert sum(job.gpu_s for job in initial) > 0.5 * by_day[0]


def test_a_seed_gives_one_trace_and_another_seed_another() -> None:
    """Thin traces of the same form; shares hold in them too."""
    one, again, other = (draw(PARAMETERS, seed, jobs=2_000) for seed in (7, 7, 8))
    for name in Drawn.__struct_fields__:
        assert np.array_equal(getattr(one, name), getattr(again, name))
    assert not np.array_equal(one.submit_s, other.submit_s)
    assert len(one.gpus) == 2_000
    assert one.is_elastic.mean() == 0.05


@pytest.mark.slow
def test_the_hash_seed_does_not_show() -> None:
    """Two interpreters with different hash seeds write the same bytes."""
    code = (
        "from coordinator.workloads.named import checksum, to_jobs\n"
        "from coordinator.workloads.paper import PaperParameters, draw\n"
        "from coordinator.workloads.scenarios import with_wrong_estimates\n"
        "from coordinator.workloads.shaping import with_elastic_share, with_fungible_share\n"
        "p = PaperParameters()\n"
        "jobs = to_jobs(draw(p, 3, jobs=1000), p)\n"
        "jobs = with_elastic_share(with_fungible_share(jobs, 0.3, 1), 0.2, 2)\n"
        "print(checksum(with_wrong_estimates(jobs, 0.4, 5)))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(said) == 1


@each_row(
    ("parameters", "hours"),
    [
        (PARAMETERS, 14.2),
        (structs.replace(PARAMETERS, elastic_ratio=3), 14.2),
        (with_fastest_reading(2), 28.4),
        (with_fastest_reading(3), 42.6),
    ],
)
def test_both_readings_of_the_elastic_running_time_can_be_drawn(
    parameters: PaperParameters, hours: float
) -> None:
    """14.2 h at the fewest workers, or with the most and so `ratio` times that at the fewest."""
    drawn = draw(parameters, 1, jobs=5_000)
    mean_s = drawn.duration_s[drawn.is_elastic].mean()
    assert mean_s == pytest.approx(hours * 3600, rel=0.03)
    assert drawn.duration_s.mean() == pytest.approx(13_538, rel=0.05)  # few jobs pin less well
    elastic = [job for job in to_jobs(drawn, parameters) if job.is_elastic]
    ratios = {(job.max_workers or 0) // (job.min_workers or 1) for job in elastic}
    assert ratios == {parameters.elastic_ratio}


def test_parameters_that_no_trace_can_have_are_refused() -> None:
    """A mean that the quantiles cannot give, a load that the sizes cannot give."""
    for changes, said in (
        ({"q95_s": 20_700.0, "q99_s": 20_800.0, "longest_s": 20_900.0}, "mean"),
        ({"load": 9.0}, "sizes"),
    ):
        with pytest.raises(ValueError, match=said):
            draw(structs.replace(PARAMETERS, **changes), 1, jobs=2_000)


def test_large_batches_take_no_more_memory_than_the_jobs_that_come() -> None:
    """A batch that outlasts the trace is cut, and those after it are not made at all."""
    tracemalloc.start()
    try:
        drawn = draw(structs.replace(PARAMETERS, batch=float(JOBS)), 1, jobs=500)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(drawn.gpus) == 500
    assert peak_bytes < 50e6


@pytest.mark.slow
def test_a_named_trace_is_a_file_of_our_format() -> None:
    """Written and read again, every job is the same: what is published can be used elsewhere."""
    jobs = jobs_of("paper-2")
    assert parse_jobs("paper-2", "".join(job_lines(jobs))).jobs == jobs


@pytest.mark.slow
def test_who_may_use_which_gpu() -> None:
    """21 % accept both types, no other job asks for the rare type, and nodes have them all."""
    workload = paper("paper-1")
    kinds = [job.gpu_types for job in workload.jobs]
    assert kinds.count(("V100", "T4")) == round(0.21 * JOBS)
    assert kinds.count((RARE_GPU,)) == PARAMETERS.rare_jobs
    assert set(kinds) == {("V100", "T4"), ("V100",), (RARE_GPU,)}
    training = [group for group in workload.nodes if group.home_pool is Pool.TRAINING]
    assert sum(group.count * group.gpus for group in training) == TRAINING_GPUS
    assert {group.gpu_type for group in workload.nodes} == {"V100", "T4", RARE_GPU}


@pytest.mark.slow
def test_overload_is_a_fifth_more_of_the_same() -> None:
    """1.2 times jobs and GPU time, 40 % of elastic jobs fungible, the rare line as it was."""
    jobs, plain = jobs_of("paper-overload"), jobs_of("paper-1")
    assert len(jobs) == round(1.2 * JOBS)
    assert sum(job.gpu_s for job in jobs) == pytest.approx(
        1.2 * sum(job.gpu_s for job in plain), rel=1e-3
    )
    elastic = [job for job in jobs if job.is_elastic]
    assert sum("T4" in job.gpu_types for job in elastic) == round(0.4 * len(elastic))
    rare, before = ([job for job in some if job.gpu_types == (RARE_GPU,)] for some in (jobs, plain))
    assert len(rare) == len(before)
    assert sum(job.gpu_s for job in rare) == pytest.approx(
        sum(job.gpu_s for job in before), rel=1e-3
    )


def test_names_are_recognized() -> None:
    """A file's name is none of ours; a seed cannot be given twice, and begins at 1."""
    assert named("cluster01.csv") is None
    assert named("paper.csv") is None
    with pytest.raises(ConfigError, match="has its seed in its name"):
        named("paper-2", seed=3)
    with pytest.raises(ConfigError, match="seed 0, expected at least 1"):
        named("paper", seed=0)


@pytest.mark.slow
def test_a_seed_names_the_same_trace_as_its_number() -> None:
    """`paper` with seed 3 is `paper-3`; without a seed it is `paper-1`."""
    assert named("paper", seed=3) == paper("paper-3")
    assert named("paper") == paper("paper-1")


def test_the_packaged_week_is_the_paper_s_curve() -> None:
    """Figure 1: a week of hours, trough near 42 % by day's mean, peak over 95 %, mean near 65 %."""
    week = inference_week()
    assert (week.unit, week.step_s, len(week.values)) == (LoadUnit.BUSY, 3600, 168)
    assert week.values[0] == 0.65
    assert max(week.values) == 0.97
    assert sum(week.values) / 168 == pytest.approx(0.696, abs=0.001)


def test_inference_load_follows_the_week_with_a_little_noise() -> None:
    """Four weeks in five-minute steps; hours stay near the curve, seeds differ, 0 to 1 holds."""
    week = np.array(inference_week().values)
    load = inference_load(1)
    assert (load.step_s, load.length_s) == (300, 28 * 86_400)
    assert inference_load(1) == load != inference_load(2)
    values = np.array(load.values)
    assert 0 <= values.min() <= values.max() <= 1
    on_the_hour = values[::12].reshape(4, 168).mean(axis=0)
    assert np.abs(on_the_hour - week).max() < 0.06
    assert np.abs(np.diff(values)).max() < 0.06


@pytest.mark.slow
def test_every_job_of_a_named_trace_can_be_simulated() -> None:
    """Gangs of whole nodes, elastic ranges of twice the base, running times as drawn."""
    jobs = jobs_of("paper-1")
    for job, made in zip(jobs, to_workload_jobs(jobs), strict=True):
        spec = made.spec
        assert spec.base_demand_gpus == job.gpus
        assert spec.gpus_per_worker <= 8
        assert spec.workers.max in {spec.workers.min, 2 * spec.workers.min}
        assert isclose(made.work_s, job.duration_s * spec.workers.min, rel_tol=1e-6)
