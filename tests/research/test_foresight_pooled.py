"""The bound of the rare line: the best that one machine can do, and below every real schedule."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.workloads.named import named
from coordinator.workloads.paper import RARE_GPU
from coordinator.workloads.records import TraceJob, Workload
from docs.research.foresight_pooled import least_queueing_s, pooled_s, to_next_pass_s

GPUS = 2


def job(number: int, at_s: float, length_s: float, gpus: int = GPUS) -> TraceJob:
    """A job of so many GPUs."""
    return TraceJob(
        job_id=f"j{number}", submit_s=float(at_s), duration_s=float(length_s), gpus=gpus
    )


def best_s(sizes: list[tuple[int, int]]) -> int:
    """Least sum of times in the system on one machine: every job for every second, tried all.

    Instants and lengths are whole seconds, so that no best order changes in between.
    """

    @cache
    def least(now_s: int, left: tuple[int, ...]) -> int:
        if not any(left):
            return 0
        there = [place for place, (at_s, _) in enumerate(sizes) if at_s <= now_s and left[place]]
        if not there:
            return least(now_s + 1, left)
        return len(there) + min(
            least(now_s + 1, (*left[:place], left[place] - 1, *left[place + 1 :]))
            for place in there
        )

    return least(0, tuple(length_s for _, length_s in sizes))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=4))
def test_it_is_the_best_of_all_orders_second_by_second(sizes: list[tuple[int, int]]) -> None:
    """Jobs that take all GPUs: neither above the best nor below it."""
    jobs = [job(number, *size) for number, size in enumerate(sizes)]
    assert pooled_s(jobs, GPUS) == pytest.approx(best_s(sizes))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, GPUS)),
        min_size=1,
        max_size=4,
    )
)
def test_no_schedule_of_whole_jobs_is_below_it(sizes: list[tuple[int, int, int]]) -> None:
    """Jobs of some of the GPUs, each order of them, each as early as there is room."""
    jobs = [job(number, *size) for number, size in enumerate(sizes)]
    found: list[float] = []
    for order in itertools.permutations(jobs):
        free_s = [0.0] * GPUS
        total_s = 0.0
        for each in order:
            free_s.sort()
            at_s = max(each.submit_s, free_s[each.gpus - 1])
            end_s = at_s + each.duration_s
            free_s[: each.gpus] = [end_s] * each.gpus
            total_s += end_s - each.submit_s
        found.append(total_s)
    assert pooled_s(jobs, GPUS) <= min(found) + 1e-9


def test_a_job_that_is_interrupted_keeps_what_is_done_of_it() -> None:
    """Of 10 s 4 are done when one of 3 s comes: they end at 7 s and 13 s."""
    assert pooled_s([job(0, 0, 10), job(1, 4, 3)], GPUS) == 13.0 + 3.0


@pytest.mark.parametrize(("at_s", "wait_s"), [(0.0, 0.0), (1.0, 81.0), (82.0, 0.0), (100.0, 64.0)])
def test_a_job_waits_for_the_next_multiple_of_the_period(at_s: float, wait_s: float) -> None:
    """And for none where passes happen at any instant."""

    def played(period_s: float | None) -> Workload:
        return Workload(name="w", jobs=(), loads=(), nodes=(), length_s=1.0, pass_period_s=period_s)

    assert to_next_pass_s(played(82.0), job(0, at_s, 1)) == wait_s
    assert to_next_pass_s(played(None), job(0, at_s, 1)) == 0.0


def test_the_bound_of_a_trace_is_of_its_waits_for_passes_and_its_rare_line() -> None:
    """Less what rare jobs run alone, over all jobs; a trace that is not named has none."""
    found = named("paper-1")
    assert found is not None
    rare = [each for each in found.jobs if RARE_GPU in each.gpu_types]
    line_s = pooled_s(rare, 24) - sum(each.duration_s for each in rare)
    passes_s = sum(
        to_next_pass_s(found, each) for each in found.jobs if RARE_GPU not in each.gpu_types
    )
    assert least_queueing_s("paper-1") == pytest.approx((line_s + passes_s) / len(found.jobs))
    assert least_queueing_s("itp-cluster02-1") is None
