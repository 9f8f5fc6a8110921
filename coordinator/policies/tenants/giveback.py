"""Give-back: what borrowers could give back, and the result of a pass. Data only.

Gangs that share GPUs give them back together.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from common.model import GpuUuid, JobId, NodeName
from coordinator.policies.contract.decisions import Decision, Resume, Start, Suspend
from coordinator.policies.contract.snapshot import JobView, WorkerView
from coordinator.policies.tenants.gpu_flow import Gpus, Left


class Source(Struct, frozen=True, kw_only=True):
    """What a borrower could give back in one piece.

    gpus: that others can have then, by node. used: what the borrower has less.
    decision: one of this pass that would be dropped; else the job's workers leave.
    seat: the job and all that share its GPUs, which are stopped whole; None stops none.
    """

    job: JobView
    gpus: Gpus
    used: int
    decision: Decision | None = None
    workers: tuple[WorkerView, ...] = ()
    seat: Seat | None = None

    @property
    def jobs(self) -> tuple[JobView, ...]:
        """The jobs that hold it."""
        return (self.job,) if self.seat is None else self.seat.jobs


class GiveBack(Struct, frozen=True, kw_only=True):
    """The result of a pass.

    decisions: of the pass, plus those that give tenants below their guarantee GPUs back.
    waits: guaranteed jobs that find no room and get none in this pass; and why.
    is_soon: some due GPUs can perhaps be reclaimed before any other event.
    fits: guaranteed jobs that find room, but were not started.
    behind: waiting jobs without guarantee, of tenants that borrow from those of the former.
    wake_at_s: when the first of `fits` has waited for long enough; None: none will by itself.
    """

    decisions: tuple[Decision, ...]
    waits: dict[JobId, str]
    is_soon: bool
    fits: frozenset[JobId]
    behind: frozenset[JobId]
    wake_at_s: float | None


class Seat(Struct, frozen=True, kw_only=True):
    """A job with GPUs, and all jobs that share any of them, directly or through others."""

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
    """The jobs that have GPUs, by seat, in the order given; each has its own where none shares.

    A migrating job is on the seat that it comes from and on the one where GPUs are held for it.
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
    """Its workers that were not ordered to stop, and those for which GPUs are held during a
    migration.
    """
    return [worker for worker in (*job.placed, *job.held) if not worker.is_leaving]


def left_by(workers: Iterable[WorkerView]) -> Left:
    """The GPUs vacated if all these workers leave; a shared GPU is counted once."""
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
