"""Guarantees that a pass left unmet though it should not: a check of decisions, as sentences.

Counts plainly, node by node, from what each tenant uses; says nothing where several nodes or
borrowers would have to give together. Must not know who decided, nor repair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.policies.floor import is_movable
from coordinator.policies.never import Fleet
from coordinator.policies.resting import rests_until_s
from coordinator.policies.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.tenants.fitting import gang_on
from coordinator.policies.tenants.guarding import blocked
from coordinator.policies.tenants.owing import PATIENCE_S, beside_idle, is_covered
from coordinator.policies.tenants.seats import Seat, having, left_by, seats
from coordinator.policies.tenants.tenancy import Tenancy

LATE_S = 60.0
"""A pass may come so much later than the instant that it was wanted at."""


class BesideIdle:
    """Since when jobs wait that a guarantee covers and that fit on free GPUs, for nobody whom the
    order of a policy may put before them."""

    def __init__(self) -> None:
        self.since_s: dict[JobId, float] = {}

    def faults(self, snapshot: ClusterSnapshot) -> list[str]:
        """Look at the cell after a pass."""
        before, now_s = self.since_s, snapshot.now_s
        self.since_s = {
            job.job_id: max(before.get(job.job_id, now_s), job.waiting_since_s or 0.0)
            for job in _beside_idle(snapshot)
        }
        return [
            f"job {job_id} waits within its guarantee for {now_s - since_s:.0f} s, though it fits "
            "on free GPUs"
            for job_id, since_s in self.since_s.items()
            if now_s - since_s > PATIENCE_S + LATE_S
        ]


def _beside_idle(snapshot: ClusterSnapshot) -> list[JobView]:
    if not any(tenant.guarantee_gpus for tenant in snapshot.tenants) or snapshot.is_frozen:
        return []
    tenancy = Tenancy(snapshot)
    barred = blocked(snapshot, tenancy)
    jobs = (job for job in snapshot.jobs if job.state == JobState.PENDING)
    waiting = [job for job in jobs if job.job_id not in barred]
    found = beside_idle(tenancy, waiting, partial(_finds_gpus, snapshot), Fleet(snapshot).is_never)
    return [job for job in found if not job.gpu.worker_multiplier]


def _fits(snapshot: ClusterSnapshot, tenancy: Tenancy, job: JobView) -> bool:
    """Whether its base gang finds free GPUs that it may start on in the pass that was, if GPUs are
    all that it asks for."""
    if job.gpu.worker_multiplier or job.cpus_per_worker or job.memory_bytes_per_worker:
        return False
    return _finds_gpus(snapshot, job, lambda node: _left_over(snapshot, tenancy, job, node))


def _finds_gpus(
    snapshot: ClusterSnapshot, job: JobView, less: Callable[[NodeView], int] = lambda node: 0
) -> bool:
    """Whether its base gang fits on what is free. less: GPUs of a node that count for taken."""
    nodes = {node.name: node for node in snapshot.nodes if _takes(node, job)}
    free = {name: node.free_gpus - less(node) for name, node in nodes.items()}
    kinds = {node.gpu_type for node in nodes.values()}
    return any(gang_on(free, nodes, job, kind) for kind in kinds)


def starved(snapshot: ClusterSnapshot) -> list[str]:
    """Jobs that wait within a guarantee after a pass, though one node has enough for them.

    Enough is what is free there and what one borrower holds there in jobs that can be stopped, of
    which it does not need anything for its own guarantee. What a tenant within its own leaves over,
    as one of its jobs is stopped for another, is nobody else's before the pass after that.
    """
    if not any(tenant.guarantee_gpus for tenant in snapshot.tenants) or snapshot.is_frozen:
        return []
    tenancy, faults = Tenancy(snapshot), list[str]()
    there = _by_place(snapshot, tenancy)
    for job in snapshot.jobs:
        if job.state != JobState.PENDING or job.gpu.worker_multiplier or not there:
            continue
        gpus = job.base_gpus
        nodes = [node for node in snapshot.nodes if _takes(node, job)]
        if sum(node.free_gpus for node in nodes) >= gpus or _exceeds(tenancy, job, gpus):
            continue  # it may fit as it is, or may not start at all
        for node in nodes:
            for (place, name), own in there.items():
                if place == node.name and _would_do(snapshot, tenancy, own, node, job):
                    who = ", ".join(each.job_id for seat in own for each in seat.jobs)
                    faults.append(
                        f"job {job.job_id} of tenant {job.tenant} waits within its guarantee, "
                        f"and {who} of tenant {name} on {node.name} borrow enough for it"
                    )
    return faults


def crowded_out(snapshot: ClusterSnapshot) -> list[str]:
    """Jobs that wait within a guarantee after a pass though they fit on free GPUs, as siblings of
    their tenant, or of one that it is part of, borrow what their parent may use.

    Only where the jobs of one of these that can be stopped are enough, and none of its guarantee.
    """
    if not any(tenant.guarantee_gpus for tenant in snapshot.tenants) or snapshot.is_frozen:
        return []
    tenancy, faults = Tenancy(snapshot), list[str]()
    crowded = [
        job
        for job in snapshot.jobs
        if job.state == JobState.PENDING
        and is_covered(tenancy, job)
        and _exceeds(tenancy, job, job.base_gpus)
        and _fits(snapshot, tenancy, job)
    ]
    theirs: dict[str, list[Seat]] = {}
    for (_, name), own in _by_place(snapshot, tenancy).items() if crowded else ():
        theirs.setdefault(name, []).extend(own)
    for job in crowded:
        for name, own in sorted(theirs.items()):
            if _would_make_room(tenancy, own, job):
                faults.append(
                    f"job {job.job_id} of tenant {job.tenant} waits within its guarantee and fits "
                    f"on free GPUs, and tenant {name} borrows what their parent may use"
                )
    return faults


def _would_make_room(tenancy: Tenancy, own: list[Seat], job: JobView) -> bool:
    """Whether a borrower's stops would be right, and leave enough of what a parent may use."""
    lender, gpus = own[0].jobs[0], job.base_gpus
    held = sum(left_by(w for each in seat.jobs for w in having(each)).used for seat in own)
    if not _may_take(tenancy, lender, job, gpus, held):
        return False
    tenancy.leave(lender, held)
    is_enough = not _exceeds(tenancy, job, gpus)
    tenancy.take(lender, held)
    return is_enough


def _by_place(
    snapshot: ClusterSnapshot, tenancy: Tenancy
) -> dict[tuple[NodeName, str], list[Seat]]:
    """Seats whose jobs can all be stopped, by the one node and the one tenant that they are of."""
    found: dict[tuple[NodeName, str], list[Seat]] = {}
    for seat in seats(snapshot.jobs):
        nodes = {worker.node for job in seat.jobs for worker in having(job)}
        names = {tenancy.leaf(job) for job in seat.jobs}
        may_stop = all(
            is_movable(job) and rests_until_s(snapshot, job) is None for job in seat.jobs
        )
        if may_stop and len(nodes) == len(names) == 1:
            found.setdefault((nodes.pop(), names.pop()), []).append(seat)
    return found


def _takes(node: NodeView, job: JobView) -> bool:
    is_training = node.role == NodeRole.TRAINING and node.is_schedulable
    return is_training and job.accepts(node.gpu_type) and node.name not in job.avoid_nodes


def _exceeds(tenancy: Tenancy, job: JobView, gpus: int) -> bool:
    return any(
        tenancy.used[name] + gpus > tenancy.limit_gpus(name) for name in tenancy.path(job)
    ) or gpus > tenancy.room(job)


def _left_over(snapshot: ClusterSnapshot, tenancy: Tenancy, job: JobView, node: NodeView) -> int:
    """GPUs there that are free only as tenants which the job is no part of stop jobs for their own,
    and that were theirs within their guarantees: what `guarding` keeps from others in such a pass.

    A cell does not tell which jobs were stopped and started in one pass: those that leave and those
    that start are taken for such.
    """
    own: dict[str, list[JobView]] = {}
    for other in snapshot.jobs:
        for name in tenancy.below_top(other, job) if other.placed else ():
            own.setdefault(name, []).append(other)
    found: dict[str, int] = {}  # by the outermost tenant: those below it leave the same GPUs
    for name, jobs in own.items():
        leaving = [w for each in jobs for w in each.placed if w.is_leaving]
        begun = [w for each in jobs if each.state == JobState.STARTING for w in each.placed]
        lost = sum(w.gpus for w in leaving) - sum(w.gpus for w in begun)
        if lost > 0 and tenancy.used[name] + lost <= tenancy.views[name].guarantee_gpus:
            there = sum(w.freed_gpus for w in leaving if w.node == node.name)
            there -= sum(w.gpus for w in begun if w.node == node.name)
            outermost = tenancy.below_top(jobs[0], job)[-1]
            found[outermost] = max(found.get(outermost, 0), there)
    return min(node.free_gpus, sum(found.values()))


def _would_do(
    snapshot: ClusterSnapshot, tenancy: Tenancy, own: list[Seat], node: NodeView, job: JobView
) -> bool:
    """Whether a borrower's stops would be right, and enough."""
    gpus = job.base_gpus
    lefts = [left_by(w for each in seat.jobs for w in having(each)) for seat in own]
    if not _may_take(tenancy, own[0].jobs[0], job, gpus, sum(left.used for left in lefts)):
        return False
    free = node.free_gpus + sum(left.free[node.name] for left in lefts)
    if free // job.gpus_per_worker < job.workers.min:
        return False
    free -= _left_over(snapshot, tenancy, job, node)
    return free // job.gpus_per_worker >= job.workers.min


def _may_take(tenancy: Tenancy, lender: JobView, job: JobView, gpus: int, held: int) -> bool:
    """Whether a job is owed so many GPUs by the lender's tenant, which borrows all that it held."""
    mine, theirs = tenancy.below_top(job, lender), tenancy.below_top(lender, job)
    if not mine or tenancy.used[mine[-1]] + gpus > tenancy.views[mine[-1]].guarantee_gpus:
        return False
    return all(tenancy.used[name] - held >= tenancy.views[name].guarantee_gpus for name in theirs)
