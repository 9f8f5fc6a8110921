"""GPUs back for tenants below their guarantee, from those that borrow. Must not know the engine.

A waiting job whose tenant stays within its guarantee with it, and that finds no room, gets what
borrowers hold: first what they would start or grow on in this very pass, then their flexible
workers, then their jobs that lose least by a stop, with all that share GPUs with them; no more of
them than it needs. A borrower holds more than its guarantee before each stop, at each level below
the tenant that both are part of. Where there is room, when its job starts is up to the policy, for
as long as any may be patient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from common.model import GpuUuid, JobId, JobState, NodeName, NodeRole
from coordinator.policies.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Resize,
    Resume,
    Start,
    Suspend,
)
from coordinator.policies.floor import is_movable
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants import owing
from coordinator.policies.tenants.fitting import gang_on
from coordinator.policies.tenants.flow import Flow, Gpus, job_of, sum_by_node
from coordinator.policies.tenants.giving import Back, Source
from coordinator.policies.tenants.guarding import blocked
from coordinator.policies.tenants.seats import Seat, left_by, seats
from coordinator.policies.tenants.tenancy import Tenancy, base_gpus
from coordinator.policies.words import counted


def taken_back(snapshot: ClusterSnapshot, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """The decisions of a pass, and those that give tenants below their guarantee theirs back."""
    return given_back(snapshot, decisions).decisions


def given_back(
    snapshot: ClusterSnapshot,
    decisions: Sequence[Decision],
    *,
    is_patient: bool = False,
    aside: Collection[JobId] = (),
) -> Back:
    """The same, and who gets nothing though a guarantee covers it.

    is_patient: jobs that fit are the policy's, however long they have waited. aside: get nothing,
        and what was decided about them stays.
    """
    back = _TakeBack(snapshot, decisions, aside)
    failed: dict[tuple[object, ...], str] = {}
    waits: dict[JobId, str] = {}
    is_soon = False
    for job in back.entitled():
        shape = (job.workers.min, job.gpus_per_worker, job.gpu.types, job.avoid_nodes)
        alike = (back.tenancy.leaf(job), *shape)
        if alike not in failed:
            if back.serve(job):
                continue
            shortage = owing.shortage_of(back.tenancy, back.seats, back.busy, job)
            failed[alike] = shortage.why
            is_soon |= shortage.is_soon
        if failed[alike]:
            waits[job.job_id] = failed[alike]
    wake_at_s = None if is_patient else back.end_patience()
    return Back(
        decisions=back.decisions(),
        waits=waits,
        is_soon=is_soon,
        fits=frozenset(job.job_id for job in back.fits),
        behind=owing.behind(back.tenancy, back.waiting(), back.fits),
        wake_at_s=wake_at_s,
    )


class _TakeBack:
    """One pass: the room and the uses after what was decided so far.

    seats: who has GPUs together. busy: jobs that something is decided about, but a turn.
    stopped: uses by tenant before the pass, less what its stops give back; the guard counts so.
    turning: jobs that are suspended or resumed in the pass, which a stop of them takes the place
        of. awaited: GPUs that somebody moves to in it. fits: jobs that had room as it was.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, decisions: Sequence[Decision], aside: Collection[JobId]
    ) -> None:
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
        self._aside = aside
        # Whoever has no room by quota, whoever gives back, is waited for by nobody.
        self.busy = {*aside, *blocked(snapshot, self.tenancy)}
        self._turning: set[JobId] = set()
        self._awaited: set[GpuUuid] = set()
        self.seats = seats(snapshot.jobs)
        self._gone: dict[JobId, list[Source]] = {}
        self._starts: list[Start] = []
        self.fits: list[JobView] = []
        for decision, left in zip(decisions, self._flow.lefts(decisions), strict=True):
            job = job_of(self._flow, decision)
            if job is not None:
                is_turn = isinstance(decision, Suspend | Resume)
                (self._turning if is_turn else self.busy).add(job.job_id)
                self._move(job, left.free, left.used, is_stop=True)
                self._take(job, self._flow.taken(decision))
            if isinstance(decision, Migrate):
                self._awaited.update(u for each in decision.placements for u in each.gpu_uuids)

    def _take(self, job: JobView, gpus: Gpus) -> None:
        self._move(job, gpus, sum(gpus.values()), sign=-1)

    def _move(
        self, job: JobView, gpus: Gpus, used: int, *, sign: int = 1, is_stop: bool = False
    ) -> None:
        """GPUs come free, and a job has so many less (or, with sign -1, takes them)."""
        self.tenancy.leave(job, used * sign)
        if is_stop:
            for name in self.tenancy.path(job):
                self._stopped[name] -= used * sign
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
            for job in self.waiting()
            if any(views[name].guarantee_gpus > used[name] for name in self.tenancy.path(job))
        ]
        return sorted(covered, key=place)

    def waiting(self) -> list[JobView]:
        """Jobs that wait on after all that was decided so far."""
        jobs = self._snapshot.jobs
        return [j for j in jobs if j.state == JobState.PENDING and j.job_id not in self.busy]

    def serve(self, job: JobView) -> bool:
        """Take back what the job needs to start, and start it; False: borrowers have not enough.

        One that fits without is left to the policy.
        """
        kinds = self._kinds(job)
        if any(self._placed(job, kind) for kind in kinds):
            if owing.is_covered(self.tenancy, job):
                self.fits.append(job)
            return True
        return any(self._serve_on(job, kind) for kind in kinds)

    def end_patience(self) -> float | None:
        """Start those that fit and that waited for long enough; returns when the next will have."""
        fits = {job.job_id for job in self.fits}
        late, wake_at_s = owing.overdue(self.tenancy, self.waiting(), fits, self._snapshot.now_s)
        for job in late:
            kind = next((kind for kind in self._kinds(job) if self._placed(job, kind)), None)
            covered = owing.is_covered(self.tenancy, job)
            if kind is not None and covered and base_gpus(job) <= self.tenancy.room(job):
                self._settle(job, kind, ())
                self.fits.remove(job)
        return wake_at_s

    def _kinds(self, job: JobView) -> Sequence[str]:
        return job.gpu.types or sorted({node.gpu_type for node in self._snapshot.nodes})

    def _placed(self, job: JobView, gpu_type: str) -> tuple[Placement, ...]:
        """Its base gang; empty where it does not fit."""
        return gang_on(self._free, self._flow.nodes, job, gpu_type)

    def _serve_on(self, job: JobView, gpu_type: str) -> bool:
        """The cheapest anywhere; where a borrower would then have given too much, node by node."""
        wanted = job.workers_on(gpu_type).min * job.gpus_per_worker
        if self._serve_from(self._sources(job, wanted, gpu_type), job, gpu_type, wanted):
            return True
        found = (source.gpus for source in self._sources(job, wanted, gpu_type))
        most = sum_by_node([self._free, *found])
        return any(
            self._serve_from(self._sources(job, wanted, gpu_type, only=name), job, gpu_type, wanted)
            for name in sorted(self._free)
            if self._flow.nodes[name].gpu_type == gpu_type and most[name] >= wanted
        )

    def _serve_from(
        self, sources: Iterable[Source], job: JobView, gpu_type: str, wanted: int
    ) -> bool:
        given: list[Source] = []
        for source in sources:
            if self._borrows(source, job):
                self._give(source)
                given.append(source)
                if self._placed(job, gpu_type):
                    break
        fits = bool(self._placed(job, gpu_type))
        if fits:
            self._spare(given, job, gpu_type)
            fits = wanted <= self.tenancy.room(job)
        if not fits:
            for source in reversed(given):
                self._give(source, sign=-1)
            return False
        self._settle(job, gpu_type, given)
        return True

    def _spare(self, given: list[Source], job: JobView, gpu_type: str) -> None:
        """Give back what was not needed after all, the dearest first."""
        for source in list(reversed(given)):
            if source.seat is None and any(each.seat for each in self._gone[source.job.job_id]):
                continue  # it goes with its job
            self._give(source, sign=-1)
            if self._placed(job, gpu_type):
                given.remove(source)
            else:
                self._give(source)

    # --- borrowers ----------------------------------------------------------------------------

    def _sources(
        self, job: JobView, wanted: int, gpu_type: str, *, only: NodeName | None = None
    ) -> Iterable[Source]:
        """What others hold there that the job's guarantee covers, the cheapest first.

        Those of one kind last whose deadline is still ahead: it may have been promised.
        only: nothing that is not of this node alone.
        """

        def is_there(gpus: Gpus) -> bool:
            if only is not None:
                return gpus.keys() == {only}
            return any(n in self._free and self._flow.nodes[n].gpu_type == gpu_type for n in gpus)

        def is_owed_by(other: JobView) -> bool:
            return owing.is_owed(self.tenancy, job, other, wanted)

        yield from (each for each in self._newcomers(is_owed_by) if is_there(each.gpus))
        theirs = [
            seat
            for seat in self.seats
            if is_owed_by(seat.jobs[0])
            and not any(
                each.job_id in self.busy or self._gone.get(each.job_id) for each in seat.jobs
            )
        ]
        yield from (each for each in self._flexible(theirs) if is_there(each.gpus))
        yield from (each for each in self._whole(theirs) if is_there(each.gpus))

    def _newcomers(self, is_owed_by: Callable[[JobView], bool]) -> Iterable[Source]:
        """What others would start or grow on in this pass."""
        for decision in sorted(self._kept, key=lambda each: self._has_date(self._job_of(each))):
            taker, gpus = self._job_of(decision), self._flow.taken(decision)
            if taker is None or not gpus or self._flow.leaving(decision):
                continue
            if taker.job_id not in self._aside and is_owed_by(taker):
                yield Source(job=taker, gpus=gpus, used=sum(gpus.values()), decision=decision)

    def _flexible(self, theirs: Iterable[Seat]) -> Iterable[Source]:
        """Flexible workers, one by one."""
        for other in sorted((each for seat in theirs for each in seat.jobs), key=self._has_date):
            if other.is_resizable and other.job_id not in self._turning:
                for worker in other.placed:
                    if worker.is_flexible and not worker.is_leaving:
                        own = self._flow.own(worker)
                        yield Source(job=other, gpus=own.free, used=own.used, workers=(worker,))

    def _whole(self, theirs: Iterable[Seat]) -> Iterable[Source]:
        """Jobs, each with all that have any of its GPUs, without the workers that go already."""
        for seat in sorted(filter(self._may_stop, theirs), key=self._price):
            given = [each for other in seat.jobs for each in self._gone.get(other.job_id, ())]
            gone = {worker for each in given for worker in each.workers}
            stay = [
                worker
                for other in seat.jobs
                for worker in other.placed
                if not worker.is_leaving and worker not in gone
            ]
            left = left_by(stay)
            yield Source(
                job=seat.jobs[0], gpus=left.free, used=left.used, workers=tuple(stay), seat=seat
            )

    def _job_of(self, decision: Decision) -> JobView | None:
        return job_of(self._flow, decision)

    def _has_date(self, job: JobView | None) -> bool:
        date_s = None if job is None else job.deadline_at_s
        return date_s is not None and date_s > self._snapshot.now_s

    def _price(self, seat: Seat) -> tuple[bool, float, str]:
        """What stopping all on a seat costs."""
        lost_gpu_s = sum(job.lost_gpu_s(self._snapshot.now_s) for job in seat.jobs)
        return (any(map(self._has_date, seat.jobs)), lost_gpu_s, seat.jobs[0].job_id)

    def _may_stop(self, seat: Seat) -> bool:
        """Whether all on a seat can be stopped now, and nobody is on the way to it.

        They are one tenant's, unless tenants came to have rules after they came to share it.
        """
        return (
            all(map(is_movable, seat.jobs))
            and len({self.tenancy.leaf(job) for job in seat.jobs}) == 1
            and seat.uuids.isdisjoint(self._awaited)
        )

    def _borrows(self, source: Source, job: JobView) -> bool:
        """Whether whoever holds it has more than its guarantee, at each level beside the job's."""
        for name in self.tenancy.below_top(source.job, job):
            guarantee = self.tenancy.views[name].guarantee_gpus
            if source.decision is not None:
                if self.tenancy.used[name] <= guarantee:
                    return False
                continue
            used = min(self.tenancy.used[name], self._stopped[name])
            if (used <= guarantee) if source.seat else (used - source.used < guarantee):
                return False
        return True

    def _give(self, source: Source, *, sign: int = 1) -> None:
        """The source's GPUs come free, or are taken again."""
        for job in source.jobs:
            gone = self._gone.setdefault(job.job_id, [])
            (gone.append if sign > 0 else gone.remove)(source)
        is_stop = source.decision is None
        self._move(source.job, source.gpus, source.used, sign=sign, is_stop=is_stop)

    # --- decisions ----------------------------------------------------------------------------

    def _settle(self, job: JobView, gpu_type: str, given: Sequence[Source]) -> None:
        placements = self._placed(job, gpu_type)
        count = job.workers_on(gpu_type).min
        factor = job.gpu.worker_multiplier.get(gpu_type, 1)
        tenant = self.tenancy.leaf(job)
        lenders = sorted({self.tenancy.leaf(source.job) for source in given})
        gpus = counted(count * job.gpus_per_worker, "GPU")
        how = f"{gpus} back from {', '.join(lenders)}"
        if not given:
            how = f"it fits on free GPUs and has waited for more than {owing.PATIENCE_S:.0f} s"
        start = Start(
            job_id=job.job_id,
            gpu_type=gpu_type,
            placements=placements,
            estimated_runtime_s=job.work_left_s(self._snapshot.now_s) * factor / count,
            estimate_source=job.estimate_source,
            reason=f"tenant {tenant} is due its guarantee: {how}",
        )
        self._starts.append(start)
        self.busy.add(job.job_id)
        self._take(job, self._flow.taken(start))
        for source in given:
            if source.decision is not None:
                self._kept.remove(source.decision)
            if source.seat is not None:
                self._kept = [each for each in self._kept if not source.seat.is_about(each)]

    def decisions(self) -> tuple[Decision, ...]:
        """What was decided before, less what is not to be, the stops, and the starts on them."""
        stops: list[Decision] = []
        for job_id in sorted(self._gone):
            sources = [source for source in self._gone[job_id] if source.decision is None]
            if sources:
                stops.append(self._stop(self._flow.jobs[job_id], sources))
        return (*self._kept, *stops, *self._starts)

    def _stop(self, job: JobView, sources: Sequence[Source]) -> Decision:
        nodes: set[NodeName] = {node for source in sources for node in source.gpus}
        who = ", ".join(
            start.job_id
            for start in self._starts
            if nodes & {placement.node for placement in start.placements}
        )
        why = f"tenant {self.tenancy.leaf(job)} borrows these GPUs, and {who} is due them"
        if not any(source.seat for source in sources):
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
