"""The knapsack where rates were measured: any values, dips stepped over, nothing past the best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.aryl.knapsack import (
    Group,
    ladder,
    solve,
    solve_exact,
    solve_greedy,
)
from tests import strategies
from tests.policies.aryl.test_knapsack import brute_force_s, value_s, weight_gpus

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
