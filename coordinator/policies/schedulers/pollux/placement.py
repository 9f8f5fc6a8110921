"""Nodes for jobs, with at most one multi-node job on each node.

Two multi-node jobs on one node share its network and slow each other down; Qiao et al., OSDI'21,
section 4.2.1, keep them apart. A job on a single node may stand beside any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, NodeName
from coordinator.policies.contract.decisions import (
    Decision,
    Placement,
    Preempt,
    Resize,
    placed_count,
)
from coordinator.policies.contract.free_gpus import FreeGpus, consolidated, fill, is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.contract.text import unsaved
from coordinator.policies.parts.restart_cost import keeps_gang


class ApartFloor(FreeGpus):
    """Free GPUs that know which jobs are on each node, and keep no worker where it clashes.

    placing: the job whose workers are given GPUs next; `apart` sets it.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        super().__init__(snapshot)
        self.placing = JobId("")
        self._nodes: dict[JobId, dict[NodeName, int]] = {}
        self._jobs_on: dict[NodeName, set[JobId]] = {}
        for job in snapshot.jobs:
            # One that moves is still where it was, and already where it goes.
            self._count((*job.placed, *job.held), 1)

    def nodes_of(self, job_id: JobId) -> list[NodeName]:
        """Where a job has workers, by name; workers ordered to stop do not count."""
        return sorted(self._nodes.get(job_id, ()))

    def crossing(self, name: NodeName, *, but: JobId | None = None) -> list[JobId]:
        """Jobs over several nodes that have workers on this one, by id, without one of them."""
        here = self._jobs_on.get(name, ())
        return sorted(each for each in here if each != but and len(self._nodes[each]) > 1)

    def vacate(self, workers: Iterable[WorkerView]) -> None:
        """Workers go, and their jobs are no longer where none of them is left."""
        workers = tuple(workers)
        super().vacate(workers)
        self._count(workers, -1)

    def stay(self, workers: Iterable[WorkerView]) -> None:
        """The opposite of `vacate`."""
        workers = tuple(workers)
        super().stay(workers)
        self._count(workers, 1)

    def goes_on(self, workers: Sequence[WorkerView]) -> bool:
        """Workers of one job that were to leave stay after all, if their GPUs were given to no job
        and they clash with no new one.
        """
        for job_id in {worker.job_id for worker in workers}:
            names = {worker.node for worker in workers if not worker.is_leaving}
            names |= self._nodes.get(job_id, {}).keys()
            if len(names) > 1 and any(self.crossing(name, but=job_id) for name in names):
                return False
        return super().goes_on(workers)

    def take(self, placements: Iterable[Placement], gpus_per_worker: int) -> None:
        """Give GPUs to the job for which `apart` last found nodes."""
        placements = tuple(placements)
        super().take(placements, gpus_per_worker)
        for placement in placements:
            self._add(self.placing, placement.node, placement.worker_count)

    def give(self, placements: Iterable[Placement], gpus_per_worker: int) -> None:
        """The opposite of `take`."""
        placements = tuple(placements)
        super().give(placements, gpus_per_worker)
        for placement in placements:
            self._add(self.placing, placement.node, -placement.worker_count)

    def _count(self, workers: Iterable[WorkerView], sign: int) -> None:
        for worker in workers:
            if not worker.is_leaving:
                self._add(worker.job_id, worker.node, sign)

    def _add(self, job_id: JobId, name: NodeName, count: int) -> None:
        nodes = self._nodes.setdefault(job_id, {})
        nodes[name] = nodes.get(name, 0) + count
        if nodes[name]:
            self._jobs_on.setdefault(name, set()).add(job_id)
        else:
            del nodes[name]
            self._jobs_on[name].discard(job_id)


def apart(floor: FreeGpus, job: JobView, gpu_type: str, count: int) -> tuple[Placement, ...]:
    """One node that takes all, with those that the job has; else the fewest without a job over
    several nodes, those that it has first. Of an `ApartFloor`."""
    assert isinstance(floor, ApartFloor)
    floor.placing = job.job_id
    rooms = floor.rooms(gpu_type, job.gpus_per_worker)
    own = floor.nodes_of(job.job_id)
    alone: tuple[Placement, ...] = ()
    if len(own) <= 1:
        alone = _on_one(floor, {name: rooms[name] for name in own or rooms if name in rooms}, count)
        is_barred = any(floor.crossing(name, but=job.job_id) for name in own)
        if is_barred or placed_count(alone) == count:
            return alone
    across = _across(floor, job, gpu_type, own, count)
    return across if placed_count(across) > placed_count(alone) else alone


def _on_one(floor: FreeGpus, rooms: dict[NodeName, int], count: int) -> tuple[Placement, ...]:
    """The fullest node that takes all; else the one that takes most."""
    if not rooms:
        return ()
    best = min(rooms, key=lambda name: (-min(rooms[name], count), floor.free[name], name))
    return fill(rooms, (best,), count)


def _across(
    floor: ApartFloor, job: JobView, gpu_type: str, own: list[NodeName], count: int
) -> tuple[Placement, ...]:
    rooms = floor.rooms(gpu_type, job.gpus_per_worker)
    clear = {name for name in rooms if not floor.crossing(name, but=job.job_id)}
    here = fill(rooms, (name for name in own if name in clear), count)
    others = floor.avoided
    floor.avoided = (*others, *(name for name in rooms if name in own or name not in clear))
    there = consolidated(floor, job, gpu_type, count - placed_count(here))
    floor.avoided = others
    return (*here, *there)


def keeping_away(floor: ApartFloor, job: JobView, gpu_type: str, count: int) -> tuple[JobId, ...]:
    """Jobs over several nodes that keep a job from further workers, by id; none if these have room
    as it is, or would have none without them either.
    """
    floor.avoided = job.nodes.avoided
    if placed_count(apart(floor, job, gpu_type, count)) >= count:
        return ()
    beside = consolidated(floor, job, gpu_type, count)
    if placed_count(beside) < count:
        return ()
    names = {*floor.nodes_of(job.job_id), *(placement.node for placement in beside)}
    return tuple(sorted({each for name in names for each in floor.crossing(name, but=job.job_id)}))


def first_to_leave(job: JobView, count: int) -> tuple[int, ...]:
    """Indices of flexible workers without which a job is on few nodes: first those on nodes without
    its base gang, where it has fewest; among equals the newest.
    """
    stay = [worker for worker in job.placed if not worker.is_leaving]
    base = {worker.node for worker in stay if not worker.is_flexible}
    on = Counter(worker.node for worker in stay)
    flexible = sorted(
        (worker for worker in stay if worker.is_flexible),
        key=lambda each: (each.node in base, on[each.node], each.node, -each.worker_index),
    )
    return tuple(sorted(worker.worker_index for worker in flexible[:count]))


# --- who stood there before ---------------------------------------------------------------------

REST_S = 3600.0
"""A job stopped within this time is not stopped for a clash. The tenants' rules that started it
where it clashes would do so again after each stop.
"""


class Parted(Struct, frozen=True, kw_only=True):
    """The end of existing clashes: flexible workers leave, else the job stops.

    left: the snapshot for all later steps: without the jobs that stop, and with the others as they
        are once their workers have left, not to be changed again.
    gone: the workers that leave.
    """

    decisions: tuple[Decision, ...]
    left: ClusterSnapshot
    gone: tuple[WorkerView, ...]


def parted(snapshot: ClusterSnapshot) -> Parted:
    """Of jobs that clash on a node the one that loses least gives way. A job stays if it may not be
    stopped, was stopped just now, or would lose most of its work.
    """
    floor, decisions = ApartFloor(snapshot), list[Decision]()
    jobs = {job.job_id: job for job in snapshot.jobs}
    gone: list[WorkerView] = []
    for node in snapshot.nodes:
        while len(here := floor.crossing(node.name)) > 1:
            ways = [
                (way, job_id) for job_id in here
                if (way := _way(jobs.get(job_id), node.name, snapshot.now_s)) is not None
            ]  # fmt: skip
            if not ways:
                break
            (_, workers), job_id = min(ways, key=lambda each: (each[0][0], each[1]))
            other = next(each for each in here if each != job_id)
            job = jobs[job_id]
            decisions.append(_decided(job, workers, node.name, other, snapshot.now_s))
            floor.vacate(workers)
            gone += workers
            if isinstance(decisions[-1], Preempt):
                del jobs[job_id]
            else:
                jobs[job_id] = _shrunk(job, workers)
    if not decisions:
        return Parted(decisions=(), left=snapshot, gone=())
    left = replace(snapshot, jobs=tuple(jobs.values()), index=None)
    return Parted(decisions=tuple(decisions), left=left, gone=tuple(gone))


Way = tuple[tuple[bool, float], tuple[WorkerView, ...]]
"""Whether it is a stop, the GPU-seconds that it throws away; the workers that go."""


def _way(job: JobView | None, name: NodeName, now_s: float) -> Way | None:
    """How a job would resolve a clash on a node; None: it does not."""
    if job is None:
        return None
    here = tuple(w for w in job.placed if w.node == name and not w.is_leaving)
    if job.is_resizable and all(worker.is_flexible for worker in here):
        return (False, 0.0), here
    if job.preemptions.latest_at_s is not None and now_s - job.preemptions.latest_at_s < REST_S:
        return None
    if is_movable(job) and not job.held and not keeps_gang(job, now_s):
        return (True, job.lost_gpu_s(now_s)), job.placed
    return None


def _decided(
    job: JobView, workers: Sequence[WorkerView], name: NodeName, other: JobId, now_s: float
) -> Decision:
    why = (
        f"{other} has workers on {name} and on other nodes, and each node takes one multi-node job"
    )
    if len(workers) < len(job.placed):
        indices = tuple(sorted(worker.worker_index for worker in workers))
        return Resize(job_id=job.job_id, removed_workers=indices, reason=why)
    lost_gpu_s = job.lost_gpu_s(now_s)
    return Preempt(
        job_id=job.job_id,
        predicted_cost_gpu_s=lost_gpu_s,
        beneficiary=other,
        reason=f"{why}; {unsaved(lost_gpu_s)}",
    )


def _shrunk(job: JobView, workers: Sequence[WorkerView]) -> JobView:
    """It has fewer workers now, and is neither resized nor stopped in the same pass."""
    placed = tuple(replace(w, is_leaving=w.is_leaving or w in workers) for w in job.placed)
    return replace(job, placed=placed, is_resizable=False, is_resting=True)
