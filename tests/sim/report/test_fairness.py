"""Finish-time fairness by hand-made runs whose ratios can be worked out on paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.sim.report.fairness import (
    AppFairness,
    FinishTimeFairness,
    Lived,
    fairness,
    of_several_jobs,
    ratios,
)
from coordinator.sim.report.fairness_input import until_pass_s
from coordinator.sim.run.simulation import Passes
from tests.tables import each_row


def lived(
    app: str,
    submitted_at_s: float,
    finished_at_s: float,
    *,
    work_gpu_s: float,
    gpus: int = 8,
    startup_s: float = 0.0,
) -> Lived:
    """A job."""
    return Lived(
        app=app,
        submitted_at_s=submitted_at_s,
        finished_at_s=finished_at_s,
        alone_gpu_s=work_gpu_s,
        gpus=gpus,
        startup_s=startup_s,
    )


def test_an_app_alone_on_the_cluster_is_as_fast_as_alone() -> None:
    """Nobody shares: rho is 1, and nobody is above it."""
    assert ratios([lived("a", 0, 100, work_gpu_s=800)], 8) == {"a": 1.0}
    found = fairness({"a": 1.0})
    assert found == FinishTimeFairness(mean=1.0, max=1.0, p50=1.0, p95=1.0, apps=1)


def test_who_waits_for_another_pays_and_who_does_not_gains() -> None:
    """Two equal jobs one after the other: both together have half of the cluster each.

    The first is present 100 s with one other: alone on 4 GPUs it takes 200 s, so rho is 0.5. The
    second is present 200 s, half of it with another (N is 1.5): 8 / 1.5 GPUs, 150 s, rho 4/3.
    """
    jobs = [lived("a", 0, 100, work_gpu_s=800), lived("b", 0, 200, work_gpu_s=800)]
    found = ratios(jobs, 8)
    assert found["a"] == pytest.approx(0.5)
    assert found["b"] == pytest.approx(200 / 150)
    assert fairness(found).share_above_1 == 0.5


def test_a_share_that_is_larger_than_what_a_job_can_use_does_not_speed_it_up() -> None:
    """One GPU of eight: alone it takes its own running time, whatever its share."""
    assert ratios([lived("a", 0, 150, work_gpu_s=100, gpus=1)], 8) == {"a": 1.5}


def test_trials_of_one_app_share_what_is_theirs() -> None:
    """Two trials of 400 GPU-s on 8 GPUs: alone both are done after 100 s; it took 200."""
    jobs = [
        lived("a", 0, 100, work_gpu_s=400),
        lived("a", 50, 200, work_gpu_s=400),
    ]
    assert ratios(jobs, 8) == {"a": 2.0}


def test_alone_an_app_starts_once_as_well() -> None:
    """12 s of starting belong to both times; 12 s more for a second start to the shared one only.

    On half of the cluster the work takes twice as long, the start does not.
    """
    assert ratios([lived("a", 0, 112, work_gpu_s=800, startup_s=12)], 8) == {"a": 1.0}
    assert ratios([lived("a", 0, 124, work_gpu_s=800, startup_s=12)], 8) == {"a": 124 / 112}
    pair = [lived(name, 0, 212, work_gpu_s=800, startup_s=12) for name in "ab"]
    assert ratios(pair, 8) == {"a": 1.0, "b": 1.0}


def test_rounding_is_nobodys_loss() -> None:
    """A share of a millionth above 1 comes of floating-point sums; a thousandth does not."""
    assert fairness({"a": 1.0 + 2e-16, "b": 1.0 + 1e-9}).share_above_1 == 0.0
    assert fairness({"a": 1.001, "b": 1.0}).share_above_1 == 0.5


def test_only_apps_of_several_jobs_are_told_and_the_worst_first() -> None:
    """So many at most: a file of figures must not grow with the trace."""
    jobs = [
        lived(app, 0, 100 + number, work_gpu_s=80) for app in ("a", "b", "c") for number in range(2)
    ]
    jobs.append(lived("alone", 0, 5000, work_gpu_s=80))
    rhos = {"a": 1.5, "b": 2.5, "c": 2.5, "alone": 9.0}
    found = of_several_jobs(jobs, rhos, most=2)
    assert found == (AppFairness(app="b", jobs=2, rho=2.5), AppFairness(app="c", jobs=2, rho=2.5))


@each_row(
    ("passes", "at_s", "wait_s"),
    [
        (Passes(), 7.0, 0.0),
        (Passes(coalesce_s=0.5), 7.0, 0.5),
        (Passes(grid_s=60.0), 7.0, 53.0),
        (Passes(grid_s=60.0), 120.0, 0.0),
        (Passes(coalesce_s=2.0, grid_s=60.0), 119.0, 61.0),
    ],
)
def test_alone_one_waits_for_the_next_pass_too(passes: Passes, at_s: float, wait_s: float) -> None:
    """As `Simulation.ask_pass` has it where nothing else happens."""
    assert until_pass_s(passes, at_s) == pytest.approx(wait_s)


def test_of_nobody_there_is_nothing() -> None:
    """No app, no ratio."""
    assert fairness({}) == FinishTimeFairness()
    assert of_several_jobs([], {}) == ()


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(1, 400), st.integers(1, 8)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 64),
)
def test_more_time_in_the_cluster_is_never_fairer(
    drawn: list[tuple[int, int, int, int]], cluster_gpus: int
) -> None:
    """Whoever ends later under the same company has a higher rho; all are positive and finite."""
    jobs = [
        lived(str(number), begun, begun + took, work_gpu_s=work, gpus=gpus)
        for number, (begun, took, work, gpus) in enumerate(drawn)
    ]
    found = ratios(jobs, cluster_gpus)
    assert len(found) == len(jobs)
    assert all(0 < rho < float("inf") for rho in found.values())
    total = fairness(found)
    assert total.max == max(found.values())
    assert total.mean <= total.max
    assert total.p50 <= total.p95 <= total.max
