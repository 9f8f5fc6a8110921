"""Waiting time by pending reason and gang size, as in the Philly study (ATC'19, table 2)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from coordinator.engine.state.tables import JobEntry

SIZES = ((1, "1"), (4, "2-4"), (8, "5-8"))
LARGEST = ">8"


class WaitFigures(Struct, frozen=True, kw_only=True):
    """One kind of waiting of the jobs of one size.

    jobs: that waited longest for this; those that waited for nothing are not counted.
    jobs_ratio: of the jobs of this size that waited for anything. waited_s: seconds of all jobs.
    """

    jobs: int
    jobs_ratio: float
    waited_s: float


Waits = dict[str, dict[str, WaitFigures]]
"""By GPUs of the gang (1, 2-4, 5-8, >8) and kind."""


def waits_by_size(jobs: Iterable[JobEntry]) -> Waits:
    """Waiting time by pending reason; empty where no policy reported it."""
    sizes = [name for _, name in SIZES] + [LARGEST]
    counts: dict[str, dict[str, int]] = {size: {} for size in sizes}
    sums_s: dict[str, dict[str, float]] = {size: {} for size in sizes}
    for job in jobs:
        size, spent = _size(job.spec.base_demand_gpus), job.wait.spent_s
        for kind, spent_s in spent.items():
            sums_s[size][kind] = sums_s[size].get(kind, 0.0) + spent_s
        if any(spent.values()):
            most = max(sorted(spent), key=lambda kind: spent[kind])
            counts[size][most] = counts[size].get(most, 0) + 1
    return {
        size: {
            kind: WaitFigures(
                jobs=counts[size].get(kind, 0),
                jobs_ratio=counts[size].get(kind, 0) / max(1, sum(counts[size].values())),
                waited_s=waited_s,
            )
            for kind, waited_s in sorted(sums_s[size].items())
        }
        for size in sizes
        if sums_s[size]
    }


def _size(gpus: int) -> str:
    return next((name for most, name in SIZES if gpus <= most), LARGEST)
