"""What nodes say: their role, their GPUs, the workers they hold. Must not know policies.

A node's report is the truth about what is held; the journal is the truth about what is wanted.
"""

from __future__ import annotations

from common.lifecycle import HEARD, NODE_TRANSITIONS, JobEvent, NodeEvent, advance, node_path
from common.messages import OrderPhase, WorkerOrder, WorkerPhase
from common.model import FINAL_JOB_STATES, JobState, NodeName, NodeRole, Pool, WorkerKey
from coordinator.engine import jobs, loans, progress
from coordinator.engine.context import Context, release_gpus
from coordinator.engine.events import NodeReported, NodeSilent, OrdersRecovered, WorkerFact
from coordinator.engine.state import GpuSlot, JobEntry, NodeEntry, WorkerEntry

TRESPASSES_KEPT = 64
"""Of one node; older ones are told again if they are still there."""


def reported(ctx: Context, event: NodeReported) -> None:
    """Fold one node's news into the tables."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        node = _join(ctx, event)
    ctx.changed_nodes[node.name] = None
    is_new_boot = node.boot_id != event.boot_id
    was_heard, old_role = node.is_heard, node.role
    node.boot_id, node.detail = event.boot_id, event.detail
    node.home_pool, node.rack, node.service = event.home_pool, event.rack, event.service
    node.heard_at_s, node.is_heard = ctx.now_s, True
    node.reported_epoch, node.reported_generation = event.epoch, event.generation
    _fold_gpus(ctx, node, event)
    _fold_role(ctx, node, event, is_new_boot=is_new_boot)
    _tell_trespasses(ctx, node, event, is_new_boot=is_new_boot)
    _fold_workers(ctx, node, event, is_new_boot=is_new_boot)
    loans.role_reported(ctx, node, event, old_role=old_role)
    if not was_heard or old_role != node.role:
        ctx.touch(node.name)
        ctx.needs_pass = True
        ctx.needs_loan_pass = True


def _join(ctx: Context, event: NodeReported) -> NodeEntry:
    home = NodeRole.TRAINING if event.home_pool == Pool.TRAINING else NodeRole.SERVING
    node = NodeEntry(
        name=event.node,
        home_pool=event.home_pool,
        role=event.role,
        boot_id=event.boot_id,
        desired_role=home,
    )
    ctx.state.nodes[event.node] = node
    ctx.tell(event.node, "node joined", f"{event.home_pool}, {len(event.gpus)} GPUs")
    return node


def _fold_gpus(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    known = {slot.uuid: slot for slot in node.gpus}
    if tuple(known) != tuple(gpu.uuid for gpu in event.gpus):
        ctx.needs_pass = True
    slots: list[GpuSlot] = []
    for gpu in event.gpus:
        slot = known.get(gpu.uuid) or GpuSlot(gpu.uuid, gpu.gpu_type)
        slot.gpu_type = gpu.gpu_type
        if slot.health != gpu.health:
            ctx.tell(node.name, f"GPU {gpu.uuid} is {gpu.health}", f"was {slot.health}")
            slot.health = gpu.health
            ctx.needs_pass = True
        slots.append(slot)
    seen = {gpu.uuid for gpu in event.gpus}
    slots += [slot for slot in node.gpus if slot.uuid not in seen and slot.holder is not None]
    node.gpus = slots


def _fold_role(ctx: Context, node: NodeEntry, event: NodeReported, *, is_new_boot: bool) -> None:
    """Move a node to the role that it reports, by the table alone."""
    if node.role == NodeRole.LOST:
        _fire(node, HEARD[event.role])
        ctx.tell(node.name, f"heard again -> {node.role}", event.detail)
    elif is_new_boot:
        _reboot(ctx, node, event)
    elif node.role != event.role:
        _move(ctx, node, event)
    if node.role == NodeRole.SERVING:
        if node.serving_since_s is None:
            node.serving_since_s = ctx.now_s
    else:
        node.serving_since_s = None


def _fire(node: NodeEntry, event: NodeEvent) -> None:
    node.role = advance(NODE_TRANSITIONS, node.role, event, who=f"node {node.name}")


def _reboot(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """Whatever ran before is gone; from there on the node may have come some way already."""
    old = node.role
    is_inference = event.home_pool == Pool.INFERENCE
    _fire(node, NodeEvent.BOOTED if is_inference else NodeEvent.BOOTED_TRAINING)
    ctx.tell(node.name, f"rebooted: {old} -> {node.role}", event.detail)
    if node.role != event.role:
        _move(ctx, node, event)


def _move(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """One step of the table, or a jump, which is told.

    A jump is taken as the role of a node that was silent meanwhile: reports can be lost, and what
    a node says of itself is the truth about what it holds, however it came there.
    """
    old, path = node.role, node_path(node.role, event.role)
    if len(path) == 1:
        _fire(node, path[0])
        ctx.tell(node.name, f"{old} -> {node.role}", event.detail)
        return
    missed = [str(role) for role in _between(old, path)]
    _fire(node, NodeEvent.SILENT)
    _fire(node, HEARD[event.role])
    without = f"without {', '.join(missed)}" if missed else "which nothing leads to"
    why = "its reports on the way were lost, or the agent broke the table"
    ctx.tell(
        node.name,
        f"{old} -> {node.role} {without}",
        f"{why}; {event.detail}" if event.detail else why,
    )


def _between(old: NodeRole, path: tuple[NodeEvent, ...]) -> list[NodeRole]:
    roles: list[NodeRole] = []
    for event in path[:-1]:
        old = NODE_TRANSITIONS[old][event]
        roles.append(old)
    return roles


def _tell_trespasses(
    ctx: Context, node: NodeEntry, event: NodeReported, *, is_new_boot: bool
) -> None:
    """Each foreign process on a GPU is told once, however often it comes and goes (design 7)."""
    if is_new_boot:
        node.trespasses_told = []  # process ids begin anew
    for fact in event.trespasses:
        if (fact.pid, fact.gpu_uuid) not in node.trespasses_told:
            node.trespasses_told.append((fact.pid, fact.gpu_uuid))
            why = "no worker was granted this GPU for it; nothing but its owner can end it"
            ctx.tell(node.name, f"trespass: process {fact.pid} on {fact.gpu_uuid}", why)
    del node.trespasses_told[:-TRESPASSES_KEPT]


def _fold_workers(ctx: Context, node: NodeEntry, event: NodeReported, *, is_new_boot: bool) -> None:
    reported_keys = {fact.key for fact in event.workers}
    node.acknowledged = [key for key in node.acknowledged if key in reported_keys]
    node.stale_stops = [key for key in node.stale_stops if key in reported_keys]
    node.unknown_workers = []
    for fact in event.workers:
        _fold_worker(ctx, node, fact)
    _missing_workers(ctx, node, event, reported_keys, is_new_boot=is_new_boot)
    if node.unknown_workers:
        ctx.ask_ledgers[node.name] = None


def _fold_worker(ctx: Context, node: NodeEntry, fact: WorkerFact) -> None:
    key = fact.key
    job = ctx.job(key.job_id)
    is_over = fact.phase in (WorkerPhase.EXITED, WorkerPhase.REFUSED)
    if key in node.acknowledged:
        return
    if job is None or key.attempt > job.attempt:
        node.unknown_workers.append(key)
        return
    worker = job.workers.get(key.worker_index)
    if worker is not None and key.attempt == job.attempt and worker.node != node.name:
        _elsewhere(ctx, node, worker, is_over=is_over)
        return
    if key.attempt < job.attempt or worker is None or job.state in FINAL_JOB_STATES:
        is_its = job.is_recovered and key.attempt == job.attempt
        if is_its and job.state in jobs.ACTIVE_JOB_STATES:
            node.unknown_workers.append(key)
        elif is_over:
            _acknowledge(ctx, node, key)
        else:
            _stop_stale(ctx, node, key, "a newer attempt or no job wants it")
        return
    _fold_live_worker(ctx, node, job, worker, fact)


def _elsewhere(ctx: Context, node: NodeEntry, worker: WorkerEntry, *, is_over: bool) -> None:
    """A node says that it holds a worker which another one was given: it has no say in it."""
    if is_over:
        _acknowledge(ctx, node, worker.key)
    else:
        _stop_stale(ctx, node, worker.key, f"it was given to {worker.node}")


def _stop_stale(ctx: Context, node: NodeEntry, key: WorkerKey, why: str) -> None:
    if key not in node.stale_stops:
        node.stale_stops.append(key)
        ctx.touch(node.name)
        ctx.tell(node.name, f"stale worker {key}", why)


def _fold_live_worker(
    ctx: Context, node: NodeEntry, job: JobEntry, worker: WorkerEntry, fact: WorkerFact
) -> None:
    old_phase, worker.phase = worker.phase, fact.phase
    worker.endpoint = fact.endpoint or worker.endpoint
    if fact.phase in (WorkerPhase.EXITED, WorkerPhase.REFUSED):
        _acknowledge(ctx, node, worker.key)
        progress.last_word(ctx, job, fact)
        jobs.worker_gone(
            ctx,
            job,
            worker,
            exit_code=fact.exit_code,
            error=fact.error,
            said_reason=fact.stop_reason,
            is_node_fault=fact.error.startswith(NODE_FAULT_PREFIX),
        )
    elif old_phase != fact.phase:
        jobs.worker_phase_changed(ctx, job, worker)


NODE_FAULT_PREFIX = "node fault"
"""How an agent begins the error of a worker that its node, not its job, ended."""


def _acknowledge(ctx: Context, node: NodeEntry, key: WorkerKey) -> None:
    if key not in node.acknowledged:
        node.acknowledged.append(key)
        ctx.touch(node.name)


def _missing_workers(
    ctx: Context,
    node: NodeEntry,
    event: NodeReported,
    reported_keys: set[WorkerKey],
    *,
    is_new_boot: bool,
) -> None:
    """Workers that the node was ordered and does not hold: it lost them.

    Only a report that already shows the generation of the order, in this epoch, proves that; or a
    new boot id, after which nothing can be running.
    """
    for job, worker in loans.workers_on(ctx, node):
        if worker.key in reported_keys:
            continue
        has_seen_order = event.epoch == ctx.state.epoch and event.generation >= worker.generation
        is_ordered = worker.order == OrderPhase.RUN or worker.phase is not None
        if (is_new_boot and is_ordered) or has_seen_order:
            what = "rebooted" if is_new_boot else "no longer holds the worker"
            _node_fault(ctx, job, worker, f"{node.name} {what}")


def _node_fault(ctx: Context, job: JobEntry, worker: WorkerEntry, what: str) -> None:
    jobs.worker_gone(
        ctx,
        job,
        worker,
        exit_code=None,
        error=f"{NODE_FAULT_PREFIX}: {what}",
        said_reason=None,
        is_node_fault=True,
    )


def silent(ctx: Context, event: NodeSilent) -> None:
    """Silence proves nothing: the node is LOST and its workers are unknown, not dead."""
    node = ctx.state.nodes.get(event.node)
    if node is None or node.role == NodeRole.LOST:
        return
    node.role = advance(NODE_TRANSITIONS, node.role, NodeEvent.SILENT, who=f"node {node.name}")
    node.serving_since_s = None
    ctx.changed_nodes[node.name] = None
    ctx.tell(node.name, "lost", f"no report for {event.silent_s:.1f} s")
    ctx.needs_loan_pass = True


def confirm_dead(ctx: Context, node_name: NodeName, by: str) -> None:
    """An operator vouches that a LOST node runs nothing: its workers are node faults now."""
    node = ctx.state.nodes[node_name]
    ctx.tell(node_name, "confirmed dead", f"by {by}")
    for job, worker in loans.workers_on(ctx, node):
        _node_fault(ctx, job, worker, f"{node.name} was confirmed dead by {by}")


def recovered(ctx: Context, event: OrdersRecovered) -> None:
    """Rebuild jobs that the journal lost from what a node's ledger holds (design 9)."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    ctx.changed_nodes[node.name] = None
    unknown = set(node.unknown_workers)
    found: set[WorkerKey] = set()
    for order in event.orders:
        job = ctx.job(order.key.job_id)
        if order.key not in unknown or not _may_adopt(node, job, order):
            continue
        found.add(order.key)
        if job is None or order.key.attempt > job.attempt:
            job = _rebuilt(ctx, order)
            _drop_older_attempt(ctx, order.key)
            ctx.state.jobs[job.job_id] = job
            ctx.state.live_jobs[job.job_id] = None
            ctx.tell(job.job_id, "recovered", f"from the ledger of {node.name}")
        _adopt(ctx, node, job, order.key, order.gpu_uuids, is_flexible=order.is_flexible)
        _fold_order(ctx, job, order)
    ordered = {order.key for order in event.orders}
    # What the ledger has and does not fit stays unknown: the node's next report judges it again.
    node.unknown_workers = [key for key in node.unknown_workers if key in ordered - found]
    for key in sorted(unknown - ordered):  # nobody knows it any more: let the node forget it
        _acknowledge(ctx, node, key)
    if found or unknown - ordered:
        # Only then: an order makes the node report, and what stayed unknown would be asked again.
        ctx.touch(node.name)
        ctx.needs_pass = True


def _rebuilt(ctx: Context, order: WorkerOrder) -> JobEntry:
    """A job as one worker's order tells it; none of its workers is here yet."""
    return JobEntry(
        job_id=order.key.job_id,
        spec=order.spec,
        tenant=order.tenant,
        user=order.user,
        submitted_at_s=order.submitted_at_s,
        pending_since_s=order.submitted_at_s,
        state=JobState.STARTING,
        attempt=order.key.attempt,
        gpu_type=order.gpu_type,
        endpoint=order.endpoint,
        preemption_count=order.preemption_count,
        expected_work_s=(order.spec.expected_runtime_s or 0.0) * order.spec.workers.min
        or ctx.settings.default_expected_runtime_s * order.spec.workers.min,
        estimate_source="recovered from a node's ledger",
        is_recovered=True,
    )


def _fold_order(ctx: Context, job: JobEntry, order: WorkerOrder) -> None:
    """Whether a rebuilt gang may run, by what its workers were ordered.

    One that was ordered to run is proof that the whole gang had been ready. Without it nobody
    runs before as many base workers as it needs are found and ready. The others may compute on a
    node that is not heard, so time proves nothing as long as they are missing.
    """
    if job.state != JobState.STARTING:
        job.workers[order.key.worker_index].order = OrderPhase.RUN
    elif order.phase == OrderPhase.RUN:
        job.gang_deadline_s = None
        job.started_at_s = job.attempt_ran_at_s = job.worker_s_at_s = ctx.now_s
        for worker in job.workers.values():
            worker.order = OrderPhase.RUN
            ctx.touch(worker.node)
        jobs.fire(ctx, job, JobEvent.GANG_READY, "it had been ordered to run")
    elif jobs.is_base_there(job):
        job.gang_deadline_s = ctx.now_s + ctx.settings.gang_ready_timeout_s


def _may_adopt(node: NodeEntry, job: JobEntry | None, order: WorkerOrder) -> bool:
    """Whether a ledger's worker has its GPUs to itself, and its job, if any, is being rebuilt."""
    free = {slot.uuid for slot in node.gpus if slot.holder in (None, order.key)}
    if not set(order.gpu_uuids) <= free or len(order.gpu_uuids) != order.spec.gpus_per_worker:
        return False
    if job is None or order.key.attempt > job.attempt:
        return True
    if order.key.worker_index in job.workers:
        return False  # the ledger of another node had it first
    is_its = order.key.attempt == job.attempt and job.is_recovered
    return is_its and job.state in jobs.ACTIVE_JOB_STATES


def _drop_older_attempt(ctx: Context, key: WorkerKey) -> None:
    old = ctx.job(key.job_id)
    for worker in list(old.workers.values()) if old else []:
        release_gpus(ctx, worker.node, worker.key)


def _adopt(
    ctx: Context,
    node: NodeEntry,
    job: JobEntry,
    key: WorkerKey,
    gpu_uuids: tuple[str, ...],
    *,
    is_flexible: bool,
) -> None:
    job.workers[key.worker_index] = WorkerEntry(
        key=key,
        node=node.name,
        gpu_uuids=tuple(slot.uuid for slot in node.gpus if slot.uuid in gpu_uuids),
        is_flexible=is_flexible,
    )
    ctx.changed_jobs[job.job_id] = None
    job.next_worker_index = max(job.next_worker_index, key.worker_index + 1)
    for slot in node.gpus:
        if slot.uuid in gpu_uuids:
            slot.holder = key
