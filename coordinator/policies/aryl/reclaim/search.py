"""Search for sets of jobs near the optimum, with a proof of the distance. Pure numbers.

Three steps, each deterministic and bounded by steps, never by time: the corners of the hull
(`lower_bound`), the missing nodes filled part by part (`dynamic_program`), and a local search by
exchanges (`local_search`). The caller's own solution competes too, so the answer is never worse.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from coordinator.policies.aryl.reclaim.dynamic_program import fill
from coordinator.policies.aryl.reclaim.local_search import improve, spare
from coordinator.policies.aryl.reclaim.lower_bound import EFFORT, hull
from coordinator.policies.aryl.reclaim.problem import Problem

EXCHANGE_EFFORT = 300_000
"""Steps of the local search: 15 to 55 ms of a core where it was measured."""


class Solution(Struct, frozen=True, kw_only=True):
    """Jobs that empty the wanted nodes, their cost, and the proven lower bound."""

    victims: frozenset[int]
    weight: int
    bound: int


def solve(
    problem: Problem,
    start: frozenset[int],
    *,
    unit: int = 1,
    effort: int = EFFORT,
    exchange_effort: int = EXCHANGE_EFFORT,
) -> Solution:
    """The cheapest jobs found that empty the wanted nodes; never dearer than `start`.

    Args:
        start: a choice that empties enough.
        unit: differences of cost below this are not worth a search of their own.
        effort: steps of the flow search; see `hull`.
        exchange_effort: steps of the local search.

    The same arguments give the same answer.
    """
    corners = hull(problem, effort=effort)
    filled = fill(problem, corners.below, corners.above)
    bound = corners.bound
    if filled.is_exact and not corners.below:
        bound = problem.weight(filled.victims)
    target = bound + unit - 1
    chosen = _leanest(problem, (start, filled.victims))
    if problem.weight(chosen) > target:
        # Large parts are filled step by step, and there small differences lead astray.
        coarse = replace(problem, weights=tuple(weight // unit for weight in problem.weights))
        other = fill(coarse, corners.below, corners.above).victims
        chosen = _leanest(problem, (chosen, other, corners.above))
    if problem.weight(chosen) > target:
        chosen = improve(problem, chosen, target=target, effort=exchange_effort)
    return Solution(victims=chosen, weight=problem.weight(chosen), bound=bound)


def _leanest(problem: Problem, choices: Iterable[frozenset[int]]) -> frozenset[int]:
    """The cheapest of choices that empty enough, each without needless jobs."""
    return min((spare(problem, victims) for victims in choices), key=problem.weight)
