"""Finish-time fairness of a run that is over: how much slower each app was than alone. Pure.

rho = T_shared / T_alone (Themis, NSDI'20, section 3): T_shared is from an app's first submission to
the end of its last job; T_alone is how long it would have taken on a share of the cluster of its
own, 1/N of the GPUs, where N is the time-weighted mean number of apps that were there meanwhile.
Above 1 an app was worse off than with a private share. Must not know policies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from msgspec import Struct


class Lived(Struct, frozen=True, kw_only=True):
    """One job that ended, in seconds and GPUs.

    app: its group; a job of its own has its own id there.
    alone_gpu_s: GPU-seconds of its work at its base gang, alone.
    gpus: the most that it can use.
    """

    app: str
    submitted_at_s: float
    finished_at_s: float
    alone_gpu_s: float
    gpus: int


class FinishTimeFairness(Struct, frozen=True, kw_only=True):
    """Of all apps; share_above_1 is the part that sharing has cost more than it gave."""

    mean: float = 0.0
    max: float = 0.0
    share_above_1: float = 0.0


def ratios(jobs: Iterable[Lived], cluster_gpus: int) -> dict[str, float]:
    """rho by app.

    With a share below what its jobs can use, an app's work takes longer in proportion; with a
    larger one it is bound by what they can use, and by the longest of them.
    """
    by_app: dict[str, list[Lived]] = {}
    for job in jobs:
        by_app.setdefault(job.app, []).append(job)
    spans = {
        app: (min(job.submitted_at_s for job in own), max(job.finished_at_s for job in own))
        for app, own in by_app.items()
    }
    present = _Present(list(spans.values()))
    found: dict[str, float] = {}
    for app, own in by_app.items():
        begun_s, ended_s = spans[app]
        share = cluster_gpus / present.mean(begun_s, ended_s)
        work_gpu_s = sum(job.alone_gpu_s for job in own)
        usable = min(share, sum(job.gpus for job in own))
        longest_s = max(job.alone_gpu_s / min(share, job.gpus) for job in own)
        alone_s = max(work_gpu_s / usable, longest_s)
        if alone_s > 0:
            found[app] = (ended_s - begun_s) / alone_s
    return found


def fairness(jobs: Iterable[Lived], cluster_gpus: int) -> FinishTimeFairness:
    """rho over all apps; all zero of none."""
    found = list(ratios(jobs, cluster_gpus).values())
    if not found:
        return FinishTimeFairness()
    return FinishTimeFairness(
        mean=sum(found) / len(found),
        max=max(found),
        share_above_1=sum(rho > 1.0 for rho in found) / len(found),
    )


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
