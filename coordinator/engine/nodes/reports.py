"""Node reports: role, GPUs and held workers of a node enter the state here.

A node's report is the truth about what it holds; the journal is the truth about the wanted state.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.messages import GpuHealth, OrderPhase, WorkerPhase
from common.model import FINAL_JOB_STATES, JobState, NodeName, NodeRole, Pool, WorkerKey
from common.node_role_table import HEARD, NODE_TRANSITIONS, NodeEvent, next_role, node_path
from coordinator.engine.jobs import (
    gang_reservations,
    preemption_loss,
    progress,
)
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.nodes import (
    foreign_processes,
    gpu_faults,
    rebuilt_gangs,
    start_failures,
)
from coordinator.engine.nodes import (
    lost as nodes_lost,
)
from coordinator.engine.nodes import (
    membership as nodes_membership,
)
from coordinator.engine.state.context import Context, keys_on, mark_holders
from coordinator.engine.state.events import GpuFact, NodeReported, WorkerFact
from coordinator.engine.state.node_groups import DesiredEntry
from coordinator.engine.state.tables import Ending, GpuSlot, JobEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.text import counted

ENDED_PHASES = (WorkerPhase.EXITED, WorkerPhase.REFUSED)

_LOST, _SERVING, _RESERVING = NodeRole.LOST, NodeRole.SERVING, WorkerPhase.RESERVING
"""Members of an enum are slow to look up, and every report asks for these."""


Said = dict[NodeName, tuple[GpuFact, ...]]
"""What each node last reported of its GPUs, to recognise a repeated report quickly."""


def reported(ctx: Context, event: NodeReported, said: Said) -> None:
    """Fold one node's news into the tables."""
    node = ctx.state.nodes.get(event.node)
    old_pool, old_service = (None, None) if node is None else (node.home_pool, node.service)
    if node is None:
        node = _join(ctx, event)
    before, is_seen_anew = _standing(node), _is_seen_anew(node, event)
    is_new_boot = node.boot_id != event.boot_id
    was_heard, old_role = node.contact.is_heard, node.role
    node.boot_id, node.detail, node.contact.heard_at_s = event.boot_id, event.detail, ctx.now_s
    if is_seen_anew:  # or it was not heard
        node.home_pool, node.rack, node.service = event.home_pool, event.rack, event.service
        node.cpus, node.memory_bytes, node.contact.is_heard = event.cpus, event.memory_bytes, True
        ctx.needs_pass |= node.labels.reported != event.labels
        node.labels.reported = event.labels
    node.contact.epoch, node.contact.generation = event.epoch, event.generation
    _fold_ledger_error(ctx, node, event)
    if is_new_boot and node.gpu_conditions:
        gpu_faults.rebooted(ctx, node, event)
    _fold_gpus(ctx, node, event, said)
    _fold_role(ctx, node, event, is_new_boot=is_new_boot)
    if is_new_boot:
        start_failures.forget(ctx, node, "it rebooted")
    if event.trespasses or is_new_boot or node.trespassed:
        foreign_processes.fold(ctx, node, event, is_new_boot=is_new_boot)
    _fold_workers(ctx, node, event, is_new_boot=is_new_boot)
    if old_pool != node.home_pool or old_service != node.service:
        nodes_membership.moved(ctx, node, old_pool=old_pool, old_service=old_service)
    loans_lifecycle.role_reported(ctx, node, event, old_role=old_role)
    if node.lease is not None:
        nodes_membership.settle(ctx, node)
    if is_seen_anew or _standing(node) != before:
        ctx.changed_nodes[node.name] = None
    if not was_heard or old_role != node.role:
        ctx.touch(node.name)
        ctx.needs_pass = True
        ctx.needs_loan_pass = True


def _is_seen_anew(node: NodeEntry, event: NodeReported) -> bool:
    """True if policies must see a node again: its location or size changed, or it was not heard."""
    return (
        not node.contact.is_heard
        or node.home_pool != event.home_pool
        or node.service != event.service
        or node.rack != event.rack
        or node.labels.reported != event.labels
        or node.cpus != event.cpus
        or node.memory_bytes != event.memory_bytes
    )


def _standing(node: NodeEntry) -> tuple[NodeRole, float | None, bool, bool]:
    """The other facts of a report that change a node for policies, except GPUs and workers."""
    return (
        node.role,
        node.serving_since_s,
        bool(node.ledger.unknown_workers),
        bool(node.ledger.error),
    )


def _join(ctx: Context, event: NodeReported) -> NodeEntry:
    home = NodeRole.TRAINING if event.home_pool == Pool.TRAINING else NodeRole.SERVING
    node = NodeEntry(
        name=event.node,
        home_pool=event.home_pool,
        role=event.role,
        boot_id=event.boot_id,
        desired=DesiredEntry(role=home, generation=ctx.state.least_generation),
    )
    ctx.state.nodes[event.node] = node
    ctx.log_event(event.node, "node joined", f"{event.home_pool}, {len(event.gpus)} GPUs")
    return node


def _fold_ledger_error(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """Close a node that cannot write its ledger, or for which two agents answer. Logged on change.

    With two agents it is unknown which machine a new worker would reach.
    """
    error = event.rival or event.ledger_error
    if bool(node.ledger.error) != bool(error):
        ctx.log_event(node.name, "takes nothing new" if error else "takes new work again", error)
        ctx.needs_pass = ctx.needs_loan_pass = True
    node.ledger.error = error


def _fold_gpus(ctx: Context, node: NodeEntry, event: NodeReported, said: Said) -> None:
    if said.get(node.name) == event.gpus and len(node.gpus) == len(event.gpus):
        return  # only here does the knowledge of its GPUs change
    said[node.name] = event.gpus
    ctx.changed_nodes[node.name] = None
    known = {slot.uuid: slot for slot in node.gpus}
    were_there = [slot.uuid for slot in node.gpus if not slot.is_gone]
    if were_there != [gpu.uuid for gpu in event.gpus]:
        ctx.needs_pass = True
        if known:
            _tell_other_gpus(ctx, node, event)
    slots: list[GpuSlot] = []
    changed: list[tuple[GpuSlot, GpuHealth]] = []
    for gpu in event.gpus:
        slot = known.get(gpu.uuid) or GpuSlot(gpu.uuid, gpu.gpu_type)
        slot.gpu_type, slot.memory_bytes = gpu.gpu_type, gpu.memory_bytes
        slot.is_gone = False
        if slot.health != gpu.health:
            changed.append((slot, slot.health))
            slot.health = gpu.health
            ctx.needs_pass = True
        slots.append(slot)
    _tell_health(ctx, node, changed, count=len(slots))
    seen = {gpu.uuid for gpu in event.gpus}
    for slot in node.gpus:
        if slot.uuid not in seen and slot.holder is not None:
            # Its holder has an account of its own, and may end long after; `release_gpus` ends it.
            slot.is_gone = True
            slots.append(slot)
    node.gpus = slots
    mark_holders(ctx, node)
    gpu_faults.fold(ctx, node, event)


def _tell_health(
    ctx: Context, node: NodeEntry, changed: Sequence[tuple[GpuSlot, GpuHealth]], *, count: int
) -> None:
    """Log the new health of some of a number of GPUs, and what each was before.

    Where all changed at once there is one cause, such as a driver that did not answer in time, and
    one line.
    """
    alike = {(was, slot.health) for slot, was in changed}
    if len(alike) == 1 and 1 < len(changed) == count:
        [(was, now)] = alike
        ctx.log_event(node.name, f"all {count} GPUs are {now}", f"were {was}")
        return
    for slot, was in changed:
        ctx.log_event(node.name, f"GPU {slot.uuid} is {slot.health}", f"was {was}")


def _tell_other_gpus(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """A GPU that fell out of its node, or was added, is logged once."""
    before = {slot.uuid for slot in node.gpus if not slot.is_gone}
    now = {gpu.uuid for gpu in event.gpus}
    count = counted(len(now), "GPU")
    for uuid in sorted(before - now):
        ctx.log_event(node.name, f"GPU {uuid} is gone", f"its node reports {count} without it")
    for uuid in sorted(now - before):
        ctx.log_event(node.name, f"GPU {uuid} is there", f"its node reports {count} with it")


def _fold_role(ctx: Context, node: NodeEntry, event: NodeReported, *, is_new_boot: bool) -> None:
    """Move a node to the role that it reports, by the table alone."""
    if node.role == _LOST:
        _fire(node, HEARD[event.role])
        node.contact.silent_since_s = None
        ctx.log_event(node.name, f"heard again -> {node.role}", event.detail)
    elif is_new_boot:
        _reboot(ctx, node, event)
    elif node.role != event.role:
        _move(ctx, node, event)
    serves, was_down = node.role == _SERVING, node.is_server_down
    is_down = serves and event.is_server_down
    if is_down != was_down:
        node.is_server_down = is_down
        if serves:
            # A dead server measures as no load: it must not look like one to spare.
            ctx.log_event(node.name, "server up again" if was_down else "server down", event.detail)
            ctx.needs_loan_pass = True
    if not serves or is_down:
        node.serving_since_s = None
    elif node.serving_since_s is None:
        node.serving_since_s = ctx.now_s


def _fire(node: NodeEntry, event: NodeEvent) -> None:
    node.role = next_role(node.role, event, who=node.name)


def _reboot(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """Whatever ran before is gone; from there on the node may have come some way already."""
    old = node.role
    is_inference = event.home_pool == Pool.INFERENCE
    _fire(node, NodeEvent.BOOTED if is_inference else NodeEvent.BOOTED_TRAINING)
    ctx.log_event(node.name, f"rebooted: {old} -> {node.role}", event.detail)
    if node.role != event.role:
        _move(ctx, node, event)


def _move(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """One step of the table, or a jump, which is logged.

    A jump is taken as the role of a node that was silent meanwhile. Reports can be lost, and a
    node's report is the truth about what it holds, by whatever path.
    """
    old, path = node.role, node_path(node.role, event.role)
    if len(path) == 1:
        _fire(node, path[0])
        ctx.log_event(node.name, f"{old} -> {node.role}", event.detail)
        return
    missed = [str(role) for role in _between(old, path)]
    _fire(node, NodeEvent.SILENT)
    _fire(node, HEARD[event.role])
    without = f"without {', '.join(missed)}" if missed else "without a known transition"
    why = "reports in between were lost, or the agent broke the transition table"
    ctx.log_event(
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


def _fold_workers(ctx: Context, node: NodeEntry, event: NodeReported, *, is_new_boot: bool) -> None:
    reported_keys = {fact.key for fact in event.workers}
    if node.ledger.acknowledged:
        node.ledger.acknowledged = [key for key in node.ledger.acknowledged if key in reported_keys]
    if node.ledger.stale_stops:
        node.ledger.stale_stops = [key for key in node.ledger.stale_stops if key in reported_keys]
    if node.ledger.unknown_workers:
        node.ledger.unknown_workers = []
    for fact in event.workers:
        if not _is_told_again(ctx, node, fact):
            _fold_worker(ctx, node, fact)
    _missing_workers(ctx, node, event, reported_keys, is_new_boot=is_new_boot)
    if node.ledger.left_reservations:
        gang_reservations.heard(ctx, node, event, reported_keys, is_new_boot=is_new_boot)
    if ctx.state.awaiting_jobs:
        rebuilt_gangs.heard(ctx, node.name, reported_keys)
    if node.ledger.unknown_workers:
        ctx.ask_ledgers[node.name] = None


def _is_told_again(ctx: Context, node: NodeEntry, fact: WorkerFact) -> bool:
    """True if a report repeats the last one of a live worker, as it mostly does.

    A worker that ended is not live any more: it was taken from its job at the first report of its
    end.
    """
    worker = ctx.worker(fact.key)
    return (
        worker is not None
        and worker.phase is fact.phase
        and worker.node == node.name
        and worker.endpoint == fact.endpoint
        and (worker.waits_for == fact.error or fact.phase is not _RESERVING)
    )


def _fold_worker(ctx: Context, node: NodeEntry, fact: WorkerFact) -> None:
    key = fact.key
    if key in node.ledger.acknowledged:
        return
    job = ctx.state.jobs.get(key.job_id)
    is_over = fact.phase in ENDED_PHASES
    if node.ledger.left_reservations and gang_reservations.is_left(node, key):
        if is_over:
            acknowledge(ctx, node, key)
            gang_reservations.release(ctx, node, key)
        return
    if job is None or key.attempt > job.attempt.number:
        node.ledger.unknown_workers.append(key)
        return
    worker = job.worker(key.worker_index)
    if worker is not None and key.attempt == job.attempt.number and worker.node != node.name:
        _held_elsewhere(ctx, node, worker, is_over=is_over)
        return
    if key.attempt < job.attempt.number or worker is None or job.state in FINAL_JOB_STATES:
        is_its = job.is_recovered and key.attempt == job.attempt.number
        if is_its and job.state in jobs_lifecycle.ACTIVE_JOB_STATES:
            node.ledger.unknown_workers.append(key)
        elif is_over:
            if key.attempt == job.attempt.number and job.state == JobState.PENDING:
                progress.last_word(ctx, job, fact)  # its node had been given up before this report
            acknowledge(ctx, node, key)
        else:
            _stop_stale(ctx, node, key, "a newer attempt or no job wants it")
        return
    _fold_live_worker(ctx, node, job, worker, fact)


def _held_elsewhere(ctx: Context, node: NodeEntry, worker: WorkerEntry, *, is_over: bool) -> None:
    """A node says that it holds a worker which another one was given: it has no say in it."""
    if is_over:
        acknowledge(ctx, node, worker.key)
    else:
        _stop_stale(ctx, node, worker.key, f"it was given to {worker.node}")


def _stop_stale(ctx: Context, node: NodeEntry, key: WorkerKey, why: str) -> None:
    if key not in node.ledger.stale_stops:
        node.ledger.stale_stops.append(key)
        ctx.touch(node.name)
        ctx.log_event(node.name, f"stale worker {key}", why)


def _fold_live_worker(
    ctx: Context, node: NodeEntry, job: JobEntry, worker: WorkerEntry, fact: WorkerFact
) -> None:
    old_phase, worker.phase = worker.phase, fact.phase
    worker.endpoint = fact.endpoint or worker.endpoint
    worker.waits_for = fact.error if fact.phase == _RESERVING else ""
    is_over = fact.phase in ENDED_PHASES
    ended_at_s = ctx.ago(fact.ended_ago_s) if is_over else ctx.now_s
    if old_phase in preemption_loss.COMPUTING and fact.phase not in preemption_loss.COMPUTING:
        preemption_loss.ceased(job, worker, ended_at_s)
    is_node_fault = is_over and _is_node_fault(node, worker, fact)
    if old_phase != fact.phase:
        start_failures.heard(ctx, node, worker, fact, is_node_fault=is_node_fault)
    if is_over:
        acknowledge(ctx, node, worker.key)
        progress.last_word(ctx, job, fact)
        jobs_lifecycle.worker_gone(
            ctx,
            job,
            worker,
            Ending(
                ended_at_s=ended_at_s,
                exit_code=fact.exit_code,
                error=fact.error,
                said_reason=fact.stop_reason,
                is_node_fault=is_node_fault,
                failure=fact.failure,
                refused="" if is_node_fault else fact.refused_for,
            ),
        )
    elif old_phase != fact.phase:
        jobs_lifecycle.worker_phase_changed(ctx, job, worker)


def _is_node_fault(node: NodeEntry, worker: WorkerEntry, fact: WorkerFact) -> bool:
    """Whether its node is to blame: it says so, or refused the worker for want of a GPU that it had
    when the worker was placed."""
    if fact.fault.is_nodes:
        return True
    return fact.phase == WorkerPhase.REFUSED and start_failures.wants_gone_gpu(node, worker)


def acknowledge(ctx: Context, node: NodeEntry, key: WorkerKey) -> None:
    """Let the node forget a worker that ended."""
    if key not in node.ledger.acknowledged:
        node.ledger.acknowledged.append(key)
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
    if not node.ledger.stores and reported_keys.issuperset(keys_on(node)):
        return
    for job, worker in loans_lifecycle.held_on(ctx, node):
        if worker.key in reported_keys:
            continue
        has_seen_order = event.epoch == ctx.state.epoch and event.generation >= worker.generation
        is_ordered = worker.order == OrderPhase.RUN or worker.phase is not None
        if (is_new_boot and is_ordered) or has_seen_order:
            what = "rebooted" if is_new_boot else "no longer holds the worker"
            nodes_lost.node_fault(ctx, job, worker, f"{node.name} {what}")
