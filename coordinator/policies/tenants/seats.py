"""Gangs that have GPUs together, so that these come free only with all of them. Knows no policy.

Must not know whose they are, nor why they would leave.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from common.model import GpuUuid, JobId, NodeName
from coordinator.policies.decisions import Decision, Resume, Start, Suspend
from coordinator.policies.snapshot import JobView, WorkerView
from coordinator.policies.tenants.flow import Left


class Seat(Struct, frozen=True, kw_only=True):
    """A job that has GPUs, and whoever has any of the same, directly or through others."""

    jobs: tuple[JobView, ...]

    @property
    def uuids(self) -> set[GpuUuid]:
        """All their GPUs that have a name, and those that are held for them."""
        return {uuid for job in self.jobs for worker in having(job) for uuid in worker.gpu_uuids}

    def is_about(self, decision: Decision) -> bool:
        """Whether a decision is a turn on it: of one of its jobs, or of one that would join."""
        match decision:
            case Suspend() | Resume():
                return any(job.job_id == decision.job_id for job in self.jobs)
            case Start():
                named = (u for placement in decision.placements for u in placement.gpu_uuids)
                return not self.uuids.isdisjoint(named)
            case _:
                return False


def seats(jobs: Iterable[JobView]) -> list[Seat]:
    """The jobs that have GPUs, by seat, in the order given; each has its own where nobody shares.

    A job that moves is on the seat that it comes from and on that where GPUs are held for it.
    """
    there = {job.job_id: job for job in jobs if having(job)}
    above = {job_id: job_id for job_id in there}
    first: dict[GpuUuid, JobId] = {}

    def top(job_id: JobId) -> JobId:
        while above[job_id] != job_id:
            job_id = above[job_id]
        return job_id

    for job_id, job in there.items():
        for worker in having(job):
            for uuid in worker.gpu_uuids:
                above[top(job_id)] = top(first.setdefault(uuid, job_id))
    found: dict[JobId, list[JobView]] = {}
    for job_id, job in there.items():
        found.setdefault(top(job_id), []).append(job)
    return [Seat(jobs=tuple(together)) for together in found.values()]


def having(job: JobView) -> list[WorkerView]:
    """Its workers that were not told to stop, and those that GPUs are held for while it moves."""
    return [worker for worker in (*job.placed, *job.held) if not worker.is_leaving]


def left_by(workers: Iterable[WorkerView]) -> Left:
    """What workers vacate if they all go; a GPU that several have is counted once."""
    seen: set[GpuUuid] = set()
    free: dict[NodeName, int] = {}
    used = 0
    for worker in workers:
        twice = {uuid for uuid in worker.gpu_uuids if uuid in seen}
        used += worker.gpus - len(twice)
        gpus = worker.freed_gpus - len(twice.difference(worker.barred_uuids))
        free[worker.node] = free.get(worker.node, 0) + gpus
        seen.update(worker.gpu_uuids)
    return Left(free=free, used=used)
