"""Bounds of docs/foresight.md: below every schedule of small instances, and not too low."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from docs.research.foresight_bounds import (
    Piece,
    least_completion_s,
    least_of,
    least_queueing_s,
    piece_of,
)

GPUS = 3


def job(number: int, at_s: int, length_s: int, gpus: int, most: int = 0) -> TraceJob:
    """A job of so many GPUs, or of up to `most`; it runs `length_s` on the first."""
    return TraceJob(
        job_id=f"j{number}",
        submit_s=float(at_s),
        duration_s=float(length_s),
        gpus=gpus,
        gpus_per_worker=1,
        min_workers=gpus,
        max_workers=max(gpus, most),
    )


def jobs_up_to(count: int) -> st.SearchStrategy[list[TraceJob]]:
    """Small jobs that come one after the other, some of them elastic."""
    sizes = st.tuples(
        st.integers(0, 6), st.integers(1, 6), st.integers(1, GPUS), st.integers(0, GPUS)
    )
    return st.lists(sizes, min_size=1, max_size=count).map(
        lambda rows: [job(number, *row) for number, row in enumerate(rows)]
    )


def schedules(jobs: Sequence[TraceJob]) -> Iterator[tuple[float, float]]:
    """(sum of waits, sum of times from submission to end) of every schedule worth having.

    Nothing is stopped: each order of jobs, each size of each, and each as early as there is room.
    """
    sizes = [range(job.min_workers or 1, (job.max_workers or 1) + 1) for job in jobs]
    for order in itertools.permutations(range(len(jobs))):
        for widths in itertools.product(*sizes):
            yield _played(jobs, order, widths)


def _played(
    jobs: Sequence[TraceJob], order: Sequence[int], widths: Sequence[int]
) -> tuple[float, float]:
    held: list[tuple[float, float, int]] = []
    waits_s = total_s = 0.0
    for place in order:
        each, width = jobs[place], widths[place]
        length_s = each.gpu_s / width
        starts = sorted({each.submit_s, *(end for _, end, _ in held if end > each.submit_s)})
        at_s = next(s for s in starts if _has_room(held, s, s + length_s, width))
        held.append((at_s, at_s + length_s, width))
        waits_s += at_s - each.submit_s
        total_s += at_s + length_s - each.submit_s
    return waits_s, total_s


def _has_room(
    held: Sequence[tuple[float, float, int]], from_s: float, until_s: float, width: int
) -> bool:
    instants = [from_s, *(begin for begin, _, _ in held if from_s < begin < until_s)]
    return all(
        sum(gpus for begin, end, gpus in held if begin <= at_s < end) + width <= GPUS
        for at_s in instants
    )


@settings(max_examples=150, deadline=None)
@given(jobs_up_to(4))
def test_no_schedule_is_below_the_bounds(jobs: list[TraceJob]) -> None:
    """Neither in waiting nor in completion times, whatever the order and the sizes."""
    pieces = [piece_of(each) for each in jobs]
    found = list(schedules(jobs))
    assert least_queueing_s(pieces, GPUS) <= min(waits_s for waits_s, _ in found) + 1e-9
    assert least_completion_s(pieces, GPUS) <= min(total_s for _, total_s in found) + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_where_every_job_takes_all_gpus_the_bounds_are_the_best_schedule(
    lengths: list[int],
) -> None:
    """All are there from the start: shortest first is best, and nothing below it is claimed or
    given away."""
    pieces = [piece_of(job(number, 0, length, GPUS)) for number, length in enumerate(lengths)]
    ends = list(itertools.accumulate(sorted(lengths)))
    assert least_completion_s(pieces, GPUS) == pytest.approx(sum(ends))
    assert least_queueing_s(pieces, GPUS) == pytest.approx(sum(ends) - sum(lengths))


def test_jobs_that_do_not_wait_for_long_do_not_hide_those_that_do() -> None:
    """A job of days beside short ones that fill the GPUs counts against no wait of theirs."""
    short = [Piece(at_s=0.0, work_gpu_s=30.0, shortest_s=10.0, longest_s=10.0)] * 4
    long = Piece(at_s=0.0, work_gpu_s=9e4, shortest_s=9e4, longest_s=9e4)
    assert least_queueing_s(short, GPUS) == 10.0 + 20.0 + 30.0
    assert least_queueing_s([*short, long], GPUS) == least_queueing_s(short, GPUS)


def test_mean_busy_times_are_least_by_work_in_all_and_not_by_what_is_left() -> None:
    """Of 10 s, 4 are done when a job of 7 s comes, which goes first: the long one is at work at 2 s
    and at 14 s, 9.2 s in the mean, where 5 s need no wait; the short one needs none."""
    pieces = [
        Piece(at_s=at_s, work_gpu_s=length_s, shortest_s=length_s, longest_s=length_s)
        for at_s, length_s in ((0.0, 10.0), (4.0, 7.0))
    ]
    assert least_queueing_s(pieces, 1) == pytest.approx(9.2 - 5.0)


def test_who_runs_on_one_type_alone_shares_its_gpus_alone() -> None:
    """Nodes of another type help only those that accept it: waits of the others stand."""
    own = [job(number, 0, 10, 2) for number in range(3)]
    nodes = (
        NodeGroup(count=1, gpus=2, gpu_type="V100"),
        NodeGroup(count=9, gpus=2, gpu_type="T4"),
    )

    def of(*kinds: str) -> tuple[float, float]:
        jobs = tuple(
            TraceJob(
                job_id=each.job_id,
                submit_s=each.submit_s,
                duration_s=each.duration_s,
                gpus=each.gpus,
                gpu_types=kinds,
            )
            for each in own
        )
        return least_of(Workload(name="w", jobs=jobs, loads=(), nodes=nodes, length_s=1.0))

    assert of("V100") == pytest.approx(((10.0 + 20.0) / 3, (10.0 + 20.0 + 30.0) / 3))
    assert of("V100", "T4") == (0.0, 10.0)
