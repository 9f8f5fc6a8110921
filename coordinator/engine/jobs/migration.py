"""Migration: GPUs elsewhere are held, the attempt saves and stops, the next one starts there.

It is one decision, so that no other job takes the new place in between. It is no preemption,
because no other job gets the GPUs.
"""

from __future__ import annotations

from common.job_state_table import JobEvent
from common.model import JobState, NodeName, StopReason, WorkerKey
from coordinator.engine.jobs import gang_start, preemption_loss
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.context import (
    NONE_BARRED,
    Context,
    barred_uuids,
    hold_gpus,
    release_gpus,
    slots_of,
)
from coordinator.engine.state.tables import AfterVacating, JobEntry, Migration
from coordinator.policies.contract.decisions import Migrate, Start
from coordinator.policies.contract.snapshot import WorkerView


def migrate(ctx: Context, decision: Migrate) -> str:
    """Commit a migration; returns why not, or an empty string."""
    job = ctx.job(decision.job_id)
    if job is None or job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        return f"{decision.job_id} does not run"
    if job.after_vacating is not None or job.attempt.gpu_type is None:
        return f"{decision.job_id} is ending"
    start = _start_of(job, decision)
    why = gang_start.why_not(ctx, job, start)
    if why:
        return why
    _hold(ctx, job, decision)
    if job.attempt.ran_at_s is not None:
        preemption_loss.ordered(ctx, job, None, is_migration=True)
    job.counts.migrations += 1
    ctx.state.counters.migrations += 1
    jobs_lifecycle.fire(ctx, job, JobEvent.MIGRATE, decision.reason)
    job.after_vacating = AfterVacating.REQUEUE
    jobs_lifecycle.stop_workers(ctx, job, StopReason.PREEMPT)
    return ""


def _start_of(job: JobEntry, decision: Migrate) -> Start:
    return Start(
        job_id=job.job_id,
        gpu_type=job.attempt.gpu_type or "",
        placements=decision.placements,
        estimated_runtime_s=0.0,
        estimate_source=job.estimate.source,
        is_packed=decision.is_packed,
        reason=decision.reason,
    )


def _hold(ctx: Context, job: JobEntry, decision: Migrate) -> None:
    """Hold the GPUs for the workers of the next attempt, in the order in which it adds them."""
    index, held = 0, list[tuple[NodeName, WorkerKey]]()
    for placement in gang_start.in_order(decision.placements):
        node, kind = mixed_nodes.there(ctx.state, placement.node)
        each = gang_start.gpus_each(job, kind, job.attempt.gpu_type or "")
        for number in range(placement.worker_count):
            key = WorkerKey(job.job_id, job.attempt.number + 1, index)
            shared = placement.gpu_uuids[number * each : (number + 1) * each]
            hold_gpus(ctx, node, each, key, shared=shared, kind=kind)
            held.append((node.name, key))
            index += 1
    job.migration = Migration(decision=decision, gpus=tuple(held))
    ctx.state.migrating_jobs[job.job_id] = None


def held(ctx: Context, job: JobEntry) -> tuple[WorkerView, ...]:
    """The workers of its next attempt for which GPUs are held, as policies see them."""
    if job.migration is None:
        return ()
    found: list[WorkerView] = []
    keys = [key for _, key in job.migration.gpus]
    for placement in gang_start.in_order(job.migration.decision.placements):
        part = mixed_nodes.found(ctx.state, placement.node)
        node = None if part is None else part[0]
        barred = NONE_BARRED if node is None else barred_uuids(node)
        for number in range(placement.worker_count):
            each = len(placement.gpu_uuids) // placement.worker_count
            uuids = placement.gpu_uuids[number * each : (number + 1) * each]
            gpus, lost = each or job.spec.gpus_per_worker, 0
            if node is not None and barred:
                lost = sum(slot.uuid in barred for slot in slots_of(node, keys[len(found)]))
            found.append(
                WorkerView(
                    job_id=job.job_id,
                    worker_index=len(found),
                    node=placement.node,
                    gpus=gpus,
                    freed_gpus=gpus - lost,
                    is_flexible=False,
                    gpu_uuids=uuids,
                    barred_uuids=tuple(uuid for uuid in uuids if uuid in barred),
                )
            )
    return tuple(found)


def settle(ctx: Context) -> None:
    """After an event: start jobs whose workers have left; give up migrations that became
    impossible.
    """
    for job_id in sorted(ctx.state.migrating_jobs):
        job = ctx.job(job_id)
        if job is None or job.migration is None:
            del ctx.state.migrating_jobs[job_id]
        elif job.after_vacating != AfterVacating.REQUEUE:
            _arrive(ctx, job, job.migration)


def _arrive(ctx: Context, job: JobEntry, migration: Migration) -> None:
    """The last worker has gone, or the job is ending for another reason."""
    del ctx.state.migrating_jobs[job.job_id]
    job.migration = None
    why = "it ended meanwhile"
    if job.state == JobState.PENDING:
        job.attempt.gpu_type = job.attempt.gpu_type or _type_of(ctx, migration)
        start = _start_of(job, migration.decision)
        why = gang_start.start(ctx, start, held=[key for _, key in migration.gpus])
    if why:
        for name, key in migration.gpus:
            release_gpus(ctx, name, key)
        ctx.log_event(job.job_id, "migration given up", why)
        ctx.needs_pass = True


def _type_of(ctx: Context, migration: Migration) -> str:
    name, key = migration.gpus[0]
    node = ctx.state.nodes[name]
    return mixed_nodes.kind_of(node, [slot.uuid for slot in slots_of(node, key)])
