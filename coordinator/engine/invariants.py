"""Rules that hold for the state after every event; each violation is reported as a sentence.

The second half checks decisions: guarantees that a pass left unmet although it could have met them.
It counts node by node from each tenant's use. It reports nothing where several nodes or borrowers
would have to give GPUs together. Nothing here repairs the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isclose

from msgspec import structs

from common.messages import OrderPhase
from common.model import (
    FINAL_JOB_STATES,
    GpuUuid,
    JobId,
    JobState,
    NodeName,
    NodeRole,
    Pool,
    WorkerKey,
)
from coordinator.engine.desired import Orders, desired_state
from coordinator.engine.jobs import estimates, gang_reservations, gpu_sharing, start_gate
from coordinator.engine.jobs.lifecycle import Line
from coordinator.engine.nodes import membership as nodes_membership
from coordinator.engine.state import usage
from coordinator.engine.state.accounting import GpuTally
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import ClusterState, GpuSlot, LoanEntry, NodeEntry
from coordinator.policies.contract.cooldown import rests_until_s
from coordinator.policies.contract.free_gpus import is_movable
from coordinator.policies.contract.index import index_of
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.tenants.entitlements import PATIENCE_S, beside_idle, is_covered
from coordinator.policies.tenants.giveback import Seat, having, left_by, seats
from coordinator.policies.tenants.gpu_flow import gang_on
from coordinator.policies.tenants.infeasible import Fleet
from coordinator.policies.tenants.quota_guard import blocked
from coordinator.policies.tenants.tenancy import Tenancy

LATE_S = 60.0
"""A pass may come so much later than the instant that it was wanted at."""


class BesideIdle:
    """Since when jobs within a guarantee wait although they fit on free GPUs, and no job that a
    policy's order may prefer needs these.
    """

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
    """True if the base gang fits on free GPUs. less: GPUs of a node that count as taken."""
    nodes = {node.name: node for node in snapshot.nodes if _takes(node, job)}
    free = {name: node.free_gpus - less(node) for name, node in nodes.items()}
    kinds = {node.gpu_type for node in nodes.values()}
    return any(gang_on(free, nodes, job, kind) for kind in kinds)


def starved(snapshot: ClusterSnapshot) -> list[str]:
    """Jobs within a guarantee that wait after a pass, although one node has enough GPUs for them.

    Enough means: the free GPUs there, and those of one borrower in jobs that can be stopped and
    that it does not need for its own guarantee. GPUs that a tenant within its guarantee leaves
    over, because one of its jobs is stopped for another, stay its own until the pass after that.
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
    """Jobs within a guarantee that wait after a pass, although they fit on free GPUs.

    Siblings of their tenant, or of one that contains it, borrow what their parent may use. Reported
    only where the stoppable jobs of one sibling are enough, and none is within its guarantee.
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
    """Seats whose jobs can all be stopped, by node and tenant; both must be unique."""
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
    return is_training and job.accepts(node.gpu_type) and node.name not in job.nodes.avoided


def _exceeds(tenancy: Tenancy, job: JobView, gpus: int) -> bool:
    return any(
        tenancy.used[name] + gpus > tenancy.limit_gpus(name) for name in tenancy.path(job)
    ) or gpus > tenancy.room(job)


def _left_over(snapshot: ClusterSnapshot, tenancy: Tenancy, job: JobView, node: NodeView) -> int:
    """GPUs that are free only because other tenants stop jobs for their own jobs, within their
    guarantees.

    `quota_guard` keeps these GPUs from others in the same pass. The state does not record which
    jobs were stopped and started in one pass: leaving and starting jobs are taken for these.
    """
    own: dict[str, list[JobView]] = {}
    for other in snapshot.jobs:
        for name in tenancy.below_top(other, job) if other.placed else ():
            own.setdefault(name, []).append(other)
    # by the outermost tenant, because those below it leave the same GPUs
    found: dict[str, int] = {}
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
    """True if the lender's tenant owes a job that many GPUs; it borrows all that it held."""
    mine, theirs = tenancy.below_top(job, lender), tenancy.below_top(lender, job)
    if not mine or tenancy.used[mine[-1]] + gpus > tenancy.views[mine[-1]].guarantee_gpus:
        return False
    return all(tenancy.used[name] - held >= tenancy.views[name].guarantee_gpus for name in theirs)


TOLERANCE = 1e-6


def gpu_faults(state: ClusterState) -> list[str]:
    """Every GPU is claimed by exactly the workers that hold it or were promised it."""
    faults: list[str] = []
    claims = _claims(state)
    for node in state.nodes.values():
        for slot in node.gpus:
            is_free = slot.holder is None and slot.nominee is None and not slot.guests
            if is_free and slot.uuid not in claims and not slot.is_gone:
                continue  # as most are
            claimants, holders = claims.get(slot.uuid, []), _holders(slot)
            if claimants != holders and sorted(claimants) != sorted(holders):
                claim, hold = (sorted(map(str, keys)) for keys in (claimants, holders))
                faults.append(f"GPU {slot.uuid}: {claim} claim, {hold} hold it")
            if slot.is_gone and slot.holder is None:
                faults.append(f"GPU {slot.uuid} is gone from {node.name} and held for no worker")
    return faults


def _claims(state: ClusterState) -> dict[str, list[WorkerKey]]:
    """The workers of jobs, reservations that were given up, and attempts to come, by GPU."""
    given = [(w.key, w.gpu_uuids) for job in state.live() for w in job.workers.values()]
    for node in state.nodes.values():
        given += [(left.key, left.gpu_uuids) for left in node.ledger.left_reservations]
    given += [(key, _uuids_of(state, key)) for key in _held_for_migrations(state)]
    claims: dict[str, list[WorkerKey]] = {}
    for key, uuids in given:
        for uuid in uuids:
            claims.setdefault(uuid, []).append(key)
    return claims


def _holders(slot: GpuSlot) -> list[WorkerKey]:
    if slot.nominee is None and not slot.guests:  # as nearly all are
        return [] if slot.holder is None else [slot.holder]
    return [key for key in (slot.holder, slot.nominee, *slot.guests) if key is not None]


def _held_for_migrations(state: ClusterState) -> list[WorkerKey]:
    """Workers of attempts to come for which GPUs are held."""
    migrations = (state.jobs[job_id].migration for job_id in state.migrating_jobs)
    return [key for migration in migrations if migration for _, key in migration.gpus]


def _uuids_of(state: ClusterState, key: WorkerKey) -> tuple[GpuUuid, ...]:
    return tuple(
        slot.uuid
        for node in state.nodes.values()
        for slot in node.gpus
        if key in (slot.holder, slot.nominee, *slot.guests)
    )


def sharing_faults(ctx: Context) -> list[str]:
    """A GPU has no more computing workers than allowed and is charged once; a job is suspended or
    packed only if that is recorded.
    """
    state, faults = ctx.state, list[str]()
    for node in state.nodes.values():
        shared = [slot for slot in node.gpus if slot.guests]  # on others only the holder computes
        if shared and node.name not in state.shared_nodes:
            faults.append(f"{node.name} has a GPU that is shared, and is not known to")
        for slot in shared:
            packed = gpu_sharing.computing_on(ctx, slot)
            if len(packed) > gpu_sharing.MAX_PACKED:
                faults.append(f"GPU {slot.uuid}: {len(packed)} jobs compute on it")
            if len(packed) > 1 and not any(job.attempt.is_packed for job in packed):
                faults.append(f"GPU {slot.uuid}: jobs compute on it that are not packed")
    for job in state.live():
        if (job.state == JobState.SUSPENDED) != (job.job_id in state.suspended_jobs):
            faults.append(f"job {job.job_id} is {job.state}, missing from its index")
        if (job.migration is not None) != (job.job_id in state.migrating_jobs):
            faults.append(f"job {job.job_id}: its migration is missing from the index")
        if job.state == JobState.SUSPENDED and estimates.computing_gpus(job):
            faults.append(f"job {job.job_id} is suspended and charged for GPUs")
    return faults + _overcharges(state)


def _overcharges(state: ClusterState) -> list[str]:
    """GPUs for which their computing workers are charged more than once in all, node by node."""
    charged: dict[NodeName, float] = {}
    for job in state.live():
        if job.attempt.ran_at_s is None or job.state == JobState.SUSPENDED:
            continue
        for worker in job.workers.values():
            if worker.order == OrderPhase.RUN and worker.stop is None:
                gpus = len(worker.gpu_uuids) * worker.share
                charged[worker.node] = charged.get(worker.node, 0.0) + gpus
    return [
        f"{name}: {gpus} GPUs are charged of {len(state.nodes[name].gpus)}"
        for name, gpus in charged.items()
        if name in state.nodes and gpus > len(state.nodes[name].gpus) + TOLERANCE
    ]


def lease_faults(ctx: Context) -> list[str]:
    """A node is wanted in its home role, or on loan under one open loan of a known service; no
    other node has a loan that is not over.
    """
    faults: list[str] = []
    for node in ctx.state.nodes.values():
        if node.lease is None:
            if node.desired.role not in (node.home_role, NodeRole.QUARANTINED):
                faults.append(f"{node.name} is wanted {node.desired.role} without a lease")
            continue
        loan = ctx.state.loans.get(node.lease.lease_id)
        if (
            loan is None
            or loan.returned_at_s is not None
            or node.homecoming.lease_id != loan.lease_id
        ):
            faults.append(f"{node.name} has lease {node.lease.lease_id} without an open loan")
        if node.desired.role != NodeRole.ON_LOAN or node.home_pool != Pool.INFERENCE:
            faults.append(f"{node.name} of {node.home_pool} has a lease: {node.desired.role}")
        if not node.homecoming.is_awaited and (why := nodes_membership.estranged(ctx, node)):
            faults.append(f"{node.name} is lent on: {why}")
    for loan in ctx.state.loans.values():
        node_of = ctx.state.nodes.get(loan.node)
        if loan.returned_at_s is None and (node_of is None or not _is_of(loan, node_of)):
            faults.append(f"loan {loan.lease_id} of {loan.node} is open, and nothing will end it")
    return faults


def _is_of(loan: LoanEntry, node: NodeEntry) -> bool:
    return node.homecoming.lease_id == loan.lease_id


def job_faults(state: ClusterState) -> list[str]:
    """Ended and waiting jobs hold nothing and have no unbooked work at stake; no job runs before
    its gang is ready.
    """
    faults: list[str] = []
    for job in state.jobs.values():
        if job.state in FINAL_JOB_STATES and job.workers:
            faults.append(f"job {job.job_id} is {job.state} and holds workers")
        if job.state == JobState.PENDING and job.workers:
            faults.append(f"job {job.job_id} waits and holds workers")
        if job.loss is not None and not job.loss.is_booked and not job.workers:
            faults.append(f"job {job.job_id} is {job.state} and its loss is not booked")
        faults += [
            f"job {job.job_id} waits for {worker.key} on {worker.node}, which cannot run it"
            for worker in job.workers.values()
            if gang_reservations.may_be_left(state, job, worker)
        ]
        if job.state == JobState.STARTING and any(
            w.order == OrderPhase.RUN for w in job.workers.values()
        ):
            faults.append(f"job {job.job_id}: a worker runs before its gang is ready")
    return faults


def array_faults(state: ClusterState) -> list[str]:
    """Each task of an array waits, lives or has ended, once; its live ones are jobs."""
    faults: list[str] = []
    for array in state.arrays.values():
        ended = (array.succeeded, array.failed, array.cancelled)
        places = [place for each in (array.waiting, *ended) for place in each]
        if sorted([*places, *array.live.values()]) != list(range(len(array.indices))):
            faults.append(f"array {array.array_id} has a task twice, or not at all")
        if array.is_over == (array.array_id in state.live_arrays):
            faults.append(f"array {array.array_id} is {array.state}, and is listed otherwise")
        for job_id in array.live:
            job = state.jobs.get(job_id)
            if job is None or job_id not in state.live_jobs:
                faults.append(f"array {array.array_id} has {job_id}, which is no live job")
            elif (job.state == JobState.PENDING) != (job_id in array.in_line):
                faults.append(f"array {array.array_id}: {job_id} is {job.state}")
    return faults


def size_faults(state: ClusterState) -> list[str]:
    """No job has more workers than it can use; workers on their way out do not count."""
    faults: list[str] = []
    for job in state.live():
        if job.attempt.gpu_type is None or job.job_id in state.oversized_jobs:
            continue
        most = job.spec.workers_on(job.attempt.gpu_type).max
        if job.running_workers > most:
            faults.append(f"job {job.job_id} has {job.running_workers} workers, at most {most}")
    return faults


def gate_faults(state: ClusterState) -> list[str]:
    """No job is started behind a shut gate, and each dependency that may come to hold is settled
    when its job ends."""
    faults: list[str] = []
    arrays = [state.arrays[array_id] for array_id in state.live_arrays]
    for job in state.live():
        if job.gate.is_shut != (job.job_id in state.gated_jobs):
            faults.append(f"job {job.job_id}: its gate is missing from the index, or open")
        if job.gate.is_shut and job.state not in (JobState.PENDING, JobState.PREEMPTING):
            faults.append(f"job {job.job_id} is {job.state} behind a shut gate")
    both: list[start_gate.Gated] = [*state.live(), *arrays]
    for one in both:
        own = start_gate.id_of(one)
        for each in one.gate.depends_on:
            of = start_gate.standing(state, each.job)
            is_open = of is not None and start_gate.holds(each.when, of) is None
            if is_open and own not in state.dependents.get(JobId(each.job), ()):
                faults.append(f"job {own}: nothing settles that it waits for {each.job}")
            if of is not None and start_gate.holds(each.when, of):
                faults.append(f"job {own} waits for {each.job}, which came so far")
    faults += [
        f"array {array.array_id}: its gate is open, and counts as shut, or the reverse"
        for array in arrays
        if array.gate.is_shut != (array.shut_since_s is not None)
    ]
    faults += [
        f"job {job_id} has an index of its start gate, and has ended"
        for job_id in state.gated_jobs
        if job_id not in state.live_jobs
    ]
    return faults


def figure_faults(state: ClusterState) -> list[str]:
    """What has ended had begun: no more jobs and loans end than were counted in."""
    counters = state.counters
    faults: list[str] = []
    ended = counters.jobs_finished + counters.jobs_failed + counters.jobs_rejected
    if ended + len(state.live_jobs) > counters.jobs_submitted:
        faults.append(
            f"{ended} jobs have ended and {len(state.live_jobs)} live, "
            f"of {counters.jobs_submitted} submitted"
        )
    back = counters.reclaims + counters.leases_lapsed + counters.turn_backs
    if back > counters.loans:
        faults.append(f"{back} loans were called back or ended, of {counters.loans}")
    return faults


def store_faults(state: ClusterState) -> list[str]:
    """A rendezvous store exists only with a live attempt, on the node that it was ordered to."""
    faults: list[str] = []
    ordered = {key: name for name, node in state.nodes.items() for key in node.ledger.stores}
    for job in state.jobs.values():
        if job.store is None:
            continue
        if job.state in FINAL_JOB_STATES or job.state == JobState.PENDING:
            faults.append(f"job {job.job_id} is {job.state} and has a rendezvous store")
        if ordered.pop(job.store.key, None) != job.store.node or job.store.gpu_uuids:
            faults.append(f"job {job.job_id}: its store is not on {job.store.node}, without GPUs")
    faults += [f"{name} is ordered {key}, which no job has" for key, name in ordered.items()]
    return faults


def closure_faults(state: ClusterState) -> list[str]:
    """A node that takes nothing new opens again at some time, and only nodes of the cell do; a
    drain with a deadline is of a node that is drained."""
    faults: list[str] = []
    for node in state.nodes.values():
        is_due = node.name in state.closed_until_s
        if is_due != bool(node.failed_starts.closed_reason):
            state_now = "opens again, and is not closed" if is_due else "is closed for ever"
            faults.append(f"{node.name} {state_now}: {node.failed_starts.closed_reason!r}")
    known = state.nodes
    faults += [
        f"{name} is closed or drained, and no node of the cell"
        for name in (*state.closed_until_s, *state.drains)
        if name not in known
    ]
    faults += [
        f"{name} has the deadline of a drain, and is not drained"
        for name in state.drains
        if name in known and not known[name].cordon.is_draining
    ]
    return faults


def window_faults(state: ClusterState) -> list[str]:
    """A window belongs to a node that is not drained yet and, once it was called home for it, not
    lent. No other node is closing.
    """
    faults: list[str] = []
    for name, window in state.windows.items():
        node = state.nodes.get(name)
        if node is None or node.cordon.is_draining:
            faults.append(f"{name} has a window, and is drained or gone")
        elif window.is_called_home and node.lease is not None:
            faults.append(f"{name} is lent although it was called home for its window")
    faults += [
        f"{node.name} is closing without a window"
        for node in state.nodes.values()
        if node.cordon.is_closing and node.name not in state.windows
    ]
    return faults


def tally_faults(kept: GpuTally, fresh: GpuTally) -> list[str]:
    """The GPU tally equals a fresh count."""
    if kept.counts != fresh.counts:
        return [f"stale tally of GPUs: {kept.counts}, now {fresh.counts}"]
    return []


def usage_faults(state: ClusterState) -> list[str]:
    """The open uses are those of the GPUs that are held now, and are counted by job."""
    faults: list[str] = []
    counts: dict[JobId, int] = {}
    for name, node in state.nodes.items():
        uses = state.held_uses.get(name, [])
        kept = {(use.job_id, use.attempt, use.gpu_type): use.gpus for use in uses}
        if kept != usage.held(node):
            faults.append(f"stale uses of {name}: {kept}, now {usage.held(node)}")
        for use in uses:
            counts[use.job_id] = counts.get(use.job_id, 0) + (use.job_id != usage.NO_JOB)
    gone = [name for name in state.held_uses if name not in state.nodes]
    faults += [f"uses of {name}, which is gone" for name in gone]
    kept_counts = {job_id: used.open_count for job_id, used in state.job_uses.items()}
    for job_id in dict.fromkeys((*counts, *kept_counts)):
        if counts.get(job_id, 0) != kept_counts.get(job_id, 0):
            faults.append(
                f"{job_id} has {counts.get(job_id, 0)} open uses, counted as "
                f"{kept_counts.get(job_id, 0)}"
            )
    return faults


def line_faults(kept: Line, fresh: Line) -> list[str]:
    """Waiting jobs are counted as they would be if they were counted now."""
    if kept.count_by_tenant != fresh.count_by_tenant:
        return [f"stale count of waiting jobs: {kept.count_by_tenant}, now {fresh.count_by_tenant}"]
    if kept.live_by_user != fresh.live_by_user:
        return [f"stale count of users' jobs: {kept.live_by_user}, now {fresh.live_by_user}"]
    return []


def view_faults(
    kept: ClusterSnapshot, nodes: Sequence[NodeView], jobs: Sequence[JobView]
) -> list[str]:
    """The views that snapshots share equal freshly built ones."""
    if len(kept.nodes) != len(nodes) or len(kept.jobs) != len(jobs):
        return ["a view is missing, or one too many is kept"]
    faults = [
        f"stale view of {old.name}: {old}, now {new}"
        for old, new in zip(kept.nodes, nodes, strict=True)
        if old != new
    ]
    faults += [
        f"stale view of {old.job_id}: {old}, now {new}"
        for old, new in zip(kept.jobs, jobs, strict=True)
        if not _is_alike(old, new, kept.now_s)
    ]
    if kept.index != index_of(kept.nodes, kept.jobs):
        faults.append("the index is not that of the snapshot")
    return faults


def order_faults(ctx: Context, kept: Orders) -> list[str]:
    """The orders that are sent again equal freshly built ones."""
    fresh = Orders()
    return [
        f"stale orders of {node.name}"
        for node in ctx.state.nodes.values()
        if desired_state(ctx, node, kept) != desired_state(ctx, node, fresh)
    ]


def _is_alike(old: JobView, new: JobView, now_s: float) -> bool:
    """Whether two views of different instants say the same of now."""
    same_instant = structs.replace(
        new,
        as_of_s=old.as_of_s,
        estimate=structs.replace(
            new.estimate,
            remaining_work_s=old.estimate.remaining_work_s,
            estimated_left_s=old.estimate.estimated_left_s,
        ),
        saves=structs.replace(new.saves, unsaved_gpu_s=old.saves.unsaved_gpu_s),
        progress=structs.replace(new.progress, attained_gpu_s=old.progress.attained_gpu_s),
        steps=structs.replace(new.steps, steps_left=old.steps.steps_left),
    )
    return (
        same_instant == old
        and isclose(old.work_left_s(now_s), new.work_left_s(now_s), abs_tol=TOLERANCE)
        and isclose(
            old.estimate_left_s(now_s), new.estimate_left_s(now_s), rel_tol=1e-9, abs_tol=TOLERANCE
        )
        and isclose(old.lost_gpu_s(now_s), new.lost_gpu_s(now_s), abs_tol=TOLERANCE)
        and isclose(
            old.attained_service_gpu_s(now_s),
            new.attained_service_gpu_s(now_s),
            rel_tol=1e-9,
            abs_tol=TOLERANCE,
        )
    )
