"""Finish-time fairness of a finished run: the slow-down of each app against running alone. Pure.

rho = T_shared / T_alone (Themis, NSDI'20, section 3): T_shared is from an app's first submission to
the end of its last job; T_alone is its time on a private share of the cluster, 1/N of the GPUs,
where N is the time-weighted mean number of apps present meanwhile. Above 1 an app was worse off
than with a private share: for it there was no sharing incentive. Both times are on the same nodes.
A private share also pays for one start; stops, moves and restarts are the cost of sharing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter

from msgspec import Struct

from coordinator.engine.state.accounting import quantile

ROUNDING = 1e-6
"""So little above 1 is rounding: instants are sums of many floating-point terms."""

APPS_TOLD = 100
"""Apps of several jobs that a run lists one by one, the worst first."""


class Lived(Struct, frozen=True, kw_only=True):
    """One job that ended, in seconds and GPUs.

    app: its group, distinct from those of other tenants; a job of its own has its own id there.
    alone_gpu_s: GPU-seconds of its work at its base gang, alone.
    gpus: the most that it can use.
    worth: the worth of a number of GPUs to it, in GPUs of its base gang: (GPUs, worth) from the
        base gang to `gpus`, worth never falling. Empty: each GPU is worth one.
    startup_s: the time of an idle cluster from its submission until it computes, and from its end
        until that is known.
    """

    app: str
    submitted_at_s: float
    finished_at_s: float
    alone_gpu_s: float
    gpus: int
    startup_s: float = 0.0
    worth: tuple[tuple[int, float], ...] = ()

    def running_s(self, share: float) -> float:
        """Its running time on a number of private GPUs, as many of them in use as help it.

        On a share below its base gang that gang alternates with idleness; between two worker counts
        it alternates between both.
        """
        if not self.worth:
            return self.alone_gpu_s / min(share, self.gpus)
        high = bisect_left(self.worth, (share, 0.0))
        if high == 0:
            return self.alone_gpu_s / share
        if high == len(self.worth):
            return self.alone_gpu_s / self.worth[-1][1]
        (few, least), (many, most) = self.worth[high - 1], self.worth[high]
        return self.alone_gpu_s / (least + (most - least) * (share - few) / (many - few))

    @property
    def least_gpu_s(self) -> float:
        """GPU-seconds of its work where a GPU is worth most."""
        best = max((worth / gpus for gpus, worth in self.worth), default=1.0)
        return self.alone_gpu_s / best


class FinishTimeFairness(Struct, frozen=True, kw_only=True):
    """rho of all apps; share_above_1 is the part that sharing has cost more than it gave.

    p50, p95: of all apps. apps: how many there were, those of one job included.
    """

    mean: float = 0.0
    max: float = 0.0
    share_above_1: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    apps: int = 0


class AppFairness(Struct, frozen=True, kw_only=True):
    """rho of one app; jobs: its succeeded ones."""

    app: str
    jobs: int
    rho: float


def ratios(jobs: Iterable[Lived], cluster_gpus: int) -> dict[str, float]:
    """rho by app.

    On a private share an app takes as long as the longest of its jobs would there, and no less than
    all their work does on the GPUs of the share. Its first job's start is added. That others of it
    start later on a small share is not counted.
    """
    by_app: dict[str, list[Lived]] = {}
    for job in jobs:
        by_app.setdefault(job.app, []).append(job)
    spans = {
        app: (min([job.submitted_at_s for job in own]), max([job.finished_at_s for job in own]))
        for app, own in by_app.items()
    }
    present = _Present(list(spans.values()))
    found: dict[str, float] = {}
    for app, own in by_app.items():
        begun_s, ended_s = spans[app]
        share = cluster_gpus / present.mean(begun_s, ended_s)
        work_gpu_s = sum([job.least_gpu_s for job in own])
        longest_s = max([job.running_s(share) for job in own])
        first = min(own, key=attrgetter("submitted_at_s"))
        alone_s = first.startup_s + max(work_gpu_s / share, longest_s)
        if alone_s > 0:
            found[app] = (ended_s - begun_s) / alone_s
    return found


def fairness(rhos: Mapping[str, float]) -> FinishTimeFairness:
    """rho over all apps; all zero of none."""
    found = list(rhos.values())
    if not found:
        return FinishTimeFairness()
    return FinishTimeFairness(
        mean=sum(found) / len(found),
        max=max(found),
        share_above_1=sum(rho > 1.0 + ROUNDING for rho in found) / len(found),
        p50=quantile(found, 0.5),
        p95=quantile(found, 0.95),
        apps=len(found),
    )


def of_several_jobs(
    jobs: Iterable[Lived], rhos: Mapping[str, float], most: int = APPS_TOLD
) -> tuple[AppFairness, ...]:
    """The apps of more than one job, the worst first, up to a number."""
    counts = Counter(job.app for job in jobs)
    found = [
        AppFairness(app=app, jobs=counts[app], rho=rho)
        for app, rho in rhos.items()
        if counts[app] > 1
    ]
    found.sort(key=lambda each: (-each.rho, each.app))
    return tuple(found[:most])


class _Present:
    """How many apps are there over time, as a step function and its integral."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        steps: dict[float, int] = {}
        for begun_s, ended_s in spans:
            steps[begun_s] = steps.get(begun_s, 0) + 1
            steps[ended_s] = steps.get(ended_s, 0) - 1
        self._at_s = sorted(steps)
        self._counts = list(accumulate(steps[at_s] for at_s in self._at_s))
        areas = (
            count * (later_s - at_s)
            for count, (at_s, later_s) in zip(self._counts, pairwise(self._at_s), strict=False)
        )
        self._areas = list(accumulate(areas, initial=0.0))

    def _area(self, at_s: float) -> float:
        place = bisect_right(self._at_s, at_s) - 1
        return self._areas[place] + self._counts[place] * (at_s - self._at_s[place])

    def mean(self, begun_s: float, ended_s: float) -> float:
        """Time-weighted mean over a span in which at least one app is there."""
        if ended_s <= begun_s:
            return 1.0
        return max(1.0, (self._area(ended_s) - self._area(begun_s)) / (ended_s - begun_s))
