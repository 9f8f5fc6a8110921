"""Gang reservations that a job gives up: workers ordered to stop that were never ordered to run.

A node runs a worker only after the order `run`. The coordinator sends it only when every node of
the gang is ready. A worker without that order therefore computes nowhere, and its job need not wait
for the node: not at all after a cancel or a gang timeout, otherwise as soon as the node is LOST.
The node may still hold the GPUs, so they stay held here until a report proves that the node
released them. The attempt number is the fence: a node that reports late is ordered to stop the
worker.

Three kinds of workers leave no such reservation. A worker rebuilt from a ledger: the journal with
its orders is lost. A worker of a job that is doubted after lost records, for the same reason. A
worker that its node reports as running.
"""

from __future__ import annotations

from collections.abc import Collection

from common.messages import OrderPhase, WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from coordinator.engine.jobs import estimates
from coordinator.engine.state.context import Context, release_gpus
from coordinator.engine.state.events import NodeReported
from coordinator.engine.state.node_groups import LeftReservation
from coordinator.engine.state.tables import (
    AfterVacating,
    ClusterState,
    JobEntry,
    NodeEntry,
    WorkerEntry,
)
from coordinator.policies.contract.text import counted

AT_ONCE = frozenset({StopReason.CANCEL, StopReason.GANG_TIMEOUT})
"""Stops after which the end of a reservation has no news for the job. After any other stop, a
node that is heard may still say why its own worker failed."""


BEGUN = frozenset({WorkerPhase.RUNNING, WorkerPhase.SUSPENDED, WorkerPhase.STOPPING})
"""Phases of a worker that was ordered to run, even where no record of that order is left."""


def may_be_left(state: ClusterState, job: JobEntry, worker: WorkerEntry) -> bool:
    """Whether a job need not wait for a worker that it stops: no node can run it."""
    is_only_reserved = worker.order == OrderPhase.RESERVE and worker.generation > 0
    if worker.stop is None or not is_only_reserved or worker.key.is_store:
        return False
    if worker.phase in BEGUN or job.job_id in state.doubted_jobs:
        return False
    if worker.stop in AT_ONCE or job.after_vacating == AfterVacating.CANCEL:
        return True
    node = state.nodes.get(worker.node)
    return node is not None and node.role == NodeRole.LOST


def leave(ctx: Context, job: JobEntry) -> bool:
    """Take these workers from their job; True if there were any."""
    left = [worker for worker in job.workers.values() if may_be_left(ctx.state, job, worker)]
    if not left:
        return False
    estimates.settle_work(job, ctx.now_s)
    ctx.changed_jobs[job.job_id] = None
    for worker in left:
        del job.workers[worker.key.worker_index]
        _hold(ctx, ctx.state.nodes[worker.node], worker)
    for other in job.workers.values():
        ctx.touch(other.node)
    return True


def _hold(ctx: Context, node: NodeEntry, worker: WorkerEntry) -> None:
    node.ledger.left_reservations.append(
        LeftReservation(
            key=worker.key,
            gpu_uuids=worker.gpu_uuids,
            reason=worker.stop or StopReason.STALE,
            generation=node.desired.generation + 1,
        )
    )
    ctx.changed_nodes[node.name] = None
    ctx.touch(node.name)


def is_left(node: NodeEntry, key: WorkerKey) -> bool:
    """Whether a node was left with this reservation."""
    return any(left.key == key for left in node.ledger.left_reservations)


def heard(
    ctx: Context,
    node: NodeEntry,
    event: NodeReported,
    reported: Collection[WorkerKey],
    *,
    is_new_boot: bool,
) -> None:
    """Free the GPUs of reservations that a node does not hold any more.

    A new boot proves that, or a report that shows the generation of the stop in this epoch: the
    order to reserve may be on its way to the node until then.
    """
    is_current = event.epoch == ctx.state.epoch
    for left in list(node.ledger.left_reservations):
        is_told = is_current and event.generation >= left.generation
        if left.key not in reported and (is_told or is_new_boot):
            release(ctx, node, left.key)


def release(ctx: Context, node: NodeEntry, key: WorkerKey) -> None:
    """Free the GPUs of one reservation: its node does not hold it any more."""
    node.ledger.left_reservations = [
        left for left in node.ledger.left_reservations if left.key != key
    ]
    release_gpus(ctx, node.name, key)
    ctx.touch(node.name)


def release_all(ctx: Context, node: NodeEntry) -> None:
    """Free the GPUs of all of them: an operator confirms that the node runs nothing."""
    for left in list(node.ledger.left_reservations):
        release(ctx, node, left.key)


def told(node: NodeEntry) -> list[str]:
    """In words, which GPUs of a node are held for reservations that were given up."""
    return [
        f"{counted(len(left.gpu_uuids), 'GPU stays', 'GPUs stay')} held for {left.key}, which was "
        "ordered to stop before it ran, until the node reports its release"
        for left in node.ledger.left_reservations
    ]
