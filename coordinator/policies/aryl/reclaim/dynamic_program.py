"""The cheapest way to empty a given number of nodes, part by part. Pure numbers.

Parts that share no job are solved separately, each as a row of points (nodes emptied, cost).
Dynamic programming combines them: exact where every part is small.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from coordinator.policies.aryl.reclaim.problem import Problem, parts

EXACT_JOBS_MAX = 11
"""A part with at most this many jobs is solved exactly, by all its 2 ** jobs sets."""

EFFORT = 60_000
"""Steps for exact prices in large parts: 15 to 30 ms of a core where it was measured."""

_FAR = np.int64(1 << 61)


class Point(Struct, frozen=True):
    """A choice in one part: the emptied nodes, the cost, and the jobs."""

    emptied: int
    weight: int
    victims: tuple[int, ...]


class Filled(Struct, frozen=True, kw_only=True):
    """Jobs that empty enough nodes. is_exact: none that contain the given ones cost less."""

    victims: frozenset[int]
    is_exact: bool


def fill(
    problem: Problem,
    given: frozenset[int],
    within: frozenset[int],
    *,
    effort: int = EFFORT,
) -> Filled:
    """Empty the wanted nodes, when the given jobs stop in any case.

    within: where a part is too large to be settled exactly, only these jobs are looked at; they
        and the given ones must empty enough.
    effort: steps for prices in large parts that count all nodes which a choice empties; after
        that they count one kind of node.
    """
    wanted = problem.wanted - problem.emptied(given)
    if wanted <= 0:
        return Filled(victims=given, is_exact=True)
    rows: list[list[Point]] = []
    is_exact = True
    for part in parts_left(problem, given):
        if _job_count(part) <= EXACT_JOBS_MAX:
            rows.append(exact_points(part, problem.weights))
            continue
        is_exact = False
        inner = {jobs: count for jobs, count in part.items() if within.issuperset(jobs)}
        for piece in _split(inner):
            if _job_count(piece) <= EXACT_JOBS_MAX:
                rows.append(exact_points(piece, problem.weights))
            else:
                growth = Growth(piece, problem.weights, effort)
                rows.append(path_points(growth, wanted))
                effort = growth.effort
    return Filled(victims=given.union(_combine(rows, wanted)), is_exact=is_exact)


Part = dict[tuple[int, ...], int]
"""Nodes by the jobs that they still need."""


def parts_left(problem: Problem, given: frozenset[int]) -> list[Part]:
    """Nodes left to empty when the given jobs stop, in parts that share no job."""
    rest: Part = {}
    for needs, count in zip(problem.needs, problem.counts, strict=True):
        left = tuple(job for job in needs if job not in given)
        if left:
            rest[left] = rest.get(left, 0) + count
    return _split(rest)


def _split(rest: Part) -> list[Part]:
    kinds = list(rest)
    return [{kinds[index]: rest[kinds[index]] for index in part} for part in parts(kinds)]


def _job_count(part: Part) -> int:
    return len({job for jobs in part for job in jobs})


def exact_points(part: Mapping[tuple[int, ...], int], weights: Sequence[int]) -> list[Point]:
    """Every choice of a small part that no other beats, by nodes emptied."""
    if len(part) == 1:
        ((needs, count),) = part.items()
        return [Point(count, sum(weights[job] for job in needs), needs)]
    jobs = sorted({job for needs in part for job in needs})
    bit = {job: 1 << place for place, job in enumerate(jobs)}
    cost: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
    for job in jobs:
        cost = np.concatenate((cost, cost + weights[job]))
    emptied: NDArray[np.int64] = np.zeros(len(cost), dtype=np.int64)
    for needs, count in part.items():
        emptied[sum(bit[job] for job in needs)] += count
    for place in range(len(jobs)):  # sums over subsets, one bit after the other
        halves = emptied.reshape(-1, 2, 1 << place)
        halves[:, 1, :] += halves[:, 0, :]
    order = np.lexsort((-emptied, cost))
    record = np.maximum.accumulate(emptied[order])
    better = np.flatnonzero(np.diff(record, prepend=0) > 0)
    return [
        Point(
            int(emptied[chosen]),
            int(cost[chosen]),
            tuple(job for job in jobs if int(chosen) & bit[job]),
        )
        for chosen in order[better]
    ]


def path_points(growth: Growth, wanted: int) -> list[Point]:
    """Good choices of a large part: node by node the least cost per node that it empties."""
    points: list[Point] = []
    while growth.emptied < wanted and growth.step():
        points.append(Point(growth.emptied, growth.weight, tuple(growth.order)))
    return points


class Growth:
    """Jobs that stop one after the other, and which nodes are empty by then."""

    def __init__(
        self, part: Mapping[tuple[int, ...], int], weights: Sequence[int], effort: int
    ) -> None:
        self.effort = effort
        self._needs = list(part)
        self._counts = list(part.values())
        self._weights = weights
        self._missing = [set(needs) for needs in self._needs]
        self._kinds: dict[int, list[int]] = {}
        for kind, needs in enumerate(self._needs):
            for job in needs:
                self._kinds.setdefault(job, []).append(kind)
        self.order: list[int] = []
        self.emptied = 0
        self.weight = 0
        self._heap: list[tuple[float, int]] = []
        for kind in range(len(self._needs)):
            self._offer(kind)

    def step(self) -> bool:
        """Stop the jobs of the node that empties most for its cost; False when all are stopped."""
        while self._heap:
            price, kind = heapq.heappop(self._heap)
            if not self._missing[kind]:
                continue
            present = self._price(kind)
            if present > price:  # it was offered when it was cheaper
                heapq.heappush(self._heap, (present, kind))
                continue
            self._stop(sorted(self._missing[kind]))
            return True
        return False

    def _stop(self, jobs: Iterable[int]) -> None:
        touched: set[int] = set()
        for job in jobs:
            self.order.append(job)
            self.weight += self._weights[job]
            for kind in self._kinds[job]:
                self._missing[kind].discard(job)
                touched.add(kind)
        near: set[int] = set()
        for kind in touched:
            if not self._missing[kind]:
                self.emptied += self._counts[kind]
            elif self.effort > 0:
                near.update(other for job in self._missing[kind] for other in self._kinds[job])
            else:
                near.add(kind)
        for kind in sorted(near):
            self._offer(kind)

    def _offer(self, kind: int) -> None:
        if self._missing[kind]:
            heapq.heappush(self._heap, (self._price(kind), kind))

    def _price(self, kind: int) -> float:
        """Cost per node emptied, of stopping all that is left on a node of this kind."""
        missing = self._missing[kind]
        gain = 0
        if self.effort <= 0:
            gain = self._counts[kind]
        else:
            near = {other for job in missing for other in self._kinds[job]}
            self.effort -= len(near)
            for other in near:
                if self._missing[other] and self._missing[other] <= missing:
                    gain += self._counts[other]
        return sum(self._weights[job] for job in missing) / gain


def _combine(rows: Sequence[Sequence[Point]], wanted: int) -> set[int]:
    """One point or none of each row, at the least cost for at least the wanted nodes."""
    best: NDArray[np.int64] = np.full(wanted + 1, _FAR)
    best[0] = 0
    taken: list[NDArray[np.int16]] = []
    for points in rows:
        before = best.copy()
        took: NDArray[np.int16] = np.full(wanted + 1, -1, dtype=np.int16)
        for place, point in enumerate(points):
            step = min(point.emptied, wanted)
            offered: NDArray[np.int64] = np.full(wanted + 1, point.weight)
            offered[step:] += before[: wanted + 1 - step]
            is_less = offered < best
            best[is_less] = offered[is_less]
            took[is_less] = place
        taken.append(took)
    victims: set[int] = set()
    left = wanted
    for points, took in zip(reversed(rows), reversed(taken), strict=True):
        if left > 0 and took[left] >= 0:
            point = points[int(took[left])]
            victims.update(point.victims)
            left -= point.emptied
    return victims
