"""From trace jobs to simulated ones: ranges, types and speed-ups obey their stated rules."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.jobspec import parse
from common.model import WorkerRange
from coordinator.workloads.choosing import Draw, choose
from coordinator.workloads.pools import Pools
from coordinator.workloads.records import ScalingCurve, SpeedUp, TraceJob
from coordinator.workloads.scenarios import with_heterogeneous_share, with_ranges
from coordinator.workloads.shaping import (
    RuntimeModel,
    ShapeOptions,
    from_curve,
    linear,
    lossy,
    to_workload_jobs,
    token,
    with_checkpoint_share,
    with_elastic_share,
    with_fungible_share,
)
from coordinator.workloads.sizes import nodes_of, worker_size
from tests.tables import each_row

GPUS = st.integers(1, 200)
POOLS = Pools(
    training_gpus=("V100",), inference_gpu="T4", training_nodes=nodes_of(8), inference_node_gpus=8
)
YOLO = ScalingCurve(
    model="yolov3", gpu_type="T4", batch_size=64, points=((1, 4.0), (2, 7.0), (4, 10.0), (8, 6.0))
)


def make_jobs(count: int, *, gpus: int = 8, **told: object) -> tuple[TraceJob, ...]:
    """That many jobs, a second apart."""
    return tuple(
        TraceJob(job_id=f"j{n}", submit_s=n, duration_s=100.0 + n, gpus=gpus, **told)  # type: ignore[arg-type]  # told by each test
        for n in range(count)
    )


@given(
    st.integers(0, 60), st.floats(0, 1), st.floats(0, 1), st.integers(0, 5), st.sampled_from(Draw)
)
def test_a_larger_share_chooses_the_smaller_one_and_more(
    count: int, one: float, other: float, seed: int, draw: Draw
) -> None:
    """Exactly the share, nested, whatever the order of the input."""
    jobs = make_jobs(count)
    less, more = sorted((one, other))
    chosen = choose(jobs, less, seed, draw=draw)
    assert len(chosen) == round(less * count)
    assert chosen <= choose(jobs, more, seed, draw=draw)
    assert chosen == choose(jobs[::-1], less, seed, draw=draw)


def test_seeds_choose_differently_and_shares_are_checked() -> None:
    """Two seeds, two choices; a percentage is no share."""
    jobs = make_jobs(100)
    for draw in Draw:
        assert choose(jobs, 0.2, 1, draw=draw) != choose(jobs, 0.2, 2, draw=draw)
    for share in (-0.1, 20.0):
        with pytest.raises(ValueError, match="expected 0 to 1"):
            choose(jobs, share, 1, draw=Draw.ELASTIC)


def chosen_by_kind(jobs: tuple[TraceJob, ...], share: float, seed: int) -> dict[str, set[str]]:
    """Whom each way to choose a share falls on."""

    def ids(shaped: tuple[TraceJob, ...], name: str) -> set[str]:
        return {job.job_id for job in shaped if getattr(job, name)}

    fungible = with_fungible_share(jobs, share, seed)
    return {
        "elastic": ids(with_elastic_share(jobs, share, seed), "is_elastic"),
        "fungible": {job.job_id for job in fungible if len(job.gpu_types) > 1},
        "saving": ids(with_checkpoint_share(jobs, share, seed), "has_checkpoints"),
        "spanning": ids(
            with_heterogeneous_share(jobs, share, seed, POOLS), "heterogeneous_speed_ratio"
        ),
    }


@each_row("seed", range(4))
def test_what_jobs_are_chosen_for_says_nothing_of_what_else_they_are_chosen_for(seed: int) -> None:
    """Of two shares of 30 %, whatever they are of, the second has 30 % of the first in it."""
    found = chosen_by_kind(make_jobs(1000), 0.3, seed)
    assert all(len(ids) == 300 for ids in found.values())
    for one, other in combinations(found.values(), 2):
        assert 60 <= len(one & other) <= 120  # 90, and a standard deviation of 6.6


def test_who_is_elastic_is_drawn_alike_as_a_share_and_as_a_scenario() -> None:
    """`--elastic 0.3` and `elastic-30` fall on the same jobs of a trace that tells no range."""
    jobs = make_jobs(100)
    ranges = {job.job_id for job in with_ranges(jobs, 0.3, 2, nodes=nodes_of(8)) if job.is_elastic}
    assert ranges == choose(jobs, 0.3, 2, draw=Draw.ELASTIC)


@given(GPUS, st.sampled_from([4, 8]))
def test_workers_fit_a_node_and_add_up(gpus: int, gpus_per_node: int) -> None:
    """A worker never spans nodes and the workers hold exactly what was asked for."""
    size = worker_size(gpus, gpus_per_node)
    assert 1 <= size <= gpus_per_node
    assert gpus % size == 0


@given(GPUS)
def test_an_elastic_range_reaches_from_half_to_twice(gpus: int) -> None:
    """Base, request and maximum are whole numbers of workers: max(1, n / 2), n and 2n."""
    [job] = with_elastic_share(make_jobs(1, gpus=gpus), 1.0, 3)
    assert job.gpus_per_worker is not None
    assert job.min_workers is not None
    assert job.max_workers is not None
    size = job.gpus_per_worker
    assert job.max_workers * size == 2 * gpus
    assert job.min_workers * size == (gpus // 2 if gpus % 2 == 0 else gpus)
    assert gpus % size == 0
    assert (job.gpus, job.duration_s) == (gpus, 100.0)


def test_a_share_of_none_takes_ranges_away() -> None:
    """What a shape was before does not matter."""
    elastic = with_elastic_share(make_jobs(10), 1.0, 3)
    assert all(job.is_elastic for job in elastic)
    assert not any(job.is_elastic for job in with_elastic_share(elastic, 0.0, 3))


def test_fungible_jobs_accept_both_types_and_others_one() -> None:
    """A job bound to a type of its own keeps it and is not counted."""
    jobs = (
        *make_jobs(10),
        TraceJob(job_id="rare", submit_s=0, duration_s=1, gpus=1, gpu_types=("X",)),
    )
    shaped = with_fungible_share(jobs, 0.3, 1)
    assert sorted(job.gpu_types for job in shaped) == [("V100",)] * 7 + [("V100", "T4")] * 3 + [
        ("X",)
    ]
    again = with_fungible_share(shaped, 0.0, 1)
    assert {job.gpu_types for job in again} == {("V100",), ("X",)}


def test_a_gpu_of_the_only_type_stands_for_itself() -> None:
    """Where both pools have one type, a share of fungible jobs changes no job, and none needs two
    workers for one."""
    jobs = with_fungible_share(make_jobs(10), 0.5, 1, training_gpu="H100", inference_gpu="H100")
    assert {job.gpu_types for job in jobs} == {("H100",)}
    options = ShapeOptions(training_gpus=("H100",), inference_gpus=("H100",))
    assert {made.spec.workers_on("H100").min for made in to_workload_jobs(jobs, options)} == {
        made.spec.workers.min for made in to_workload_jobs(make_jobs(10), options)
    }


def test_a_share_of_the_jobs_checkpoints() -> None:
    """Only those save somewhere."""
    jobs = with_checkpoint_share(make_jobs(10), 0.4, 1)
    assert sum(job.has_checkpoints for job in jobs) == 4
    saving = [made for made in to_workload_jobs(jobs) if made.spec.checkpoint.path]
    assert len(saving) == 4


def test_the_linear_model_is_the_paper_s() -> None:
    """Lyra's Figure 6: A (2..3 workers, 100 s) takes 150 s at its base, B (2..6, 20 s) 60 s."""
    for low, high, fastest_s, base_s in ((2, 3, 100.0, 150.0), (2, 6, 20.0, 60.0)):
        speedup = linear(WorkerRange(min=low, max=high))
        work_s = fastest_s * speedup.rate(high)
        assert work_s / speedup.rate(low) == base_s


def test_each_worker_beyond_the_base_loses_a_fifth() -> None:
    """The base gang is whole: four workers, of which two are extra, do 3.6 workers' work."""
    speedup = lossy(WorkerRange(min=2, max=4))
    assert speedup.rates == pytest.approx((2.0, 2.8, 3.6))
    assert speedup.rate(1) == 0.0
    assert speedup.rate(9) == pytest.approx(3.6)


def test_small_workers_stand_for_large_ones() -> None:
    """With a multiplier of two, four small workers do two large ones' work, in small workers'."""
    speedup = lossy(WorkerRange(min=2, max=4))
    assert speedup.rate(3, multiplier=2) == 0.0
    assert speedup.rate(4, multiplier=2) == pytest.approx(4.0)
    assert speedup.rate(5, multiplier=2) == pytest.approx(4.8)
    assert speedup.rate(6, multiplier=2) == pytest.approx(5.6)


def test_a_measured_curve_counts_against_the_base_gang() -> None:
    """Speeds are relative to the base, may fall, and end where measuring ended."""
    workers, speedup = from_curve(WorkerRange(min=2, max=16), 1, YOLO)
    assert workers == WorkerRange(min=2, max=8)
    assert speedup.rate(2) == 2.0
    assert speedup.rate(4) == pytest.approx(2 * 10 / 7)
    assert speedup.rate(8) == pytest.approx(2 * 6 / 7)
    with pytest.raises(ValueError, match="yolov3 on 16 GPUs"):
        from_curve(WorkerRange(min=2, max=4), 8, YOLO)


@each_row("runtime", [each for each in RuntimeModel if each != RuntimeModel.TUNED])
def test_with_the_gpus_that_it_had_a_job_takes_as_long_as_it_did(runtime: RuntimeModel) -> None:
    """True work is set for the width of the trace, under each runtime model."""
    jobs = with_elastic_share(make_jobs(8, gpus=4, model="yolov3", batch_size=64), 0.5, 3)
    options = ShapeOptions(runtime=runtime, curves={("yolov3", 64): YOLO})
    for job, made in zip(jobs, to_workload_jobs(jobs, options), strict=True):
        had = job.gpus // made.spec.gpus_per_worker
        assert made.work_s / made.speedup.rate(had) == pytest.approx(job.duration_s)
        base_s = made.work_s / made.speedup.rates[0]
        assert made.spec.expected_runtime_s == pytest.approx(base_s)


def test_without_a_curve_a_job_is_linear() -> None:
    """Nothing is made up for models that nobody measured, nor for sizes beyond the measured."""
    other = with_elastic_share(make_jobs(1, gpus=4, model="bert", batch_size=64), 1.0, 3)
    large = with_elastic_share(make_jobs(1, gpus=16, model="yolov3", batch_size=64), 1.0, 3)
    options = ShapeOptions(runtime=RuntimeModel.TABLE, curves={("yolov3", 64): YOLO})
    for jobs in (other, large):
        [made] = to_workload_jobs(jobs, options)
        assert made.speedup == linear(made.spec.workers)


def test_an_estimate_of_the_trace_comes_first_and_an_oracle_only_where_asked() -> None:
    """Declared running times are at base width; without oracle, unknown stays unknown."""
    told = make_jobs(1, gpus=8, estimate_s=50.0)
    untold = make_jobs(1, gpus=8)
    elastic = with_elastic_share(told, 1.0, 3)
    open_eyed, blind = ShapeOptions(), ShapeOptions(is_oracle=False)
    assert to_workload_jobs(told, blind)[0].spec.expected_runtime_s == 50.0
    assert to_workload_jobs(elastic, blind)[0].spec.expected_runtime_s == 100.0
    assert to_workload_jobs(untold, open_eyed)[0].spec.expected_runtime_s == 100.0
    assert to_workload_jobs(untold, blind)[0].spec.expected_runtime_s is None


def test_made_jobs_are_in_order_and_pass_the_checks_of_a_job_file() -> None:
    """Order by submission, ties by id; fungible jobs need two T4 for one V100."""
    jobs = with_fungible_share(with_elastic_share(make_jobs(20, gpus=12), 0.5, 1), 0.5, 2)
    made = to_workload_jobs(jobs[::-1])
    assert [job.at_s for job in made] == sorted(job.at_s for job in made)
    for job in made:
        assert parse(msgspec.to_builtins(job.spec), source="test") == job.spec
        assert job.spec.workers_on("T4").min == job.spec.workers.min * (
            2 if "T4" in job.spec.gpu.types else 1
        )


def test_names_become_tokens() -> None:
    """A NATS subject token: no blanks, dots or parentheses, 64 characters at most."""
    assert token("ResNet-18 (batch size 32)") == "ResNet-18--batch-size-32-"
    assert len(token("é" * 99)) == 64


@given(
    st.integers(1, 5),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    st.integers(0, 40),
    st.integers(1, 3),
)
def test_a_rate_stays_within_its_table(
    least: int, rates: list[float], workers: int, multiplier: int
) -> None:
    """No gang, no progress; beyond the table nothing is gained."""
    rate = SpeedUp(min_workers=least, rates=tuple(rates)).rate(workers, multiplier=multiplier)
    if workers < least * multiplier:
        assert rate == 0.0
    else:
        assert min(rates) - 1e-9 <= rate / multiplier <= max(rates) + 1e-9
