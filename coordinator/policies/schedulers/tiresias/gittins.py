"""Gittins indices of jobs, from a history of whole services.

The index of a job that has attained a service `a` is the best rate at which it may end per
GPU-second invested, over all investments (Tiresias, NSDI'19, section 3.2.3 and pseudocode 1):

    G(a) = sup over D > 0 of  P(S - a <= D | S > a) / E[min(S - a, D) | S > a]

With samples d_1 <= ... <= d_n for S the supremum is at some D = d_j - a. Let i samples be at most
a, N_j samples at most d_j, and C(t) = sum of min(d, t) over all samples; then the ratio at d_j is

    (N_j - i) / (C(d_j) - C(a)),

the slope from the point (C(a), i) to the point (C(d_j), N_j), and the supremum is the slope of the
tangent to the upper hull of the points that lie ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from msgspec import Struct

LEAST_GPU_S = 1e-6


class GittinsTable(Struct, frozen=True, kw_only=True):
    """A history, ready to be asked.

    ends: the different services, ascending. counts: samples up to each. costs: C at each.
    sums: sum of the samples up to each. nexts: the next point of the upper hull that begins at
    each; itself at the last.
    """

    ends: tuple[float, ...]
    counts: tuple[int, ...]
    sums: tuple[float, ...]
    costs: tuple[float, ...]
    nexts: tuple[int, ...]

    def index(self, attained_gpu_s: float) -> float:
        """The index of a job with that service, in 1/GPU-s; 0 beyond all that was ever seen."""
        at = bisect_right(self.ends, attained_gpu_s)
        if at == len(self.ends):
            return 0.0
        seen = self.counts[at - 1] if at else 0
        total = self.sums[at - 1] if at else 0.0
        cost = total + attained_gpu_s * (self.counts[-1] - seen)
        best = self._slope(cost, seen, at)
        while self.nexts[at] != at:
            ahead = self._slope(cost, seen, self.nexts[at])
            if ahead < best:
                break
            at, best = self.nexts[at], ahead
        return best

    def _slope(self, cost: float, seen: int, at: int) -> float:
        # At the very end of a sample rounding may leave no remaining cost.
        return (self.counts[at] - seen) / max(self.costs[at] - cost, LEAST_GPU_S)

    def static_index(self, attained_gpu_s: float, delta_gpu_s: float) -> float:
        """The index as the public Tiresias simulator estimates it, in 1/GPU-s.

        It looks a fixed D ahead and does not subtract the age from what the samples that end
        within D will have cost: P / mean of (d where d <= a + D, else D).
        """
        at = bisect_right(self.ends, attained_gpu_s)
        if at == len(self.ends):
            return 0.0
        until = bisect_right(self.ends, attained_gpu_s + delta_gpu_s)
        seen = self.counts[at - 1] if at else 0
        total = self.sums[at - 1] if at else 0.0
        ended, spent = (self.counts[until - 1], self.sums[until - 1]) if until else (0, 0.0)
        if ended <= seen:
            return 0.0
        cost = spent - total + delta_gpu_s * (self.counts[-1] - ended)
        return (ended - seen) / cost


@lru_cache(maxsize=4)
def gittins_table(services_gpu_s: tuple[float, ...]) -> GittinsTable:
    """A table of services of whole jobs, each above 0, in any order."""
    samples = sorted(services_gpu_s)
    totals = list(accumulate(samples))
    lasts = [
        place
        for place, sample in enumerate(samples)
        if place + 1 == len(samples) or samples[place + 1] > sample
    ]
    ends = tuple(samples[place] for place in lasts)
    counts = tuple(place + 1 for place in lasts)
    sums = tuple(totals[place] for place in lasts)
    costs = tuple(
        spent + end * (len(samples) - count)
        for spent, end, count in zip(sums, ends, counts, strict=True)
    )
    return GittinsTable(
        ends=ends, counts=counts, sums=sums, costs=costs, nexts=_hull(costs, counts)
    )


def _hull(costs: Sequence[float], counts: Sequence[int]) -> tuple[int, ...]:
    """The successor of each point on the upper hull of it and all that follow."""
    nexts = list(range(len(costs)))
    for at in range(len(costs) - 2, -1, -1):
        ahead = at + 1
        while nexts[ahead] != ahead:
            further = nexts[ahead]
            rise = (counts[further] - counts[at]) * (costs[ahead] - costs[at])
            if rise < (counts[ahead] - counts[at]) * (costs[further] - costs[at]):
                break
            ahead = further
        nexts[at] = ahead
    return tuple(nexts)
