"""The multiple-choice knapsack of flexible demand, pure numbers. Must not know jobs or nodes.

Lyra, EuroSys'23, section 5.2: one group per elastic job, item k is k flexible workers, weight
k * GPUs per worker, value the running time that they save; at most one item per group.
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
    current: flexible workers it has now; each one more or less costs `change_cost_s`.
    weight: how much a second of its running time counts; above 1 where others wait for its end.
    """

    work_s: float
    base_workers: int
    extra_max: int
    gpus_per_worker: int
    current: int = 0
    change_cost_s: float = 0.0
    weight: float = 1.0

    def value_s(self, extra: int) -> float:
        """Seconds of running time, by weight, that `extra` workers save, less what the change
        costs."""
        saved_s = jct_reduction_s(self.work_s, self.base_workers, extra)
        return self.weight * saved_s - self.change_cost_s * abs(extra - self.current)


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
        return solve_greedy(groups, capacity_gpus)  # nothing competes: greedy is exact
    cells = sum(group.extra_max for group in groups) * capacity_gpus
    return (solve_exact if cells <= cells_max else solve_greedy)(groups, capacity_gpus)


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
    """Worker by worker to the largest gain per GPU.

    Gains fall with each worker of a job, so this is the relaxation rounded down: it misses less
    than the one worker that no longer fitted.
    """
    answer = [0] * len(groups)
    left = [capacity_gpus]

    def take(index: int) -> bool:
        size = groups[index].gpus_per_worker
        if size > left[0]:
            return False
        left[0] -= size
        answer[index] += 1
        return True

    climb(groups, answer, take)
    return tuple(answer)


def climb(groups: Sequence[Group], counts: list[int], take: Callable[[int], bool]) -> None:
    """Offer one worker at a time to the group with the largest gain per GPU.

    `take(index)` gives a worker, changing `counts[index]`, or says that none fits; that group is
    then offered no more.
    """
    heap: list[tuple[float, int]] = []

    def offer(index: int) -> None:
        group, count = groups[index], counts[index]
        if count >= group.extra_max:
            return
        gain_s = group.value_s(count + 1) - group.value_s(count)
        if gain_s > 0:
            heapq.heappush(heap, (-gain_s / group.gpus_per_worker, index))

    for index in range(len(groups)):
        offer(index)
    while heap:
        _, index = heapq.heappop(heap)
        if take(index):
            offer(index)
