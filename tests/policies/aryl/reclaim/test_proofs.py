"""What a reclaim says of its choice: that none is cheaper, or how few there might be, is true."""

from __future__ import annotations

import re

import pytest

from coordinator.policies.aryl.reclaim.choose_nodes import Choice, Reclaiming, choose_nodes
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.aryl.reclaim.preemption_cost import Costs
from tests.exact_reclaim import Exact, Question
from tests.exact_reclaim import solve as solve_exactly
from tests.reclaim_cases import CASES, snapshot_of

FEWER = re.compile(r"(\d+) jobs chosen: no choice has fewer than (\d+)$")
NONE = re.compile(r"(\d+) jobs chosen: none can be cheaper$")


def chosen(case: str, node_count: int, wanted: int, seed: int) -> tuple[Choice, Exact]:
    """What the search takes back, and what HiGHS finds and proves of the same nodes."""
    held = CASES[case](node_count, seed)
    snapshot = snapshot_of(held)
    how = Reclaiming(costs=Costs(snapshot), is_searching=True)
    choice = choose_nodes(Occupancy(snapshot), snapshot.nodes, wanted, how)
    jobs = 1 + max(job for here in held.values() for job in here)
    exact = solve_exactly(
        Question(
            nodes=tuple(tuple(sorted(here)) for here in held.values()),
            weights=(1,) * jobs,
            wanted=wanted,
            limit_s=20.0,
        )
    )
    return choice, exact


@pytest.mark.parametrize("seed", [0, 1])
def test_where_the_bound_is_below_the_choice_the_reason_says_so(seed: int) -> None:
    """It names the most that is proven: fewer than are chosen, no more than HiGHS needs, and near
    that."""
    choice, exact = chosen("random, up to 4 nodes", 40, 10, seed)
    assert exact.is_proven
    told = FEWER.search(choice.note)
    assert told is not None, choice.note
    found, least = int(told[1]), int(told[2])
    assert found == len(choice.victims)
    assert least <= exact.weight <= found
    assert least < found
    assert least >= 0.9 * exact.weight


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_the_reason_says_that_none_is_cheaper_none_is(seed: int) -> None:
    """HiGHS needs as many."""
    choice, exact = chosen("gangs", 24, 8, seed)
    told = NONE.search(choice.note)
    assert told is not None, choice.note
    assert int(told[1]) == len(choice.victims) == exact.weight
