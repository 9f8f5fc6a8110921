"""ElasticFlow (ASPLOS 2023): jobs state deadlines, and who is admitted meets his.

A job is admitted only if it and all that were admitted before can have their minimum satisfactory
shares (section 4.1); what these leave goes where one more step costs the fewest GPU-seconds (4.2).
The plan of every promise is remembered: where a new greedy plan would break one, the old plans
hold. So no newcomer and no replanning breaks a promise, as long as no node is lost and jobs run as
predicted. Where the cell says what starts, restarts and resizes take, plans hold that too (ours);
not stops and growth that nobody could foresee, for which there is the margin. So a few promises are
broken by seconds, and seldom one by more; who is late then gets the earliest date that breaks no
other promise. Where it says nothing takes time plans are the paper's. Ours as well is what stops
cost: the paper's jobs save, and who does not is planned without a pause and goes on as long as no
promise needs its GPUs. Must not know nodes: who gets how many workers is carried out by the floor.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import inf

import msgspec
from msgspec import Struct

from common.model import JobId, JobState, Preemptibility
from coordinator.policies.answers import answers
from coordinator.policies.blockers import Hold
from coordinator.policies.deadlines.overheads import (
    NONE,
    Overheads,
    changes_of,
    handed_over,
    has_costs,
    left_s,
    seen,
)
from coordinator.policies.deadlines.predict import Margin
from coordinator.policies.deadlines.promises import (
    NO_QUOTAS,
    Book,
    Plans,
    Sharing,
    by_deadline,
)
from coordinator.policies.deadlines.quotas import Quotas, has_quotas, quotas_beside
from coordinator.policies.deadlines.shares import Claim, Plan, next_change_s, now_of
from coordinator.policies.deadlines.sizes import claim_of, sizes_of
from coordinator.policies.decisions import Allocation, Reject
from coordinator.policies.floor import Floor, consolidated, present_workers
from coordinator.policies.granting import Grant, carry_out
from coordinator.policies.knob_types import Period, Seconds
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.recall import recalled
from coordinator.policies.setbacks import told
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.words import counted

UNLESS = "unless a promised deadline needs it"
RESIZES_PER_SLOT = 10
"""A grant beyond the share is reckoned with for so many times what it takes to change, at least:
else no growth would ever be worth the time for which the gang stands still."""
IN_FLIGHT = (JobState.STARTING, JobState.RESIZING, JobState.PREEMPTING)


class ElasticFlowKnobs(Struct, frozen=True, kw_only=True):
    """What can be turned.

    margin: plans reckon with so many times the work that is predicted to be left.
    slot_s: how long a grant beyond the minimum share is reckoned with before it is planned anew.
    restart_s: what a stop costs a job beside its work, until it computes again.
    rejects: whether a job that cannot be promised its deadline is refused; else it runs without.
    powers_of_two: sizes double; else any size in the job's range.
    round_s: shares are settled no more often than this, but where a plan says so; 0: whenever
        something happens. admits_together: the newcomers of a round are admitted all or none. Both
        as in the authors' artefact, whose rounds are 60 s.
    """

    margin: Margin = 1.05
    slot_s: Period = 60.0
    restart_s: Seconds = 30.0
    rejects: bool = True
    powers_of_two: bool = True
    round_s: Seconds = 0.0
    admits_together: bool = False


class _Memory(Struct, frozen=True, array_like=True):
    """promises: the plan under which each admitted job meets its deadline.

    settled_at_s: when shares were settled; again at that instant, as jobs stop and start.
    round_at_s: when they may be settled anew. due_at_s: when a plan wants it in any case.
    late: who was promised a deadline that it cannot meet any more; it is not refused for that.
    overheads: what is known of attempts. dates: that were promised instead to those that are late.
    """

    promises: Plans = {}
    settled_at_s: float = -inf
    round_at_s: float = 0.0
    due_at_s: float = inf
    late: tuple[str, ...] = ()
    overheads: Overheads = {}
    dates: dict[str, float] = {}


class _Outcome(Struct, frozen=True, kw_only=True):
    """One pass, before anything is placed. notes: why a job does not run now."""

    grants: tuple[Grant, ...]
    rejects: tuple[Reject, ...]
    promises: Plans
    late: tuple[str, ...]
    overheads: Overheads
    dates: dict[str, float]
    wake_at_s: float
    notes: dict[JobId, str]


class _Pass:
    """All GPU types of a snapshot, one after another; a job stands in the first that takes it."""

    def __init__(self, knobs: ElasticFlowKnobs, snapshot: ClusterSnapshot, memory: bytes) -> None:
        self._knobs = knobs
        self._now_s = snapshot.now_s
        self._jobs = snapshot.jobs
        self._floor = Floor(snapshot)
        self._tenancy = Tenancy(snapshot) if has_quotas(snapshot.tenants) else None
        before = recalled(memory, _Memory)
        self._kept = before.promises
        self._dates_before = before.dates
        self._dates: dict[str, float] = {}
        self._late_before = frozenset(before.late)
        self._late: list[str] = []
        self._snapshot = snapshot
        self._has_costs = has_costs(snapshot)
        self._overheads = seen(before.overheads, snapshot)
        self._grants: list[Grant] = []
        self._rejects: list[Reject] = []
        self._promises: Plans = {}
        self._wake_at_s = inf
        self._notes: dict[JobId, str] = {}

    def outcome(self) -> _Outcome:
        kinds = self._floor.gpu_types
        for kind in kinds:
            mine = [job for job in self._jobs if _kind_of(job, kinds) == kind]
            self._pool(kind, mine)
        return _Outcome(
            grants=tuple(self._grants),
            rejects=tuple(self._rejects),
            promises=self._promises,
            late=tuple(sorted(self._late)),
            overheads=self._overheads,
            dates=self._dates,
            wake_at_s=self._wake_at_s,
            notes=self._notes,
        )

    def _pool(self, kind: str, jobs: Sequence[JobView]) -> None:
        gpus = self._floor.total_gpus(kind) - sum(map(_fixed_gpus, jobs))
        by_id = {job.job_id: job for job in jobs if not _fixed_gpus(job)}
        claims = {name: self._claim(job, kind, gpus) for name, job in by_id.items()}
        promised, newcomers, soft = self._sorted(by_id, claims)
        book = Book(self._now_s, gpus, self._kept, self._quotas(by_id))
        book.promise(promised, soft)
        if self._has_costs:
            self._dates.update(book.put_off(self._dates_before, self._kept))
        if self._has_costs:
            newcomers = handed_over(newcomers, self._floor.nodes.values(), kind, jobs)
        groups = [newcomers] if self._knobs.admits_together else [[each] for each in newcomers]
        for group in groups:
            if group and not book.admit(group):
                for claim in group:
                    soft += self._refused(book, by_id[JobId(claim.job_id)], claim)
        self._late += [claim.job_id for claim in book.late]
        self._late += self._dates
        soft = [*book.late, *sorted(soft, key=by_deadline)]
        slot_s = max(self._knobs.slot_s, RESIZES_PER_SLOT * self._snapshot.resize_s)
        given = Sharing(book, soft, now_s=self._now_s, gpus=gpus, slot_s=slot_s).share()
        self._promises.update(book.plans)
        changes = (next_change_s(plan, self._now_s) for plan in book.plans.values())
        self._wake_at_s = min(self._wake_at_s, min(changes, default=inf))
        for claim in (*book.claims, *soft):
            self._grant(by_id[JobId(claim.job_id)], kind, given[claim.job_id], book)

    def _claim(self, job: JobView, kind: str, gpus: int) -> Claim:
        factor = job.gpu.worker_multiplier.get(kind, 1)
        most = gpus // (job.gpus_per_worker * factor)
        sizes = sizes_of(job, most, powers_of_two=self._knobs.powers_of_two)
        overhead = self._overheads.get(job.job_id, NONE)
        left = left_s(job, overhead, self._now_s)
        return claim_of(
            job,
            self._now_s,
            sizes,
            left_s=left if self._has_costs else job.estimate_left_s(self._now_s),
            margin=self._knobs.margin,
            restart_s=self._knobs.restart_s,
            factor=factor,
            changes=changes_of(job, overhead, self._snapshot),
            tenant="" if self._tenancy is None else self._tenancy.leaf(job),
        )

    def _quotas(self, here: Container[JobId]) -> Quotas:
        if self._tenancy is None:
            return NO_QUOTAS
        elsewhere = [job for job in self._jobs if job.job_id not in here]
        plans = {**self._kept, **self._promises}
        gpus = self._floor.total_gpus()
        return quotas_beside(self._tenancy, gpus, elsewhere, plans, self._now_s)

    def _sorted(
        self, jobs: dict[JobId, JobView], claims: dict[JobId, Claim]
    ) -> tuple[list[Claim], list[Claim], list[Claim]]:
        """Who was promised, who asks for it in order of submission, and who has no deadline.

        Whoever has run is not refused any more, whatever policy let it in; nor is who was promised
        its deadline and cannot meet it now.
        """
        promised: list[Claim] = []
        newcomers: list[JobView] = []
        soft: list[Claim] = []
        for name, job in jobs.items():
            if job.deadline_at_s is None:
                soft.append(claims[name])
            elif self._is_let_in(job):
                promised.append(claims[name])
            else:
                newcomers.append(job)
        newcomers.sort(key=lambda job: (job.submitted_at_s, job.job_id))
        return promised, [claims[job.job_id] for job in newcomers], soft

    def _is_let_in(self, job: JobView) -> bool:
        """Whether it has begun, or was promised its deadline before."""
        has_begun = job.first_started_at_s is not None or job.state != JobState.PENDING
        return has_begun or job.job_id in self._kept or job.job_id in self._late_before

    def _refused(self, book: Book, job: JobView, claim: Claim) -> list[Claim]:
        """A newcomer that cannot be promised its deadline: rejected, or without a promise."""
        if not self._knobs.rejects or job.deadline_at_s is None:
            return [claim]
        asked_s = job.deadline_at_s - job.submitted_at_s
        earliest_s = book.earliest_s(claim, job.submitted_at_s) - job.submitted_at_s
        which = "none can be promised: its base gang never fits"
        if earliest_s < inf:
            earliest_s = float(round(earliest_s))  # it is whole, but for sums of floats
            which = f"the earliest that can be promised is {earliest_s:.0f} s after submission"
        within = f" or within what tenant {claim.tenant} may be promised" if claim.tenant else ""
        self._rejects.append(
            Reject(
                job_id=job.job_id,
                earliest_s=earliest_s if earliest_s < inf else None,
                reason=f"its deadline {asked_s:.0f} s after submission cannot be met without "
                f"breaking a promise to another job{within}; {which}",
            )
        )
        return []

    def _grant(self, job: JobView, kind: str, workers: int, book: Book) -> None:
        plan = book.plans.get(job.job_id)
        if workers == 0:
            self._notes[job.job_id] = self._waits(plan)
            return
        share = 0 if plan is None else now_of(plan, self._now_s)
        if plan is None:
            why = "without a promise, on what the promised shares leave"
        else:
            early_s = (job.deadline_at_s or 0.0) - plan[-1].end_s
            why = f"minimum share {counted(share, 'worker')}, {early_s:.0f} s before its deadline"
        factor = job.gpu.worker_multiplier.get(kind, 1)
        self._grants.append(
            Grant(
                job=job,
                workers=workers * factor,
                gpu_type=kind,
                reason=f"{workers} now: {why}",
                is_promised=plan is not None or job.job_id in self._late,
            )
        )

    def _waits(self, plan: Plan | None) -> str:
        if not plan:
            return "promised shares and those before it leave no room for its base gang"
        first = plan[0]
        return (
            f"it was promised its deadline and starts in {first.start_s - self._now_s:.0f} s at "
            f"the latest, with {counted(first.workers, 'worker')}; until then others need the "
            "GPUs more"
        )


def _kind_of(job: JobView, kinds: Sequence[str]) -> str | None:
    if job.gpu_type is not None:
        return job.gpu_type
    return next((kind for kind in job.gpu.types or kinds if kind in kinds), None)


def _fixed_gpus(job: JobView) -> int:
    """GPUs that it holds and cannot be asked to give back; it is no part of any plan."""
    if job.preemptibility == Preemptibility.FULL or job.state == JobState.PENDING:
        return 0
    return present_workers(job) * job.gpus_per_worker


def _allocate(knobs: ElasticFlowKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    before = recalled(memory, _Memory)
    if before.settled_at_s < snapshot.now_s < min(before.round_at_s, before.due_at_s):
        wake_at_s = min(before.round_at_s, before.due_at_s)
        return Allocation(decisions=(), memory=memory, wake_at_s=wake_at_s)
    found = _Pass(knobs, snapshot, memory).outcome()
    plan = carry_out(snapshot, found.grants, place=consolidated)
    wake_at_s = min(found.wake_at_s, inf if plan.wake_at_s is None else plan.wake_at_s)
    if any(job.state in IN_FLIGHT for job in snapshot.jobs):
        wake_at_s = min(wake_at_s, snapshot.now_s + knobs.slot_s)  # what they hold is settled then
    after = _Memory(
        found.promises,
        snapshot.now_s,
        snapshot.now_s + knobs.round_s,
        wake_at_s,
        found.late,
        found.overheads,
        found.dates,
    )
    return Allocation(
        decisions=(*found.rejects, *plan.decisions),
        memory=msgspec.msgpack.encode(after),
        wake_at_s=wake_at_s if wake_at_s < inf else None,
    )


def _hold(knobs: ElasticFlowKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[Hold, ...]:
    found = _Pass(knobs, snapshot, memory).outcome()
    plan = carry_out(snapshot, found.grants, place=consolidated)
    rejects = {reject.job_id: reject.reason for reject in found.rejects}
    return answers(snapshot, plan.decisions, plan.holds, {**found.notes, **rejects})


def _told(
    _: ElasticFlowKnobs, snapshot: ClusterSnapshot, __: bytes, job_id: JobId
) -> tuple[str, ...]:
    found = (told(job, snapshot.now_s, UNLESS) for job in snapshot.jobs if job.job_id == job_id)
    return next(found, ())


ELASTICFLOW: Policy = joint(
    "qos-elasticflow",
    "deadlines promised on admission: minimum shares, the rest by marginal return (ElasticFlow)",
    knobs=ElasticFlowKnobs(),
    allocate=_allocate,
    hold=_hold,
    tell=_told,
    by_weight=False,  # a job that was promised its deadline waits for no tenant's turn
    keeps_quotas=True,  # nor is its promise forgotten while its tenant has no room
    parts=Parts(
        order="deadline",
        size="minimum satisfactory share, then marginal return",
        place="fewest nodes",
    ),
)
