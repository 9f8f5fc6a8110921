"""The largest worker count of a job that the fleet could hold. Pure.

A submitter chooses `workers.max` and the length of a speed-up table, and a policy iterates over
these counts. Policies therefore see a job no larger than the GPUs of the fleet: a job of 1:100000
workers costs a cell of 8 GPUs as much as one of 1:8. Every node of the cell counts, with all its
GPUs and in any role, so a job never looks smaller than it could become.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from common.model import WHOLE_GPU, GpuRequest, WorkerRange, is_mig
from common.profile import JobProfile
from coordinator.engine.state.tables import JobEntry, NodeEntry

FleetGpus = Mapping[str, int]
"""GPUs of all nodes of the cell, by type."""


def fleet_gpus(nodes: Iterable[NodeEntry]) -> dict[str, int]:
    """The GPUs of these nodes by type; a node without GPUs has no entry."""
    found: dict[str, int] = {}
    for node in nodes:
        for kind in node.gpu_types if node.gpus else ():
            found[kind] = found.get(kind, 0) + node.count_of(kind)
    return found


class Reach(NamedTuple):
    """The worker range of one gang, cut to the fleet.

    workers: in workers of the reference type. most_on: per GPU type the most workers, for each type
    on which the fleet holds fewer than the range and its multiplier allow.
    """

    workers: WorkerRange
    most_on: Mapping[str, int]


_NO_LIMITS: dict[str, int] = {}


def _reach(
    fleet: FleetGpus,
    workers: WorkerRange,
    gpus_per_worker: int,
    gpu: GpuRequest,
    *,
    present: int = 0,
) -> Reach:
    if workers.max <= workers.min + 1:
        return Reach(workers, _NO_LIMITS)  # so of most jobs: nothing can be cut
    factors, spans = gpu.worker_multiplier, gpu.heterogeneous_speed_ratio > 0
    held = {
        gpu_type: gpus // gpus_per_worker
        for gpu_type, gpus in fleet.items()
        if gpu.accepts(gpu_type)
    }
    counts = [-(-count // factors.get(name, 1)) for name, count in held.items()]
    most = max(workers.min + 1, present, sum(counts) if spans else max(counts, default=0))
    cut = WorkerRange(min=workers.min, max=most) if most < workers.max else workers
    most_on = _NO_LIMITS
    for name, count in held.items() if not spans else ():  # otherwise other types count as well
        factor = factors.get(name, 1)
        least = max(factor * workers.min + 1, present, count)
        if least < factor * cut.max:
            most_on = {**most_on, name: least}
    return Reach(cut, most_on)


def whole_only(fleet: FleetGpus, gpu: GpuRequest) -> GpuRequest:
    """A job's GPU types as policies see them: "any GPU" means any whole one, if there are MIG
    parts.
    """
    if gpu.types or not any(map(is_mig, fleet)):
        return gpu
    whole = tuple(sorted(kind for kind in fleet if not is_mig(kind)))
    return replace(gpu, types=whole or (WHOLE_GPU,))


def reach_of(fleet: FleetGpus, job: JobEntry) -> Reach:
    """The present reach of a job. An elastic job stays elastic, and keeps its workers."""
    spec, present = job.spec, len(job.workers)
    workers = spec.workers if present <= spec.workers.max else _present(job)
    return _reach(fleet, workers, spec.gpus_per_worker, spec.gpu, present=present)


def _present(job: JobEntry) -> WorkerRange:
    """The range of a job up to its present workers: a person may have lowered its maximum."""
    workers, kind = job.spec.workers, job.attempt.gpu_type or ""
    if len(job.workers) <= job.spec.workers_on(kind).max:
        return workers
    factor = job.spec.gpu.worker_multiplier.get(kind, 1)
    return replace(workers, max=-(-len(job.workers) // factor))


def reach_behind(fleet: FleetGpus, job: JobEntry) -> WorkerRange | None:
    """The range of the gang behind a pre-run; None without one."""
    gang = job.spec.prerun.gang
    if gang is None:
        return None
    return _reach(fleet, gang.workers, gang.gpus_per_worker, job.spec.gpu).workers


def is_other(before: FleetGpus, now: FleetGpus, job: JobEntry) -> bool:
    """True if two fleets show a job differently."""
    gpu = job.spec.gpu
    if whole_only(before, gpu) != whole_only(now, gpu):
        return True
    return reach_of(before, job) != reach_of(now, job) or (
        reach_behind(before, job) != reach_behind(now, job)
    )


def shortened(profile: JobProfile, most: int) -> JobProfile:
    """The profile without points that no size up to `most` asks for.

    The first point at or above `most` stays: sizes below it lie on the line to it.
    """
    points = profile.speedup
    kept = bisect_left(points, most, key=lambda point: point[0]) + 1
    return profile if kept >= len(points) else replace(profile, speedup=points[:kept])
