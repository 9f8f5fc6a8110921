"""GPUs back for tenants below their guarantee, from those that borrow. Must not know the engine.

A waiting job whose tenant stays within its guarantee with it, and that finds no room, gets what
borrowers hold: first what they would start or grow on in this very pass, then their flexible
workers, then their jobs that lose least by a stop; no more of them than it needs. A borrower holds
more than its guarantee before each stop, at each level below the tenant that both are part of.
Where there is room, when its job starts is up to the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.policies.decisions import Decision, Placement, Preempt, Resize, Start
from coordinator.policies.floor import is_movable
from coordinator.policies.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.tenants.fitting import gang_on
from coordinator.policies.tenants.flow import Flow, Gpus, job_of
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.words import counted


class _Source(Struct, frozen=True, kw_only=True):
    """What a borrower could give back in one piece.

    decision: one of this pass that would not be; else the job's workers leave, and it is stopped
        where they are all of it.
    """

    job: JobView
    gpus: Gpus
    decision: Decision | None = None
    workers: tuple[WorkerView, ...] = ()
    is_whole: bool = False


def taken_back(snapshot: ClusterSnapshot, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """The decisions of a pass, and those that give tenants below their guarantee theirs back."""
    back = _TakeBack(snapshot, decisions)
    failed: set[tuple[object, ...]] = set()
    for job in back.entitled():
        alike = (back.tenancy.leaf(job), job.workers.min, job.gpus_per_worker, job.gpu.types)
        if alike not in failed and not back.serve(job):
            failed.add(alike)
    return back.decisions()


class _TakeBack:
    """One pass: the room and the uses after what was decided so far.

    stopped: uses by tenant before the pass, less what its stops give back; the guard counts so.
    """

    def __init__(self, snapshot: ClusterSnapshot, decisions: Sequence[Decision]) -> None:
        self._snapshot = snapshot
        self._kept = list(decisions)
        self._flow = Flow(snapshot)
        self.tenancy = Tenancy(snapshot)
        self._stopped = dict(self.tenancy.used)
        self._free = {
            name: gpus
            for name, gpus in self._flow.free.items()
            if self._flow.nodes[name].role == NodeRole.TRAINING
        }
        self._busy: set[JobId] = set()
        self._gone: dict[JobId, list[_Source]] = {}
        self._starts: list[Start] = []
        for decision in decisions:
            job = job_of(self._flow, decision)
            if job is not None:
                self._busy.add(job.job_id)
                self._move(job, self._flow.left(decision), is_stop=True)
                self._move(job, self._flow.taken(decision), sign=-1)

    def _move(self, job: JobView, gpus: Gpus, *, sign: int = 1, is_stop: bool = False) -> None:
        """GPUs of a job come free (or, with sign -1, are taken)."""
        total = sum(gpus.values()) * sign
        self.tenancy.leave(job, total)
        if is_stop:
            for name in self.tenancy.path(job):
                self._stopped[name] -= total
        for node, count in gpus.items():
            if node in self._free:
                self._free[node] += count * sign

    def entitled(self) -> list[JobView]:
        """Waiting jobs that some guarantee may cover, of the tenants that have least of theirs."""
        used, views = self.tenancy.used, self.tenancy.views

        def place(job: JobView) -> tuple[object, ...]:
            due = (name for name in self.tenancy.path(job) if views[name].guarantee_gpus)
            has = min(used[name] / views[name].guarantee_gpus for name in due)
            return (has, -job.priority, job.submitted_at_s, job.job_id)

        covered = [
            job
            for job in self._snapshot.jobs
            if job.state == JobState.PENDING
            and job.job_id not in self._busy
            and any(views[name].guarantee_gpus > used[name] for name in self.tenancy.path(job))
        ]
        return sorted(covered, key=place)

    def serve(self, job: JobView) -> bool:
        """Take back what the job needs to start, and start it; False: borrowers have not enough.

        One that fits without is left to the policy.
        """
        kinds = job.gpu.types or sorted({n.gpu_type for n in self._snapshot.nodes})
        if any(self._placed(job, kind) for kind in kinds):
            return True
        return any(self._serve_on(job, kind) for kind in kinds)

    def _placed(self, job: JobView, gpu_type: str) -> tuple[Placement, ...]:
        """Its base gang; empty where it does not fit."""
        return gang_on(self._free, self._flow.nodes, job, gpu_type)

    def _serve_on(self, job: JobView, gpu_type: str) -> bool:
        wanted = job.workers_on(gpu_type).min * job.gpus_per_worker
        given: list[_Source] = []
        for source in self._sources(job, wanted, gpu_type):
            if self._borrows(source, job):
                self._give(source)
                given.append(source)
                if self._placed(job, gpu_type):
                    break
        fits = bool(self._placed(job, gpu_type))
        if fits:
            self._spare(given, job, gpu_type)
            fits = self._is_within(job, wanted)
        if not fits:
            for source in reversed(given):
                self._give(source, sign=-1)
            return False
        self._settle(job, gpu_type, given)
        return True

    def _spare(self, given: list[_Source], job: JobView, gpu_type: str) -> None:
        """Give back what was not needed after all, the dearest first."""
        for source in list(reversed(given)):
            if not source.is_whole and any(each.is_whole for each in self._gone[source.job.job_id]):
                continue  # it goes with its job
            self._give(source, sign=-1)
            if self._placed(job, gpu_type):
                given.remove(source)
            else:
                self._give(source)

    def _is_within(self, job: JobView, gpus: int) -> bool:
        """Whether its tenants stay within what they may use."""
        tenancy = self.tenancy
        return all(
            tenancy.used[name] + gpus <= tenancy.limit_gpus(name) for name in tenancy.path(job)
        )

    # --- borrowers ----------------------------------------------------------------------------

    def _sources(self, job: JobView, wanted: int, gpu_type: str) -> Iterable[_Source]:
        """What others hold there that the job's guarantee covers, the cheapest first."""
        for decision in self._kept:
            taker, gpus = job_of(self._flow, decision), self._flow.taken(decision)
            if taker is None or not gpus or self._flow.left(decision):
                continue
            if self._is_owed(job, taker, wanted) and self._is_there(gpus, gpu_type):
                yield _Source(job=taker, gpus=gpus, decision=decision)
        others = [
            other
            for other in self._snapshot.jobs
            if other.placed
            and other.job_id not in self._busy
            and not self._gone.get(other.job_id)
            and self._is_owed(job, other, wanted)
        ]
        for other in others:
            for worker in other.placed if other.is_resizable else ():
                gpus = {worker.node: worker.gpus}
                may_go = worker.is_flexible and not worker.is_leaving
                if may_go and self._is_there(gpus, gpu_type):
                    yield _Source(job=other, gpus=gpus, workers=(worker,))
        now_s = self._snapshot.now_s
        for other in sorted(
            filter(is_movable, others), key=lambda other: (other.lost_gpu_s(now_s), other.job_id)
        ):
            gone = {w for each in self._gone.get(other.job_id, ()) for w in each.workers}
            stay = [w for w in other.placed if not w.is_leaving and w not in gone]
            if self._is_there(gpus := _by_node(stay), gpu_type):
                yield _Source(job=other, gpus=gpus, workers=tuple(stay), is_whole=True)

    def _is_there(self, gpus: Gpus, gpu_type: str) -> bool:
        return any(n in self._free and self._flow.nodes[n].gpu_type == gpu_type for n in gpus)

    def _is_owed(self, job: JobView, other: JobView, wanted: int) -> bool:
        """Whether the guarantee that covers the job is of a tenant beside the other's."""
        mine = self.tenancy.below_top(job, other)
        if not mine:
            return False
        top = self.tenancy.views[mine[-1]]
        return self.tenancy.used[top.name] + wanted <= top.guarantee_gpus

    def _borrows(self, source: _Source, job: JobView) -> bool:
        """Whether whoever holds it has more than its guarantee, at each level beside the job's."""
        gpus = sum(source.gpus.values())
        for name in self.tenancy.below_top(source.job, job):
            guarantee = self.tenancy.views[name].guarantee_gpus
            if source.decision is not None:
                if self.tenancy.used[name] <= guarantee:
                    return False
                continue
            used = min(self.tenancy.used[name], self._stopped[name])
            if (used <= guarantee) if source.is_whole else (used - gpus < guarantee):
                return False
        return True

    def _give(self, source: _Source, *, sign: int = 1) -> None:
        """The source's GPUs come free, or are taken again."""
        gone = self._gone.setdefault(source.job.job_id, [])
        (gone.append if sign > 0 else gone.remove)(source)
        self._move(source.job, source.gpus, sign=sign, is_stop=source.decision is None)

    # --- decisions ----------------------------------------------------------------------------

    def _settle(self, job: JobView, gpu_type: str, given: Sequence[_Source]) -> None:
        placements = self._placed(job, gpu_type)
        count = job.workers_on(gpu_type).min
        factor = job.gpu.worker_multiplier.get(gpu_type, 1)
        tenant = self.tenancy.leaf(job)
        lenders = sorted({self.tenancy.leaf(source.job) for source in given})
        start = Start(
            job_id=job.job_id,
            gpu_type=gpu_type,
            placements=placements,
            estimated_runtime_s=job.work_left_s(self._snapshot.now_s) * factor / count,
            estimate_source=job.estimate_source,
            reason=f"tenant {tenant} is due its guarantee: "
            f"{counted(count * job.gpus_per_worker, 'GPU')} back from {', '.join(lenders)}",
        )
        self._starts.append(start)
        self._busy.add(job.job_id)
        self._move(job, self._flow.taken(start), sign=-1)
        for source in given:
            if source.decision is not None:
                self._kept.remove(source.decision)

    def decisions(self) -> tuple[Decision, ...]:
        """What was decided before, less what is not to be, the stops, and the starts on them."""
        if not self._starts:
            return tuple(self._kept)
        stops: list[Decision] = []
        for job_id in sorted(self._gone):
            sources = [source for source in self._gone[job_id] if source.decision is None]
            if sources:
                stops.append(self._stop(sources))
        return (*self._kept, *stops, *self._starts)

    def _stop(self, sources: Sequence[_Source]) -> Decision:
        job = sources[0].job
        nodes: set[NodeName] = {node for source in sources for node in source.gpus}
        who = ", ".join(
            start.job_id
            for start in self._starts
            if nodes & {placement.node for placement in start.placements}
        )
        why = f"tenant {self.tenancy.leaf(job)} borrows these GPUs, and {who} is due them"
        if not any(source.is_whole for source in sources):
            workers = [worker for source in sources for worker in source.workers]
            removed = tuple(sorted(worker.worker_index for worker in workers))
            return Resize(job_id=job.job_id, removed_workers=removed, reason=why)
        lost_gpu_s = job.lost_gpu_s(self._snapshot.now_s)
        return Preempt(
            job_id=job.job_id,
            predicted_cost_gpu_s=lost_gpu_s,
            beneficiary=who,
            reason=f"{why}; {lost_gpu_s:.0f} GPU-s of work lost",
        )


def _by_node(workers: Iterable[WorkerView]) -> Gpus:
    found: Gpus = {}
    for worker in workers:
        found[worker.node] = found.get(worker.node, 0) + worker.gpus
    return found
