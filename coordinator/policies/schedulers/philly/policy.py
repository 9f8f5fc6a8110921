"""The scheduler of the Philly study (ATC'19): quotas, gang reservations and relaxed locality.

Section 2.3. A virtual cluster is a tenant. Its quota is its guarantee, or its weight's part of the
cell where no tenant has one; other tenants use idle quota. The tenant with the smallest part of its
quota in use comes first, and within it the job submitted first. Later jobs that fit start before an
earlier one that does not.

The first job of a tenant that does not fit, of a size within its quota, holds the GPUs that it
finds, as far as the quota leaves them, for `hold_s`. If its gang is not complete by then, it
releases all of them for `back_off_s` and tries again. Meanwhile any job that fits may use them, and
the next gang of its tenant may hold. After every `tries` timeouts it asks for less locality. A job
that waits without holding ages in the same way. All of that follows from when a job first did not
fit. The policy remembers that instant, and the GPUs held.

Running jobs are preempted for a job within quota only when `preempt_ratio` of the GPUs are in use,
and only those of tenants beyond theirs, the youngest first.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from common.model import JobId, JobState, NodeName, NonNegativeInt, Ratio
from coordinator.policies.contract.decisions import (
    FAIR_SHARE,
    FRAGMENTATION,
    Allocation,
    PendingReason,
    Wait,
)
from coordinator.policies.contract.free_gpus import FreeGpus, is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.parts.grants import Grant, carry_out, going_on
from coordinator.policies.parts.memory import recalled
from coordinator.policies.policy import Parts, joint
from coordinator.policies.schedulers.philly.gang_reservation import (
    Attempted,
    Holding,
    out_of_sight,
)
from coordinator.policies.schedulers.philly.gang_tries import Patience, Try
from coordinator.policies.schedulers.philly.locality import ANYWHERE, LEVELS, Gang, whole
from coordinator.policies.schedulers.philly.prerun_pool import PrerunPool, is_prerun
from coordinator.policies.schedulers.philly.quotas import QuotasInUse, held_gpus
from coordinator.policies.tenants.infeasible import Fleet
from coordinator.policies.tenants.queues import Tree, in_turn, lines
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.tree import WHOLE


class Knobs(Patience, frozen=True, kw_only=True):
    """preempt_ratio: share of the GPUs in use from which on jobs are preempted.

    holders: most jobs of one tenant that hold GPUs at a time.
    prerun_gpus: GPUs only for pre-runs of gangs, whatever their tenants have in use.
    reserves: GPUs that a gang releases while it backs off stay closed to later jobs of its tenant.
    """

    preempt_ratio: Ratio = 0.9
    holders: NonNegativeInt = 1
    prerun_gpus: NonNegativeInt = 0
    reserves: bool = False


class _Pass:
    """One walk over the waiting jobs.

    attempted: the memory after it. grants: starts with their nodes.
    victims: jobs that may be stopped for them.
    waiting, kinds: the others, and their pending reasons. wakes: when time alone changes something.
    """

    def __init__(self, knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._tenancy = Tenancy(snapshot)
        self._quotas = QuotasInUse(snapshot, self._tenancy)
        self._floor = FreeGpus(snapshot)
        self._pool = PrerunPool(snapshot, self._floor, knobs.prerun_gpus)
        self._holding = Holding(
            self._floor, self._quotas, knobs, snapshot.now_s, knobs.holders,
            reserves=knobs.reserves,
        )  # fmt: skip
        self._full: set[tuple[object, ...]] = set()
        self._stuck: set[tuple[object, ...]] = set()
        self._types = self._floor.gpu_types
        before = recalled(memory, dict[JobId, Attempted])
        self.attempted = out_of_sight(before, snapshot.unseen)
        self.grants: list[Grant] = []
        self.victims: set[JobId] = set()
        self.waiting: list[tuple[JobView, Attempted, int]] = []
        self.kinds: dict[str, list[JobId]] = {FAIR_SHARE: [], FRAGMENTATION: []}
        self.wakes: list[float] = []
        self._fleet = Fleet(snapshot, lends=False)
        self._before: dict[JobId, Attempted] = {}
        for job in snapshot.jobs:
            if job.state == JobState.PENDING and job.job_id in before:
                self._before[job.job_id] = self._resumed(job, before[job.job_id])
        waiting, tree = lines(snapshot, self._tenancy.leaf), Tree(snapshot)
        part = self._quotas.part_in_use
        for job in in_turn(waiting, lambda line: tree.first(line, part), lambda: len(self.grants)):
            self._look_at(job)

    def _resumed(self, job: JobView, tried: Attempted) -> Attempted:
        if self._fleet.is_never(job):
            return Attempted(tried.since_s)
        return self._holding.resume(job, tried)

    def _look_at(self, job: JobView) -> None:
        tried = self._before.get(job.job_id, Attempted(self._snapshot.now_s))
        self._holding.let_go(job, tried)
        # without the GPUs that it held
        age, room = self._holding.age(tried), self._quotas.room(job)
        alike = (*self._asks(job), is_prerun(job), age.level, age.may_hold)
        if alike in self._stuck and not tried.held:
            self._wait(job, age, tried, room)
            return
        self._floor.avoided = job.nodes.avoided
        with self._holding.kept_from(self._tenancy.leaf(job)):
            is_started = self._start_in_pool(job) or self._start(job, age.level, tried)
            if not is_started and not self._preempt_for(job, age.level):
                held = dict[NodeName, int]()
                # The rest of a gang that no nodes could take never comes.
                if not self._fleet.is_never(job):
                    held = self._holding.acquire(job, self._gangs(job), tried)
                self._wait(job, age, Attempted(tried.since_s, held), room)
                if not held and not self._holding.is_keeping(job):
                    self._stuck.add(alike)  # else its like may find more to hold
        self._floor.avoided = ()

    def _start_in_pool(self, job: JobView) -> bool:
        """A pre-run starts in the pool, in its turn but without regard to quotas."""
        kept = ("GPU that is kept", "GPUs that are kept")
        why = f"its pre-run, in the pool of {counted(self._pool.gpus, *kept)} for them"
        grant = self._pool.begin(job, why)
        if grant is not None:
            self._tenancy.take(job, grant.workers * job.gpus_per_worker)
            self.grants.append(grant)
        return grant is not None

    def _asks(self, job: JobView) -> tuple[object, ...]:
        """The tenant of a job and all that it asks for: where one finds nothing, equal ones do not
        either.
        """
        return (self._tenancy.leaf(job), job.nodes.avoided, *self._gangs(job))

    def _gangs(self, job: JobView) -> Iterator[Gang]:
        for gpu_type in job.gpu.types or self._types:
            yield Gang(job.workers_on(gpu_type).min, job.gpus_per_worker, gpu_type)

    def _start(self, job: JobView, level: int, tried: Attempted) -> bool:
        for gang in self._gangs(job):
            leaf = self._tenancy.leaf(job)
            alike = (gang, level, job.nodes.avoided, leaf if self._holding.keeps(leaf) else "")
            if alike in self._full and not tried.held:
                continue  # room only shrinks along the line
            placements = whole(self._floor, gang, level)
            if placements:
                self._floor.take(placements, gang.gpus_per_worker)
                self._tenancy.take(job, gang.workers * gang.gpus_per_worker)
                nodes = len({placement.node for placement in placements})
                reason = f"its gang fits: {LEVELS[level]}, {counted(nodes, 'node')}"
                self.grants.append(
                    Grant(
                        job=job, workers=gang.workers, reason=reason, gpu_type=gang.gpu_type,
                        placements=placements,
                    )
                )  # fmt: skip
                return True
            self._full.add(alike)
        return False

    # --- preemption ---------------------------------------------------------------------------

    def _preempt_for(self, job: JobView, level: int) -> bool:
        """Start it on GPUs of tenants beyond their quota, where the cell is full."""
        capacity = self._tenancy.capacity - self._pool.idle_gpus
        is_full = self._tenancy.used[WHOLE] >= self._knobs.preempt_ratio * capacity
        asks = ("preempt", level, *self._asks(job))
        if not (is_full and self._quotas.is_within(job)) or asks in self._full:
            return False
        gone: list[JobView] = []
        for victim in self._quotas.beyond(self._stoppable(), job):
            if not self._quotas.is_used_without(victim, job):
                continue
            self._tenancy.leave(victim, held_gpus(victim))
            self._floor.vacate(victim.placed)
            gone.append(victim)
            self._full = {alike for alike in self._full if alike[0] == "preempt"}
            self._stuck = set()
            if self._start(job, level, Attempted(0.0)):
                self.victims.update(each.job_id for each in gone if not self._goes_on(each))
                return True
        for victim in gone:
            self._tenancy.take(victim, held_gpus(victim))
            self._floor.stay(victim.placed)
        self._full.add(asks)
        return False

    def _goes_on(self, victim: JobView) -> bool:
        """True if no other gang needs what it holds."""
        if not self._floor.goes_on(victim.placed):
            return False
        self._tenancy.take(victim, held_gpus(victim))
        return True

    def _stoppable(self) -> Iterator[JobView]:
        """Jobs that may be stopped and are not yet; no job needs the GPUs of the pool."""
        jobs = (job for job in self._snapshot.jobs if job.job_id not in self.victims)
        return (job for job in jobs if is_movable(job) and not self._pool.has(job))

    # --- waiting ------------------------------------------------------------------------------

    def _wait(self, job: JobView, age: Try, tried: Attempted, room: int) -> None:
        """The job waits, and its tenant's quota leaves this number of GPUs for it to hold."""
        self.attempted[job.job_id] = tried
        is_within = room >= job.base_gpus
        holds_later = room > 0 and not age.may_hold
        if tried.held or holds_later or age.level < ANYWHERE:
            self.wakes.append(age.until_s)
        if not self._fleet.is_never(job):  # else neither a quota nor a place would let it start
            self.kinds[FRAGMENTATION if is_within else FAIR_SHARE].append(job.job_id)
        self.waiting.append((job, tried, room))

    def holds(self) -> tuple[PendingReason, ...]:
        """Why each of the others waits, in sentences."""
        return tuple(
            PendingReason(job_id=job.job_id, blockers=(self._why(job, tried, room),))
            for job, tried, room in self.waiting
        )

    def _why(self, job: JobView, tried: Attempted, room: int) -> str:
        age = self._holding.age(tried)
        gpus, held = self._holding.told(job, tried) if room else (0, "")
        if room < job.base_gpus:
            quota = self._quotas.told(job, gpus)
            no_place = f"no idle GPUs of others fit it ({LEVELS[age.level]})"
            return f"fair share: {quota}, and {no_place}{held}"
        return (
            "fragmentation: within quota, but no place for "
            f"{counted(job.workers.min, 'worker')} of {counted(job.gpus_per_worker, 'GPU')} "
            f"({LEVELS[age.level]}; {counted(age.timeouts, 'try', 'tries')} timed out){held}"
        )


def _allocate(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    walk = _Pass(knobs, snapshot, memory)
    plan = carry_out(snapshot, [*going_on(snapshot, but=walk.victims), *walk.grants])
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(walk.attempted),
        wake_at_s=min(walk.wakes, default=None),
        waits=tuple(Wait(kind=kind, jobs=tuple(jobs)) for kind, jobs in walk.kinds.items() if jobs),
    )


def _explain(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    return _Pass(knobs, snapshot, memory).holds()


POLICIES = (
    joint(
        "philly",
        "quotas that lend idle shares, gangs acquired GPU by GPU, locality relaxed after "
        "failed attempts",
        knobs=Knobs(),
        allocate=_allocate,
        pending_reasons=_explain,
        parts=Parts(
            order="smallest share of quota in use, then submission, out of order",
            size="base demand",
            place="locality levels, then the emptiest rack and node",
        ),
    ),
)
