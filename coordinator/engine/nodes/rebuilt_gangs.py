"""Gangs rebuilt from ledgers that miss a node: which nodes they wait for, and how the wait ends.

Each order names the nodes of its gang. A ledger read after the journal was lost therefore names the
missing nodes. A missing node may still compute, so only its report or an operator's confirmation
ends the wait.
"""

from __future__ import annotations

from collections.abc import Collection

from common.messages import WorkerOrder
from common.model import NodeName, WorkerKey
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.nodes import lost as nodes_lost
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import ClusterState, JobEntry, WorkerEntry


def gang_nodes(job: JobEntry) -> tuple[NodeName, ...]:
    """Nodes of a job's workers, and the missing nodes that it waits for.

    The node of its first worker comes first: programs take it for the meeting place of the gang.
    """
    if len(job.workers) == 1 and not job.attempt.awaited_nodes:
        return tuple([worker.node for worker in job.workers.values()])
    names = {*(worker.node for worker in job.workers.values()), *job.attempt.awaited_nodes}
    first = job.workers[min(job.workers)].node if job.workers else ""
    return tuple(sorted(names, key=lambda name: (name != first, name)))


def adopted(ctx: Context, job: JobEntry, order: WorkerOrder) -> None:
    """A worker was found in a ledger: the rest of its gang is awaited until the base is there."""
    if jobs_lifecycle.is_base_there(job):
        job.attempt.awaited_nodes = []
        return
    ctx.state.awaiting_jobs[job.job_id] = None
    here = {worker.node for worker in job.workers.values()}
    awaited = {*job.attempt.awaited_nodes, *(NodeName(name) for name in order.gang_nodes)}
    job.attempt.awaited_nodes = sorted(awaited - here)


def is_awaited(state: ClusterState, name: NodeName) -> bool:
    """Whether a gang waits for a node, known or not."""
    return any(name in state.jobs[job_id].attempt.awaited_nodes for job_id in state.live_jobs)


def heard(ctx: Context, name: NodeName, held: Collection[WorkerKey]) -> None:
    """A node reports all that it holds: gangs that awaited it and are not there wait no longer.

    A worker that it holds is read from its ledger instead; see `adopted`.
    """
    for job_id in list(ctx.state.awaiting_jobs):
        job = ctx.job(job_id)
        if job is None or not job.attempt.awaited_nodes:
            del ctx.state.awaiting_jobs[job_id]
        elif name in job.attempt.awaited_nodes and not any(
            key.job_id == job_id and key.attempt >= job.attempt.number for key in held
        ):
            ctx.log_event(job_id, f"{name} reports without it", "the rest of its gang is not there")
            _await_no_longer(ctx, job, name, f"{name} reports without its worker")


def confirm_dead(ctx: Context, name: NodeName, by: str) -> None:
    """An operator confirms that nothing runs there: gangs that waited only for this node queue
    again.

    While another node of the gang is missing, its workers may still compute.
    """
    for job_id in list(ctx.state.live_jobs):
        job = ctx.state.jobs[job_id]
        if name not in job.attempt.awaited_nodes:
            continue
        ctx.log_event(
            job_id, f"{name} confirmed dead", f"by {by}: the rest of its gang is not there"
        )
        _await_no_longer(ctx, job, name, f"{name} was confirmed dead by {by}")


def _await_no_longer(ctx: Context, job: JobEntry, name: NodeName, why: str) -> None:
    """The last one awaited is a node fault, as the loss of a worker that was seen would be."""
    job.attempt.awaited_nodes = [other for other in job.attempt.awaited_nodes if other != name]
    ctx.changed_jobs[job.job_id] = None
    if job.attempt.awaited_nodes or job.state not in jobs_lifecycle.ACTIVE_JOB_STATES:
        return
    key = WorkerKey(job.job_id, job.attempt.number, job.attempt.next_worker_index)
    worker = WorkerEntry(key=key, node=name, gpu_uuids=(), is_flexible=False)
    job.workers[key.worker_index] = worker
    nodes_lost.node_fault(ctx, job, worker, why)
