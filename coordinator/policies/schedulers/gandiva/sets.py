"""Gandiva as simulators play it: node sets by gang size, turns in each, shares by demand.

From Gandiva (OSDI'18) it has the affinity of nodes to one gang size and the turns (sections 3.1 and
4.1), and nothing else: no packing, no growing, no move except when a set is made or dissolved.
ElasticFlow's artefact (pkusys/ElasticFlow, figure 8a) compares with this form; its two faults are
knobs here. The end of a turn is a preemption, because a job may get any GPUs of its set. A job that
would lose most of its work by it keeps its GPUs (`restart_cost`), and a turn lasts long enough to
be worth its handover.
"""

from __future__ import annotations

from math import inf
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Allocation, PendingReason, Placement
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    accepted_types,
    fill,
    is_movable,
    present_workers,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.pooling import by_submission
from coordinator.policies.parts.restart_cost import keeps_gang, told_of
from coordinator.policies.policy import Parts, joint
from coordinator.policies.schedulers.gandiva.board import COMPUTING_STATES
from coordinator.policies.schedulers.gandiva.node_sets import Class, Division, NodeSet
from coordinator.policies.schedulers.gandiva.pass_times import Look, Looked, Pace
from coordinator.policies.schedulers.gandiva.turn_length import fresh, handed

Times = Annotated[float, Meta(ge=0, le=1e6)]


class Knobs(Pace, frozen=True, kw_only=True):
    """least_turn_ratio: a turn lasts at least this many times its handover.

        The handover is from the decision until the gang runs. Loading a checkpoint is not reported
        and takes about as long again, so at 20 a turn is some ten times its whole cost. Not in the
        paper. 0: a turn is a slice.
    counts_by_gang: divide as the artefact does: one set more or less for each gang that a class has
        too few or too many, even if a set holds several. A job that lost its place stops even if
        no other job takes it.
    """

    least_turn_ratio: Times = 20.0
    counts_by_gang: bool = False


class Memory(Struct, frozen=True, kw_only=True):
    """sets: with their jobs, in turn. waits: jobs that were looked at and found no set.

    came_at_s, looked_at_s: of `looked`, which defines them; stored flat.
    handed_at_s: when each job with a place was given it.
    """

    sets: tuple[NodeSet, ...] = ()
    waits: tuple[JobId, ...] = ()
    came_at_s: float = float("-inf")
    looked_at_s: float = float("-inf")
    handed_at_s: dict[JobId, float] = {}

    @property
    def looked(self) -> Looked:
        """When it last looked, and when it last saw a new job."""
        return Looked(at_s=self.looked_at_s, came_at_s=self.came_at_s)


class _Pass:
    """One pass."""

    def __init__(self, knobs: Knobs, snapshot: ClusterSnapshot, blob: bytes) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._before = recalled(blob, Memory)
        self._floor = FreeGpus(snapshot)
        self._jobs = {job.job_id: job for job in snapshot.jobs if self._is_ours(job)}
        gpus = dict(self._floor.free)
        for job in self._jobs.values():
            for worker in job.placed:
                if not worker.is_leaving:
                    gpus[worker.node] += worker.freed_gpus
        # A gang that is stopped there may not come back: no gang is then stopped, except for
        # another one.
        self._is_barred = any(node.barred_gpus for node in self._floor.nodes.values())
        types = {name: node.gpu_type for name, node in self._floor.nodes.items()}
        self.division = Division(self._before.sets, gpus=gpus, types=types, unseen=snapshot.unseen)
        self._settle()

    def _is_ours(self, job: JobView) -> bool:
        """It waits, or stands on nodes that can be given away."""
        there = self._floor.nodes
        return all(worker.node in there for worker in job.placed if not worker.is_leaving)

    # --- who stands where ---------------------------------------------------------------------

    def _settle(self) -> None:
        knobs, before, now_s = self._knobs, self._before, self._snapshot.now_s
        # A hidden job has arrived already, whatever happens to its set meanwhile.
        self._hidden = self._snapshot.unseen & (self.division.set_of().keys() | before.waits)
        self.division.leave(self._is_alike)
        known = self.division.set_of().keys() | before.waits
        self.look = Look(knobs, before.looked, now_s, has_new=not self._jobs.keys() <= known)
        if self.look.is_one or not knobs.quiet_s:
            self.division.keep(self._jobs)
            if self.look.is_one:
                had = fresh(self._jobs, before.handed_at_s, knobs.least_turn_ratio, now_s)
                self.division.rotate(self._stay() | had)
                self.division.divide(counts_by_gang=knobs.counts_by_gang)
            self._welcome()
        stays = self._stay()
        self.division.first(
            {job.job_id: (job.job_id not in stays, -job.priority) for job in self._jobs.values()}
        )

    def _is_alike(self, job_id: JobId, each: NodeSet) -> bool:
        """Whether a job is a gang of a set's class, or gone; after its pre-run it is another."""
        job = self._jobs.get(job_id)
        return job is None or _class(job, each.kind.gpu_type) == each.kind

    def _may_stand(self, job_id: JobId, each: NodeSet) -> bool:
        """Whether a job avoids no node of a set."""
        return set(self._jobs[job_id].nodes.avoided).isdisjoint(each.nodes)

    def _stay(self) -> set[JobId]:
        """Running jobs that may not be stopped now, or are not to lose their work."""
        now_s = self._snapshot.now_s
        return {
            job.job_id
            for job in self._jobs.values()
            if job.state in COMPUTING_STATES and (not is_movable(job) or keeps_gang(job, now_s))
        }

    def _welcome(self) -> None:
        """Jobs in no set, by submission; running ones first."""
        self.division.leave(self._may_stand)
        settled = self.division.set_of()
        new = [job for job in self._jobs.values() if job.job_id not in settled]
        new.sort(key=lambda job: (not job.placed, job.submitted_at_s, job.job_id))
        for job in new:
            nodes = tuple(sorted({worker.node for worker in job.placed if not worker.is_leaving}))
            kinds = [_class(job, gpu_type) for gpu_type in self._types(job)]
            if not (nodes and kinds and self.division.adopt(job.job_id, kinds[0], nodes)):
                self.division.place(job.job_id, kinds, job.nodes.avoided)
        stuck: set[tuple[object, ...]] = set()  # room only shrinks while they move
        for job in sorted(self._jobs.values(), key=by_submission):
            if job.job_id in settled and len(types := self._types(job)) > 1:
                classes = tuple(_class(job, gpu_type) for gpu_type in types)
                mine = settled[job.job_id]
                alike = (mine.kind, classes, job.nodes.avoided)
                if alike in stuck:
                    continue
                if not self.division.move_on(job.job_id, mine, classes, job.nodes.avoided):
                    stuck.add(alike)

    def _types(self, job: JobView) -> tuple[str, ...]:
        """The GPU type of its attempt, else those that it accepts and that are there."""
        if job.gpu_type is not None:
            return (job.gpu_type,)
        return tuple(accepted_types(job, self._floor))

    #   --- results ------------------------------------------------------------------------------

    def allocation(self) -> Allocation:
        """Stops and starts, and the memory."""
        decisions = carry_out(
            self._snapshot,
            self._grants(),
            floor=self._floor,
            place=self._place,
            stops_in_vain=self._knobs.counts_by_gang and not self._is_barred,
        ).decisions
        after = Memory(
            sets=tuple(self.division.sets),
            waits=self._waits(),
            came_at_s=self.look.after.came_at_s,
            looked_at_s=self.look.after.at_s,
            handed_at_s=handed(
                self._jobs, self._before.handed_at_s, decisions, self._snapshot.now_s
            ),
        )
        return Allocation(
            decisions=decisions,
            memory=msgspec.msgpack.encode(after),
            wake_at_s=self._wake_at_s(),
        )

    def _waits(self) -> tuple[JobId, ...]:
        """Jobs that found no set, hidden ones included; jobs that came since the last look do not
        count yet.
        """
        settled = self.division.set_of()
        seen = self._jobs.keys()
        known = seen & self._before.waits if self.look.is_awaited else seen
        return tuple(sorted((known | self._hidden) - settled.keys()))

    def _grants(self) -> list[Grant]:
        grants = [
            Grant(job=job, workers=present_workers(job), reason="a stop would lose its work")
            for job in self._jobs.values()
            if keeps_gang(job, self._snapshot.now_s)
        ]
        kept = {grant.job.job_id for grant in grants}
        self._nodes: dict[JobId, tuple[NodeName, ...]] = {}
        for each in self.division.sets:
            turn = [job_id for job_id in self.division.computing(each) if job_id not in kept]
            for job in (self._jobs[job_id] for job_id in turn if job_id in self._jobs):
                self._nodes[job.job_id] = each.nodes
                away = any(worker.node not in each.nodes for worker in job.placed)
                if away and is_movable(job):
                    continue  # it goes on where it is until another job's turn comes there
                grants.append(
                    Grant(
                        job=job,
                        workers=each.kind.workers,
                        gpu_type=each.kind.gpu_type,
                        reason=f"its turn in the set {', '.join(each.nodes)} for gangs of "
                        f"{counted(each.kind.gpus, 'GPU')}: "
                        f"{counted(len(self.division.seen(each)), 'job')}, room "
                        f"for {self.division.room(each)}",
                    )
                )
        return grants

    def _place(
        self, floor: FreeGpus, job: JobView, gpu_type: str, count: int
    ) -> tuple[Placement, ...]:
        """On the nodes of its set."""
        rooms = floor.rooms(gpu_type, job.gpus_per_worker)
        mine = [name for name in self._nodes.get(job.job_id, ()) if name in rooms]
        return fill(rooms, mine, count)

    def _wake_at_s(self) -> float | None:
        """The next look, while it may change something."""
        waits = any(job.state == JobState.PENDING for job in self._jobs.values())
        may_change = self.division.is_shared or waits or self._knobs.counts_by_gang
        return self.look.next_s if self._jobs and may_change else None

    def holds(self) -> tuple[PendingReason, ...]:
        """Why each job that waits would not start: those in sets first, by their turns there."""
        settled = self.division.set_of()
        turns = {name for each in self.division.sets for name in self.division.computing(each)}
        line = {
            job_id: at
            for each in self.division.sets
            for at, job_id in enumerate(self.division.seen(each))
        }
        waiting = [
            job
            for job in self._jobs.values()
            if job.state == JobState.PENDING and job.job_id not in turns
        ]
        waiting.sort(key=lambda job: (line.get(job.job_id, inf), job.submitted_at_s, job.job_id))
        return tuple(
            PendingReason(job_id=job.job_id, blockers=(self._why(job, settled.get(job.job_id)),))
            for job in waiting
        )

    def _why(self, job: JobView, mine: NodeSet | None) -> str:
        if mine is None:
            gang = counted(job.base_gpus, "GPU")
            loose = counted(len(self.division.loose()), "node")
            return f"no set of nodes for gangs of {gang}, and {loose} in no set"
        return (
            f"waits for its turn in the set {', '.join(mine.nodes)}: "
            f"{counted(self.division.seen(mine).index(job.job_id), 'job')} before it, room for "
            f"{self.division.room(mine)}"
        )


def _class(job: JobView, gpu_type: str) -> Class:
    workers = job.workers_on(gpu_type).min
    return Class(workers * job.gpus_per_worker, gpu_type, job.gpus_per_worker)


def allocate(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """One scheduling pass."""
    return _Pass(knobs, snapshot, memory).allocation()


def hold(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """Why each job that waits would not start in a pass now."""
    return _Pass(knobs, snapshot, memory).holds()


def tell(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes, job_id: JobId) -> tuple[str, ...]:
    """For a job whose turn does not end: why."""
    return told_of(snapshot, job_id)


POLICIES = (
    joint(
        "gandiva-sets",
        "node sets by gang size with turns by preemption, as simulators model Gandiva",
        knobs=Knobs(),
        allocate=allocate,
        pending_reasons=hold,
        standing=tell,
        parts=Parts(
            order="submission, then turns",
            size="base demand",
            place="a set of its gang size, else a new set, else turns",
        ),
    ),
)
