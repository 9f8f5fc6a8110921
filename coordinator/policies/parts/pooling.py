"""Pools: which GPUs are shared out together and which jobs compete for them, one per GPU type.

A job that accepts several types competes on one of them at a time. While it waits, each pass
chooses again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from msgspec import Struct

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    accepted_types,
    gpus_of,
    is_movable,
    spare_workers,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView

Order = Callable[[JobView], Any]
"""A key: the order in which waiting jobs choose among types."""

Size = Callable[[JobView], int]
"""With how many workers of its range a job would begin, if it can."""


def base_gang(job: JobView) -> int:
    """A job without a deadline begins with its base gang."""
    return job.workers.min


def by_submission(job: JobView) -> tuple[float, JobId]:
    """The job that has waited longest chooses first."""
    return job.submitted_at_s, job.job_id


def by_deadline(job: JobView) -> tuple[float, float, JobId]:
    """The job with the earliest deadline chooses first."""
    deadline_s = inf if job.deadline_at_s is None else job.deadline_at_s
    return deadline_s, job.submitted_at_s, job.job_id


class Pool(Struct, frozen=True, kw_only=True):
    """GPUs of one type that can be shared out, and the jobs that compete for them.

    gpus: free ones, and those of its running jobs. jobs: that wait or may be stopped, and where the
        caller asks for them those that may only be resized (`stays`); by id.
    """

    gpu_type: str
    gpus: int
    jobs: tuple[JobView, ...]

    def factor(self, job: JobView) -> int:
        """Workers of this type that stand for one of a job's range."""
        return job.gpu.worker_multiplier.get(self.gpu_type, 1)

    def kept_gpus(self) -> dict[JobId, int]:
        """GPUs of the base gangs that stay, which no other job can have."""
        return {j.job_id: j.base_gpus_on(self.gpu_type) for j in self.jobs if stays(j)}


def stays(job: JobView) -> bool:
    """Whether it runs and may not be stopped: others get its flexible workers at most."""
    return job.state != JobState.PENDING and not is_movable(job)


def pools(
    snapshot: ClusterSnapshot,
    floor: FreeGpus,
    *,
    order: Order = by_submission,
    size: Size = base_gang,
    resizes: bool = False,
) -> list[Pool]:
    """One per GPU type; a waiting job stands in that which `chosen_types` names, or in none.

    resizes: jobs that may be resized and not stopped compete too; the caller leaves them their base
        gangs.
    """
    kinds = floor.gpu_types
    chosen = chosen_types(snapshot, floor, order=order, size=size, resizes=resizes)
    jobs: dict[str, list[JobView]] = {kind: [] for kind in kinds}
    movable: list[WorkerView] = []
    for job in snapshot.jobs:
        if job.state == JobState.PENDING:
            if job.job_id in chosen:
                jobs[chosen[job.job_id]].append(job)
        elif competes(job, floor, resizes=resizes) and job.gpu_type in jobs:
            jobs[job.gpu_type].append(job)
            movable += _held(job)
    gpus = _gpus(floor, movable)
    return [Pool(gpu_type=kind, gpus=gpus[kind], jobs=tuple(jobs[kind])) for kind in kinds]


def chosen_types(
    snapshot: ClusterSnapshot,
    floor: FreeGpus,
    *,
    order: Order = by_submission,
    size: Size = base_gang,
    resizes: bool = False,
) -> dict[JobId, str]:
    """On which GPU type each waiting job competes; of one that none could host, none."""
    hosting = hosting_types(snapshot, floor)
    return choices(snapshot, floor, hosting, order=order, size=size, resizes=resizes)


def hosting_types(snapshot: ClusterSnapshot, floor: FreeGpus) -> dict[JobId, tuple[str, ...]]:
    """GPU types whose nodes could hold each waiting job's base gang, in its order; none: left out.

    A gang that would not fit on the nodes of a type that take workers now, were they all free,
    would keep the others of that type waiting for nothing.
    """
    whole = _Ground(floor, {name: gpus_of(node) for name, node in floor.nodes.items()})
    found = {
        job.job_id: tuple(
            kind
            for kind in accepted_types(job, floor)
            if whole.has_room(job, kind, job.workers.min)
        )
        for job in snapshot.jobs
        if job.state == JobState.PENDING
    }
    return {job_id: kinds for job_id, kinds in found.items() if kinds}


def choices(
    snapshot: ClusterSnapshot,
    floor: FreeGpus,
    hosting: Mapping[JobId, Sequence[str]],
    *,
    order: Order = by_submission,
    size: Size = base_gang,
    standing: Mapping[JobId, str] | None = None,
    resizes: bool = False,
) -> dict[JobId, str]:
    """Which of its hosting types each of these waiting jobs takes.

    The first on which its size has room: on free GPUs, else on those of workers that others can
    spare, next to the gangs that choose before it. Without this type its base gang looks for room
    in the same way. If that has none either, it takes the type with the least work: the base gangs
    there over its GPUs.

    standing: jobs that already have a type. That job takes another one only for free GPUs that
        its own lacks, for its base gang.
    """
    standing = standing or {}
    if not standing and all(len(kinds) == 1 for kinds in hosting.values()):
        return {job_id: kinds[0] for job_id, kinds in hosting.items()}
    choosing = _Choosing(snapshot, floor, size, resizes)
    line = (job for job in snapshot.jobs if job.job_id in hosting)
    return {
        job.job_id: choosing.choose(job, hosting[job.job_id], standing.get(job.job_id))
        for job in sorted(line, key=order)
    }


def competes(job: JobView, floor: FreeGpus, *, resizes: bool) -> bool:
    """Whether a running job may be stopped, or resized, for others, on nodes that take workers."""
    may_change = is_movable(job) or (resizes and job.is_resizable)
    return may_change and all(worker.node in floor.free for worker in _held(job))


def _held(job: JobView) -> list[WorkerView]:
    return [worker for worker in job.placed if not worker.is_leaving]


def _gpus(floor: FreeGpus, movable: Sequence[WorkerView]) -> dict[str, int]:
    """GPUs by type that are free, or that these workers have."""
    floor.vacate(movable)
    gpus = {kind: floor.free_gpus(kind) for kind in floor.gpu_types}
    for worker in movable:
        # Jobs that hold these may go on with them, as the job may with the others.
        gpus[floor.nodes[worker.node].gpu_type] += worker.gpus - worker.freed_gpus
    floor.stay(movable)
    return gpus


_Gang = tuple[int, int, tuple[NodeName, ...]]
"""GPUs of a worker, workers, and nodes that are avoided."""


class _Ground:
    """GPUs by node on which gangs are put one after the other: room only shrinks."""

    def __init__(self, floor: FreeGpus, free: Mapping[NodeName, int]) -> None:
        self._free: dict[str, dict[NodeName, int]] = {kind: {} for kind in floor.gpu_types}
        for name, gpus in free.items():
            self._free[floor.nodes[name].gpu_type][name] = gpus
        self._full: dict[str, set[_Gang]] = {kind: set() for kind in self._free}
        self._fits: dict[str, set[_Gang]] = {kind: set() for kind in self._free}
        """Results for gangs already looked at: many are alike."""

    def has_room(self, job: JobView, kind: str, size: int) -> bool:
        """True if a number of workers of its range fit, on nodes that the job does not avoid."""
        if kind not in self._free:
            return False
        workers = size * job.gpu.worker_multiplier.get(kind, 1)
        gang = (job.gpus_per_worker, workers, job.nodes.avoided)
        if gang not in self._fits[kind] and gang not in self._full[kind]:
            fits = sum(self._rooms(job, kind).values()) >= workers
            (self._fits if fits else self._full)[kind].add(gang)
        return gang in self._fits[kind]

    def put(self, job: JobView, kind: str, size: int) -> None:
        """A gang that has room takes it, on the fullest nodes first."""
        self._fits[kind].clear()
        free, left = self._free[kind], size * job.gpu.worker_multiplier.get(kind, 1)
        rooms = self._rooms(job, kind)
        for name in sorted(rooms, key=lambda name: (free[name], name)):
            here = min(left, rooms[name])
            free[name] -= here * job.gpus_per_worker
            left -= here

    def _rooms(self, job: JobView, kind: str) -> dict[NodeName, int]:
        avoided = job.nodes.avoided
        return {
            name: gpus // job.gpus_per_worker
            for name, gpus in self._free[kind].items()
            if gpus >= job.gpus_per_worker and name not in avoided
        }


class _Choosing:
    """One pass: a job that chooses takes room from those behind."""

    def __init__(
        self, snapshot: ClusterSnapshot, floor: FreeGpus, size: Size, resizes: bool
    ) -> None:
        self._size = size
        running = [
            job for job in snapshot.jobs if job.placed and competes(job, floor, resizes=resizes)
        ]
        self._gpus = _gpus(floor, [worker for job in running for worker in _held(job)])
        self._asked = dict.fromkeys(self._gpus, 0)
        for job in running:
            if job.gpu_type in self._asked:
                self._asked[job.gpu_type] += job.base_gpus_on(job.gpu_type)
        spare = [worker for job in running for worker in spare_workers(job)]
        free = dict(floor.free)
        floor.vacate(spare)
        self._grounds = (_Ground(floor, free), _Ground(floor, floor.free))
        floor.stay(spare)

    def choose(self, job: JobView, kinds: Sequence[str], own: str | None) -> str:
        """One of the types that could host it; its own, if it has one, where none is free."""
        free, base = self._grounds[0], job.workers.min
        if own is not None:
            line = (own, *(kind for kind in kinds if kind != own))
            found = next((kind for kind in line if free.has_room(job, kind, base)), own)
            return self._take(job, found, base)
        for size in sorted({base, self._size(job)}, reverse=True):
            for ground in self._grounds:
                for kind in kinds:
                    if ground.has_room(job, kind, size):
                        return self._take(job, kind, size)
        return self._take(job, min(kinds, key=lambda kind: self._load(job, kind)), base)

    def _load(self, job: JobView, kind: str) -> float:
        return (self._asked[kind] + job.base_gpus_on(kind)) / max(1, self._gpus[kind])

    def _take(self, job: JobView, kind: str, size: int) -> str:
        for ground in self._grounds:
            if ground.has_room(job, kind, size):
                ground.put(job, kind, size)
        if kind in self._asked:
            self._asked[kind] += job.base_gpus_on(kind)
        return kind
