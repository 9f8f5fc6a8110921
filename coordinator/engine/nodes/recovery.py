"""Recovery from ledgers: jobs that the journal lost are rebuilt worker by worker."""

from __future__ import annotations

from common.job_state_table import JobEvent
from common.messages import OrderPhase, WorkerOrder
from common.model import FINAL_JOB_STATES, JobState, StopReason, WorkerKey
from coordinator.engine.jobs import (
    arrays,
    estimates,
    gpu_sharing,
    numbers,
    preemption_loss,
    rendezvous,
    start_gate,
)
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.jobs.resize_costs import ResizeCosts
from coordinator.engine.nodes import rebuilt_gangs, rebuilt_start
from coordinator.engine.nodes.reports import acknowledge
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.context import Context, hold_gpus, release_gpus
from coordinator.engine.state.events import OrdersRecovered
from coordinator.engine.state.job_groups import (
    AttemptEntry,
    JobCounts,
    WaitEntry,
    WorkEstimate,
)
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.estimates import Source


def recovered(ctx: Context, event: OrdersRecovered) -> None:
    """Rebuild jobs that the journal lost from what a node's ledger holds."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    ctx.changed_nodes[node.name] = None
    unknown = set(node.ledger.unknown_workers)
    found: set[WorkerKey] = set()
    for order in event.orders:
        job = ctx.job(order.key.job_id)
        if order.key not in unknown or not _may_adopt(node, job, order):
            continue
        found.add(order.key)
        if job is None or order.key.attempt > job.attempt.number:
            if job is None or job.state in FINAL_JOB_STATES:
                # The journal has lost that it was submitted, and its end will be counted.
                ctx.state.counters.jobs_submitted += 1
            job = _rebuilt(ctx, order)
            _drop_older_attempt(ctx, job)
            ctx.state.jobs[job.job_id] = job
            ctx.state.live_jobs[job.job_id] = None
            arrays.recovered(ctx, job)
            ctx.log_event(job.job_id, "recovered", f"from the ledger of {node.name}")
        _adopt(ctx, node, job, order.key, order.gpu_uuids, is_flexible=order.is_flexible)
        _fold_order(ctx, job, order, event)
        rebuilt_gangs.adopted(ctx, job, order)
        _stop_too(ctx, job, order.key)
    aside = {o.key.job_id for o in event.orders if o.is_suspended and o.key in found}
    gpu_sharing.found_together(ctx, node, {key.job_id for key in found}, aside)
    ordered = {order.key for order in event.orders}
    # An entry of the ledger that does not fit stays unknown: the node's next report judges it
    # again.
    node.ledger.unknown_workers = [
        key for key in node.ledger.unknown_workers if key in ordered - found
    ]
    # the state does not know it any more: let the node forget it
    for key in sorted(unknown - ordered):
        acknowledge(ctx, node, key)
    if found or unknown - ordered:
        # Only then: an order makes the node report, and what stayed unknown would be asked again.
        ctx.touch(node.name)
        ctx.needs_pass = True


def _rebuilt(ctx: Context, order: WorkerOrder) -> JobEntry:
    """A job rebuilt from one worker's order, without workers yet."""
    spec, number = numbers.recovered(order.spec)
    # the gang that owns the work, also during a pre-run
    gang = spec.prerun.gang or spec
    runtime_s = spec.expected_runtime_s or ctx.settings.default_expected_runtime_s
    job = JobEntry(
        job_id=order.key.job_id,
        spec=spec,
        tenant=order.tenant,
        user=order.user,
        submitted_at_s=order.submitted_at_s,
        wait=WaitEntry(pending_since_s=order.submitted_at_s),
        state=JobState.STARTING,
        attempt=AttemptEntry(
            number=order.key.attempt, gpu_type=order.gpu_type, endpoint=order.endpoint
        ),
        counts=JobCounts(preemptions=order.preemption_count),
        estimate=WorkEstimate(expected_work_s=runtime_s * gang.workers.min, source=Source.LEDGER),
        is_recovered=True,
    )
    known = ctx.state.jobs.get(job.job_id)
    if known is not None:
        job.number = known.number
    else:
        numbers.give(ctx.state, job, wanted=number)
    return job


def _fold_order(ctx: Context, job: JobEntry, order: WorkerOrder, ledger: OrdersRecovered) -> None:
    """Whether a rebuilt gang may run, by the orders of its workers.

    A worker that was ordered to run proves that the whole gang had been ready. Without that proof
    no worker runs until as many base workers as the job needs are found and ready. The others may
    compute on a node that does not report, so time proves nothing while they are missing.
    """
    if order.key.is_store:
        return  # it was ordered with the reservations, and proves nothing of the gang
    began_ago_s = ledger.began_ago_s.get(str(order.key))
    if job.state != JobState.STARTING:
        job.workers[order.key.worker_index].order = OrderPhase.RUN
        if began_ago_s is not None:
            rebuilt_start.known_later(ctx, job, order, ledger.node, began_ago_s)
    elif order.phase == OrderPhase.RUN:
        job.attempt.gang_deadline_s = None
        job.started_at_s = job.attempt.ran_at_s = job.clock.at_s = ctx.now_s
        for worker in job.workers.values():
            worker.order = OrderPhase.RUN
            ctx.touch(worker.node)
        since = rebuilt_start.known(ctx, job, order, ledger.node, began_ago_s)
        jobs_lifecycle.fire(ctx, job, JobEvent.GANG_READY, f"it had been ordered to run; {since}")
        if order.is_suspended:
            gpu_sharing.put_aside(ctx, job, "it had been suspended")
    elif jobs_lifecycle.is_base_there(job):
        job.attempt.gang_deadline_s = ctx.now_s + ctx.settings.gang_ready_timeout_s


def _stop_too(ctx: Context, job: JobEntry, key: WorkerKey) -> None:
    """A job that is being stopped, as at its time limit, stops a worker that is found later."""
    if job.after_vacating is None or key.is_store:
        return
    for worker in list(job.workers.values()):
        if worker.stop is not None and worker.stop != StopReason.RELEASE:
            jobs_lifecycle.stop_workers(ctx, job, worker.stop, only=(key.worker_index,))
            return


def _may_adopt(node: NodeEntry, job: JobEntry | None, order: WorkerOrder) -> bool:
    """Whether a ledger's worker has its GPUs to itself, and its job, if any, is being rebuilt."""
    free = {
        slot.uuid
        for slot in node.gpus
        if slot.holder in (None, order.key) or (order.is_sharing and slot.nominee is None)
    }
    kind = mixed_nodes.kind_of(node, order.gpu_uuids)
    each = order.spec.gpu.gpus_for_one(kind, order.gpu_type) or 1
    gpus = 0 if order.key.is_store else order.spec.gpus_per_worker * each
    if not set(order.gpu_uuids) <= free or len(order.gpu_uuids) != gpus:
        return False
    if job is None or order.key.attempt > job.attempt.number:
        return True
    if job.worker(order.key.worker_index) is not None:
        return False  # the ledger of another node had it first
    is_its = order.key.attempt == job.attempt.number and job.is_recovered
    return is_its and job.state in jobs_lifecycle.ACTIVE_JOB_STATES


def _drop_older_attempt(ctx: Context, job: JobEntry) -> None:
    """The journal's entries of a rebuilt job are over; losses already booked stay."""
    old = ctx.job(job.job_id)
    if old is None:
        return
    for worker in list(old.workers.values()):
        release_gpus(ctx, worker.node, worker.key)
    preemption_loss.settle(ctx, old)
    job.lost_gpu_s = old.lost_gpu_s
    job.resizes = ResizeCosts(recent_s=old.resizes.recent_s, lost_gpu_s=old.resizes.lost_gpu_s)
    rendezvous.ended(ctx, old)
    start_gate.forget(ctx.state, old)


def _adopt(
    ctx: Context,
    node: NodeEntry,
    job: JobEntry,
    key: WorkerKey,
    gpu_uuids: tuple[str, ...],
    *,
    is_flexible: bool,
) -> None:
    uuids = tuple(slot.uuid for slot in node.gpus if slot.uuid in gpu_uuids)
    worker = WorkerEntry(
        key=key,
        node=node.name,
        gpu_uuids=uuids,
        is_flexible=is_flexible,
        is_other_type=mixed_nodes.kind_of(node, uuids) != job.attempt.gpu_type,
    )
    ctx.changed_jobs[job.job_id] = None
    if key.is_store:
        rendezvous.hold(job, node, worker)
        return
    estimates.settle_work(job, ctx.now_s)  # of the workers found before
    job.workers[key.worker_index] = worker
    job.attempt.next_worker_index = max(job.attempt.next_worker_index, key.worker_index + 1)
    hold_gpus(ctx, node, len(worker.gpu_uuids), key, shared=worker.gpu_uuids)
