"""Borrowed GPUs that a guarantee may reclaim, the cheapest first.

First come GPUs on which borrowers would start or grow in this very pass, then their flexible
workers, then their jobs: the lowest priority first, then the smallest loss by a stop, with all jobs
that share GPUs with them. Data that a pass cannot change is computed once, because many waiting
jobs ask for the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import Struct

from common.model import GpuUuid, JobId, NodeName
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Resume,
    Start,
    Suspend,
)
from coordinator.policies.contract.free_gpus import is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.tenants import entitlements
from coordinator.policies.tenants.free_counts import Counts
from coordinator.policies.tenants.giveback import Seat, Source, having, left_by, seats
from coordinator.policies.tenants.gpu_flow import Flow, Gang, job_of

Ranks = tuple[int, ...]
"""Priorities of jobs above the lowest of all jobs, the highest first. Compared, the row with the
fewest jobs of the highest priority comes first. With equal priorities it is empty.
"""


def ranks(jobs: Iterable[JobView], least: int) -> Ranks:
    """The row of some jobs. least: the lowest priority of all jobs that could be meant."""
    return tuple(sorted((job.priority for job in jobs if job.priority > least), reverse=True))


class _Holding(Struct, frozen=True, kw_only=True):
    """A source before any give-back. whose: jobs on its seat. nodes: all its nodes."""

    source: Source
    whose: tuple[JobId, ...]
    nodes: frozenset[NodeName]


class Lenders:
    """Borrowers that hold GPUs or would in this pass, and what they gave back so far.

    seats: jobs that share GPUs.
    busy: jobs with a decision other than a turn; they wait for nothing and give nothing.
    turning: jobs that are suspended or resumed in the pass; a stop of them replaces that.
    kept: decisions of the pass that still stand.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        flow: Flow,
        counts: Counts,
        decisions: Sequence[Decision],
        aside: Collection[JobId],
    ) -> None:
        """aside: jobs whose decisions stay."""
        self._now_s = snapshot.now_s
        self._flow = flow
        self._counts = counts
        self.kept = list(decisions)
        self.seats = seats(snapshot.jobs)
        self.busy = set(aside)
        self._gone: dict[JobId, list[Source]] = {}
        self._turning: set[JobId] = set()
        awaited: set[GpuUuid] = set()
        for decision in decisions:
            job = job_of(flow, decision)
            if job is not None:
                is_turn = isinstance(decision, Suspend | Resume)
                (self._turning if is_turn else self.busy).add(job.job_id)
            if isinstance(decision, Migrate):
                awaited.update(u for each in decision.placements for u in each.gpu_uuids)
        self._least = min((job.priority for job in snapshot.jobs if having(job)), default=0)
        dated = sorted(decisions, key=lambda each: self._standing(job_of(flow, each)))
        newcomers = (self._newcomer(each) for each in dated)
        self._newcomers = [
            each for each in newcomers if each is not None and each.source.job.job_id not in aside
        ]
        self._awaited = awaited
        self._look()

    #   --- before any give-back ------------------------------------------------------------------

    def _look(self) -> None:
        """What jobs without a decision may give."""
        there = [seat for seat in self.seats if self.busy.isdisjoint(_ids(seat))]
        self._flexible = list(self._flexible_of(there))
        can_stop = (seat for seat in there if self._may_stop(seat, self._awaited))
        self._whole = [self._whole_of(seat) for seat in sorted(can_stop, key=self._price)]
        self._on = [_by_node(each) for each in (self._newcomers, self._flexible, self._whole)]

    def _newcomer(self, decision: Decision) -> _Holding | None:
        """The nodes and GPUs on which a decision starts or grows a job."""
        job, gpus = job_of(self._flow, decision), self._flow.taken(decision)
        if job is None or not gpus or self._flow.leaving(decision):
            return None
        source = Source(job=job, gpus=gpus, used=sum(gpus.values()), decision=decision)
        return _Holding(source=source, whose=(job.job_id,), nodes=frozenset(gpus))

    def _flexible_of(self, there: Iterable[Seat]) -> Iterator[_Holding]:
        """Workers beyond a base gang, one by one."""
        pairs = [(other, seat) for seat in there for other in seat.jobs]
        for other, seat in sorted(pairs, key=lambda pair: self._standing(pair[0])):
            if other.is_resizable and other.job_id not in self._turning:
                for worker in other.placed:
                    if worker.is_flexible and not worker.is_leaving:
                        own = self._flow.own(worker)
                        source = Source(job=other, gpus=own.free, used=own.used, workers=(worker,))
                        nodes = frozenset((worker.node,))
                        yield _Holding(source=source, whose=_ids(seat), nodes=nodes)

    def _whole_of(self, seat: Seat) -> _Holding:
        """Jobs, each with all that have any of its GPUs."""
        source = _stop_of(seat, frozenset())
        return _Holding(source=source, whose=_ids(seat), nodes=frozenset(source.gpus))

    def _has_date(self, job: JobView | None) -> bool:
        date_s = None if job is None else job.deadline_at_s
        return date_s is not None and date_s > self._now_s

    def _standing(self, job: JobView | None) -> tuple[bool, int]:
        """Of two jobs that give as much at equal cost the lesser one gives."""
        return self._has_date(job), 0 if job is None else job.priority

    def _price(self, seat: Seat) -> tuple[bool, Ranks, float, str]:
        """The cost of stopping all jobs on a seat, with the tie-breaker."""
        return (*self._cost(seat), seat.jobs[0].job_id)

    def _cost(self, seat: Seat) -> tuple[bool, Ranks, float]:
        lost_gpu_s = sum(job.lost_gpu_s(self._now_s) for job in seat.jobs)
        return (any(map(self._has_date, seat.jobs)), ranks(seat.jobs, self._least), lost_gpu_s)

    def cost(self, given: Iterable[Source]) -> tuple[int, Ranks, float]:
        """The cost of all the stops among them: possibly promised deadlines, priorities,
        GPU-seconds.
        """
        stopped = [source.seat for source in given if source.seat is not None]
        costs = [self._cost(seat) for seat in stopped]
        return (
            sum(dated for dated, _, _ in costs),
            ranks((job for seat in stopped for job in seat.jobs), self._least),
            sum(lost_gpu_s for _, _, lost_gpu_s in costs),
        )

    def ranks(self, given: Iterable[Source]) -> Ranks:
        """Priorities of the jobs that all the stops among them stop."""
        stopped = (source.seat for source in given if source.seat is not None)
        return ranks((job for seat in stopped for job in seat.jobs), self._least)

    def _may_stop(self, seat: Seat, awaited: Collection[GpuUuid]) -> bool:
        """True if all jobs on a seat can be stopped now, and none is on the way to it.

        They are of one tenant, unless tenants got rules after they came to share it.
        """
        return (
            all(map(is_movable, seat.jobs))
            and len({self._counts.tenancy.leaf(job) for job in seat.jobs}) == 1
            and seat.uuids.isdisjoint(awaited)
        )

    #   --- what borrowers could give ------------------------------------------------------------

    def sources(
        self,
        job: JobView,
        wanted: int,
        gang: Gang,
        *,
        only: NodeName | None = None,
        is_anywhere: bool = False,
    ) -> Iterator[Source]:
        """Borrowed GPUs on nodes where the gang of a guaranteed job may go.

        Within a kind, jobs whose deadline is still ahead come last, because it may have been
        promised; before that by priority, the lowest first. GPUs given during the iteration are
        seen as they are then.

        only: just sources on this node alone.
        is_anywhere: also where the gang may not go, because its tenant has no room before others
            use less.
        """
        newcomers, flexible, whole = (
            (self._newcomers, self._flexible, self._whole)
            if only is None
            else (each.get(only, ()) for each in self._on)
        )
        nodes: Collection[NodeName] = gang.nodes if only is None else gang.nodes & {only}
        if is_anywhere:
            nodes = self._flow.nodes.keys()
        for each in newcomers:
            if self._is_for(each, job, wanted, nodes):
                yield each.source
        gone = {job_id for job_id, given in self._gone.items() if given} | self.busy
        for each in flexible:
            if self._is_for(each, job, wanted, nodes) and gone.isdisjoint(each.whose):
                yield each.source
        for each in whole:
            if self._is_for(each, job, wanted, nodes) and gone.isdisjoint(each.whose):
                yield self._rest_of(each)

    def _is_for(
        self, holding: _Holding, job: JobView, wanted: int, nodes: Collection[NodeName]
    ) -> bool:
        """Whether a tenant borrows it there that owes a job as much."""
        tenancy, other = self._counts.tenancy, holding.source.job
        return (
            not holding.nodes.isdisjoint(nodes)
            and entitlements.is_owed(tenancy, job, other, wanted)
            and all(map(self._counts.has_more, tenancy.below_top(other, job)))
        )

    def _rest_of(self, holding: _Holding) -> Source:
        """A stop, without the workers that go already."""
        seat = holding.source.seat
        assert seat is not None
        given = (each for job_id in holding.whose for each in self._gone.get(job_id, ()))
        gone = {worker for each in given for worker in each.workers}
        return _stop_of(seat, gone) if gone else holding.source

    #   --- what borrowers give ------------------------------------------------------------------

    def give(self, source: Source, *, sign: int = 1) -> None:
        """The source's GPUs come free, or are taken again."""
        self._counts.give(source, sign=sign)
        for job in source.jobs:
            gone = self._gone.setdefault(job.job_id, [])
            (gone.append if sign > 0 else gone.remove)(source)

    def goes_whole(self, job: JobView) -> bool:
        """True if all of a job is ordered to stop."""
        return any(each.seat is not None for each in self._gone.get(job.job_id, ()))

    def settle(self, job: JobView, given: Sequence[Source]) -> None:
        """A job starts on given GPUs: decisions that made way for it are dropped. A job that would
        have started by one waits again, and one that would have grown may be stopped.
        """
        has_runner = False
        self.busy.add(job.job_id)
        for source in given:
            made = source.decision
            if made is not None:
                self.kept.remove(made)
                self.busy.discard(source.job.job_id)
                # a dropped decision stops none of its workers
                self._gone[source.job.job_id].remove(source)
                has_runner |= not isinstance(made, Start)
            if source.seat is not None:
                self.kept = [each for each in self.kept if not source.seat.is_about(each)]
        made_way = {id(source) for source in given if source.decision is not None}
        self._newcomers = [each for each in self._newcomers if id(each.source) not in made_way]
        if has_runner:
            self._look()
        self._on[0] = _by_node(self._newcomers)

    def stops(self) -> list[tuple[JobView, list[Source]]]:
        """Jobs ordered to stop, whole or in part, and what each gives.

        Those that give most come last. A stopped job may have more than its tenant borrows, but
        only while the tenant holds more than its guarantee.
        """
        found = [
            (id_, [s for s in given if s.decision is None]) for id_, given in self._gone.items()
        ]
        by_gpus = sorted(
            (any(each.seat for each in given), sum(each.used for each in given), job_id, given)
            for job_id, given in found
            if given
        )
        return [(self._flow.jobs[job_id], given) for *_, job_id, given in by_gpus]


def _ids(seat: Seat) -> tuple[JobId, ...]:
    return tuple(job.job_id for job in seat.jobs)


def _stop_of(seat: Seat, gone: Collection[WorkerView]) -> Source:
    stay = [
        worker
        for job in seat.jobs
        for worker in job.placed
        if not worker.is_leaving and worker not in gone
    ]
    left = left_by(stay)
    return Source(job=seat.jobs[0], gpus=left.free, used=left.used, workers=tuple(stay), seat=seat)


def _by_node(holdings: Iterable[_Holding]) -> dict[NodeName, list[_Holding]]:
    """Sources that are on one node alone, in the same order."""
    found: dict[NodeName, list[_Holding]] = {}
    for each in holdings:
        if len(each.nodes) == 1:
            found.setdefault(min(each.nodes), []).append(each)
    return found
