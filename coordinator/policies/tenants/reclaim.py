"""Reclaim for guarantees: GPUs back for tenants below their guarantee, from those that borrow.

A waiting job that finds no room, and whose tenant stays within its guarantee with it, gets GPUs of
borrowers: first those on which they would start or grow in this very pass, then their flexible
workers, then their jobs. Jobs of the lowest priority go first, then those that lose least by a
stop, with all jobs that share GPUs with them. The reclaim takes no more than the job needs, and
prefers victims that leave borrowers their guarantees. A borrower holds more than its guarantee
before each stop, at each level below the tenant that contains both. Where there is room, the policy
decides when the job starts, up to a limit (`entitlements`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Decision, Preempt, Resize, Start
from coordinator.policies.contract.free_gpus import gang_shape
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted, listed, unsaved
from coordinator.policies.tenants import entitlements
from coordinator.policies.tenants.borrowers import Lenders
from coordinator.policies.tenants.free_counts import Counts
from coordinator.policies.tenants.giveback import GiveBack, Source
from coordinator.policies.tenants.gpu_flow import Flow, Gang, Gpus, moves_of, sum_by_node
from coordinator.policies.tenants.infeasible import Fleet
from coordinator.policies.tenants.pointless_stops import in_vain
from coordinator.policies.tenants.queues import submission
from coordinator.policies.tenants.quota_guard import blocked
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.victims import Choosing, Way

Shape = tuple[object, ...]
"""The demand of a job, and its tenant: alike jobs find room alike."""


def given_back(
    snapshot: ClusterSnapshot,
    decisions: Sequence[Decision],
    *,
    is_patient: bool = False,
    aside: Collection[JobId] = (),
) -> GiveBack:
    """The decisions of a pass with the give-back, and the guaranteed jobs that get nothing.

    is_patient: jobs that fit are left to the policy, however long they have waited.
    aside: get nothing, and decisions about them stay.
    """
    while True:
        back = _TakeBack(snapshot, decisions, aside)
        wake_at_s = back.serve_all(is_patient=is_patient)
        if (rest := back.without_vain()) is None:
            break
        decisions = rest
    return GiveBack(
        decisions=back.decisions(),
        waits=back.waits,
        is_soon=back.is_soon,
        fits=frozenset(job.job_id for job in back.fits),
        behind=entitlements.behind(back.tenancy, back.waiting(), back.fits, back.is_never),
        wake_at_s=wake_at_s,
    )


class _TakeBack:
    """One pass: the due jobs after the decisions so far, and the borrowers that give.

    waits, fits: as of `GiveBack`; fits: jobs.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, decisions: Sequence[Decision], aside: Collection[JobId]
    ) -> None:
        self._snapshot = snapshot
        self._before = decisions
        self._flow = flow = Flow(snapshot)
        self._counts = Counts(snapshot, flow)
        self.tenancy = self._counts.tenancy
        self._lenders = Lenders(snapshot, flow, self._counts, decisions, aside)
        self._choosing = Choosing(self._counts, self._lenders)
        self._starts: list[Start] = []
        self._due: dict[JobId, list[JobId]] = {}
        self._blocked: Mapping[JobId, str] = {}
        self.waits: dict[JobId, str] = {}
        self.is_soon = False
        self.fits: list[JobView] = []
        for move in moves_of(flow, decisions):
            self._counts.stop(move.job, move.left, move.gone, is_whole=move.is_whole)
            self._counts.take(move.job, move.taken)

    # --- who is due -----------------------------------------------------------------------------

    def serve_all(self, *, is_patient: bool) -> float | None:
        """Reclaim what guaranteed jobs need, until no job gets anything more.

        When one starts, another may lose the room that it had, or its own start. Returns when the
        first of those that fit will have waited for long enough.
        """
        while True:
            begun = len(self._starts)
            self._serve_each()
            wake_at_s = None if is_patient else self._end_patience()
            if len(self._starts) == begun:
                return wake_at_s

    def _serve_each(self) -> None:
        """All of them once, the tenants first that have least of their guarantee."""
        # Stops, and starts that gave way, may make quota room for a job that had none before.
        self._blocked = blocked(self._snapshot, self.tenancy)
        self.waits, self.is_soon, self.fits = {}, False, []
        failed: dict[Shape, str] = {}
        room: tuple[int, dict[Shape, bool]] = (-1, {})
        for job in self._entitled():
            alike = self._shape(job)
            if alike not in failed:
                if room[0] != len(self._starts):  # a job that starts leaves less
                    room = (len(self._starts), {})
                if alike not in room[1]:
                    room[1][alike] = self._fits(job)
                if room[1][alike]:  # when it starts is up to the policy
                    if entitlements.is_covered(self.tenancy, job):
                        self.fits.append(job)
                    continue
                if any(self._serve_on(job, kind) for kind in self._kinds(job)):
                    continue
                seats, busy = self._lenders.seats, self._lenders.busy
                shortage = entitlements.shortage_of(self.tenancy, seats, busy, job)
                failed[alike] = shortage.why
                self.is_soon |= shortage.is_soon
            if failed[alike]:
                self.waits[job.job_id] = failed[alike]

    def _shape(self, job: JobView) -> Shape:
        return (self.tenancy.alike(job), *gang_shape(job))

    def _entitled(self) -> list[JobView]:
        """Waiting jobs that some guarantee may cover, of the tenants that have least of theirs."""
        used, views = self.tenancy.used, self.tenancy.views
        has: dict[str, Fraction] = {}
        for name in views:
            due = [each for each in self.tenancy.path_of(name) if views[each].guarantee_gpus]
            if any(views[each].guarantee_gpus > used[each] for each in due):
                has[name] = min(Fraction(used[each], views[each].guarantee_gpus) for each in due)

        def place(job: JobView) -> tuple[object, ...]:
            return (has[self.tenancy.leaf(job)], *submission(job))

        return sorted((j for j in self.waiting() if self.tenancy.leaf(j) in has), key=place)

    def waiting(self) -> list[JobView]:
        """Jobs that wait on after all that was decided so far, and that may start by quota."""
        busy = self._lenders.busy | self._blocked.keys()
        jobs = self._snapshot.jobs
        return [job for job in jobs if job.state == JobState.PENDING and job.job_id not in busy]

    @cached_property
    def _fleet(self) -> Fleet:
        return Fleet(self._snapshot)  # most passes ask nothing of it

    def is_never(self, job: JobView) -> bool:
        """True if the present nodes could not run a job even if they were empty."""
        return self._fleet.is_never(job)

    def _end_patience(self) -> float | None:
        """Start those that fit and that waited for long enough; returns when the next will have."""
        if not self.fits:
            return None
        free, found = self._counts.free, dict[Shape, bool]()

        def finds_gpus(job: JobView) -> bool:
            alike = self._shape(job)
            if alike not in found:
                found[alike] = any(self._gang(job, kind).fits(free) for kind in self._kinds(job))
            return found[alike]

        now_s = self._snapshot.now_s
        late, wake_at_s = entitlements.overdue(
            self.tenancy, self.waiting(), finds_gpus, self.is_never, now_s
        )
        for job in late:
            gang = next(self._gangs_that_fit(job), None)
            if gang is not None and entitlements.is_covered(self.tenancy, job):
                self._settle(job, gang, ())
        return wake_at_s

    def _kinds(self, job: JobView) -> Sequence[str]:
        return job.gpu.types or sorted({node.gpu_type for node in self._snapshot.nodes})

    def _gang(self, job: JobView, gpu_type: str) -> Gang:
        return Gang(self._counts.free, self._flow.nodes, job, gpu_type)

    def _fits(self, job: JobView) -> bool:
        """Whether its base gang finds room as it is, and its tenant has room for it."""
        return any(True for _ in self._gangs_that_fit(job))

    def _gangs_that_fit(self, job: JobView) -> Iterator[Gang]:
        """The gangs that fit, by GPU type."""
        for kind in self._kinds(job):
            gang = self._gang(job, kind)
            if gang.fits(self._counts.free) and self._choosing.has_room(job, gang):
                yield gang

    # --- who gives ------------------------------------------------------------------------------

    def _serve_on(self, job: JobView, gpu_type: str) -> bool:
        """Start the job on GPUs that others give; False: nothing has changed."""
        gang = self._gang(job, gpu_type)
        lacks_gpus = not gang.fits(self._counts.free)
        given = self._choosing.take(self._ways(job, gang), job, gang)
        if given is None:
            return False
        # Free GPUs elsewhere may be left over by a stop of this pass inside a guarantee.
        first = {node for source in given for node in source.gpus} if lacks_gpus else ()
        self._settle(job, gang, given, first)
        return True

    def _ways(self, job: JobView, gang: Gang) -> Iterator[Way]:
        """The cheapest anywhere; where a borrower would then have given too much, node by node."""
        wanted = gang.count * job.gpus_per_worker
        there = partial(self._lenders.sources, job, wanted, gang)
        # GPUs that make quota room may be on any node.
        if not self._choosing.has_room(job, gang):
            yield from self._by_tenant(job, partial(there, is_anywhere=True))
        most = sum_by_node([self._counts.free, *(source.gpus for source in there())])
        if self._is_deep(job):
            more = sum_by_node([self._counts.free, *self._all_of(job, there)])
            most = {name: max(most.get(name, 0), more.get(name, 0)) for name in most | more}
        if not gang.fits(most):
            return
        yield there
        if self._is_deep(job):
            yield partial(self._nearest_first, job, there)
        for name in sorted(gang.nodes):
            if most[name] >= wanted:
                yield from self._by_tenant(job, partial(there, only=name))

    def _is_deep(self, job: JobView) -> bool:
        """Whether its tenant is part of another one."""
        return len(self.tenancy.path(job)) > 1

    def _nearest_first(self, job: JobView, sources: Way) -> Iterator[Source]:
        """GPUs of siblings before those of others: a tenant above may owe nothing to the job, and
        be owed nothing for it, until its own children have given what they borrow.
        """
        below_top = self.tenancy.below_top
        for apart in range(1, len(self.tenancy.path(job)) + 1):
            for source in sources():
                if len(below_top(job, source.job)) == apart:
                    yield source

    def _all_of(self, job: JobView, sources: Way) -> list[Gpus]:
        """GPUs of all that would be given so, nearest first."""
        given = list[Source]()
        for source in self._nearest_first(job, sources):
            self._lenders.give(source)
            given.append(source)
        for source in reversed(given):
            self._lenders.give(source, sign=-1)
        return [source.gpus for source in given]

    def _by_tenant(self, job: JobView, sources: Way) -> Iterator[Way]:
        """The cheapest of all; or what one tenant has, as a tenant above several may have more than
        its guarantee only until the cheapest of them are stopped, and those are not enough."""
        yield sources
        if self._is_deep(job):
            yield partial(self._nearest_first, job, sources)
        leaf = self.tenancy.leaf
        names = sorted({leaf(source.job) for source in sources()})
        if len(names) > 1:
            for name in names:
                yield partial(self._of_tenant, sources, name)

    def _of_tenant(self, sources: Way, name: str) -> Iterator[Source]:
        return (each for each in sources() if self.tenancy.leaf(each.job) == name)

    # --- decisions ----------------------------------------------------------------------------

    def _settle(
        self, job: JobView, gang: Gang, given: Sequence[Source], first: Collection[NodeName] = ()
    ) -> None:
        """Start a job on given and free GPUs, on some nodes first."""
        tenant = self.tenancy.leaf(job)
        lenders = sorted({self.tenancy.leaf(source.job) for source in given})
        gpus = counted(gang.count * job.gpus_per_worker, "GPU")
        how = f"{gpus} back from {', '.join(lenders)}"
        if not given:
            how = (
                f"it fits on free GPUs and has waited for more than {entitlements.PATIENCE_S:.0f} s"
            )
        factor = job.gpu.worker_multiplier.get(gang.gpu_type, 1)
        start = Start(
            job_id=job.job_id,
            gpu_type=gang.gpu_type,
            placements=gang.placed(self._counts.free, first),
            estimated_runtime_s=job.work_left_s(self._snapshot.now_s) * factor / gang.count,
            estimate_source=job.estimate.source,
            reason=f"tenant {tenant} is owed its guarantee: {how}",
        )
        self._starts.append(start)
        for other in (other for source in given for other in source.jobs):
            self._due.setdefault(other.job_id, []).append(job.job_id)
        self._counts.take(job, self._flow.taken(start))
        self._lenders.settle(job, given)

    def decisions(self) -> tuple[Decision, ...]:
        """The decisions so far less the dropped ones, then the stops, then the starts on them."""
        stops = (self._stop(job, sources) for job, sources in self._lenders.stops())
        return (*self._lenders.kept, *stops, *self._starts)

    def without_vain(self) -> Sequence[Decision] | None:
        """The pass's decisions without those that gave way and without all stops that were for
        them; None where every stop keeps its use.

        The reclaim is repeated from there, because a job that runs on may be the one that gives. A
        start of this class is no use of that stop: its job may be due its GPUs only because of
        the stop. The policy would want the stopped job back there sooner or later, and decide the
        same again. The start is a use where the job had no quota room before, and the stopped one
        has none after it.
        """
        kept = set(map(id, self._lenders.kept))
        rest = [each if id(each) in kept else None for each in self._before]
        if None not in rest:
            return None
        barred = blocked(self._snapshot, Tenancy(self._snapshot))
        leavers = [each for each in self._lenders.kept if self._flow.leaving(each)]
        others = self.decisions()[len(kept) :]
        uses = [
            each
            for each in others
            if not isinstance(each, Start)
            or (each.job_id in barred and self._keeps_out(each, leavers))
        ]
        if not in_vain(self._flow, self._before, [*rest, *uses]):
            return None
        vain = set(in_vain(self._flow, self._before, rest))
        return [each for n, each in enumerate(rest) if each is not None and n not in vain]

    def _keeps_out(self, start: Start, leavers: Sequence[Decision]) -> bool:
        """True if all jobs that leave GPUs where one starts have no room until it is due its own
        again.

        The cause is a borrow limit of a tenant that contains all, whatever its other jobs do. Lend
        limits and the size of the cell do not count: the rest that they leave a tenant changes with
        the use of the same guarantee by others.
        """
        taken = self._flow.taken(start)
        wanted, path = sum(taken.values()), self.tenancy.path(self._flow.jobs[start.job_id])

        def is_out(decision: Decision) -> bool:
            if not isinstance(decision, Preempt):
                return False
            stopped = self._flow.jobs[decision.job_id]
            views = [self.tenancy.views[name] for name in self.tenancy.path(stopped)]
            limits = [view.borrow_limit_gpus for view in views if view.name in path]
            # Until it is due as much again it has more than the rest of its guarantee.
            return any(n is not None and stopped.base_gpus - wanted >= n for n in limits)

        return all(is_out(each) for each in leavers if _nodes_of(self._flow, each) & taken.keys())

    def _stop(self, job: JobView, sources: Sequence[Source]) -> Decision:
        nodes: set[NodeName] = {node for source in sources for node in source.gpus}
        takers = [
            start.job_id
            for start in self._starts
            if nodes & {placement.node for placement in start.placements}
        ]
        takers = takers or self._due[job.job_id]  # room by quota, wherever they start
        due = listed(takers, "is", "are")
        why = f"tenant {self.tenancy.leaf(job)} borrows these GPUs, and {due} due them"
        if not any(source.seat for source in sources):
            workers = [worker for source in sources for worker in source.workers]
            removed = tuple(sorted(worker.worker_index for worker in workers))
            return Resize(job_id=job.job_id, removed_workers=removed, reason=why)
        lost_gpu_s = job.lost_gpu_s(self._snapshot.now_s)
        return Preempt(
            job_id=job.job_id,
            predicted_cost_gpu_s=lost_gpu_s,
            beneficiary=", ".join(takers),
            guarantee=self.tenancy.below_top(self._flow.jobs[self._due[job.job_id][0]], job)[-1],
            reason=f"{why}; {unsaved(lost_gpu_s)}",
        )


def _nodes_of(flow: Flow, decision: Decision) -> set[NodeName]:
    """Where it orders workers to leave."""
    return {worker.node for worker in flow.leaving(decision)}
