"""YARN's schedulers as baselines for gangs: strict FIFO, fair queues, capacity queues.

Sources: Apache Hadoop's Capacity and Fair Scheduler (their documented rules), and the form in which
papers compare deep learning schedulers with them: `yarn` is non-preemptive FIFO with consolidation
and head-of-line blocking (YARN-CS of Tiresias, NSDI'19, section 5.1).

A queue is a tenant. Inside a queue jobs go by priority and submission, and the first that does not
fit blocks those behind it; but an infeasible job blocks no other job, because YARN refuses requests
beyond its maximum. Both go down the tree of queues to the one that is served next: `yarn-fair` each
time to the one with the least GPUs over its weight, `yarn-capacity` to the one that uses the
smallest part of its capacity: its guarantee, and its weight's part of what the guarantees beside it
leave of their parent's capacity. Borrowing, and getting guarantees back, are the tenants' rules
that hold for all policies.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from common.model import Ratio
from coordinator.policies.contract.decisions import Allocation, PendingReason
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    accepted_types,
    fewest_nodes,
    is_movable,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.knobs import Idle, KnobSet, Period
from coordinator.policies.parts.grants import Grant, begin, carry_out, going_on
from coordinator.policies.parts.memory import recalled
from coordinator.policies.policy import NoKnobs, Parts, Policy, joint
from coordinator.policies.tenants.infeasible import Fleet, wish_of
from coordinator.policies.tenants.queues import Blocked, Tree, in_turn, line, lines, partly_behind
from coordinator.policies.tenants.tenancy import Tenancy, waiting_gpus
from coordinator.policies.tenants.tree import WHOLE


class FairKnobs(KnobSet, frozen=True, kw_only=True):
    """preempts: preempt jobs of queues above their fair share for a queue that is below its own.

        Off, as by default in YARN (yarn.scheduler.fair.preemption).
    threshold: share of its fair share below which a queue is starved (YARN's
        fairSharePreemptionThreshold, 0.5 there too).
    timeout_s: time that a waiting queue must be starved before it preempts (YARN's
        fairSharePreemptionTimeout, which YARN leaves unset by default).
    """

    preempts: bool = False
    threshold: Ratio = 0.5
    timeout_s: Period = 60.0

    def idle(self) -> Idle:
        """Those of preemption, without it."""
        return {} if self.preempts else dict.fromkeys(("threshold", "timeout_s"), ("preempts",))


Key = Callable[[Tenancy], Callable[[str], float]]
"""What a queue of any level has, as a fraction of its own share, in a pass over these tenants: the
least is served next.
"""


class _Queues:
    """One pass: queues are served one job at a time until each is empty or blocked.

    never: jobs that block no other, because they could not run in the fleet, or only on absent
        nodes.
    """

    def __init__(self, snapshot: ClusterSnapshot, key: Key) -> None:
        self.tenancy = Tenancy(snapshot)
        self.grants: list[Grant] = []
        self.held: list[PendingReason] = []
        self.never: list[PendingReason] = []
        self._floor = FreeGpus(snapshot)
        self._fleet = Fleet(snapshot, lends=False)
        tree, part = Tree(snapshot), key(self.tenancy)
        blocked, queues = Blocked(), lines(snapshot, self.tenancy.leaf)
        for job in in_turn(queues, lambda all_: tree.first(all_, part), lambda: len(self.grants)):
            self._serve(job, self.tenancy.leaf(job), blocked)

    def _serve(self, job: JobView, queue: str, blocked: Blocked) -> None:
        kinds, first = blocked.look(queue, accepted_types(job, self._floor))
        if first is not None and not kinds:
            why = f"behind {first} in its queue, which does not fit (the order is strict)"
            self.held.append(PendingReason(job_id=job.job_id, blockers=(why,)))
            return
        why = f"first of queue {queue}, which is served next"
        if grant := begin(self._floor, job, why, kinds=kinds):
            self.tenancy.take(job, grant.workers * job.gpus_per_worker)
            self.grants.append(grant)
        elif never := _why_it_blocks_nobody(self._fleet, job):
            self.never.append(PendingReason(job_id=job.job_id, blockers=never))
        else:
            blocked.block(queue, job, self._fleet.hosts(job, kinds))
            gang = counted(job.base_gpus, "GPU in one piece is", "GPUs in one piece are")
            why = (
                f"{gang} not free{partly_behind(kinds, first) or '; it is the first of its queue'}"
            )
            self.held.append(PendingReason(job_id=job.job_id, blockers=(why,)))


def _why_it_blocks_nobody(fleet: Fleet, job: JobView) -> tuple[str, ...]:
    wish = wish_of(job)
    return fleet.why_never(wish) or fleet.why_absent(wish)


# --- one strict line ----------------------------------------------------------------------------


CELL = ""
"""The name of its only queue."""

FIRST = "first in line, on the fewest nodes"


class _Line:
    """The whole cell is one queue."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.grants: list[Grant] = []
        self.held: list[PendingReason] = []
        floor, fleet, blocked = FreeGpus(snapshot), Fleet(snapshot, lends=False), Blocked()
        for job in line(snapshot):
            kinds, first = blocked.look(CELL, accepted_types(job, floor))
            if first is not None and not kinds:
                why = f"behind {first}, which does not fit (the order is strict)"
                self.held.append(PendingReason(job_id=job.job_id, blockers=(why,)))
            elif grant := begin(floor, job, FIRST, fewest_nodes, kinds):
                self.grants.append(grant)
            elif never := _why_it_blocks_nobody(fleet, job):
                self.held.append(PendingReason(job_id=job.job_id, blockers=never))
            else:
                blocked.block(CELL, job, fleet.hosts(job, kinds))
                gang = counted(job.base_gpus, "GPU is", "GPUs on the fewest nodes are")
                why = f"{gang} not free{partly_behind(kinds, first) or '; it is the first'}"
                self.held.append(PendingReason(job_id=job.job_id, blockers=(why,)))


def _strict(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    grants = [*going_on(snapshot), *_Line(snapshot).grants]
    return Allocation(decisions=carry_out(snapshot, grants).decisions)


# --- queues -------------------------------------------------------------------------------------


def of_weight(tenancy: Tenancy) -> Callable[[str], float]:
    """GPUs of a queue over its weight (Fair Scheduler, policy `fair`)."""
    return lambda name: tenancy.used[name] / tenancy.views[name].weight


def of_capacity(tenancy: Tenancy) -> Callable[[str], float]:
    """The part of its capacity that a queue uses (Capacity Scheduler)."""
    gpus = capacities(tenancy)
    return lambda name: tenancy.used[name] / gpus[name]


def capacities(tenancy: Tenancy) -> dict[str, float]:
    """GPUs that queues are due however much the others ask for, by name; all above 0.

    As YARN's are percentages, those of siblings together are their parent's: its guarantee is a
    queue's own, and what the guarantees leave is divided by weight among all. Where they leave
    nothing it counts as one GPU, so that a queue without one is still served, if rarely.
    """
    gpus = {WHOLE: float(tenancy.capacity)}
    for parent in (WHOLE, *tenancy.views):
        views = [tenancy.views[name] for name in tenancy.children[parent]]
        over = max(1.0, gpus[parent] - sum(view.guarantee_gpus for view in views))
        each = over / (sum(view.weight for view in views) or 1.0)
        gpus |= {view.name: view.guarantee_gpus + view.weight * each for view in views}
    return gpus


def _capacity(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    queues = _Queues(snapshot, of_capacity)
    plan = carry_out(snapshot, [*going_on(snapshot), *queues.grants])
    return Allocation(decisions=plan.decisions)


class _Starved(Struct, frozen=True):
    """Since when each queue has been below its threshold."""

    since_s: dict[str, float] = {}


def _fair(knobs: FairKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    queues = _Queues(snapshot, of_weight)
    if not knobs.preempts:
        plan = carry_out(snapshot, [*going_on(snapshot), *queues.grants])
        return Allocation(decisions=plan.decisions)
    return _preempting(knobs, snapshot, memory, queues)


def _preempting(
    knobs: FairKnobs, snapshot: ClusterSnapshot, memory: bytes, queues: _Queues
) -> Allocation:
    """Queues that were below their threshold for long get the first of their jobs started."""
    before = recalled(memory, _Starved)
    tenancy, now_s = queues.tenancy, snapshot.now_s
    fair = tenancy.fair_shares(waiting_gpus(snapshot, Tenancy(snapshot)))
    heads: dict[str, JobView] = {}
    jobs = {job.job_id: job for job in snapshot.jobs}
    for hold in queues.held:
        job = jobs[hold.job_id]
        if tenancy.used[tenancy.leaf(job)] < knobs.threshold * fair[tenancy.leaf(job)]:
            heads.setdefault(tenancy.leaf(job), job)
    since_s = {queue: before.since_s.get(queue, now_s) for queue in heads}
    due = [queue for queue, at_s in since_s.items() if at_s + knobs.timeout_s <= now_s]
    grants = [*_kept(snapshot, tenancy, fair, bool(due)), *queues.grants]
    for queue in sorted(due):
        why = f"queue {queue} has had less than {knobs.threshold:g} of its fair share"
        grants.append(Grant(job=heads[queue], workers=heads[queue].workers.min, reason=why))
    plan = carry_out(snapshot, grants)
    wakes = (at_s + knobs.timeout_s for at_s in since_s.values())
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(_Starved(since_s)),
        wake_at_s=min((wake for wake in wakes if wake > now_s), default=None),
    )


def _kept(
    snapshot: ClusterSnapshot, tenancy: Tenancy, fair: dict[str, float], may_stop: bool
) -> list[Grant]:
    """All running jobs, but those by which a queue is above its fair share: the lowest
    priority first, of these the newest."""
    kept = going_on(snapshot)
    if not may_stop:
        return kept
    used = dict(Tenancy(snapshot).used)
    newest = sorted(
        kept, key=lambda each: (each.job.priority, -(each.job.attempt.started_at_s or 0.0))
    )
    stopped: set[str] = set()
    for grant in newest:
        queue = tenancy.leaf(grant.job)
        gpus = sum(worker.gpus for worker in grant.job.placed if not worker.is_leaving)
        if is_movable(grant.job) and used[queue] - gpus >= fair[queue]:
            used[queue] -= gpus
            stopped.add(grant.job.job_id)
    return [grant for grant in kept if grant.job.job_id not in stopped]


def _family(name: str, description: str, key: Key, parts: Parts) -> Policy:
    def hold(_: Struct, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
        queues = _Queues(snapshot, key)
        return (*queues.held, *queues.never)

    if key is of_weight:
        return joint(
            name, description, knobs=FairKnobs(), allocate=_fair, pending_reasons=hold, parts=parts,
            by_weight=False,
        )  # fmt: skip
    return joint(
        name, description, knobs=NoKnobs(), allocate=_capacity, pending_reasons=hold, parts=parts,
        by_weight=False,
    )  # fmt: skip


POLICIES = (
    joint(
        "yarn",
        "YARN-CS of the papers: strict FIFO on the fewest nodes, no preemption",
        knobs=NoKnobs(),
        allocate=_strict,
        pending_reasons=lambda _, snapshot, memory: tuple(_Line(snapshot).held),
        parts=Parts(order="submission, strict", size="base demand", place="fewest nodes, or wait"),
    ),
    _family(
        "yarn-fair",
        "YARN's Fair Scheduler: the queue with the fewest GPUs over its weight is served next",
        of_weight,
        Parts(order="least used queue, FIFO inside", size="base demand", place="best fit"),
    ),
    _family(
        "yarn-capacity",
        "YARN's Capacity Scheduler: the queue that uses least of its capacity is served next",
        of_capacity,
        Parts(order="least of capacity, FIFO inside", size="base demand", place="best fit"),
    ),
)
