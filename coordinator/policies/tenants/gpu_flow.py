"""GPU flow: what decisions move between tenants, in GPUs of real nodes.

It also counts whether a gang finds room on free GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nlargest

from msgspec import Struct

from common.model import GpuUuid, JobId, NodeName
from coordinator.policies.contract.decisions import (
    Decision,
    Loan,
    Migrate,
    Placement,
    Preempt,
    Reclaim,
    Recommend,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView, WorkerView
from coordinator.policies.tenants.tenancy import Count


def gang_on(
    free: Mapping[NodeName, int], nodes: Mapping[NodeName, NodeView], job: JobView, gpu_type: str
) -> tuple[Placement, ...]:
    """Its base gang on the fullest nodes that take a worker; empty if it does not fit.

    free: GPUs by node; no other node is used. Nodes that the job avoids take no worker.
    """
    gang = Gang(free, nodes, job, gpu_type)
    return gang.placed(free) if gang.fits(free) else ()


class Gang:
    """The base gang of a job, and the nodes of one GPU type that may take a worker of it.

    free: GPUs by node, as for `gang_on`. count: workers. nodes: by name; those that it avoids are
    left out.
    """

    def __init__(
        self,
        free: Mapping[NodeName, int],
        nodes: Mapping[NodeName, NodeView],
        job: JobView,
        gpu_type: str,
    ) -> None:
        self._size = job.gpus_per_worker
        self.gpu_type = gpu_type
        self.count = job.workers_on(gpu_type).min
        avoided = job.nodes.avoided
        self.nodes = frozenset(
            n for n in free if nodes[n].gpu_type == gpu_type and n not in avoided
        )

    def workers(self, gpus: Mapping[NodeName, int]) -> int:
        """The number of its workers that find room on these GPUs."""
        return sum(
            max(0, count // self._size) for name, count in gpus.items() if name in self.nodes
        )

    def fits(self, free: Mapping[NodeName, int]) -> bool:
        """Whether all of it does."""
        return self.workers(free) >= self.count

    def lacks(self, free: Mapping[NodeName, int], there: Collection[NodeName]) -> int:
        """GPUs that have to come free at least on some nodes, beside all these, until it fits.

        On each node one worker may use the GPUs that others leave there.
        """
        short = max(0, self.count - self.workers(free))
        parts = (max(0, free[name]) % self._size for name in self.nodes.intersection(there))
        return short * self._size - sum(nlargest(short, parts))

    def placed(
        self, free: Mapping[NodeName, int], first: Collection[NodeName] = ()
    ) -> tuple[Placement, ...]:
        """It, on the fullest nodes, some of them first; only where it fits."""
        left, found = self.count, list[Placement]()
        there = (name for name in self.nodes if free[name] >= self._size)
        for name in sorted(there, key=lambda name: (name not in first, free[name], name)):
            here = min(left, free[name] // self._size)
            if here > 0:
                found.append(Placement(node=name, worker_count=here))
                left -= here
        return tuple(sorted(found, key=lambda each: each.node))


Gpus = dict[NodeName, int]


class Left(Struct, frozen=True, kw_only=True):
    """What workers vacate, in GPUs.

    free: those that others can have, by node.
    used: those that their tenant has less, including any that stay barred.
    """

    free: Gpus
    used: int


class Flow:
    """What decisions move on real nodes, in GPUs.

    sharers: jobs per GPU that have it, or for whose next attempt it is held.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.jobs: dict[JobId, JobView] = {job.job_id: job for job in snapshot.jobs}
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.free: Gpus = {n.name: n.free_gpus for n in snapshot.nodes if n.is_schedulable}
        self.sharers: dict[GpuUuid, set[JobId]] = {}
        for job in snapshot.jobs:
            for worker in (*job.placed, *job.held):
                for uuid in () if worker.is_leaving else worker.gpu_uuids:
                    self.sharers.setdefault(uuid, set()).add(job.job_id)

    def taken(self, decision: Decision) -> Gpus:
        """GPUs that it takes, by node."""
        match decision:
            case Start():
                return self._of(
                    self.jobs.get(decision.job_id), decision.gpu_type, decision.placements
                )
            case Migrate():
                job = self.jobs.get(decision.job_id)
                return self._of(job, (job and job.gpu_type) or "", decision.placements)
            case Resize():
                job = self.jobs.get(decision.job_id)
                return self._of(job, (job and job.gpu_type) or "", decision.added)
            case _:
                return {}

    def lefts(self, decisions: Sequence[Decision | None]) -> list[Left]:
        """What each of them vacates, one after another.

        A shared GPU comes free with the last of its workers, if all leave and none joins.
        """
        kept = {u for made in decisions if made is not None for u in _named(made)}
        gone: Counter[GpuUuid] = Counter()
        seen: set[tuple[JobId, int]] = set()
        found: list[Left] = []
        for decision in decisions:
            free: Gpus = {}
            used = 0
            for worker in () if decision is None else self.leaving(decision):
                if (worker.job_id, worker.worker_index) in seen:
                    continue
                seen.add((worker.job_id, worker.worker_index))
                gone.update(worker.gpu_uuids)
                left = {u for u in worker.gpu_uuids if gone[u] == len(self.sharers[u])} - kept
                used += len(left) if worker.gpu_uuids else worker.gpus
                gpus = _freed(worker, left)
                if gpus:
                    free[worker.node] = free.get(worker.node, 0) + gpus
            found.append(Left(free=free, used=used))
        return found

    def parts(self, place: int, decisions: Sequence[Decision | None]) -> Gpus:
        """GPUs that would not come free, by node, if one of the decisions were not made."""
        others = [None if at == place else made for at, made in enumerate(decisions)]
        found = sum_by_node(left.free for left in self.lefts(decisions))
        for node, gpus in sum_by_node(left.free for left in self.lefts(others)).items():
            found[node] -= gpus
        return {node: gpus for node, gpus in found.items() if gpus > 0}

    def leaving(self, decision: Decision) -> list[WorkerView]:
        """Workers that it orders to stop."""
        match decision:
            case Preempt() | Migrate():
                job = self.jobs.get(decision.job_id)
                gone = set[int]() if job is None else {w.worker_index for w in job.placed}
            case Resize():
                job, gone = self.jobs.get(decision.job_id), set(decision.removed_workers)
            case _:
                return []
        placed = job.placed if job is not None else ()
        return [w for w in placed if w.worker_index in gone and not w.is_leaving]

    def own(self, worker: WorkerView) -> Left:
        """What a worker vacates when it leaves alone: the GPUs that no other job shares with it."""
        left = {uuid for uuid in worker.gpu_uuids if len(self.sharers[uuid]) == 1}
        used = len(left) if worker.gpu_uuids else worker.gpus
        return Left(free={worker.node: _freed(worker, left)}, used=used)

    def beside(self, decision: Decision) -> set[JobId]:
        """Jobs on the GPUs that a decision names for its own."""
        return {job_id for uuid in _named(decision) for job_id in self.sharers.get(uuid, ())}

    def _of(self, job: JobView | None, gpu_type: str, placements: Iterable[Placement]) -> Gpus:
        found: Gpus = {}
        if job is None:
            return found
        for placement in placements:
            if placement.gpu_uuids:
                continue  # shared GPUs stay with the tenant
            node = self.nodes.get(placement.node)
            each = None if node is None else job.gpu.gpus_for_one(node.gpu_type, gpu_type)
            gpus = placement.worker_count * job.gpus_per_worker * (each or 1)
            found[placement.node] = found.get(placement.node, 0) + gpus
        return found


def _freed(worker: WorkerView, left: Collection[GpuUuid]) -> int:
    """GPUs that others can have once a worker has left. left: its own that no worker holds any
    more.
    """
    if not worker.gpu_uuids:
        return worker.freed_gpus
    return len(left) - sum(uuid in left for uuid in worker.barred_uuids)


def _named(decision: Decision) -> set[GpuUuid]:
    """GPUs that it names for its job, which others may have too."""
    if not isinstance(decision, Start | Migrate):
        return set()
    return {uuid for placement in decision.placements for uuid in placement.gpu_uuids}


def job_of(flow: Flow, decision: Decision) -> JobView | None:
    """The job that it is about; None where it is about a node."""
    if isinstance(decision, Loan | Reclaim | Recommend):
        return None
    return flow.jobs.get(decision.job_id)


class Move(Struct, frozen=True, kw_only=True):
    """One decision about a job, in GPUs.

    place: among the decisions. left: vacated GPUs that others can have, by node.
    gone: all vacated GPUs. is_whole: it stops a whole job.
    """

    place: int
    decision: Decision
    job: JobView
    left: Gpus
    gone: int
    taken: Gpus
    is_whole: bool

    @property
    def stop(self) -> tuple[int, bool]:
        """As `are_borrowed` looks at it."""
        return self.gone, self.is_whole

    @property
    def net(self) -> int:
        """GPUs that its tenants have more after it."""
        return sum(self.taken.values()) - self.gone


def moves_of(flow: Flow, decisions: Sequence[Decision | None]) -> list[Move]:
    """All decisions about a job; None among them was dropped."""
    found: list[Move] = []
    for place, (decision, left) in enumerate(zip(decisions, flow.lefts(decisions), strict=True)):
        job = None if decision is None else job_of(flow, decision)
        if decision is not None and job is not None:
            found.append(
                Move(
                    place=place,
                    decision=decision,
                    job=job,
                    left=left.free,
                    gone=left.used,
                    taken=flow.taken(decision),
                    is_whole=isinstance(decision, Preempt),
                )
            )
    return found


def more_free(moves: Iterable[Move]) -> Gpus:
    """GPUs that more are free after all of them, by node; fewer where it is negative."""
    found: Gpus = {}
    for move in moves:
        for gpus, sign in ((move.left, 1), (move.taken, -1)):
            for node, count in gpus.items():
                found[node] = found.get(node, 0) + count * sign
    return found


def are_borrowed(stops: Iterable[tuple[Count, bool]], used: Count, guarantee: int) -> list[bool]:
    """For each of a tenant's own moves, one after another: whether it left only borrowed GPUs.

    stops: GPUs, and whether a whole job leaves them. used: before the first.

    A job is whole: its stop is no loss of a guarantee while the tenant holds more than that before
    it (as in Kueue and KAI). Of workers, only as many leave as are beyond it.
    """
    found: list[bool] = []
    for gone, is_whole in stops:
        found.append(used > guarantee if is_whole else used - gone >= guarantee)
        used -= gone
    return found


def sum_by_node(many: Iterable[Mapping[NodeName, int]]) -> Gpus:
    """GPUs of all of them together."""
    found: Gpus = {}
    for each in many:
        for node, gpus in each.items():
            found[node] = found.get(node, 0) + gpus
    return found
