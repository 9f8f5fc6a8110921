"""The desired state of a node, as the coordinator sends it."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from common.messages import DesiredState, OrderPhase, StopOrder, WorkerOrder
from common.model import (
    GpuUuid,
    JobId,
    JobSpec,
    JobState,
    NodeName,
    NodeRole,
    StopReason,
)
from coordinator.engine.jobs import numbers
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.nodes import rebuilt_gangs
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry

STALE_GRACE_S = 10.0
"""Grace of a worker that is no longer wanted."""


class _Gang(Struct):
    """The common part of all orders of a job, and the orders made from it."""

    spec: JobSpec
    """Without what matters before a start alone."""
    worker_count: int
    nodes: tuple[NodeName, ...]
    orders: dict[int, WorkerOrder] = field(default_factory=dict[int, WorkerOrder])


class Orders:
    """The order of each worker, made again only for jobs that changed. Derived, so never saved.

    The nodes of a gang get the same orders, and a node mostly gets orders that it already knows.
    """

    def __init__(self) -> None:
        self._gangs: dict[JobId, _Gang] = {}

    def note(self, changed: Iterable[JobId]) -> None:
        """Learn which jobs an event changed."""
        for job_id in changed:
            self._gangs.pop(job_id, None)

    def of(
        self, placed: Iterable[tuple[JobEntry, WorkerEntry]], shared: frozenset[GpuUuid]
    ) -> tuple[WorkerOrder, ...]:
        """The orders of workers; `shared`: GPUs of their node that several workers have."""
        orders: list[WorkerOrder] = []
        for job, worker in placed:
            gang = self._gangs.get(job.job_id)
            if gang is None:
                count, nodes = max(1, job.running_workers), rebuilt_gangs.gang_nodes(job)
                gang = _Gang(numbers.ordered(_begun(job.spec), job.number), count, nodes)
                self._gangs[job.job_id] = gang
            order = gang.orders.get(worker.key.worker_index)
            is_sharing = bool(shared) and not shared.isdisjoint(worker.gpu_uuids)
            if order is None or order.is_sharing != is_sharing:
                order = _order(job, worker, gang, is_sharing=is_sharing)
                gang.orders[worker.key.worker_index] = order
            orders.append(order)
        return tuple(orders)


def desired_state(ctx: Context, node: NodeEntry, orders: Orders) -> DesiredState:
    """The complete desired state, so that the last one sent is enough."""
    placed = loans_lifecycle.held_on(ctx, node)
    if node.ledger.stores:
        placed.sort(key=lambda pair: pair[1].key)
    stops = [
        StopOrder(key=worker.key, reason=worker.stop, grace_s=worker.stop_grace_s)
        for _, worker in placed
        if worker.stop is not None
    ]
    stops += [
        StopOrder(key=key, reason=StopReason.STALE, grace_s=STALE_GRACE_S)
        for key in node.ledger.stale_stops
    ]
    stops += [
        StopOrder(key=left.key, reason=left.reason, grace_s=STALE_GRACE_S)
        for left in node.ledger.left_reservations
    ]
    reclaim_in_s = None
    if node.homecoming.reclaim_at_s is not None:
        reclaim_in_s = max(0.0, node.homecoming.reclaim_at_s - ctx.now_s)
    return DesiredState(
        node=node.name,
        epoch=ctx.state.epoch,
        generation=node.desired.generation,
        role=node.desired.role,
        lease=node.lease,
        validation=_validation(node),
        reclaim_in_s=reclaim_in_s,
        workers=orders.of(placed, _shared(ctx, node)),
        stops=tuple(stops),
        acknowledged=tuple(node.ledger.acknowledged),
    )


def _validation(node: NodeEntry) -> int | UnsetType:
    """Only where it says something: agents of an older version refuse it."""
    is_meant = node.role == NodeRole.QUARANTINED and node.desired.validation > 0
    return node.desired.validation if is_meant else UNSET


def _shared(ctx: Context, node: NodeEntry) -> frozenset[GpuUuid]:
    """GPUs that several workers have."""
    if node.name not in ctx.state.shared_nodes:
        return frozenset()
    return frozenset([slot.uuid for slot in node.gpus if slot.guests])


_UNORDERED = ("depends_on", "is_held")


def _begun(spec: JobSpec) -> JobSpec:
    """A spec without fields that matter before a start alone: older agents refuse them.

    The selection stays: a job that is rebuilt from the ledger may start and grow again.
    """
    told = [name for name in _UNORDERED if getattr(spec, name) is not UNSET]
    return replace(spec, **dict.fromkeys(told, UNSET)) if told else spec


def _order(job: JobEntry, worker: WorkerEntry, gang: _Gang, *, is_sharing: bool) -> WorkerOrder:
    is_to_run = worker.order == OrderPhase.RUN
    return WorkerOrder(
        key=worker.key,
        spec=gang.spec,
        tenant=job.tenant,
        user=job.user,
        submitted_at_s=job.submitted_at_s,
        gpu_uuids=worker.gpu_uuids,
        gpu_type=job.attempt.gpu_type or "",
        is_flexible=worker.is_flexible,
        phase=worker.order,
        worker_count=gang.worker_count if is_to_run else len(job.workers),
        endpoint=job.attempt.endpoint,
        has_store=job.store is not None,
        preemption_count=job.counts.preemptions,
        gang_nodes=gang.nodes,
        is_suspended=is_to_run and job.state == JobState.SUSPENDED,
        is_sharing=is_sharing,
    )
