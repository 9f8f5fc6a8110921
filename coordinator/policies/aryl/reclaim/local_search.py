"""Local search for a cheaper set of jobs that empties as many nodes. Pure numbers.

It exchanges jobs until no exchange helps. Then it repeatedly removes a few victims and fills the
gap otherwise. Both loops are bounded by steps, never by time. Their only randomness comes from
counters: the same arguments give the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from coordinator.policies.aryl.reclaim.problem import Problem

RUIN_MAX = 10
"""Victims let go at a time, at most."""

_FACTOR, _STEP, _MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1
"""Knuth's linear congruential sequence (TAOCP 2, 3.3.4): even draws, the same everywhere."""


def spare(problem: Problem, victims: Iterable[int]) -> frozenset[int]:
    """The victims without those that are not needed, per node given up the dearest first."""
    tally = Tally(problem, victims)
    heap = [tally.price_of_sparing(job) for job in sorted(tally.victims)]
    heapq.heapify(heap)
    while heap:
        price, job = heapq.heappop(heap)
        if job not in tally.victims:
            continue
        present, _ = tally.price_of_sparing(job)
        if present < price:  # a node of its is not empty any more, so that it is worth less
            heapq.heappush(heap, (present, job))
        elif tally.loss(job) <= tally.emptied - problem.wanted:
            tally.remove(job)
            for kind in tally.kinds[job]:
                for other in problem.needs[kind]:
                    if other in tally.victims:
                        heapq.heappush(heap, tally.price_of_sparing(other))
    return frozenset(tally.victims)


def improve(
    problem: Problem, victims: Iterable[int], *, target: int, effort: int
) -> frozenset[int]:
    """The cheapest set found in a bounded number of steps, never more expensive than `victims`.

    victims: a choice that empties enough. target: a cost that is good enough to stop at.
    """
    tally = Tally(problem, victims)
    _exchange(problem, tally, effort)
    draws = _Draws()
    while tally.weight > target and tally.steps < effort:
        best = (tally.weight, -tally.emptied)
        changes = _ruin(problem, tally, draws)
        is_full = _fill_again(problem, tally, changes, banned=changes[0][0])
        if is_full and (tally.weight, -tally.emptied) <= best:
            continue
        tally.undo(changes)
    return frozenset(tally.victims)


Change = tuple[int, bool]
"""A job, and whether it became a victim or was let go."""


def _exchange(problem: Problem, tally: Tally, effort: int) -> None:
    """Stop all jobs of one more node and spare as many others as can be, while that helps.

    An exchange is kept when it costs less, or as much and empties more nodes.
    """
    kinds = sorted(range(len(problem.needs)), key=lambda kind: (len(problem.needs[kind]), kind))
    is_better = True
    while is_better and tally.steps < effort:
        is_better = False
        for kind in kinds:
            if not tally.lack_weight[kind] or tally.steps >= effort:
                continue
            tally.steps += 10
            before = (tally.weight, -tally.emptied)
            changes = tally.empty(kind)
            tally.spare(changes, kept=frozenset(job for job, _ in changes))
            if (tally.weight, -tally.emptied) < before:
                is_better = True
            else:
                tally.undo(changes)


class _Draws:
    """Even draws that repeat."""

    def __init__(self) -> None:
        self._state = 1

    def below(self, count: int) -> int:
        """A number from 0 up to, not including, count."""
        self._state = (self._state * _FACTOR + _STEP) & _MASK
        return (self._state >> 33) % count


def _ruin(problem: Problem, tally: Tally, draws: _Draws) -> list[Change]:
    """Let some victims go: one by chance, and others near it, then anywhere. At least one."""
    standing = sorted(tally.victims)
    pivot = standing[draws.below(len(standing))]
    wanted = 1 + draws.below(min(RUIN_MAX, len(standing)))
    near = sorted(
        {
            job
            for kind in tally.kinds[pivot]
            for job in problem.needs[kind]
            if job in tally.victims and job != pivot
        }
    )
    tally.steps += 20 + (len(standing) >> 2)
    chosen = {pivot: None}
    while len(chosen) < wanted:
        pool = near if near and draws.below(2) else standing
        chosen.setdefault(pool[draws.below(len(pool))])
        wanted -= pool is near  # near ones may all be chosen already
    changes: list[Change] = []
    for job in chosen:
        tally.remove(job)
        changes.append((job, False))
    return changes


def _fill_again(problem: Problem, tally: Tally, changes: list[Change], *, banned: int) -> bool:
    """Empty nodes, the cheapest first, until enough are, without the banned job; False if none."""
    is_barred = frozenset(tally.kinds[banned])
    while tally.emptied < problem.wanted:
        tally.steps += 5 + (len(problem.needs) >> 1)
        open_kinds = [
            (weight / count, kind)
            for kind, (weight, count) in enumerate(
                zip(tally.lack_weight, problem.counts, strict=True)
            )
            if weight and kind not in is_barred
        ]
        if not open_kinds:
            return False
        changes += tally.empty(min(open_kinds)[1])
    tally.spare(changes)
    return True


class Tally:
    """Victims, and the jobs that each kind of node still lacks; kept up to date change by change.

    lack_weight: per kind, the weight of its jobs that are no victims; 0 when it is empty.
    steps: the cost of all changes so far, in steps.
    """

    def __init__(self, problem: Problem, victims: Iterable[int]) -> None:
        self._problem = problem
        self.kinds: list[list[int]] = [[] for _ in problem.weights]
        for kind, needs in enumerate(problem.needs):
            for job in needs:
                self.kinds[job].append(kind)
        self.lack_weight = [sum(problem.weights[job] for job in needs) for needs in problem.needs]
        self.victims: set[int] = set()
        self.weight = 0
        self.emptied = 0
        self.steps = 0
        self._losses = [0] * len(problem.weights)
        self._by_loss: dict[int, set[int]] = {}
        for job in sorted(set(victims)):
            self.add(job)

    def add(self, job: int) -> None:
        """One more job stops."""
        weight = self._problem.weights[job]
        self.victims.add(job)
        self._by_loss.setdefault(0, set()).add(job)
        self.weight += weight
        self.steps += 3 + 2 * len(self.kinds[job])
        for kind in self.kinds[job]:
            self.lack_weight[kind] -= weight
            if not self.lack_weight[kind]:
                self._count(kind, self._problem.counts[kind])

    def remove(self, job: int) -> None:
        """A job goes on after all."""
        weight = self._problem.weights[job]
        self.weight -= weight
        self.steps += 3 + 2 * len(self.kinds[job])
        for kind in self.kinds[job]:
            if not self.lack_weight[kind]:
                self._count(kind, -self._problem.counts[kind])
            self.lack_weight[kind] += weight
        self.victims.remove(job)
        self._by_loss[self._losses[job]].remove(job)

    def _count(self, kind: int, nodes: int) -> None:
        self.emptied += nodes
        needs = self._problem.needs[kind]
        self.steps += 2 + 4 * len(needs)
        for job in needs:
            loss = self._losses[job]
            self._by_loss[loss].remove(job)
            self._losses[job] = loss + nodes
            self._by_loss.setdefault(loss + nodes, set()).add(job)

    def loss(self, job: int) -> int:
        """Nodes that are empty only with this victim."""
        return self._losses[job]

    def price_of_sparing(self, job: int) -> tuple[float, int]:
        """Nodes given up per cost saved, and the job."""
        return self._losses[job] / self._problem.weights[job], job

    def empty(self, kind: int) -> list[Change]:
        """Stop all jobs of a node."""
        changes = [(job, True) for job in self._problem.needs[kind] if job not in self.victims]
        for job, _ in changes:
            self.add(job)
        return changes

    def spare(
        self, changes: list[Change] | None = None, *, kept: frozenset[int] = frozenset()
    ) -> None:
        """Spare victims that the wanted nodes do not need; per node given up the most expensive
        first.

        changes: spared victims are added to it.
        """
        while True:
            surplus = self.emptied - self._problem.wanted
            loose = [
                (loss / self._problem.weights[job], job)
                for loss, jobs in self._by_loss.items()
                if loss <= surplus
                for job in jobs
                if job not in kept
            ]
            self.steps += 6 + 2 * len(self._by_loss) + 2 * len(loose)
            if not loose:
                return
            job = min(loose)[1]
            self.remove(job)
            if changes is not None:
                changes.append((job, False))

    def undo(self, changes: Iterable[Change]) -> None:
        """Take changes back, the last first."""
        for job, was_added in reversed(list(changes)):
            if was_added:
                self.remove(job)
            else:
                self.add(job)
