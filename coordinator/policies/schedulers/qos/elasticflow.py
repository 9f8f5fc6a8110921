"""ElasticFlow (ASPLOS 2023): jobs state deadlines, and every admitted job meets its deadline.

A job is admitted only if it and all jobs admitted before can have their minimum satisfactory shares
(section 4.1). The rest goes where one more step costs the fewest GPU-seconds (4.2). The plan of
every promise is remembered: where a new greedy plan would break one, the old plans hold. So no
newcomer and no replanning breaks a promise, as long as no node is lost and jobs run as predicted.

Where the cell knows what starts, restarts and resizes take, plans include it too (ours). They do
not include stops and growth that could not be foreseen; the margin is for those. So a few promises
are broken by seconds, and seldom one by more. A late job then gets the earliest date that breaks no
other promise. Without known times plans are the paper's.

The cost of stops is ours as well: the paper's jobs save. A job that does not save is planned
without a pause and runs on as long as no promise needs its GPUs. Where the GPUs of a share are free
in pieces, other jobs move, if they stay in time.
"""

from __future__ import annotations

from math import inf

import msgspec
from msgspec import Struct, structs

from common.model import JobId, JobState, Preemptibility
from coordinator.policies.contract.decisions import Allocation, PendingReason, Reject
from coordinator.policies.contract.free_gpus import consolidated
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.knobs import Period, Seconds
from coordinator.policies.parts.blockers_for_all import NOWHERE, answers
from coordinator.policies.parts.defragment import Clearing
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.parts.grants import Plan as Carried
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.restart_cost import told_of
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.schedulers.qos.admission import Book, Plans, by_deadline
from coordinator.policies.schedulers.qos.admission_batch import AGAIN_S
from coordinator.policies.schedulers.qos.applicants import is_start_of_gang
from coordinator.policies.schedulers.qos.gpu_pools import Pool, Tried
from coordinator.policies.schedulers.qos.marginal_return import Sharing
from coordinator.policies.schedulers.qos.minimum_shares import next_change_s, now_of
from coordinator.policies.schedulers.qos.overheads import Overheads
from coordinator.policies.schedulers.qos.planning import Planning
from coordinator.policies.schedulers.qos.prediction import Margin
from coordinator.policies.schedulers.qos.quota_stops import with_quota_stops
from coordinator.policies.schedulers.qos.reasons import (
    UNLESS,
    grant_reason,
    refusal,
    stopped_for,
    unanswered,
    waiting_reason,
)

RESIZES_PER_SLOT = 10
"""A grant beyond the share counts for at least this many times the time of its change. Otherwise no
growth would ever be worth the pause of the gang.
"""
IN_FLIGHT = (JobState.STARTING, JobState.RESIZING, JobState.PREEMPTING)


class ElasticFlowKnobs(Struct, frozen=True, kw_only=True):
    """Knobs of `qos-elasticflow`.

    margin: factor on the predicted remaining work in plans.
    slot_s: time that a plan counts on a grant beyond the minimum share before it is planned again.
    restart_s: time that a stop costs a job besides its lost work, until it makes progress again.
    rejects: refuse a job whose deadline cannot be promised; false: run it without a promise.
    powers_of_two: sizes are powers of two; false: any size in the job's range.
    round_s: shortest time between two divisions of the shares, unless a plan asks for one; 0:
        divide at every event. The artefact of the authors uses 60 s.
    admits_together: admit either all new jobs of a round or none, as the artefact of the authors
        does.
    migrates: move jobs that stay in time, where the GPUs of a promised share are fragmented.
    """

    margin: Margin = 1.05
    slot_s: Period = 60.0
    restart_s: Seconds = 30.0
    rejects: bool = True
    powers_of_two: bool = True
    round_s: Seconds = 0.0
    admits_together: bool = False
    migrates: bool = True


class Settled(Struct, frozen=True):
    """The round clock: shares are settled at most once a round, except where a plan says so.

    ElasticFlow's artefact settles every 60 s.

    at_s: when shares were settled; again at that instant, because jobs stop and start.
    round_at_s: when they may be settled again. due_at_s: when a plan wants it in any case.
    """

    at_s: float = -inf
    round_at_s: float = 0.0
    due_at_s: float = inf

    def rests_until_s(self, now_s: float) -> float | None:
        """When they are settled next; None: now."""
        next_s = min(self.round_at_s, self.due_at_s)
        return next_s if self.at_s < now_s < next_s else None


class _Memory(Struct, frozen=True, array_like=True):
    """promises: the plan under which each admitted job meets its deadline.

    settled_at_s, round_at_s, due_at_s: of `settled`, which defines them; stored flat.
    late: jobs with a promise that they cannot meet any more; they are not refused for that.
    overheads: measured for attempts. dates: promised instead to late jobs.
    unpromised: refused jobs that are admitted all the same.
    kinds: GPU types of the promises to those that take several.
    """

    promises: Plans = {}
    settled_at_s: float = -inf
    round_at_s: float = 0.0
    due_at_s: float = inf
    late: tuple[str, ...] = ()
    overheads: Overheads = {}
    dates: dict[str, float] = {}
    unpromised: tuple[str, ...] = ()
    kinds: dict[str, str] = {}

    @property
    def settled(self) -> Settled:
        """When shares were settled, and when they are again."""
        return Settled(self.settled_at_s, self.round_at_s, self.due_at_s)


class _Pass:
    """One pass, before any placement: all GPU types of a snapshot.

    notes: why a job does not run now. The others are decisions, the memory, and the next wake-up.
    """

    def __init__(self, knobs: ElasticFlowKnobs, snapshot: ClusterSnapshot, memory: bytes) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._now_s = snapshot.now_s
        before = recalled(memory, _Memory)
        self.planning = Planning(
            snapshot,
            before,
            margin=knobs.margin,
            restart_s=knobs.restart_s,
            powers_of_two=knobs.powers_of_two,
        )
        self.grants: list[Grant] = []
        self.rejects: list[Reject] = []
        self.unpromised = set(self.planning.unpromised)
        self.kinds: dict[str, str] = {}
        self.wake_at_s = inf
        self.notes: dict[JobId, str] = {}
        if later := self.planning.answer(self._refuse, together=knobs.admits_together):
            self.wake_at_s = self._now_s + AGAIN_S
            self.notes |= {JobId(each.job_id): unanswered(at) for at, each in enumerate(later)}
        for pool in self.planning.pools.values():
            self.planning.reckon(pool)
            self._settle(pool)

    def _refuse(self, job: JobView, tried: Tried) -> None:
        """A newcomer that cannot be promised its deadline: rejected, or without a promise."""
        if not self._knobs.rejects or job.deadline_at_s is None:
            pool, claim = tried[0]
            self.unpromised.add(claim.job_id)
            pool.jobs[job.job_id] = job
            pool.soft.append(claim)
            return
        dates = (pool.book.earliest_s(claim, job.submitted_at_s) for pool, claim in tried)
        self.rejects.append(refusal(job, job.deadline_at_s, min(dates), tried[0][1].tenant))

    def _settle(self, pool: Pool) -> None:
        """Share out what the plans leave, and give every job its count."""
        book, soft = pool.book, [*pool.book.late, *sorted(pool.soft, key=by_deadline)]
        slot_s = max(self._knobs.slot_s, RESIZES_PER_SLOT * self._snapshot.resize_s)
        sharing = Sharing(book, soft, now_s=self._now_s, gpus=pool.gpus, slot_s=slot_s)
        given = sharing.share()
        changes = (next_change_s(plan, self._now_s) for plan in book.plans.values())
        self.wake_at_s = min(self.wake_at_s, min(changes, default=inf))
        for claim in (*book.claims, *soft):
            job, workers = pool.jobs[JobId(claim.job_id)], given[claim.job_id]
            if is_start_of_gang(job):
                # Its plan may begin later, and it can give the GPUs back until then.
                may_stop = job.preemptibility == Preemptibility.FULL
                gang_gpus = job.base_gpus_on(pool.kind)
                starts = workers or (may_stop and sharing.lend(gang_gpus))
                workers = job.workers.min if starts else 0
            self._grant(job, pool.kind, workers, book)

    def carried_out(self) -> Carried:
        """The grants on real nodes; others move for shares, and are planned so."""
        clearing = (
            Clearing(self._snapshot, self.planning.bearing.may_move)
            if self._knobs.migrates
            else None
        )
        why = stopped_for(self._snapshot)
        plan = carry_out(
            self._snapshot, self.grants, place=consolidated, clearing=clearing, why=why
        )
        if not self.planning.has_quotas:
            return plan
        granted = {grant.job.job_id for grant in self.grants}
        decisions = with_quota_stops(self._snapshot, plan.decisions, granted, why)
        return structs.replace(plan, decisions=decisions)

    def _grant(self, job: JobView, kind: str, workers: int, book: Book) -> None:
        plan, kinds = book.plans.get(job.job_id), self.planning.kinds
        is_promised = plan is not None or job.job_id in self.planning.late
        if is_promised and len({*job.gpu.types}) != 1:  # be the others there or not
            self.kinds[job.job_id] = kind
        if workers == 0:
            fits = kinds.could_hold(job, kind)
            self.notes[job.job_id] = waiting_reason(plan, self._now_s) if fits else NOWHERE
            return
        factor = job.gpu.worker_multiplier.get(kind, 1)
        self.grants.append(
            Grant(
                job=job,
                workers=workers * factor,
                gpu_type=kind,
                reason=grant_reason(job, workers, plan, self._now_s),
                share=min(workers, now_of(plan or (), self._now_s)) * factor,
                is_promised=is_promised,
            )
        )


def _allocate(knobs: ElasticFlowKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    before = recalled(memory, _Memory)
    rests_until_s = before.settled.rests_until_s(snapshot.now_s)
    if rests_until_s is not None:
        return Allocation(decisions=(), memory=memory, wake_at_s=rests_until_s)
    found = _Pass(knobs, snapshot, memory)
    plan = found.carried_out()
    wake_at_s = min(found.wake_at_s, inf if plan.wake_at_s is None else plan.wake_at_s)
    if any(job.state in IN_FLIGHT for job in snapshot.jobs):
        wake_at_s = min(wake_at_s, snapshot.now_s + knobs.slot_s)  # their GPUs are settled then
    after = _Memory(
        found.planning.bearing.plans,
        snapshot.now_s,
        snapshot.now_s + knobs.round_s,
        wake_at_s,
        tuple(sorted(found.planning.late)),
        found.planning.overheads,
        found.planning.dates,
        tuple(sorted(found.unpromised)),
        found.kinds,
    )
    return Allocation(
        decisions=(*found.rejects, *plan.decisions),
        memory=msgspec.msgpack.encode(after),
        wake_at_s=wake_at_s if wake_at_s < inf else None,
    )


def _hold(
    knobs: ElasticFlowKnobs, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PendingReason, ...]:
    found = _Pass(knobs, snapshot, memory)
    plan = found.carried_out()
    rejects = {reject.job_id: reject.reason for reject in found.rejects}
    return answers(snapshot, plan.decisions, plan.holds, {**found.notes, **rejects})


def _told(
    _: ElasticFlowKnobs, snapshot: ClusterSnapshot, __: bytes, job_id: JobId
) -> tuple[str, ...]:
    return told_of(snapshot, job_id, UNLESS)


ELASTICFLOW: Policy = joint(
    "qos-elasticflow",
    "deadlines promised on admission: minimum shares, the rest by marginal return (ElasticFlow)",
    knobs=ElasticFlowKnobs(),
    allocate=_allocate,
    pending_reasons=_hold,
    standing=_told,
    by_weight=False,  # a job that was promised its deadline waits for no tenant's turn
    keeps_quotas=True,  # nor is its promise forgotten while its tenant has no room
    parts=Parts(
        order="deadline",
        size="minimum satisfactory share, then marginal return",
        place="fewest nodes",
    ),
)
