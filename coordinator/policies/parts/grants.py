"""Grants -> decisions: turns worker counts per job into stops, starts and resizes on real nodes.

A policy that decides jointly lists the jobs that run, each with its worker count, in order of
precedence (`Grant`). `carry_out` finds the nodes. Running jobs stay where they are. The engine's
nominees pass on the GPUs that others leave, in the same pass. No job is preempted without use for
its GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import (
    Decision,
    PendingReason,
    Placement,
    Preempt,
    Resize,
    Start,
    merge,
    placed_count,
)
from coordinator.policies.contract.estimates import runtime_on
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    Place,
    best_fit,
    first_fit,
    is_movable,
    present_workers,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.contract.text import counted, listed, unsaved
from coordinator.policies.parts.defragment import Clearing

Why = Callable[[Sequence[JobId]], str]
"""The purpose of a stop, as text, by the jobs that take the GPUs."""


def turn_over(takers: Sequence[JobId]) -> str:
    """Where jobs take turns that is all."""
    return "its turn is over"


class Grant(Struct, frozen=True, kw_only=True):
    """A job and its worker count from now on; at least its base gang.

    gpu_type: of the attempt; None takes the first accepted one with room. Running jobs keep theirs.
    placements: exactly there, for a waiting job; None leaves it to the placement rule.
    is_promised: its deadline was promised to it.
    share: other jobs move for this number of its workers, if they find no room otherwise.
    leaving: indices of the flexible workers that leave first if it has fewer than now; then the
        newest.
    room_for: waiting jobs that take what they leave: without their starts no worker leaves.
    """

    job: JobView
    workers: int
    reason: str
    gpu_type: str | None = None
    placements: tuple[Placement, ...] | None = None
    is_promised: bool = False
    share: int = 0
    leaving: tuple[int, ...] = ()
    room_for: tuple[JobId, ...] = ()


def going_on(snapshot: ClusterSnapshot, *, but: Collection[JobId] = ()) -> list[Grant]:
    """Every job that has workers keeps as many as they are."""
    return [
        Grant(job=job, workers=present_workers(job), reason="it runs")
        for job in snapshot.jobs
        if job.placed and job.job_id not in but
    ]


def begin(
    floor: FreeGpus,
    job: JobView,
    reason: str,
    place: Place = best_fit,
    kinds: Sequence[str] | None = None,
) -> Grant | None:
    """Give a job that waits free GPUs for its whole base gang; None where it does not fit.

    kinds: as for `first_fit`.
    """
    found = first_fit(floor, job, place, kinds)
    if found is None:
        return None
    gpu_type, placements = found
    floor.take(placements, job.gpus_per_worker)
    count = job.workers_on(gpu_type).min
    return Grant(job=job, workers=count, gpu_type=gpu_type, placements=placements, reason=reason)


class Plan(Struct, frozen=True, kw_only=True):
    """The plan from grants: decisions in the order in which they can be carried out.

    holds: why granted jobs that wait were not placed.
    wake_at_s: when a job with a granted resize may be resized at last.
    """

    decisions: tuple[Decision, ...]
    holds: tuple[PendingReason, ...] = ()
    wake_at_s: float | None = None


def carry_out(
    snapshot: ClusterSnapshot,
    grants: Sequence[Grant],
    *,
    floor: FreeGpus | None = None,
    place: Place = best_fit,
    stops_in_vain: bool = False,
    clearing: Clearing | None = None,
    why: Why = turn_over,
) -> Plan:
    """Decisions that give each granted job its workers, as far as nodes allow.

    Running jobs that may be stopped and were granted nothing are preempted if another job starts or
    grows on their GPUs, or in any case where `stops_in_vain`. Jobs that cannot be changed now (they
    start, stop or resize, or did not agree) keep their workers whatever is granted.

    clearing: moves others for a `share` that finds no room; None: no job moves.
    why: the reason given to preempted jobs.
    """
    floor = floor or FreeGpus(snapshot)
    return _Carrying(snapshot, grants, floor, place, clearing, why).plan(stops_in_vain)


class _Shrink(Struct, frozen=True):
    """Workers that go by a grant."""

    grant: Grant
    leaving: tuple[WorkerView, ...]


class _Carrying:
    """One pass.

    takers: jobs that start or grow on a node, by node.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        grants: Sequence[Grant],
        floor: FreeGpus,
        place: Place,
        clearing: Clearing | None,
        why: Why,
    ) -> None:
        self._snapshot = snapshot
        self._grants = grants
        self._floor = floor
        self._place = place
        self._clearing = clearing
        self._why = why
        self._shrinks: list[_Shrink] = []
        self._starts: list[Decision] = []
        self._grows: list[Decision] = []
        self._holds: list[PendingReason] = []
        self._takers: dict[NodeName, list[JobId]] = {}
        self._wakes: list[float] = []
        granted = {grant.job.job_id for grant in grants}
        # The highest priority is spared first, then the job that loses most by a stop.
        self._staying = sorted(
            (job for job in snapshot.jobs if is_movable(job) and job.job_id not in granted),
            key=lambda job: (-job.priority, -job.lost_gpu_s(snapshot.now_s), job.job_id),
        )
        self._going: list[JobView] = []

    def plan(self, stops_in_vain: bool) -> Plan:
        if stops_in_vain:
            for job in self._staying:
                self._floor.vacate(job.placed)
            self._going, self._staying = self._staying, []
        self._resize(shrinks=True)
        for grant in self._grants:
            if grant.job.state == JobState.PENDING:
                self._start(grant)
        shrinks = self._needed_shrinks()
        self._resize(shrinks=False)
        preempts = [self._preempt(job) for job in self._going]
        moves = self._clearing.decisions if self._clearing is not None else ()
        return Plan(
            decisions=(*shrinks, *preempts, *moves, *self._starts, *self._grows),
            holds=tuple(self._holds),
            wake_at_s=min(self._wakes, default=None),
        )

    def _find(
        self, place: Place, job: JobView, gpu_type: str, *, least: int, count: int, share: int
    ) -> tuple[Placement, ...]:
        """Nodes for `count` workers: free GPUs first, else also those of jobs without a grant.

        If that gives no room either, others move for `share` of them. Only jobs whose GPUs are
        really taken are stopped. With fewer than `least` workers none is.
        """
        self._floor.avoided = job.nodes.avoided
        found = place(self._floor, job, gpu_type, count)
        wanted = 0 if self._clearing is None else min(share, count)
        if placed_count(found) >= count or not (self._staying or placed_count(found) < wanted):
            return found
        for other in self._staying:
            self._floor.vacate(other.placed)
        more = place(self._floor, job, gpu_type, count)
        if placed_count(more) < wanted and self._clear(job, gpu_type, least, wanted):
            more = place(self._floor, job, gpu_type, count)
        if placed_count(more) < least or placed_count(more) <= placed_count(found):
            for other in self._staying:
                self._floor.stay(other.placed)
            return more if placed_count(more) < least else found
        self._floor.take(more, job.gpus_per_worker)
        staying: list[JobView] = []
        for other in self._staying:
            (staying if self._floor.goes_on(other.placed) else self._going).append(other)
        self._staying = staying
        self._floor.give(more, job.gpus_per_worker)
        return more

    def _clear(self, job: JobView, gpu_type: str, least: int, count: int) -> bool:
        """Let others move, but those who change in this pass, or might go."""
        if self._clearing is None:
            return False
        busy = {each.job_id for each in (*self._staying, *self._going)}
        busy |= {
            grant.job.job_id
            for grant in self._grants
            if grant.workers != present_workers(grant.job)
        }
        return self._clearing.make(self._floor, job, gpu_type, least=least, count=count, busy=busy)

    def _preempt(self, job: JobView) -> Decision:
        nodes = {worker.node for worker in job.placed}
        takers = sorted({taker for node in nodes for taker in self._takers.get(node, ())})
        lost_gpu_s, yet = job.lost_gpu_s(self._snapshot.now_s), "" if takers else " yet"
        return Preempt(
            job_id=job.job_id,
            predicted_cost_gpu_s=lost_gpu_s,
            beneficiary=", ".join(takers),
            reason=f"{self._why(takers)}: {listed(takers, 'takes', 'take')} GPUs where it runs"
            f"{yet}; {unsaved(lost_gpu_s)}",
        )

    # --- running jobs -------------------------------------------------------------------------

    def _resize(self, *, shrinks: bool) -> None:
        for grant in self._grants:
            job = grant.job
            if not job.is_resizable or job.gpu_type is None:
                continue
            more = grant.workers - present_workers(job)
            if more == 0 or (more < 0) != shrinks:
                continue
            if shrinks:
                self._shrink(grant, -more)
            elif (at_s := resizable_at_s(self._snapshot, job)) is not None:
                self._wakes.append(at_s)
            else:
                self._grow(grant, more)

    def _shrink(self, grant: Grant, count: int) -> None:
        flexible = [w for w in grant.job.placed if w.is_flexible and not w.is_leaving]
        # The named ones, then the newest: they stand farthest from the base gang.
        flexible.sort(key=lambda w: (w.worker_index not in grant.leaving, -w.worker_index))
        if leaving := tuple(flexible[:count]):
            self._floor.vacate(leaving)
            self._shrinks.append(_Shrink(grant, leaving))

    def _needed_shrinks(self) -> list[Decision]:
        """All shrinks, except those for a start that failed and with GPUs that were not taken."""
        waits = {hold.job_id for hold in self._holds}
        return [
            Resize(
                job_id=each.grant.job.job_id,
                removed_workers=tuple(sorted(worker.worker_index for worker in each.leaving)),
                reason=each.grant.reason,
            )
            for each in self._shrinks
            if waits.isdisjoint(each.grant.room_for) or not self._floor.goes_on(each.leaving)
        ]

    def _grow(self, grant: Grant, count: int) -> None:
        job = grant.job
        assert job.gpu_type is not None
        most = job.workers_on(job.gpu_type).max - present_workers(job)
        share = grant.share - present_workers(job)
        placements = self._find(
            self._place, job, job.gpu_type, least=1, count=min(count, most), share=share
        )
        if placements:
            self._give(job, placements)
            self._grows.append(
                Resize(
                    job_id=job.job_id,
                    added=tuple(_flexible(placement) for placement in placements),
                    reason=_told(grant, placed_count(placements), min(count, most)),
                )
            )

    # --- waiting jobs -------------------------------------------------------------------------

    def _start(self, grant: Grant) -> None:
        job, most = grant.job, 0
        kinds = (grant.gpu_type,) if grant.gpu_type else job.gpu.types or self._floor.gpu_types
        for gpu_type in kinds:
            gang = job.workers_on(gpu_type)
            count = min(max(grant.workers, gang.min), gang.max)
            place = _exactly(grant.placements) if grant.placements else self._place
            placements = self._find(
                place, job, gpu_type, least=gang.min, count=count, share=grant.share
            )
            placed = placed_count(placements)
            if placed >= gang.min:
                self._give(job, placements)
                why = _told(grant, placed, count)
                self._starts.append(self._start_on(grant, gpu_type, placements, why))
                return
            most = max(most, placed)
        self._holds.append(
            PendingReason(
                job_id=job.job_id,
                blockers=(
                    f"it is its turn, but of {counted(job.workers.min, 'worker')} of "
                    f"{counted(job.gpus_per_worker, 'GPU')} only {most} can be placed",
                ),
            )
        )

    def _start_on(
        self, grant: Grant, gpu_type: str, placements: Sequence[Placement], why: str
    ) -> Start:
        job = grant.job
        base = job.workers_on(gpu_type).min
        split = merge(list(_split(placements, base)))
        count = placed_count(placements)
        return Start(
            job_id=job.job_id,
            gpu_type=gpu_type,
            placements=split,
            estimated_runtime_s=runtime_on(job, gpu_type, count, self._snapshot.now_s),
            estimate_source=job.estimate.source,
            reason=why,
            is_promised=grant.is_promised,
        )

    def _give(self, job: JobView, placements: Iterable[Placement]) -> None:
        for placement in placements:
            self._takers.setdefault(placement.node, []).append(job.job_id)
        self._floor.take(placements, job.gpus_per_worker)


def _exactly(placements: tuple[Placement, ...]) -> Place:
    """There and nowhere else."""

    def place(floor: FreeGpus, job: JobView, gpu_type: str, _: int) -> tuple[Placement, ...]:
        rooms = floor.rooms(gpu_type, job.gpus_per_worker)
        wanted: dict[NodeName, int] = {}
        for each in placements:
            wanted[each.node] = wanted.get(each.node, 0) + each.worker_count
        fits = all(rooms.get(name, 0) >= count for name, count in wanted.items())
        return placements if fits else ()

    return place


def _told(grant: Grant, placed: int, wanted: int) -> str:
    """Why it has these workers, and where there was no room for all that it was granted."""
    if placed >= wanted:
        return grant.reason
    return f"{grant.reason}; there is room for {placed} of {counted(wanted, 'worker')} to add"


def _flexible(placement: Placement) -> Placement:
    return Placement(node=placement.node, worker_count=placement.worker_count, is_flexible=True)


def _split(placements: Iterable[Placement], base: int) -> Iterable[Placement]:
    """The first workers are the base gang, the others are flexible."""
    for placement in placements:
        own = min(base, placement.worker_count)
        base -= own
        if own:
            yield Placement(node=placement.node, worker_count=own)
        if placement.worker_count > own:
            yield Placement(
                node=placement.node, worker_count=placement.worker_count - own, is_flexible=True
            )
