"""What a node is to be, as it is sent there. Must not change anything, nor know who sends it."""

from __future__ import annotations

from common.messages import DesiredState, OrderPhase, StopOrder, WorkerOrder
from common.model import GpuUuid, JobState, NodeName, StopReason
from coordinator.engine import loans, rebuilding
from coordinator.engine.context import Context
from coordinator.engine.state import JobEntry, NodeEntry, WorkerEntry

STALE_GRACE_S = 10.0
"""Grace of a worker that nobody wants any more."""


def desired_state(ctx: Context, node: NodeEntry) -> DesiredState:
    """The whole of it, so that the last one that was sent is enough."""
    placed = loans.held_on(ctx, node)
    if node.stores:
        placed.sort(key=lambda pair: pair[1].key)
    stops = [
        StopOrder(key=worker.key, reason=worker.stop, grace_s=worker.stop_grace_s)
        for _, worker in placed
        if worker.stop is not None
    ]
    stops += [
        StopOrder(key=key, reason=StopReason.STALE, grace_s=STALE_GRACE_S)
        for key in node.stale_stops
    ]
    reclaim_in_s = None
    if node.reclaim_at_s is not None:
        reclaim_in_s = max(0.0, node.reclaim_at_s - ctx.now_s)
    return DesiredState(
        node=node.name,
        epoch=ctx.state.epoch,
        generation=node.generation,
        role=node.desired_role,
        lease=node.lease,
        reclaim_in_s=reclaim_in_s,
        workers=_orders(placed, _shared(node)),
        stops=tuple(stops),
        acknowledged=tuple(node.acknowledged),
    )


def _shared(node: NodeEntry) -> frozenset[GpuUuid]:
    """GPUs that several workers have."""
    return frozenset([slot.uuid for slot in node.gpus if slot.guests])


def _orders(
    placed: list[tuple[JobEntry, WorkerEntry]], shared: frozenset[GpuUuid]
) -> tuple[WorkerOrder, ...]:
    """What each worker is to do, in the order of their keys."""
    orders: list[WorkerOrder] = []
    last: JobEntry | None = None
    running_count = 0
    nodes: tuple[NodeName, ...] = ()
    for job, worker in placed:
        if job is not last:  # the workers of one job stand together
            last, running_count = job, max(1, job.running_workers)
            nodes = rebuilding.gang_nodes(job)
        orders.append(_order(job, worker, running_count, nodes, shared))
    return tuple(orders)


def _order(
    job: JobEntry,
    worker: WorkerEntry,
    running_count: int,
    gang_nodes: tuple[NodeName, ...],
    shared: frozenset[GpuUuid],
) -> WorkerOrder:
    is_to_run = worker.order == OrderPhase.RUN
    return WorkerOrder(
        key=worker.key,
        spec=job.spec,
        tenant=job.tenant,
        user=job.user,
        submitted_at_s=job.submitted_at_s,
        gpu_uuids=worker.gpu_uuids,
        gpu_type=job.gpu_type or "",
        is_flexible=worker.is_flexible,
        phase=worker.order,
        worker_count=running_count if is_to_run else len(job.workers),
        endpoint=job.endpoint,
        has_store=job.store is not None,
        preemption_count=job.preemption_count,
        gang_nodes=gang_nodes,
        is_suspended=is_to_run and job.state == JobState.SUSPENDED,
        is_sharing=not shared.isdisjoint(worker.gpu_uuids),
    )
