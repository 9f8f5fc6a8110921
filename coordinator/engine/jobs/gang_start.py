"""Start an attempt: check that the gang fits where it was placed, then place all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from common.job_state_table import JobEvent
from common.model import GpuUuid, JobState, NodeName, NodeRole, Pool, WorkerKey, is_mig
from coordinator.engine.jobs import (
    gpu_sharing,
    node_selection,
    preemption_loss,
    rendezvous,
)
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.nodes import windows
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.context import Context, free_slots
from coordinator.engine.state.job_groups import AttemptEntry
from coordinator.engine.state.tables import JobEntry, NodeEntry
from coordinator.policies.contract.decisions import Placement, Start, placed_count


def is_schedulable(node: NodeEntry) -> bool:
    """Whether workers may start on a node now."""
    return (
        node.contact.is_heard
        and not node.cordon.is_cordoned
        and not node.ledger.error
        and not node.failed_starts.closed_reason
        and not node.is_out
        and not (node.cordon.is_closing and node.role == NodeRole.ON_LOAN)
        and not node.ledger.unknown_workers
        and not node.homecoming.is_awaited
        and (
            (node.role == NodeRole.TRAINING and node.home_pool == Pool.TRAINING)
            or (node.role == NodeRole.ON_LOAN and node.lease is not None)
        )
    )


def gpus_each(job: JobEntry, kind: str, gpu_type: str) -> int:
    """GPUs of one type that one worker of an attempt takes."""
    return job.spec.gpus_per_worker * (job.spec.gpu.gpus_for_one(kind, gpu_type) or 1)


def does_not_fit(
    ctx: Context,
    job: JobEntry,
    gpu_type: str,
    placements: Iterable[Placement],
    *,
    is_packed: bool = False,
    is_new: bool = False,
    held: Collection[WorkerKey] = (),
) -> str:
    """Why workers cannot be placed like this; empty if they can.

    is_new: they are an attempt that begins; else the present one grows.
    held: keys with GPUs held already; these GPUs count as free.
    """
    if is_mig(gpu_type) and not job.spec.accepts(gpu_type):
        return f"{job.job_id} did not ask for {gpu_type}"
    wanted: dict[NodeName, int] = {}
    named: dict[NodeName, list[GpuUuid]] = {}
    for placement in placements:
        name = placement.node
        part = mixed_nodes.found(ctx.state, name)
        if part is None or not is_schedulable(part[0]):
            return f"{name} takes no workers now"
        barred = node_selection.why_not_on(job.spec, part[0])
        if why := barred or windows.why_not_on(ctx, job, part[0], is_new=is_new):
            return why
        kind = part[1]
        if job.spec.gpu.gpus_for_one(kind, gpu_type) is None:
            return f"{name} has {kind}, the attempt runs on {gpu_type}"
        gpus = placement.worker_count * gpus_each(job, kind, gpu_type)
        if not placement.gpu_uuids:
            wanted[name] = wanted.get(name, 0) + gpus
            continue
        why = "" if held else gpu_sharing.why_not_on(ctx, job, placement, gpus)
        if why:
            return why
        named.setdefault(name, []).extend(placement.gpu_uuids)
    for name, gpus in wanted.items():
        free = _free(ctx, name, held)
        if free < gpus:
            return f"{name} has {free} GPUs free, {gpus} asked"
    return _clashes(ctx, job, named, is_packed=is_packed)


def _free(ctx: Context, name: NodeName, held: Collection[WorkerKey]) -> int:
    """GPUs of a part that is there which can be promised, or are held for these."""
    part = mixed_nodes.found(ctx.state, name)
    if part is None:
        return 0
    node, kind = part
    free = sum(slot.gpu_type == kind for slot in free_slots(ctx, node))
    if not held:
        return free
    return free + sum(
        slot.gpu_type == kind and (slot.holder in held or slot.nominee in held)
        for slot in node.gpus
    )


def _clashes(
    ctx: Context, job: JobEntry, named: dict[NodeName, list[GpuUuid]], *, is_packed: bool
) -> str:
    for name, uuids in named.items():
        if len(set(uuids)) != len(uuids):
            return f"{name}: a GPU is named twice"
        node, _ = mixed_nodes.there(ctx.state, name)
        why = gpu_sharing.why_not_beside(ctx, job, node, uuids, is_packed=is_packed)
        if why:
            return why
    return ""


def why_not(
    ctx: Context, job: JobEntry, decision: Start, *, held: Collection[WorkerKey] = ()
) -> str:
    """Why a gang cannot start as decided; empty when it can. Its state is the caller's matter."""
    gang = job.spec.workers_on(decision.gpu_type)
    base = sum(p.worker_count for p in decision.placements if not p.is_flexible)
    count = placed_count(decision.placements)
    if base != gang.min or count > gang.max:
        return f"{base} base and {count} workers in all, the gang is {gang.min} to {gang.max}"
    return does_not_fit(
        ctx,
        job,
        decision.gpu_type,
        decision.placements,
        is_packed=decision.is_packed,
        is_new=True,
        held=held,
    )


def start(ctx: Context, decision: Start, *, held: Collection[WorkerKey] = ()) -> str:
    """Commit a start; returns why not, or an empty string.

    held: keys of the attempt that begins, for which GPUs are held already.
    """
    job = ctx.job(decision.job_id)
    if job is None or job.state != JobState.PENDING:
        return f"{decision.job_id} does not wait"
    if job.gate.is_shut:
        return f"{decision.job_id} is not in the queue"
    why = why_not(ctx, job, decision, held=held)
    if why:
        return why
    preemption_loss.close(job)
    if job.attempt.number == 0:
        # a job that has begun is not refused, with or without a promise
        job.is_promised = decision.is_promised
    # They belong to the attempt before; its events have them.
    job.exit_code, job.error, job.retry.failed_on = None, "", []
    job.workers = {}
    job.attempt = AttemptEntry(
        number=job.attempt.number + 1,
        gpu_type=decision.gpu_type,
        gang_deadline_s=ctx.now_s + ctx.settings.gang_ready_timeout_s,
        is_packed=decision.is_packed,
    )
    add(ctx, job, in_order(decision.placements))
    rendezvous.add(ctx, job)
    jobs_lifecycle.fire(ctx, job, JobEvent.START, decision.reason)
    return ""


def in_order(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """As their workers are numbered: the base gang first."""
    return tuple(sorted(placements, key=lambda placement: placement.is_flexible))


def add(ctx: Context, job: JobEntry, placements: Iterable[Placement]) -> None:
    """Give a job workers; the caller has looked that they fit."""
    for placement in placements:
        node, kind = mixed_nodes.there(ctx.state, placement.node)
        job.was_on_loan |= node.role == NodeRole.ON_LOAN
        each = gpus_each(job, kind, job.attempt.gpu_type or "")
        for number in range(placement.worker_count):
            shared = placement.gpu_uuids[number * each : (number + 1) * each]
            jobs_lifecycle.add_worker(
                ctx, job, node, kind, is_flexible=placement.is_flexible, shared=shared
            )
