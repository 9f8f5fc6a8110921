"""Estimates: their sources and error bounds, and the speed of a job by worker count.

The engine names its sources by this enumeration, with details behind them, and policies ask here. A
new source therefore counts as a guess until this module lists it.

Lyra (EuroSys'23, section 5) takes throughput as linear in workers; its section 8 names measured
curves as future work. `JobProfile` reads this curve. This module converts it to the units of a
GPU type; without a profile, speed is proportional to workers.
"""

from __future__ import annotations

from enum import StrEnum

from common.model import JobId
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView


def has_curve(job: JobView, *, trusts_profiles: bool = True) -> bool:
    """Whether it states how it speeds up, and is believed."""
    return trusts_profiles and bool(job.profile.speedup)


def rate_on(
    job: JobView, gpu_type: str, workers: int, *, trusts_profiles: bool = True
) -> int | float:
    """Worker-seconds of work per second of a number of workers of a GPU type, in workers of that
    type: of a type that needs twice the workers, twice as many do the same work.
    """
    if not has_curve(job, trusts_profiles=trusts_profiles):
        return workers
    factor = job.gpu.worker_multiplier.get(gpu_type, 1)
    return factor * job.profile.rate(workers / factor, base=job.workers.min)


def best_rate(job: JobView, *, trusts_profiles: bool = True) -> int | float:
    """Worker-seconds of work a second at its best size, in workers of the reference type."""
    span = job.workers
    if not has_curve(job, trusts_profiles=trusts_profiles):
        return span.max
    return job.rate(job.profile.fastest(span.min, span.max))


def fastest_s(job: JobView, *, trusts_profiles: bool = True) -> float:
    """Running time of a waiting job at its best size, on any GPU type."""
    return job.estimate.remaining_work_s / best_rate(job, trusts_profiles=trusts_profiles)


def work_on(job: JobView, gpu_type: str, now_s: float) -> float:
    """Worker-seconds left, counted in workers of a GPU type: a type that needs twice the workers
    has twice the worker-seconds."""
    return job.work_left_s(now_s) * job.gpu.worker_multiplier.get(gpu_type, 1)


def runtime_on(job: JobView, gpu_type: str, workers: int, now_s: float) -> float:
    """Running time left with this number of workers of a GPU type, in seconds."""
    return work_on(job, gpu_type, now_s) / rate_on(job, gpu_type, workers)


def base_runtime_s(job: JobView, gpu_type: str, now_s: float) -> float:
    """The same with the base gang alone, whatever its profile states."""
    return work_on(job, gpu_type, now_s) / job.workers_on(gpu_type).min


class Source(StrEnum):
    """The word or words that an estimate's source begins with, best known first."""

    LIVE = "live progress"
    PRERUN = "length of its pre-run"
    """A limit that the engine keeps."""
    EARLIER = "progress of an earlier attempt"
    DECLARED = "declared"
    HISTORY = "history"
    """From jobs of the same tenant, name and command."""
    SIZE = "median"
    """From other jobs of the size: a guess."""
    OUTLIVED = "an earlier attempt that outlived the estimate"
    """A guess: how much longer it takes is not known."""
    LEDGER = "recovered from a node's ledger"
    """The work done before is not known: a guess."""
    DEFAULT = "default"
    """A guess."""


LATE_RATIOS = {
    Source.LIVE: 1.25,
    Source.PRERUN: 1.0,
    Source.EARLIER: 1.5,
    Source.DECLARED: 1.5,
    Source.HISTORY: 2.0,
}
"""How many times its estimate a job may take and still be waited for, by the estimate's source. An
earlier attempt was measured, but may have had another GPU type. A source that is not named here
is a guess, and no reclaim waits for it.
"""


def late_ratio(source: str) -> float | None:
    """How many times its estimate a job may take; None: the estimate is a guess.

    Args:
        source: what `EstimateView.source` says; words that are no source are a guess.
    """
    for known, ratio in LATE_RATIOS.items():
        if source.startswith(known):
            return ratio
    return None


def ends_at_s(snapshot: ClusterSnapshot, *, trusts_profiles: bool = True) -> dict[JobId, float]:
    """When the jobs that run will be over, as they run now: each by the workers that stay, at its
    base gang at least."""
    found: dict[JobId, float] = {}
    for job in snapshot.jobs:
        if job.gpu_type is not None:
            staying = sum(not worker.is_leaving for worker in job.placed)
            workers = max(job.workers_on(job.gpu_type).min, staying)
            rate = rate_on(job, job.gpu_type, workers, trusts_profiles=trusts_profiles)
            found[job.job_id] = snapshot.now_s + work_on(job, job.gpu_type, snapshot.now_s) / rate
    return found
