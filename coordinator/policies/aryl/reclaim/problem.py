"""The reclaim problem as numbers: sets of jobs that must stop to empty nodes.

A node is empty when all its base jobs stop. The problem asks for the cheapest set of jobs that
empties the wanted number of nodes. Each job counts once, however many nodes it is on (Lyra,
EuroSys'23, section 4: a knapsack with dependent values, NP-hard).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

_LARGEST = 1 << 40
"""A cost above this counts as this: 35,000 GPU-years."""

_PRICES_MAX = 1 << 34
"""Prices beside priorities add up to about this at most, in units of more than a GPU-second if they
must."""

_SUM_MAX = 1 << 52
"""The total of priorities and prices is below this, so that ties can still be distinguished."""


class Problem(Struct, frozen=True, kw_only=True):
    """Kinds of nodes and the jobs on them, by number.

    needs: per kind the jobs that must stop, sorted, at least one; no two kinds are alike.
    counts: nodes of each kind. weights: what each job costs, at least 1.
    wanted: nodes to empty, at least 1 and at most all.
    """

    needs: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    weights: tuple[int, ...]
    wanted: int

    def emptied(self, victims: Collection[int]) -> int:
        """Nodes that are empty when these jobs stop."""
        gone = frozenset(victims)
        return sum(
            count
            for needs, count in zip(self.needs, self.counts, strict=True)
            if gone.issuperset(needs)
        )

    def weight(self, victims: Iterable[int]) -> int:
        """The cost of stopping these jobs."""
        return sum(self.weights[job] for job in victims)


class Merged(Struct, frozen=True, kw_only=True):
    """A problem in which jobs that are only ever of use together are one."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]
    """Per job of the problem: the jobs that it stands for."""

    def spread(self, victims: Iterable[int]) -> set[int]:
        """The jobs behind jobs of the merged problem."""
        return {job for victim in victims for job in self.members[victim]}

    def gather(self, victims: Iterable[int]) -> frozenset[int]:
        """Jobs of the merged problem all of whose members are among these."""
        chosen = frozenset(victims)
        return frozenset(
            number for number, jobs in enumerate(self.members) if chosen.issuperset(jobs)
        )


def merge(nodes: Sequence[Sequence[int]], weights: Sequence[int], wanted: int) -> Merged:
    """A problem from the base jobs of each node that has any; equal jobs and equal nodes are one.

    The answer does not depend on the order of `nodes`.
    """
    hosts: dict[int, list[int]] = {}
    for place, held in enumerate(nodes):
        for job in sorted(set(held)):
            hosts.setdefault(job, []).append(place)
    alike: dict[tuple[int, ...], list[int]] = {}
    for job in sorted(hosts):
        alike.setdefault(tuple(hosts[job]), []).append(job)
    members = tuple(tuple(jobs) for jobs in alike.values())
    number = {job: new for new, jobs in enumerate(members) for job in jobs}
    kinds: dict[tuple[int, ...], int] = {}
    for held in nodes:
        needs = tuple(sorted({number[job] for job in held}))
        kinds[needs] = kinds.get(needs, 0) + 1
    ordered = sorted(kinds)
    problem = Problem(
        needs=tuple(ordered),
        counts=tuple(kinds[needs] for needs in ordered),
        weights=tuple(sum(weights[job] for job in jobs) for jobs in members),
        wanted=wanted,
    )
    return Merged(problem=problem, members=members)


def parts(needs: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Kinds that share no job with those of another part, as indices into `needs`, in order."""
    root: dict[int, int] = {}

    def find(job: int) -> int:
        while root.setdefault(job, job) != job:
            root[job] = root[root[job]]
            job = root[job]
        return job

    for jobs in needs:
        first = find(jobs[0])
        for job in jobs[1:]:
            root[find(job)] = first
    found: dict[int, list[int]] = {}
    for kind, jobs in enumerate(needs):
        found.setdefault(find(jobs[0]), []).append(kind)
    return list(found.values())


def by_priority(prices: Sequence[int], priorities: Sequence[int]) -> list[int]:
    """Whole numbers whose sums compare by priority, then by the sum of `prices`.

    Of two sets of jobs the one is less that has fewer of the highest priority in which they differ.
    Where priorities are alike they are the prices. Their sum is below 2 ** 52: where priorities are
    too many for that, some next to each other count as one.

    Args:
        prices: of each job, at least 1.
        priorities: of each job.
    """
    levels = sorted(set(priorities))
    if len(levels) < 2:
        return list(prices)
    cut = max(1, -(-sum(prices) // _PRICES_MAX))  # the GPU-seconds that count as one unit
    priced = [-(-price // cut) for price in prices]
    while True:
        at_level = [bisect_right(levels, each) - 1 for each in priorities]
        steps, step = [0], sum(priced) + 1
        for at in range(1, len(levels)):
            steps.append(step)
            step *= at_level.count(at) + 1
        if step < _SUM_MAX or len(levels) == 2:
            return [steps[at] + price for at, price in zip(at_level, priced, strict=True)]
        del levels[1]


def lexical_weights(
    first: Sequence[int], second: Sequence[float], *, largest: int = _LARGEST
) -> tuple[tuple[int, ...], int]:
    """Whole numbers whose sums compare by the sum of `first`, then by the sum of `second`.

    Their sum is below 2 ** 60, so that arrays can hold it; with very large costs `second` is
    distinguished less finely.

    Returns:
        The weights, and the unit that stands for 1 of `first`; all of `second` together is less
        than a sixty-fourth of it.
    """
    capped = [min(whole, largest) for whole in first]
    unit = 1 << max(6, min(32, 59 - sum(capped).bit_length()))
    scale = (unit >> 6) / (sum(second) or 1.0)
    weights = (whole * unit + int(part * scale) for whole, part in zip(capped, second, strict=True))
    return tuple(weights), unit
