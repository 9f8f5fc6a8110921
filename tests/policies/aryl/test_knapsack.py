"""The knapsack of flexible demand: the paper's numbers, and the optimum found another way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.aryl.knapsack import (
    Group,
    jct_reduction_s,
    solve,
    solve_exact,
    solve_greedy,
)
from tests import strategies
from tests.tables import each_row


def job(workers: tuple[int, int], fastest_s: float, gpus_per_worker: int = 1) -> Group:
    """A job as the paper writes it: worker range and minimum running time."""
    return Group(
        work_s=fastest_s * workers[1],
        base_workers=workers[0],
        extra_max=workers[1] - workers[0],
        gpus_per_worker=gpus_per_worker,
    )


def value_s(groups: Sequence[Group], extras: Sequence[int]) -> float:
    """What a choice is worth."""
    return sum(group.value_s(extra) for group, extra in zip(groups, extras, strict=True))


def weight_gpus(groups: Sequence[Group], extras: Sequence[int]) -> int:
    """GPUs that a choice holds."""
    return sum(group.gpus_per_worker * e for group, e in zip(groups, extras, strict=True))


def brute_force_s(groups: Sequence[Group], capacity_gpus: int) -> float:
    """The best value of all choices that fit."""
    choices = itertools.product(*(range(group.extra_max + 1) for group in groups))
    fitting = (c for c in choices if weight_gpus(groups, c) <= capacity_gpus)
    return max(value_s(groups, choice) for choice in fitting)


def average_jct_s(groups: Sequence[Group], extras: Sequence[int]) -> float:
    """Mean completion time of two jobs; when one ends the other grows into its workers."""
    counts = [group.base_workers + e for group, e in zip(groups, extras, strict=True)]
    ends_s = [group.work_s / count for group, count in zip(groups, counts, strict=True)]
    first = min(range(2), key=lambda index: ends_s[index])
    other = groups[1 - first]
    left_s = other.work_s - counts[1 - first] * ends_s[first]
    grown = min(other.base_workers + other.extra_max, sum(counts))
    return (ends_s[first] + ends_s[first] + left_s / grown) / 2


@pytest.mark.parametrize(
    ("group", "values"),
    [(job((2, 3), 100.0, 2), [50.0]), (job((2, 6), 20.0), [20.0, 30.0, 36.0, 40.0])],
)
def test_item_values_of_figure_6(group: Group, values: list[float]) -> None:
    """An item is worth the absolute time saved against the base gang, as printed in figure 6."""
    got = [
        jct_reduction_s(group.work_s, group.base_workers, extra)
        for extra in range(1, group.extra_max + 1)
    ]
    assert got == pytest.approx(values)


@each_row(
    ("a", "extras", "average_s"),
    [
        (job((2, 6), 50.0), (4, 0), 51.67),
        (job((2, 6), 50.0), (0, 4), 41.67),
        (job((2, 6), 50.0), (2, 2), 45.0),
        (job((2, 3), 100.0), (1, 3), 62.0),
        (job((2, 3), 100.0), (0, 4), 63.33),
    ],
)
def test_average_completion_times_of_tables_3_and_4(
    a: Group, extras: tuple[int, int], average_s: float
) -> None:
    """Linear scaling gives the completion times that the paper prints for 8 workers."""
    assert average_jct_s((a, job((2, 6), 20.0)), extras) == pytest.approx(average_s, abs=0.005)


@pytest.mark.parametrize("solver", [solve_exact, solve_greedy, solve])
def test_table_4_is_not_shortest_first(
    solver: Callable[[Sequence[Group], int], tuple[int, ...]],
) -> None:
    """The knapsack favors the longer job where the paper shows that this is better on average."""
    groups = (job((2, 3), 100.0), job((2, 6), 20.0))
    extras = solver(groups, 4)
    assert extras == (1, 3)
    assert average_jct_s(groups, extras) == pytest.approx(62.0)


@given(st.lists(strategies.groups(), max_size=4), st.integers(0, 24))
def test_exact_answer_is_the_optimum(groups: list[Group], capacity_gpus: int) -> None:
    """Dynamic programming finds what trying every choice finds, and keeps to the capacity."""
    extras = solve_exact(groups, capacity_gpus)
    assert weight_gpus(groups, extras) <= capacity_gpus
    assert value_s(groups, extras) == pytest.approx(brute_force_s(groups, capacity_gpus))


@given(st.lists(strategies.groups(is_moving=True), max_size=4), st.integers(0, 24))
def test_exact_answer_pays_for_changes(groups: list[Group], capacity_gpus: int) -> None:
    """The optimum holds as well when each change of a running job costs a rendezvous."""
    extras = solve_exact(groups, capacity_gpus)
    assert value_s(groups, extras) == pytest.approx(brute_force_s(groups, capacity_gpus))


@given(st.lists(strategies.groups(is_moving=True), min_size=1, max_size=4), st.integers(0, 24))
def test_greedy_misses_less_than_one_worker(groups: list[Group], capacity_gpus: int) -> None:
    """Gains are concave, so greedy is at most the largest gain of one worker below the optimum."""
    extras = solve_greedy(groups, capacity_gpus)
    largest_s = max(
        group.value_s(k + 1) - group.value_s(k) for group in groups for k in range(group.extra_max)
    )
    assert weight_gpus(groups, extras) <= capacity_gpus
    gap_s = brute_force_s(groups, capacity_gpus) - value_s(groups, extras)
    assert gap_s <= max(0.0, largest_s) + 1e-6


def test_greedy_gap_is_small_on_many_jobs() -> None:
    """On a hundred jobs that want twice the GPUs there are, greedy is within a thousandth."""
    chance = random.Random(7)
    groups = [
        job((2, 2 + chance.randint(1, 4)), chance.uniform(60, 50_000), chance.choice((1, 2, 4)))
        for _ in range(100)
    ]
    capacity = sum(group.extra_max * group.gpus_per_worker for group in groups) // 2
    exact, greedy = solve_exact(groups, capacity), solve_greedy(groups, capacity)
    assert value_s(groups, exact) * 0.999 <= value_s(groups, greedy)
    assert value_s(groups, greedy) <= value_s(groups, exact) + 1e-6


def test_a_table_that_is_too_large_is_answered_greedily() -> None:
    """Above the limit of cells `solve` gives the greedy answer, below it the exact one."""
    # by gain per GPU the first job takes one GPU and spoils the place of the second
    groups = [job((1, 2), 30.0), job((1, 2), 50.0, 2)]
    assert solve(groups, 2) == solve_exact(groups, 2) == (0, 1)
    assert solve(groups, 2, cells_max=0) == solve_greedy(groups, 2) == (1, 0)


@given(st.lists(strategies.groups(is_moving=True), min_size=1, max_size=4))
def test_where_nothing_competes_each_climbs_as_greedily(groups: list[Group]) -> None:
    """With room for all, `solve` takes the steps of `solve_greedy` without its queue."""
    room = sum(group.extra_max * group.gpus_per_worker for group in groups)
    assert solve(groups, room) == solve_greedy(groups, room)


def test_a_worker_that_gains_nothing_is_left_out_where_nothing_competes() -> None:
    """Among equals the fewest: no work is left, or the gain is what the change costs."""
    ended = job((1, 3), 0.0)
    even = Group(work_s=20.0, base_workers=1, extra_max=2, gpus_per_worker=1, change_cost_s=10.0)
    assert solve([ended, even], 100) == solve_exact([ended, even], 100) == (0, 0)
