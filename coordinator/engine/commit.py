"""Commit decisions: re-check each against the present state, then carry it out.

A policy may be stale or wrong; what no longer fits is refused with a reason and changes nothing.
"""

from __future__ import annotations

from typing import assert_never

from common.lifecycle import JobEvent
from common.model import JobState, NodeName, NodeRole, StopReason
from coordinator.engine import awaiting, jobs, loans, stores, watching
from coordinator.engine.commands import Refused
from coordinator.engine.context import Context, free_slots
from coordinator.engine.state import JobEntry, NodeEntry
from coordinator.policies.decisions import (
    Decision,
    Loan,
    Placement,
    Preempt,
    Reclaim,
    Recommend,
    Resize,
    Start,
)


def commit(ctx: Context, decision: Decision) -> None:
    """Carry out one decision, or refuse it."""
    why = _try(ctx, decision)
    if why:
        ctx.refused.append(Refused(decision=decision, why=why))
        ctx.state.counters.decisions_refused += 1
    else:
        ctx.decisions.append(decision)


def _try(ctx: Context, decision: Decision) -> str:
    match decision:
        case Start():
            return _start(ctx, decision)
        case Resize():
            return _resize(ctx, decision)
        case Preempt():
            return _preempt(ctx, decision)
        case Loan():
            return loans.lend(ctx, decision)
        case Reclaim() if decision.wait_s > 0:
            return awaiting.begin(ctx, decision)
        case Reclaim():
            return loans.reclaim(ctx, decision)
        case Recommend():
            return watching.take(ctx, decision)
        case _:
            assert_never(decision)


def is_schedulable(node: NodeEntry) -> bool:
    """Whether workers may start on a node now."""
    return (
        node.is_heard
        and not node.is_cordoned
        and not node.unknown_workers
        and not node.is_awaited
        and (
            node.role == NodeRole.TRAINING
            or (node.role == NodeRole.ON_LOAN and node.lease is not None)
        )
    )


def _does_not_fit(
    ctx: Context, job: JobEntry, gpu_type: str, placements: tuple[Placement, ...]
) -> str:
    wanted: dict[str, int] = {}
    for placement in placements:
        wanted[placement.node] = wanted.get(placement.node, 0) + placement.worker_count
    for name, workers in wanted.items():
        node = ctx.state.nodes.get(NodeName(name))
        if node is None or not is_schedulable(node):
            return f"{name} takes no workers now"
        each = job.spec.gpu.gpus_for_one(node.gpu_type, gpu_type)
        if each is None:
            return f"{name} has {node.gpu_type}, the attempt runs on {gpu_type}"
        gpus = workers * each * job.spec.gpus_per_worker
        free = len(free_slots(ctx, node))
        if free < gpus:
            return f"{name} has {free} GPUs free, {gpus} asked"
    return ""


def _start(ctx: Context, decision: Start) -> str:
    job = ctx.job(decision.job_id)
    if job is None or job.state != JobState.PENDING:
        return f"{decision.job_id} does not wait"
    gang = job.spec.workers_on(decision.gpu_type)
    base = sum(p.worker_count for p in decision.placements if not p.is_flexible)
    count = sum(p.worker_count for p in decision.placements)
    if base != gang.min or count > gang.max:
        return f"{base} base and {count} workers in all, the gang is {gang.min} to {gang.max}"
    why = _does_not_fit(ctx, job, decision.gpu_type, decision.placements)
    if why:
        return why
    job.attempt += 1
    job.next_worker_index = 0
    job.workers = {}
    job.succeeded_workers = []
    job.gpu_type = decision.gpu_type
    job.gang_deadline_s = ctx.now_s + ctx.settings.gang_ready_timeout_s
    _add(ctx, job, tuple(p for p in decision.placements if not p.is_flexible))
    _add(ctx, job, tuple(p for p in decision.placements if p.is_flexible))
    stores.add(ctx, job)
    jobs.fire(ctx, job, JobEvent.START, decision.reason)
    return ""


def _add(ctx: Context, job: JobEntry, placements: tuple[Placement, ...]) -> None:
    for placement in placements:
        node = ctx.state.nodes[placement.node]
        job.was_on_loan |= node.role == NodeRole.ON_LOAN
        for _ in range(placement.worker_count):
            jobs.add_worker(ctx, job, node, is_flexible=placement.is_flexible)


def _resize(ctx: Context, decision: Resize) -> str:
    job = ctx.job(decision.job_id)
    if job is None or job.state not in (JobState.RUNNING, JobState.RESIZING):
        return f"{decision.job_id} does not run"
    if job.state == JobState.RESIZING and decision.added:
        return f"{decision.job_id} is already resizing"
    if job.after_vacating is not None:
        return f"{decision.job_id} is ending"
    for index in decision.removed_workers:
        worker = job.workers.get(index)
        if worker is None or not worker.is_flexible or worker.stop is not None:
            return f"worker {index} is not a flexible worker that can be released"
    grown = job.running_workers - len(decision.removed_workers)
    grown += sum(placement.worker_count for placement in decision.added)
    if job.gpu_type is None or grown > job.spec.workers_on(job.gpu_type).max:
        return f"{grown} workers are more than it can use"
    why = _does_not_fit(ctx, job, job.gpu_type, decision.added)
    if why:
        return why
    jobs.stop_workers(ctx, job, StopReason.RELEASE, only=decision.removed_workers)
    _add(ctx, job, tuple(_as_flexible(p) for p in decision.added))
    if decision.added:
        job.gang_deadline_s = ctx.now_s + ctx.settings.gang_ready_timeout_s
    job.resized_at_s = ctx.now_s
    ctx.changed_jobs[job.job_id] = None
    job.resize_count += 1
    ctx.state.counters.resizes += 1
    jobs.fire(ctx, job, JobEvent.RESIZE, decision.reason)
    return ""


def _as_flexible(placement: Placement) -> Placement:
    """Workers beyond the base gang are flexible, whatever the policy wrote."""
    return Placement(node=placement.node, worker_count=placement.worker_count, is_flexible=True)


def _preempt(ctx: Context, decision: Preempt) -> str:
    job = ctx.job(decision.job_id)
    if job is None or job.state not in jobs.ACTIVE_JOB_STATES or job.after_vacating is not None:
        return f"{decision.job_id} cannot be preempted now"
    if decision.node is None and job.preempted_at_s is not None:
        # A node that a service wants back is an outside event; another job's turn is not.
        since_s = ctx.now_s - job.preempted_at_s
        if since_s < ctx.settings.min_runtime_s:
            return f"{decision.job_id} was preempted {since_s:.0f} s ago"
    jobs.preempt(ctx, job, decision.reason, loan=ctx.loan_of(decision.node))
    return ""
