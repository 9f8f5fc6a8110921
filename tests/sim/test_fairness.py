"""Finish-time fairness by hand-made runs whose ratios can be worked out on paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.sim.fairness import FinishTimeFairness, Lived, fairness, ratios


def lived(
    app: str, submitted_at_s: float, finished_at_s: float, *, work_gpu_s: float, gpus: int = 8
) -> Lived:
    """A job."""
    return Lived(
        app=app,
        submitted_at_s=submitted_at_s,
        finished_at_s=finished_at_s,
        alone_gpu_s=work_gpu_s,
        gpus=gpus,
    )


def test_an_app_alone_on_the_cluster_is_as_fast_as_alone() -> None:
    """Nobody shares: rho is 1, and nobody is above it."""
    assert ratios([lived("a", 0, 100, work_gpu_s=800)], 8) == {"a": 1.0}
    found = fairness([lived("a", 0, 100, work_gpu_s=800)], 8)
    assert found == FinishTimeFairness(mean=1.0, max=1.0, share_above_1=0.0)


def test_who_waits_for_another_pays_and_who_does_not_gains() -> None:
    """Two equal jobs one after the other: both together have half of the cluster each.

    The first is present 100 s with one other: alone on 4 GPUs it takes 200 s, so rho is 0.5. The
    second is present 200 s, half of it with another (N is 1.5): 8 / 1.5 GPUs, 150 s, rho 4/3.
    """
    jobs = [lived("a", 0, 100, work_gpu_s=800), lived("b", 0, 200, work_gpu_s=800)]
    found = ratios(jobs, 8)
    assert found["a"] == pytest.approx(0.5)
    assert found["b"] == pytest.approx(200 / 150)
    assert fairness(jobs, 8).share_above_1 == 0.5


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


def test_of_nobody_there_is_nothing() -> None:
    """No app, no ratio."""
    assert fairness([], 8) == FinishTimeFairness()


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
    total = fairness(jobs, cluster_gpus)
    assert total.max == max(found.values())
    assert total.mean <= total.max
