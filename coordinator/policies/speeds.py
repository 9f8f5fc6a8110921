"""How fast a job goes with so many workers, and for how long: by its profile, else in proportion.

Lyra (EuroSys'23, section 5) takes throughput for linear in workers; its section 8 names measured
curves as the way on. `JobProfile` reads such a curve; here it is put into the units of a GPU type.
Must not know nodes, nor who grows.
"""

from __future__ import annotations

from coordinator.policies.snapshot import JobView


def has_curve(job: JobView, *, trusts_profiles: bool = True) -> bool:
    """Whether it tells how it speeds up, and is believed."""
    return trusts_profiles and bool(job.profile.speedup)


def rate_on(
    job: JobView, gpu_type: str, workers: int, *, trusts_profiles: bool = True
) -> int | float:
    """Worker-seconds of work a second that so many workers of a GPU type do, in workers of that
    type: of a type that needs twice the workers, twice as many do what they did."""
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
    return job.remaining_work_s / best_rate(job, trusts_profiles=trusts_profiles)


def work_on(job: JobView, gpu_type: str, now_s: float) -> float:
    """Worker-seconds left, counted in workers of a GPU type: a type that needs twice the workers
    has twice the worker-seconds."""
    return job.work_left_s(now_s) * job.gpu.worker_multiplier.get(gpu_type, 1)


def runtime_on(job: JobView, gpu_type: str, workers: int, now_s: float) -> float:
    """Running time left with so many workers of a GPU type, in seconds."""
    return work_on(job, gpu_type, now_s) / rate_on(job, gpu_type, workers)


def base_runtime_s(job: JobView, gpu_type: str, now_s: float) -> float:
    """The same with the base gang alone, whatever its profile tells."""
    return work_on(job, gpu_type, now_s) / job.workers_on(gpu_type).min
