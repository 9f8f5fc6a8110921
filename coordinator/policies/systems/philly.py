"""The scheduler of the Philly study (ATC'19, section 2.3): quotas, gangs that are acquired piece by
piece, and locality that is given up step by step. Must not know the engine.

A virtual cluster is a tenant. Its quota is its guarantee, or an equal part of the cell where no
tenant has one; what a tenant leaves idle others use. The tenant with the smallest part of its quota
in use comes first, and in it who was submitted first; later jobs that fit start before an earlier
one that does not.

The first job of a tenant that does not fit and is within quota holds what GPUs it finds, for
`hold_s`; if its gang is not complete by then it lets go of all of them, for `back_off_s`, and tries
again. Every `tries` such timeouts it asks for less locality. Whoever waits without holding ages in
the same way. All of that follows from when a job first did not fit, which is what is remembered,
with what is held.

Running jobs are preempted for a job within quota only when `preempt_ratio` of the GPUs are in use,
and only those of tenants beyond theirs, the youngest first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from common.model import JobId, JobState, NodeName, Ratio
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation
from coordinator.policies.floor import Floor, is_movable
from coordinator.policies.granting import Grant, carry_out, going_on
from coordinator.policies.placing.locality import ANYWHERE, Gang, part, whole
from coordinator.policies.placing.tries import Patience, Try, try_at
from coordinator.policies.policy import Parts, joint
from coordinator.policies.recall import recalled
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.lines import lines
from coordinator.policies.tenants.tenancy import WHOLE, Tenancy, base_gpus
from coordinator.policies.waits import FAIR_SHARE, FRAGMENTATION, Wait

LEVELS = ("fewest servers of one rack", "one rack", "anywhere")


class Knobs(Patience, frozen=True, kw_only=True):
    """preempt_ratio: part of the GPUs in use from which on it preempts.

    holders: jobs of one tenant that hold GPUs at a time.
    """

    preempt_ratio: Ratio = 0.9
    holders: Annotated[int, Meta(ge=0)] = 1


class Attempted(Struct, frozen=True):
    """A job that does not fit: since when, and the GPUs that it holds, by node."""

    since_s: float
    held: dict[NodeName, int] = {}


class _Pass:
    """One walk over the waiting jobs.

    attempted: what is remembered after it. grants: who starts where. victims: who may be stopped
    for them. waiting, kinds: the others, and what for. wakes: when time alone changes something.
    """

    def __init__(self, knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._tenancy = Tenancy(snapshot)
        self._quotas = _quotas(snapshot, self._tenancy)
        self._floor = Floor(snapshot)
        self._holders = Counter[str]()
        self._full: set[tuple[object, ...]] = set()
        self._stuck: set[tuple[object, ...]] = set()
        self._types = self._floor.gpu_types
        self.attempted: dict[JobId, Attempted] = {}
        self.grants: list[Grant] = []
        self.victims: set[JobId] = set()
        self.waiting: list[tuple[JobView, Try, Attempted, bool]] = []
        self.kinds: dict[str, list[JobId]] = {FAIR_SHARE: [], FRAGMENTATION: []}
        self.wakes: list[float] = []
        self._before = recalled(memory, dict[JobId, Attempted])
        self._lines = lines(snapshot, self._tenancy.leaf)
        for job in snapshot.jobs:
            if job.state == JobState.PENDING and job.job_id in self._before:
                self._reserve(job, self._before[job.job_id])
        for job in self._in_turn():
            self._look_at(job)

    def _try(self, tried: Attempted) -> Try:
        return try_at(self._knobs, tried.since_s, self._snapshot.now_s)

    def _reserve(self, job: JobView, tried: Attempted) -> None:
        """Keep what it holds away from the others, as far as it is still there."""
        free, kept = self._floor.free, dict[NodeName, int]()
        if self._try(tried).may_hold:
            there = {name: min(gpus, free.get(name, 0)) for name, gpus in tried.held.items()}
            kept = {name: gpus for name, gpus in there.items() if gpus}
        self._hold(kept)
        self._before[job.job_id] = structs.replace(tried, held=kept)
        if kept:  # whoever holds goes on, before others of its tenant begin to
            self._holders[self._tenancy.leaf(job)] += 1

    def _hold(self, held: Mapping[NodeName, int], sign: int = 1) -> None:
        """GPUs are held, or with sign -1 let go."""
        for name, gpus in held.items():
            self._floor.free[name] -= sign * gpus

    def _in_turn(self) -> Iterator[JobView]:
        """The tenant with the least of its quota in use first; it may change with each start."""
        queues = {leaf: deque(line) for leaf, line in self._lines.items()}
        used = self._tenancy.used
        while queues:
            leaf = min(queues, key=lambda name: (used[name] / max(1.0, self._quotas[name]), name))
            starts = len(self.grants)
            while queues[leaf] and len(self.grants) == starts:  # until then it stays in front
                yield queues[leaf].popleft()
            if not queues[leaf]:
                del queues[leaf]

    def _is_within(self, job: JobView) -> bool:
        leaf = self._tenancy.leaf(job)
        return self._tenancy.used[leaf] + base_gpus(job) <= self._quotas[leaf]

    def _look_at(self, job: JobView) -> None:
        now_s = self._snapshot.now_s
        tried = self._before.get(job.job_id, Attempted(now_s))
        age, is_within = self._try(tried), self._is_within(job)
        shape = (job.gpus_per_worker, job.workers, job.gpu.types, job.avoid_nodes)
        alike = (self._tenancy.leaf(job), *shape, age.level, age.may_hold, is_within)
        if alike in self._stuck and not tried.held:
            self._wait(job, age, tried, is_within=is_within)
            return
        self._floor.avoided = job.avoid_nodes
        self._hold(tried.held, -1)
        if not self._start(job, age.level, tried) and not self._preempt_for(job, age.level):
            held = self._acquire(job, age, tried) if is_within and age.may_hold else {}
            self._wait(job, age, Attempted(tried.since_s, held), is_within=is_within)
            self._stuck.add(alike)
        self._floor.avoided = ()

    def _kinds_of(self, job: JobView) -> Iterator[Gang]:
        for gpu_type in job.gpu.types or self._types:
            yield Gang(job.workers_on(gpu_type).min, job.gpus_per_worker, gpu_type)

    def _start(self, job: JobView, level: int, tried: Attempted) -> bool:
        for gang in self._kinds_of(job):
            alike = (gang, level, job.avoid_nodes)
            if alike in self._full and not tried.held:
                continue  # room only shrinks along the line
            placements = whole(self._floor, gang, level)
            if placements:
                self._floor.take(placements, gang.gpus_per_worker)
                self._tenancy.take(job, gang.workers * gang.gpus_per_worker)
                nodes = len({placement.node for placement in placements})
                reason = f"its gang fits: {LEVELS[level]}, {nodes} servers"
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
        used, capacity = self._tenancy.used, self._tenancy.capacity
        is_full = used[WHOLE] >= self._knobs.preempt_ratio * capacity
        asks = ("preempt", base_gpus(job), level, self._tenancy.leaf(job), job.avoid_nodes)
        if not (is_full and self._is_within(job)) or asks in self._full:
            return False
        self._full.add(asks)
        gone: list[JobView] = []
        for victim in self._beyond_quota():
            leaf, gpus = self._tenancy.leaf(victim), sum(w.gpus for w in victim.placed)
            if used[leaf] - gpus < self._quotas[leaf]:
                continue
            self._tenancy.leave(victim, gpus)
            self._floor.vacate(victim.placed)
            gone.append(victim)
            self._full = {alike for alike in self._full if alike[0] == "preempt"}
            self._stuck = set()
            if self._start(job, level, Attempted(0.0)):
                self.victims.update(each.job_id for each in gone if not self._goes_on(each))
                return True
        for victim in gone:
            self._tenancy.take(victim, sum(w.gpus for w in victim.placed))
            self._floor.stay(victim.placed)
        return False

    def _goes_on(self, victim: JobView) -> bool:
        """Nobody needs what it holds."""
        if not self._floor.goes_on(victim.placed):
            return False
        self._tenancy.take(victim, sum(worker.gpus for worker in victim.placed))
        return True

    def _beyond_quota(self) -> list[JobView]:
        used, leaf = self._tenancy.used, self._tenancy.leaf
        jobs = (job for job in self._snapshot.jobs if is_movable(job))
        found = [
            job
            for job in jobs
            if job.job_id not in self.victims and used[leaf(job)] > self._quotas[leaf(job)]
        ]
        return sorted(found, key=lambda job: (-(job.started_at_s or 0.0), job.job_id))

    # --- waiting ------------------------------------------------------------------------------

    def _acquire(self, job: JobView, age: Try, tried: Attempted) -> dict[NodeName, int]:
        """What it holds from now on of the GPUs that it finds."""
        leaf = self._tenancy.leaf(job)
        if not tried.held and self._holders[leaf] >= self._knobs.holders:
            return {}
        for gang in self._kinds_of(job):
            held = part(self._floor, gang, age.level, tried.held)
            if held:
                self._holders[leaf] += not tried.held
                self._hold(held)
                return held
        return {}

    def _wait(self, job: JobView, age: Try, tried: Attempted, *, is_within: bool) -> None:
        self.attempted[job.job_id] = tried
        if tried.held or age.level < ANYWHERE:
            self.wakes.append(age.until_s)
        self.kinds[FRAGMENTATION if is_within else FAIR_SHARE].append(job.job_id)
        self.waiting.append((job, age, tried, is_within))

    def holds(self) -> tuple[Hold, ...]:
        """Why each of the others waits, in sentences."""
        return tuple(
            Hold(job_id=job.job_id, blockers=(self._why(job, age, tried, is_within),))
            for job, age, tried, is_within in self.waiting
        )

    def _why(self, job: JobView, age: Try, tried: Attempted, is_within: bool) -> str:
        leaf = self._tenancy.leaf(job)
        if not is_within:
            return (
                f"fair share: tenant {leaf} uses {self._tenancy.used[leaf]} GPUs of its quota of "
                f"{self._quotas[leaf]:.0f}, the job needs {base_gpus(job)}, and no idle GPUs of "
                f"others fit it ({LEVELS[age.level]})"
            )
        why = (
            f"fragmentation: within quota, but {job.workers.min} workers of {job.gpus_per_worker} "
            f"GPUs find no place ({LEVELS[age.level]}; {age.timeouts} tries timed out)"
        )
        left_s = age.until_s - self._snapshot.now_s
        if tried.held:
            nodes = ", ".join(f"{gpus} on {name}" for name, gpus in sorted(tried.held.items()))
            return f"{why}; holds {nodes}, for {left_s:.0f} s more"
        return why if age.may_hold else f"{why}; holds nothing for {left_s:.0f} s"


def _quotas(snapshot: ClusterSnapshot, tenancy: Tenancy) -> dict[str, float]:
    """GPUs by tenant: its guarantee, or an equal part where nobody has one."""
    if any(view.guarantee_gpus for view in snapshot.tenants):
        return {name: float(view.guarantee_gpus) for name, view in tenancy.views.items()}
    leaves = {tenancy.leaf(job) for job in snapshot.jobs}
    return dict.fromkeys(tenancy.views, tenancy.capacity / max(1, len(leaves)))


def _allocate(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    walk = _Pass(knobs, snapshot, memory)
    plan = carry_out(snapshot, [*going_on(snapshot, but=walk.victims), *walk.grants])
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(walk.attempted),
        wake_at_s=min(walk.wakes, default=None),
        waits=tuple(Wait(kind=kind, jobs=tuple(jobs)) for kind, jobs in walk.kinds.items() if jobs),
    )


def _explain(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[Hold, ...]:
    return _Pass(knobs, snapshot, memory).holds()


POLICIES = (
    joint(
        "philly",
        "quotas with idle shares lent, gangs acquired piece by piece, locality relaxed by tries",
        knobs=Knobs(),
        allocate=_allocate,
        hold=_explain,
        parts=Parts(
            order="least of its quota in use, then submission, out of order",
            size="base demand",
            place="locality levels, then the emptiest rack and server",
        ),
    ),
)
