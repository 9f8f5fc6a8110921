"""The knapsack of flexible demand: the paper's numbers, the optimum found another way, measured
rates with dips, and one price for each resize."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.aryl.knapsack import (
    Group,
    jct_reduction_s,
    ladder,
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


MIXED = st.lists(
    st.one_of(strategies.rated_groups(is_moving=True), strategies.groups(is_moving=True)),
    max_size=4,
)


CAPACITY_GPUS = st.integers(0, 24)


def largest_step_s(group: Group) -> float:
    """The largest gain of one step of its ladder."""
    corners = [0, *ladder(group, 0)]
    gains = (group.value_s(high) - group.value_s(low) for low, high in itertools.pairwise(corners))
    return max(gains, default=0.0)


DIPPING = Group(
    work_s=100.0,
    base_workers=1,
    extra_max=4,
    gpus_per_worker=1,
    rates=(1.0, 0.5, 2.0, 1.9, 1.5),
)
"""Two workers are slower than one, three are the best, more are slower again."""


@given(MIXED, CAPACITY_GPUS)
def test_exact_answer_is_the_optimum_of_any_rates(groups: list[Group], capacity_gpus: int) -> None:
    """Dynamic programming finds what trying every choice finds, whatever was measured."""
    extras = solve_exact(groups, capacity_gpus)
    assert weight_gpus(groups, extras) <= capacity_gpus
    assert value_s(groups, extras) == pytest.approx(brute_force_s(groups, capacity_gpus))


@given(MIXED, CAPACITY_GPUS)
def test_greedy_misses_less_than_one_step_of_any_rates(
    groups: list[Group], capacity_gpus: int
) -> None:
    """By the least concave curve above the values, greedy is at most one step below the optimum."""
    extras = solve_greedy(groups, capacity_gpus)
    assert weight_gpus(groups, extras) <= capacity_gpus
    gap_s = brute_force_s(groups, capacity_gpus) - value_s(groups, extras)
    assert gap_s <= max(map(largest_step_s, groups), default=0.0) + 1e-6


@given(MIXED)
def test_where_nothing_competes_each_gets_its_best(groups: list[Group]) -> None:
    """The answer without competition is the optimum too, for dips and all."""
    capacity_gpus = sum(group.extra_max * group.gpus_per_worker for group in groups)
    extras = solve(groups, capacity_gpus)
    best = [max(map(group.value_s, range(group.extra_max + 1))) for group in groups]
    assert value_s(groups, extras) == pytest.approx(sum(best))


@pytest.mark.parametrize("solver", [solve_exact, solve_greedy])
@given(groups=st.lists(strategies.rated_groups(), max_size=4), capacity_gpus=CAPACITY_GPUS)
def test_no_choice_is_slower_than_fewer_workers(
    solver: Callable[[Sequence[Group], int], tuple[int, ...]],
    groups: list[Group],
    capacity_gpus: int,
) -> None:
    """No fewer workers than those chosen are as fast, where a change costs nothing."""
    working = [replace(group, work_s=group.work_s + 1.0) for group in groups]
    for group, extra in zip(working, solver(working, capacity_gpus), strict=True):
        assert all(rate < group.rates[extra] for rate in group.rates[:extra])


@given(strategies.groups(is_moving=True), CAPACITY_GPUS)
def test_rates_in_proportion_are_the_linear_rule(group: Group, capacity_gpus: int) -> None:
    """Who measures what the paper assumes gets what the paper gives."""
    linear = tuple(float(group.base_workers + extra) for extra in range(group.extra_max + 1))
    told = replace(group, rates=linear)
    for solver in (solve_exact, solve_greedy):
        assert value_s([group], solver([told], capacity_gpus)) == pytest.approx(
            value_s([group], solver([group], capacity_gpus))
        )


def test_a_ladder_steps_over_a_dip_and_ends_at_the_best() -> None:
    """From one worker at once to three, and no further."""
    assert ladder(DIPPING, 0) == [2]
    assert ladder(DIPPING, 2) == []
    assert ladder(DIPPING, 4) == []
    rising = replace(DIPPING, rates=(1.0, 2.0, 3.0, 4.0, 4.0))
    assert ladder(rising, 0) == [1, 2, 3]


@given(strategies.rated_groups(is_moving=True))
def test_a_ladder_gains_less_for_a_worker_from_step_to_step(group: Group) -> None:
    """Every step gains something, and no later one more for a worker: greedy may trust in it."""
    corners = [0, *ladder(group, 0)]
    gains_s = [
        (group.value_s(high) - group.value_s(low)) / (high - low)
        for low, high in itertools.pairwise(corners)
    ]
    assert all(gain_s > 0 for gain_s in gains_s)
    assert all(low >= high - 1e-9 for low, high in itertools.pairwise(gains_s))
    assert group.value_s(corners[-1]) == max(map(group.value_s, range(group.extra_max + 1)))


def test_a_step_that_does_not_fit_is_taken_as_far_as_it_helps() -> None:
    """With one GPU the dip is no help, with two the job is past it."""
    assert [solve_greedy([DIPPING], gpus) for gpus in range(4)] == [(0,), (0,), (2,), (2,)]
    humped = replace(DIPPING, rates=(1.0, 1.2, 1.1, 4.0, 1.0))
    assert [solve_greedy([humped], gpus) for gpus in range(4)] == [(0,), (1,), (1,), (3,)]


def test_who_is_faster_with_fewer_gives_up_what_pays_for_the_change() -> None:
    """From five workers to three, unless the seconds saved are fewer than the change costs."""
    large = replace(DIPPING, current=4, change_cost_s=1.0)
    saved_s = 100 / 1.5 - 100 / 2.0
    assert saved_s > 2.0
    assert solve([large], 4) == solve_exact([large], 4) == (2,)
    dear = replace(large, change_cost_s=saved_s)
    assert solve([dear], 4) == solve_exact([dear], 4) == (4,)


@given(MIXED)
def test_with_room_for_all_each_group_has_what_it_climbs_to_among_others(
    groups: list[Group],
) -> None:
    """Nothing competes there, so that nobody's order matters: the greedy answer is the same."""
    room_gpus = weight_gpus(groups, [group.extra_max for group in groups])
    assert solve(groups, room_gpus) == solve_greedy(groups, room_gpus)


PRICED = st.builds(
    lambda group, cost_s: replace(group, resize_cost_s=cost_s, change_cost_s=0.0),
    st.one_of(strategies.groups(is_moving=True), strategies.rated_groups(is_moving=True)),
    st.integers(0, 60).map(float),
)


GROUPS = st.lists(PRICED, max_size=4)


@given(GROUPS, CAPACITY_GPUS)
def test_the_knapsack_is_exact_where_each_resize_has_one_price(
    groups: list[Group], capacity_gpus: int
) -> None:
    """By dynamic programming the optimum, by steps no more than one step below it."""
    best_s = brute_force_s(groups, capacity_gpus)
    exact, greedy = solve_exact(groups, capacity_gpus), solve_greedy(groups, capacity_gpus)
    assert value_s(groups, exact) == pytest.approx(best_s)
    assert weight_gpus(groups, greedy) <= capacity_gpus
    missed_s = best_s - value_s(groups, greedy)
    assert missed_s <= max(map(largest_step_s, groups), default=0.0) + 1e-6


@given(PRICED)
def test_alone_a_job_moves_only_for_more_than_its_price(group: Group) -> None:
    """Where nothing competes it gets what it is worth most with, and that may be where it is."""
    [extra] = solve([group], group.extra_max * group.gpus_per_worker)
    assert group.value_s(extra) == pytest.approx(
        max(map(group.value_s, range(group.extra_max + 1)))
    )
