"""Minimum satisfactory shares: ElasticFlow's own example, and what any plan owes."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.schedulers.qos.minimum_shares import (
    GUARD_S,
    Claim,
    fill,
    greedily,
    next_change_s,
    now_of,
)
from coordinator.policies.schedulers.qos.timeline import Piece, Plan, Timeline

SIZES = (1, 2, 4)


def claim(
    work_s: float,
    deadline_s: float,
    *,
    rates: tuple[float, ...] = (1.0, 1.5, 2.0),
    gpus_per_worker: int = 1,
) -> Claim:
    """A job that may have 1, 2 or 4 workers."""
    return Claim(
        job_id="c",
        sizes=SIZES[: len(rates)],
        rates=rates,
        gpus_per_worker=gpus_per_worker,
        work_s=work_s,
        deadline_s=deadline_s,
    )


def others(gpus: int, pieces: tuple[tuple[float, float, int], ...]) -> Timeline:
    """What plans of one-GPU workers leave."""
    line = Timeline(0.0, gpus)
    line.take(tuple(Piece(*piece) for piece in pieces), 1)
    return line


def test_the_papers_example_gets_its_share() -> None:
    """Four GPUs, three taken in slot 1: two workers do 2.5 of 3, so the share is 1, then 4."""
    line = others(4, ((0.0, 1.0, 3),))
    wanted = claim(3.0, 2.0 + GUARD_S)
    assert fill(line, wanted, 0.0) == (Piece(0.0, 1.0, 1), Piece(1.0, 2.0, 4))
    assert fill(line, claim(3.01, 2.0 + GUARD_S), 0.0) is None


def test_a_plan_with_room_takes_the_smallest_size() -> None:
    """The share is minimal: one worker where one is enough, and it ends when the work is done."""
    assert fill(Timeline(0.0, 4), claim(3.0, 10.0), 0.0) == (Piece(0.0, 3.0, 1),)


def test_the_smaller_size_runs_before_the_point_of_the_larger() -> None:
    """Two workers are needed from 1 on only; before that one works, so that the job ends early."""
    line = others(4, ((0.0, 1.0, 1),))
    plan = fill(line, claim(3.5, 3.0 + GUARD_S, rates=(1.0, 2.0, 4.0)), 0.0)
    assert plan == (Piece(0.0, 1.0, 1), Piece(1.0, 2.25, 2))


def test_a_deadline_that_is_past_has_no_plan() -> None:
    """Nothing can be planned into the past."""
    assert fill(Timeline(5.0, 4), claim(0.1, 5.0), 5.0) is None


LINES = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(1, 4)), max_size=4
).map(lambda rows: _line(rows))


def _line(rows: list[tuple[int, int, int]]) -> Timeline:
    line = Timeline(0.0, 8)
    for start_s, length_s, workers in rows:
        plan = (Piece(float(start_s), float(start_s + length_s), workers),)
        if line.has_room(plan, 1):
            line.take(plan, 1)
    return line


RATES = st.sampled_from(((1.0, 2.0, 4.0), (1.0, 1.5, 2.0), (1.0, 1.9, 2.1), (1.0, 2.5, 3.0)))


@given(LINES, RATES, st.integers(1, 30), st.integers(1, 12), st.sampled_from((1, 2)))
def test_a_plan_does_its_work_in_time_on_free_gpus(
    line: Timeline, rates: tuple[float, ...], work: int, deadline: int, each: int
) -> None:
    """A plan does all of the work, before the deadline, on GPUs that are free all that time."""
    wanted = claim(float(work), float(deadline), rates=rates, gpus_per_worker=each)
    plan = fill(line, wanted, 0.0)
    if plan is not None:
        assert plan[-1].end_s <= deadline - GUARD_S + 1e-9
        assert abs(wanted.done_by(plan, 0.0) - work) <= 1e-6
        assert line.has_room(plan, each)


@given(LINES, RATES, st.integers(1, 30), st.integers(1, 12))
def test_no_smaller_size_would_have_been_enough(
    line: Timeline, rates: tuple[float, ...], work: int, deadline: int
) -> None:
    """With sizes only up to the one below the largest of the plan, the work does not fit."""
    plan = fill(line, claim(float(work), float(deadline), rates=rates), 0.0)
    largest = None if plan is None else max(piece.workers for piece in plan)
    sizes = len(SIZES) if largest is None else SIZES.index(largest)
    end_s = deadline - GUARD_S
    done = 0.0
    for from_s, to_s, free in line.spans(0.0, end_s):
        fitting = [rate for size, rate in zip(SIZES[:sizes], rates, strict=False) if size <= free]
        done += max(fitting, default=0.0) * (to_s - from_s)
    assert done < work * (1.0 + 1e-9)


@given(LINES, st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
def test_what_is_taken_can_be_given_back(line: Timeline, sizes: list[int]) -> None:
    """Taking plans and giving them back leaves the free GPUs as they were, at every instant."""
    before = [(at_s, line.spans(at_s, at_s + 0.5)[0][2]) for at_s in range(20)]
    plans: list[Plan] = [
        (Piece(float(at), float(at + 3), size),) for at, size in zip((0, 2, 5), sizes, strict=False)
    ]
    for plan in plans:
        line.take(plan, 1)
    for plan in reversed(plans):
        line.give(plan, 1)
    assert [(at_s, line.spans(at_s, at_s + 0.5)[0][2]) for at_s in range(20)] == before


def test_one_more_step_now_is_followed_by_the_share_of_the_rest() -> None:
    """A size for a slot, then the fewest workers that do what is left: the end comes earlier."""
    wanted = claim(10.0, 20.0, rates=(1.0, 2.0, 4.0))
    assert greedily(Timeline(0.0, 4), wanted, 0.0, 2.0, 1) == (
        Piece(0.0, 2.0, 2),
        Piece(2.0, 8.0, 1),
    )


def test_a_late_job_goes_on_with_its_size() -> None:
    """Without a deadline there is no share: the size holds to the end."""
    wanted = claim(10.0, float("inf"))
    assert greedily(Timeline(0.0, 4), wanted, 0.0, 2.0, 2) == (Piece(0.0, 5.0, 4),)


def test_a_plan_tells_its_size_and_its_next_change() -> None:
    """In a gap nobody works; the next change is the start or end that comes first."""
    plan = (Piece(1.0, 2.0, 2), Piece(4.0, 5.0, 1))
    found = [(now_of(plan, at_s), next_change_s(plan, at_s)) for at_s in (0.0, 1.0, 3.0, 4.5)]
    assert found == [(0, 1.0), (2, 2.0), (0, 4.0), (1, 5.0)]
    assert next_change_s(plan, 5.0) == float("inf")


@given(LINES, RATES, st.integers(1, 12), st.integers(1, 10))
def test_a_later_deadline_never_loses_a_plan(
    line: Timeline, rates: tuple[float, ...], work: int, deadline: int
) -> None:
    """Whoever fits by a deadline fits by every later one: the earliest date can be searched for."""
    plans = [
        fill(line, claim(float(work), float(at), rates=rates), 0.0) is not None
        for at in range(deadline, deadline + 8)
    ]
    assert plans == sorted(plans)


def test_every_size_is_tried_before_none_is_found() -> None:
    """A plan exists exactly when all free GPUs, by the best size in each span, do the work."""
    for work, deadline in product((1.0, 2.0, 6.0, 9.0), (1.0, 2.0, 4.0)):
        line = others(4, ((0.0, 1.0, 3), (2.0, 3.0, 2)))
        end_s = deadline - GUARD_S
        best = {0: 0.0, 1: 1.0, 2: 1.5, 3: 1.5, 4: 2.0}
        most = sum(best[free] * (to_s - from_s) for from_s, to_s, free in line.spans(0.0, end_s))
        assert (fill(line, claim(work, deadline), 0.0) is not None) == (most >= work)
