"""YARN's schedulers as baselines for gangs: strict FIFO, fair queues, capacity queues.

Sources: Apache Hadoop's Capacity and Fair Scheduler (their documented rules), and the form in which
papers compare deep learning schedulers with them: `yarn` is non-preemptive FIFO with consolidation
and head-of-line blocking (YARN-CS of Tiresias, NSDI'19, section 5.1). Must not know the engine.

A queue is a tenant. Inside a queue jobs go by priority and submission, and the first that does not
fit blocks those behind it. `yarn-fair` serves the queue with the least GPUs over its weight;
`yarn-capacity` goes down the tree of queues, each time to the one that uses the smallest part of
its capacity: its guarantee, or its weight's part of the whole where it has none. What a queue may
borrow, and that it gets its guarantee back, are the rules of tenants that hold for all policies.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from common.model import JobState, PositiveFloat, Ratio
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation, Placement
from coordinator.policies.floor import Floor, best_fit, consolidated, is_movable, present_workers
from coordinator.policies.granting import Grant, carry_out
from coordinator.policies.policy import NoKnobs, Parts, Policy, joint
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.tenancy import WHOLE, Tenancy, base_gpus, waiting_gpus


class FairKnobs(Struct, frozen=True, kw_only=True):
    """preempts: off, as by default in YARN (yarn.scheduler.fair.preemption).

    threshold, timeout_s: a queue that has had less than this part of its fair share for so long
    takes GPUs from queues above theirs (fairSharePreemptionThreshold 0.5; YARN's own timeout is
    never, so with `preempts` one is needed).
    """

    preempts: bool = False
    threshold: Ratio = 0.5
    timeout_s: PositiveFloat = 60.0


def fewest_nodes(floor: Floor, job: JobView, gpu_type: str, count: int) -> tuple[Placement, ...]:
    """On as few nodes as it would have on empty ones, or not at all."""
    sizes = sorted(
        (n.gpus // job.gpus_per_worker for n in floor.nodes.values() if n.gpu_type == gpu_type),
        reverse=True,
    )
    fewest, left = 0, count
    while left > 0 and fewest < len(sizes):
        left -= sizes[fewest]
        fewest += 1
    found = consolidated(floor, job, gpu_type, count)
    return found if len(found) <= fewest else ()


Next = Callable[[Tenancy, set[str]], str]
"""(tenants, queues that have a job to try) -> the queue that is served next."""


class _Queues:
    """One pass: queues are served one job at a time until each is empty or blocked.

    is_consolidated: gangs take the fewest nodes or wait.
    """

    def __init__(self, snapshot: ClusterSnapshot, next_: Next, *, is_consolidated: bool) -> None:
        self.tenancy = Tenancy(snapshot)
        self.grants: list[Grant] = []
        self.held: list[Hold] = []
        self._floor = Floor(snapshot)
        self._place = fewest_nodes if is_consolidated else best_fit
        lines: dict[str, list[JobView]] = {}
        for job in snapshot.jobs:
            if job.state == JobState.PENDING:
                lines.setdefault(self.tenancy.leaf(job), []).append(job)
        for line in lines.values():
            line.sort(key=_submission)
        while lines:
            queue = next_(self.tenancy, set(lines))
            if not self._start(lines[queue][0], queue):
                self._block(lines.pop(queue))
                continue
            lines[queue].pop(0)
            if not lines[queue]:
                del lines[queue]

    def _start(self, job: JobView, queue: str) -> bool:
        for kind in job.gpu.types or self._floor.gpu_types:
            count = job.workers_on(kind).min
            found = self._place(self._floor, job, kind, count)
            if sum(placement.worker_count for placement in found) == count:
                self._floor.take(found, job.gpus_per_worker)
                self.tenancy.take(job, count * job.gpus_per_worker)
                why = f"first of queue {queue}, which is served next"
                self.grants.append(
                    Grant(job=job, workers=count, gpu_type=kind, placements=found, reason=why)
                )
                return True
        return False

    def _block(self, line: list[JobView]) -> None:
        head = line[0]
        first = f"{base_gpus(head)} GPUs in one piece are not free; it is the first of its queue"
        self.held.append(Hold(job_id=head.job_id, blockers=(first,)))
        behind = f"behind {head.job_id} in its queue, which does not fit (the order is strict)"
        self.held += [Hold(job_id=job.job_id, blockers=(behind,)) for job in line[1:]]


def _submission(job: JobView) -> tuple[object, ...]:
    return (-job.priority, job.submitted_at_s, job.job_id)


def _running(snapshot: ClusterSnapshot) -> list[Grant]:
    """Everybody who runs goes on as they are."""
    return [
        Grant(job=job, workers=present_workers(job), reason="it runs")
        for job in snapshot.jobs
        if job.placed
    ]


# --- one strict line ----------------------------------------------------------------------------


class _Line:
    """The whole cell is one queue."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.grants: list[Grant] = []
        self.held: list[Hold] = []
        floor = Floor(snapshot)
        line = sorted((j for j in snapshot.jobs if j.state == JobState.PENDING), key=_submission)
        for place, job in enumerate(line):
            if not self._start(floor, job):
                first = f"{base_gpus(job)} GPUs on the fewest nodes are not free; it is the first"
                self.held.append(Hold(job_id=job.job_id, blockers=(first,)))
                why = f"behind {job.job_id}, which does not fit (the order is strict)"
                rest = line[place + 1 :]
                self.held += [Hold(job_id=other.job_id, blockers=(why,)) for other in rest]
                break

    def _start(self, floor: Floor, job: JobView) -> bool:
        for kind in job.gpu.types or floor.gpu_types:
            count = job.workers_on(kind).min
            found = fewest_nodes(floor, job, kind, count)
            if sum(placement.worker_count for placement in found) == count:
                floor.take(found, job.gpus_per_worker)
                why = "first in line, on the fewest nodes"
                self.grants.append(
                    Grant(job=job, workers=count, gpu_type=kind, placements=found, reason=why)
                )
                return True
        return False


def _strict(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    grants = [*_running(snapshot), *_Line(snapshot).grants]
    return Allocation(decisions=carry_out(snapshot, grants).decisions)


# --- queues -------------------------------------------------------------------------------------


def least_used(tenancy: Tenancy, queues: set[str]) -> str:
    """The queue with the fewest GPUs over its weight (Fair Scheduler, policy `fair`)."""
    return min(queues, key=lambda name: (tenancy.used[name] / tenancy.views[name].weight, name))


def least_of_capacity(tenancy: Tenancy, queues: set[str]) -> str:
    """Down the tree, each time to the child that uses the smallest part of its capacity."""
    parent, whole = WHOLE, float(tenancy.capacity)
    while True:
        children = tenancy.children[parent]
        weights = sum(tenancy.views[name].weight for name in children)
        with_jobs = [name for name in children if _has_jobs(tenancy, name, queues)]

        capacity = {
            name: tenancy.views[name].guarantee_gpus
            or whole * tenancy.views[name].weight / weights
            or 1.0
            for name in with_jobs
        }
        _, parent = min((tenancy.used[name] / capacity[name], name) for name in with_jobs)
        if not tenancy.children[parent]:
            return parent
        whole = float(capacity[parent])


def _has_jobs(tenancy: Tenancy, name: str, queues: set[str]) -> bool:
    return name in queues or any(
        _has_jobs(tenancy, child, queues) for child in tenancy.children[name]
    )


def _capacity(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    queues = _Queues(snapshot, least_of_capacity, is_consolidated=False)
    plan = carry_out(snapshot, [*_running(snapshot), *queues.grants])
    return Allocation(decisions=plan.decisions)


class _Starved(Struct, frozen=True):
    """Since when each queue has been below its threshold."""

    since_s: dict[str, float] = {}


def _fair(knobs: FairKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    queues = _Queues(snapshot, least_used, is_consolidated=False)
    if not knobs.preempts:
        plan = carry_out(snapshot, [*_running(snapshot), *queues.grants])
        return Allocation(decisions=plan.decisions)
    return _preempting(knobs, snapshot, memory, queues)


def _preempting(
    knobs: FairKnobs, snapshot: ClusterSnapshot, memory: bytes, queues: _Queues
) -> Allocation:
    """Queues that were below their threshold for long get the first of their jobs started."""
    try:
        before = msgspec.msgpack.decode(memory, type=_Starved)
    except msgspec.MsgspecError:
        before = _Starved()
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
    """Everybody who runs, but the jobs by which a queue is above its fair share, newest first."""
    kept = _running(snapshot)
    if not may_stop:
        return kept
    used = dict(Tenancy(snapshot).used)
    newest = sorted(kept, key=lambda grant: -(grant.job.started_at_s or 0.0))
    stopped: set[str] = set()
    for grant in newest:
        queue = tenancy.leaf(grant.job)
        gpus = sum(worker.gpus for worker in grant.job.placed if not worker.is_leaving)
        if is_movable(grant.job) and used[queue] - gpus >= fair[queue]:
            used[queue] -= gpus
            stopped.add(grant.job.job_id)
    return [grant for grant in kept if grant.job.job_id not in stopped]


def _family(name: str, description: str, next_: Next, parts: Parts) -> Policy:
    def hold(_: Struct, snapshot: ClusterSnapshot, memory: bytes) -> tuple[Hold, ...]:
        return tuple(_Queues(snapshot, next_, is_consolidated=False).held)

    if next_ is least_used:
        return joint(name, description, knobs=FairKnobs(), allocate=_fair, hold=hold, parts=parts)
    return joint(name, description, knobs=NoKnobs(), allocate=_capacity, hold=hold, parts=parts)


POLICIES = (
    joint(
        "yarn",
        "YARN-CS of the papers: strict FIFO on the fewest nodes, nobody is stopped",
        knobs=NoKnobs(),
        allocate=_strict,
        hold=lambda _, snapshot, memory: tuple(_Line(snapshot).held),
        parts=Parts(order="submission, strict", size="base demand", place="fewest nodes, or wait"),
    ),
    _family(
        "yarn-fair",
        "YARN's Fair Scheduler: the queue with the fewest GPUs over its weight is served next",
        least_used,
        Parts(order="least used queue, FIFO inside", size="base demand", place="best fit"),
    ),
    _family(
        "yarn-capacity",
        "YARN's Capacity Scheduler: the queue that uses least of its capacity is served next",
        least_of_capacity,
        Parts(order="least of capacity, FIFO inside", size="base demand", place="best fit"),
    ),
)
