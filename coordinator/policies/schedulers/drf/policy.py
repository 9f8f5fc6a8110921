"""Dominant resource fairness: the tenant with the smallest dominant share goes next.

Sources: DRF, NSDI'11, algorithm 1; H-DRF, SoCC'13, for a tree of tenants. Progressive filling: the
tenant with the smallest dominant share over its weight starts its next job, whole gangs only. A
tenant whose job does not fit is blocked for this pass. Flexible workers are dealt one by one in the
same order on the rest. The filling is algorithm 1 of DRF (section 4.2) for any single pieces, one
at a time to the line that is next, until no line takes more.

A running gang is stopped for another tenant only where `preempts` says so, and by Volcano's rule:
the tenant that starts stays below the share that the other has after the stop. Flexible workers
follow the same rule without the knob, because nothing is lost with them. A tenant's own flexible
workers always go for its gangs, because they are dealt on what gangs leave.

To make room, victims are taken, least disruptive first, until the gang fits. Then each victim that
is not needed is spared again: the gang needs every victim that remains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from msgspec import Struct, structs

from common.model import JobId, NodeName
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import (
    Allocation,
    PendingReason,
    Placement,
    earliest,
    placed_count,
)
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    can_grow,
    is_movable,
    present_workers,
    spare_workers,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.parts.dominant_share import DominantShares
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.parts.resource_vectors import Bins
from coordinator.policies.policy import Parts, joint
from coordinator.policies.tenants.queues import Blocked, in_turn, lines, partly_behind

V = TypeVar("V")


def fewest_victims(
    line: Iterable[V],
    *,
    may_go: Callable[[V], bool],
    move: Callable[[V, int], None],
    fits: Callable[[], bool],
) -> list[V] | None:
    """Victims of a line, all of them needed; None if the gang does not fit even without all.

    may_go: evaluated with the victims before it gone.
    move: a victim leaves (1), or stays after all (-1). Afterwards the returned victims are gone,
        and all others are where they were.
    """
    gone: list[V] = []
    does_fit = False
    for victim in line:
        if not may_go(victim):
            continue
        move(victim, 1)
        gone.append(victim)
        if does_fit := fits():
            break
    needed: list[V] = []
    for victim in reversed(gone):
        move(victim, -1)
        if does_fit and not fits():
            move(victim, 1)
            needed.append(victim)
    return needed if does_fit else None


class RoomsLeft:
    """The same total as of a look at all nodes of a GPU type, for a look at those that change.

    workers: that these nodes take; `Bins.pick` finds nodes for as many and no more.
    """

    def __init__(self, bins: Bins, job: JobView, gpu_type: str) -> None:
        self._bins = bins
        self._job = job
        self._rooms = {
            name: bins.room(job, name)
            for name, node in bins.floor.nodes.items()
            if node.gpu_type == gpu_type
        }
        self.workers = sum(self._rooms.values())

    def look(self, nodes: Iterable[NodeName]) -> None:
        """The free part of these nodes may have changed; of others of the type it has not."""
        for name in nodes:
            if name in self._rooms:
                now = self._bins.room(self._job, name)
                self.workers += now - self._rooms[name]
                self._rooms[name] = now


T = TypeVar("T")


def deal(
    lines: Mapping[str, Iterable[T]],
    first: Callable[[Mapping[str, T]], str],
    give: Callable[[T], bool],
) -> None:
    """Deal one at a time to the head of the next line.

    first: chooses among the remaining lines, by their heads, as things stand.
    give: gives one more to a head; False if it takes none, and the next of its line is the head
        from then on.
    """
    queues = {name: deque(line) for name, line in lines.items()}
    while heads := {name: queue[0] for name, queue in queues.items() if queue}:
        name = first(heads)
        if not give(heads[name]):
            queues[name].popleft()


class DrfKnobs(Struct, frozen=True, kw_only=True):
    """preempts: preempt running gangs for others, by Volcano's rule."""

    preempts: bool = False


class _Victim(Struct, frozen=True, kw_only=True):
    """Workers of another tenant that could go: a flexible one; a gang after its flexible ones."""

    job: JobView
    workers: tuple[WorkerView, ...]
    is_whole: bool


class _Shrunk(Struct, frozen=True):
    """Indices of leaving flexible workers of one job, and the jobs that they leave for."""

    room_for: list[JobId]
    leaving: list[int]


class Filling:
    """One pass of progressive filling. held: jobs that wait on, and why."""

    def __init__(self, knobs: DrfKnobs, snapshot: ClusterSnapshot) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._bins = Bins(snapshot)
        self._shares = DominantShares(snapshot, self._bins.total)
        self._starts: dict[JobId, tuple[JobView, str, list[Placement]]] = {}
        self._grown: dict[JobId, list[Placement]] = {}
        self._shrunk: dict[JobId, _Shrunk] = {}
        self._stopped: set[JobId] = set()
        self.held: list[tuple[JobView, str]] = []
        self._fill()
        self._spare()
        self._grow()

    def _fill(self) -> None:
        """The first job of the tenant with the smallest share, until each is blocked or done."""
        blocked = Blocked()
        for job in in_turn(lines(self._snapshot), self._shares.first_of, lambda: len(self._starts)):
            kinds, first = blocked.look(job.tenant, self._bins.kinds(job))
            if first is not None and not kinds:
                why = f"behind {first} of its tenant, which does not fit"
            elif self._start(job, kinds):
                continue
            elif hosts := self._bins.hosts(job):
                blocked.block(job.tenant, job, (kind for kind in kinds if kind in hosts))
                why = f"its base gang does not fit{partly_behind(kinds, first)}"
                why += f"; {job.tenant} has a share of {self._shares.of(job.tenant):.3f}"
            else:
                why = self._bins.why_not_alone(job)
            self.held.append((job, why))

    def _start(self, job: JobView, kinds: Sequence[str]) -> bool:
        for makes_room in (False, True):
            for kind in kinds:
                if makes_room and not self._make_room(job, kind):
                    continue
                base = job.workers_on(kind).min
                found = self._bins.pick(job, kind, base, self._bins.fullest)
                if found:
                    self._bins.move(job, found)
                    self._shares.count(job, base)
                    self._starts[job.job_id] = (job, kind, list(found))
                    return True
        return False

    # --- victims ------------------------------------------------------------------------------

    def _make_room(self, job: JobView, kind: str) -> bool:
        """Remove workers of tenants that stay above the job's; no worker leaves without need."""
        base = job.workers_on(kind).min
        left = RoomsLeft(self._bins, job, kind)

        def may_go(victim: _Victim) -> bool:
            if victim.job.tenant == job.tenant:
                return True
            return self._shares.keeps_more(victim.job, len(victim.workers), job, base)

        def move(victim: _Victim, sign: int) -> None:
            self._move(victim, sign)
            left.look(worker.node for worker in victim.workers)

        for line in self._victims(job, kind):
            found = fewest_victims(
                line, may_go=may_go, move=move, fits=lambda: left.workers >= base
            )
            if found is not None:
                for victim in found:
                    self._note(victim, job)
                self._follow(found)
                return True
        return False

    def _victims(self, job: JobView, kind: str) -> Iterator[Iterable[_Victim]]:
        """Lines to try: flexible workers, its own tenant's last; else those of others, and gangs.

        Its own are in no line with gangs: those that are given back at last would not have counted
        when a gang was found to leave its tenant more than this one has.
        """
        there = [
            other
            for other in self._snapshot.jobs
            if other.gpu_type == kind and other.job_id not in self._stopped
        ]
        others = [other for other in there if other.tenant != job.tenant]
        others.sort(
            key=lambda other: (-self._shares.beside(other, job), other.priority, other.job_id)
        )
        flexible = [each for other in others for each in self._flexible(other)]
        own = sorted(
            (other for other in there if other.tenant == job.tenant),
            key=lambda other: other.priority,
        )
        yield chain(flexible, *map(self._flexible, own))
        if self._knobs.preempts:
            gangs = (other for other in others if other.job_id not in self._shrunk)
            yield chain(flexible, self._gangs(gangs, job))

    def _flexible(self, job: JobView) -> Iterator[_Victim]:
        """Each worker that it can spare and still has, the newest first."""
        shrunk = self._shrunk.get(job.job_id)
        gone = frozenset(shrunk.leaving if shrunk else ())
        for worker in spare_workers(job):
            if worker.worker_index not in gone:
                yield _Victim(job=job, workers=(worker,), is_whole=False)

    def _gangs(self, others: Iterable[JobView], job: JobView) -> Iterator[_Victim]:
        """Gangs of the tenants with the largest shares first, then the lowest priority, then the
        smallest loss.
        """
        now_s = self._snapshot.now_s
        for other in sorted(
            filter(is_movable, others),
            key=lambda other: (
                -self._shares.beside(other, job),
                other.priority,
                other.lost_gpu_s(now_s),
                other.job_id,
            ),
        ):
            spare = spare_workers(other)
            stay = (each for each in other.placed if not each.is_leaving and each not in spare)
            yield _Victim(job=other, workers=tuple(stay), is_whole=True)

    def _move(self, victim: _Victim, sign: int) -> None:
        self._bins.vacate(victim.job, victim.workers, sign)
        self._shares.count(victim.job, -sign * len(victim.workers))

    def _note(self, victim: _Victim, job: JobView) -> None:
        if victim.is_whole:
            self._stopped.add(victim.job.job_id)
        else:
            shrunk = self._shrunk.setdefault(victim.job.job_id, _Shrunk([], []))
            shrunk.room_for.append(job.job_id)
            shrunk.leaving.extend(worker.worker_index for worker in victim.workers)

    def _follow(self, found: Iterable[_Victim]) -> None:
        """With a gang its flexible workers go as well, also those that could have stayed."""
        gone = {(each.job_id, each.worker_index) for victim in found for each in victim.workers}
        for victim in found:
            rest = tuple(
                worker
                for worker in victim.job.placed
                if not worker.is_leaving and (worker.job_id, worker.worker_index) not in gone
            )
            if victim.is_whole and rest:
                self._move(structs.replace(victim, workers=rest), 1)

    def _spare(self) -> None:
        """A gang whose GPUs stay free goes on, the one that loses most by a stop first."""
        now_s = self._snapshot.now_s
        gone = [job for job in self._snapshot.jobs if job.job_id in self._stopped]
        for job in sorted(
            gone, key=lambda job: (-job.priority, -job.lost_gpu_s(now_s), job.job_id)
        ):
            if self._bins.goes_on(job, job.placed):
                self._shares.count(job, present_workers(job))
                self._stopped.remove(job.job_id)
                self._shrunk.pop(job.job_id, None)

    # --- flexible workers -----------------------------------------------------------------------

    def _grow(self) -> None:
        """Worker by worker to the tenant with the smallest share that can use one.

        Of equals to the one whose job came first, as for a start.
        """
        growing: dict[str, list[tuple[JobView, str]]] = {}
        for job, kind, _ in self._starts.values():
            growing.setdefault(job.tenant, []).append((job, kind))
        for job in self._snapshot.jobs:
            if job.job_id in self._shrunk or job.job_id in self._stopped:
                continue
            is_ready = resizable_at_s(self._snapshot, job) is None
            if job.is_resizable and job.gpu_type and is_ready:
                growing.setdefault(job.tenant, []).append((job, job.gpu_type))
        for line in growing.values():
            line.sort(key=lambda each: (each[0].submitted_at_s, each[0].job_id))
        deal(growing, self._first_to_grow, lambda each: self._grow_one(*each))

    def _first_to_grow(self, heads: Mapping[str, tuple[JobView, str]]) -> str:
        since_s = {tenant: job.submitted_at_s for tenant, (job, _) in heads.items()}
        return self._shares.first_of(since_s)

    def _grow_one(self, job: JobView, kind: str) -> bool:
        started = self._starts.get(job.job_id)
        mine = started[2] if started else self._grown.setdefault(job.job_id, [])
        have = present_workers(job) + placed_count(mine)
        if have >= job.workers_on(kind).max:
            return False
        found = self._bins.pick(job, kind, 1, self._bins.fullest)
        if found:
            self._bins.move(job, found)
            self._shares.count(job, 1)
            mine += found
        return bool(found)

    # --- decisions ------------------------------------------------------------------------------

    def allocation(self) -> Allocation:
        """Decisions for all that."""
        grants = [
            Grant(
                job=job,
                workers=placed_count(placements),
                gpu_type=kind,
                placements=tuple(placements),
                reason=f"tenant {job.tenant} has the smallest dominant share"
                f"{self._shares.among(job.tenant)}, {self._shares.of(job.tenant):.3f} with it",
            )
            for job, kind, placements in self._starts.values()
        ]
        for job in self._snapshot.jobs:
            if job.placed and job.job_id not in self._stopped:
                more = placed_count(self._grown.get(job.job_id, ()))
                shrunk = self._shrunk.get(job.job_id, _Shrunk([], []))
                count = present_workers(job) + more - len(shrunk.leaving)
                why = (
                    f"tenant {job.tenant} has a dominant share of {self._shares.of(job.tenant):.3f}"
                )
                leaving = tuple(shrunk.leaving)
                grants.append(
                    Grant(
                        job=job, workers=count, reason=why, leaving=leaving,
                        room_for=tuple(shrunk.room_for),
                    )
                )  # fmt: skip
        # A stopped job makes room, if only in CPUs or memory.
        plan = carry_out(self._snapshot, grants, place=self._planned, stops_in_vain=True)
        return Allocation(decisions=plan.decisions, wake_at_s=self._wake_at_s())

    def _planned(self, _: FreeGpus, job: JobView, kind: str, count: int) -> tuple[Placement, ...]:
        """The result of `_grow`; nodes have room for it when the shrinks are done."""
        return tuple(self._grown.get(job.job_id, ()))

    def _wake_at_s(self) -> float | None:
        """When a job that could grow may be resized again."""
        jobs = (job for job in self._snapshot.jobs if can_grow(job))
        return earliest(*(resizable_at_s(self._snapshot, job) for job in jobs))


def _allocate(knobs: DrfKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    return Filling(knobs, snapshot).allocation()


def _hold(knobs: DrfKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    held = Filling(knobs, snapshot).held
    return tuple(PendingReason(job_id=job.job_id, blockers=(why,)) for job, why in held)


POLICIES = (
    joint(
        "drf",
        "progressive filling: tenants by dominant share of GPUs, CPUs and memory",
        knobs=DrfKnobs(),
        allocate=_allocate,
        pending_reasons=_hold,
        by_weight=False,
        parts=Parts(
            order="smallest dominant share",
            size="base, then one worker at a time in the same order",
            place="best fit in GPUs, CPUs and memory",
        ),
    ),
)
