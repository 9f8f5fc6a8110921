"""The multiple-choice knapsack of flexible demand. Pure numbers.

Lyra, EuroSys'23, section 5.2: one group per elastic job; item k is k flexible workers, with weight
k * GPUs per worker and value the running time that they save; at most one item per group. Beyond
the paper, a group may have measured rates instead of linear ones, which may rise and fall.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import gcd

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

EXACT_CELLS_MAX = 2_000_000
"""Items times capacity above which the greedy answer is taken; some 5 ms of one core."""


class Group(Struct, frozen=True, kw_only=True):
    """The flexible demand of one elastic job.

    work_s: worker-seconds left, in workers of the GPU type it runs on.
    current: flexible workers it has now; each one more or less costs `change_cost_s`, and a
        change by any number `resize_cost_s`, in seconds.
    weight: how much a second of its running time counts; above 1 where others wait for its end.
    rates: worker-seconds of work a second with the base and k flexible workers, for each k from 0
        to `extra_max` at least; empty: in proportion to the workers, as in the paper.
    """

    work_s: float
    base_workers: int
    extra_max: int
    gpus_per_worker: int
    current: int = 0
    change_cost_s: float = 0.0
    resize_cost_s: float = 0.0
    weight: float = 1.0
    rates: tuple[float, ...] = ()

    @property
    def is_curved(self) -> bool:
        """Whether its gains may rise from worker to worker; else each one more brings less."""
        return bool(self.rates) or self.resize_cost_s > 0.0

    def value_s(self, extra: int) -> float:
        """Seconds of running time, by weight, that `extra` workers save, less what the change
        costs."""
        if self.rates:
            saved_s = self.work_s / self.rates[0] - self.work_s / self.rates[extra]
        else:
            saved_s = jct_reduction_s(self.work_s, self.base_workers, extra)
        cost_s = self.change_cost_s * abs(extra - self.current)
        if self.resize_cost_s and extra != self.current:
            cost_s += self.resize_cost_s
        return self.weight * saved_s - cost_s

    def best(self, low: int, high: int) -> int:
        """The fewest flexible workers from `low` to `high` that are worth as much as any."""
        return max(range(low, high + 1), key=lambda extra: (self.value_s(extra), -extra))


def jct_reduction_s(work_s: float, base_workers: int, extra: int) -> float:
    """Running time at the base gang less that with `extra` workers more (section 5.2, figure 6).

    Throughput is linear in workers, as in the paper: R / w_min - R / (w_min + k).
    """
    return work_s / base_workers - work_s / (base_workers + extra)


def solve(
    groups: Sequence[Group], capacity_gpus: int, *, cells_max: int = EXACT_CELLS_MAX
) -> tuple[int, ...]:
    """Flexible workers per group: exact while the table is small, else greedy."""
    weight = sum(group.extra_max * group.gpus_per_worker for group in groups)
    if weight <= capacity_gpus:
        return tuple([_best_alone(group) for group in groups])  # nothing competes
    cells = sum(group.extra_max for group in groups) * capacity_gpus
    return (solve_exact if cells <= cells_max else solve_greedy)(groups, capacity_gpus)


def _best_alone(group: Group) -> int:
    """The size that a group climbs to with room for all, by the steps of `solve_greedy`."""
    if group.is_curved:
        return solve_greedy([group], group.extra_max * group.gpus_per_worker)[0]
    count, value_s = 0, group.value_s(0)
    while count < group.extra_max:
        more_s = group.value_s(count + 1)
        if more_s - value_s <= 0:
            break  # gains fall with each worker
        count, value_s = count + 1, more_s
    return count


def solve_exact(groups: Sequence[Group], capacity_gpus: int) -> tuple[int, ...]:
    """Best choice by dynamic programming, O(items * capacity); among equals the fewest workers."""
    if not groups:
        return ()
    unit = gcd(*(group.gpus_per_worker for group in groups))
    capacity = max(0, capacity_gpus // unit)
    best: NDArray[np.float64] = np.zeros(capacity + 1)
    choices: list[NDArray[np.int32]] = []
    for group in groups:
        before = best
        best = before + group.value_s(0)
        choice: NDArray[np.int32] = np.zeros(capacity + 1, dtype=np.int32)
        size = group.gpus_per_worker // unit
        for extra in range(1, min(group.extra_max, capacity // size) + 1):
            weight = extra * size
            candidate = before[: capacity + 1 - weight] + group.value_s(extra)
            is_better = candidate > best[weight:]
            best[weight:][is_better] = candidate[is_better]
            choice[weight:][is_better] = extra
        choices.append(choice)
    left = capacity
    answer: list[int] = []
    for group, choice in zip(reversed(groups), reversed(choices), strict=True):
        extra = int(choice[left])
        answer.append(extra)
        left -= extra * (group.gpus_per_worker // unit)
    return tuple(reversed(answer))


def solve_greedy(groups: Sequence[Group], capacity_gpus: int) -> tuple[int, ...]:
    """Step by step to the largest gain per GPU; a step is one worker where rates are linear.

    Gains fall with each step of a job, so this is the relaxation rounded down: it misses less
    than the one step that no longer fitted.
    """
    answer = [0] * len(groups)
    left = [capacity_gpus]

    def take(index: int, more: int) -> bool:
        group, count = groups[index], answer[index]
        fitting = min(more, left[0] // group.gpus_per_worker)
        if fitting and group.is_curved:
            fitting = group.best(count, count + fitting) - count
        left[0] -= fitting * group.gpus_per_worker
        answer[index] += fitting
        return fitting == more

    climb(groups, answer, take)
    return tuple(answer)


def climb(groups: Sequence[Group], counts: list[int], take: Callable[[int, int], bool]) -> None:
    """Offer workers to the group with the largest gain per GPU, one at a time where rates are
    linear, else as many as `ladder` has for a step.

    `take(index, more)` gives that number of workers, or as many of them as fit and help, and
    changes `counts[index]`. It returns whether it gave all; else that group is offered no more.
    """
    heap: list[tuple[float, int, int]] = []
    ladders = {
        index: ladder(group, counts[index])[::-1]
        for index, group in enumerate(groups)
        if group.is_curved
    }

    def offer(index: int) -> None:
        group, count = groups[index], counts[index]
        steps = ladders.get(index)
        if count >= group.extra_max or steps == []:
            return
        more = 1 if steps is None else steps.pop() - count
        gain_s = group.value_s(count + more) - group.value_s(count)
        if gain_s > 0:
            heapq.heappush(heap, (-gain_s / (more * group.gpus_per_worker), index, more))

    for index in range(len(groups)):
        offer(index)
    while heap:
        _, index, more = heapq.heappop(heap)
        if take(index, more):
            offer(index)


def ladder(group: Group, count: int) -> list[int]:
    """The counts above `count` by which a group climbs to its best one, the lowest first.

    They are the corners of the least concave curve above its values: from each one on no other
    step gains more for a worker, and gains for a worker fall from step to step. So a size in a dip
    of the rates is stepped over, and no size beyond the best one is ever offered.
    """
    top = group.best(count, max(count, group.extra_max))
    values_s = [group.value_s(extra) for extra in range(count, top + 1)]
    corners: list[int] = []
    for extra in range(top - count + 1):
        while len(corners) > 1 and _is_below(values_s, corners[-2], corners[-1], extra):
            corners.pop()
        corners.append(extra)
    return [count + extra for extra in corners[1:]]


def _is_below(values_s: Sequence[float], low: int, middle: int, high: int) -> bool:
    """Whether the middle value is below the line through the other two."""
    rise_s = (values_s[high] - values_s[low]) * (middle - low)
    return (values_s[middle] - values_s[low]) * (high - low) < rise_s
