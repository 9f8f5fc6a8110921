"""The rendezvous store of an attempt: a process of its own next to the gang's first worker.

Losing a flexible node must not lose the rendezvous, so the store runs on the node of worker 0,
which is a base worker. It uses no GPU, is ordered with the gang's reservations, and is stopped when
the attempt's last worker has ended.
"""

from __future__ import annotations

from common.messages import WorkerPhase
from common.model import STORE_INDEX, WorkerKey
from coordinator.engine.jobs.ended_workers import remember
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry


def add(ctx: Context, job: JobEntry) -> None:
    """Order the store of an attempt whose workers were just placed, if its job has one."""
    if not job.spec.has_store:
        return
    first = job.workers[0]
    assert not first.is_flexible, f"{first.key}: base workers are placed before flexible ones"
    node = ctx.state.nodes[first.node]
    hold(
        job,
        node,
        WorkerEntry(
            key=WorkerKey(job.job_id, job.attempt.number, STORE_INDEX),
            node=node.name,
            gpu_uuids=(),
            is_flexible=False,
            generation=node.desired.generation + 1,
        ),
    )
    ctx.touch(node.name)


def hold(job: JobEntry, node: NodeEntry, store: WorkerEntry) -> None:
    """Note where an attempt's store is."""
    job.store = store
    node.ledger.stores.append(store.key)


def is_ready(job: JobEntry) -> bool:
    """Whether the gang can meet; its node says ready or running of a store that listens."""
    return job.store is None or job.store.phase in (WorkerPhase.READY, WorkerPhase.RUNNING)


def ended(ctx: Context, job: JobEntry) -> None:
    """The store is gone; where its log is stays known."""
    store = job.store
    if store is None:
        return
    job.store = None
    remember(job, store)
    ctx.changed_jobs[job.job_id] = None
    node = ctx.state.nodes.get(store.node)
    if node is not None and store.key in node.ledger.stores:
        node.ledger.stores.remove(store.key)
        ctx.changed_nodes[node.name] = None


def leave(ctx: Context, job: JobEntry) -> None:
    """The attempt is over: order its store to stop, without waiting for that.

    It computes nothing, and the next attempt has another key, another port and another store.
    """
    store = job.store
    if store is None:
        return
    ended(ctx, job)
    node = ctx.state.nodes.get(store.node)
    if node is not None:
        node.ledger.stale_stops.append(store.key)
        ctx.touch(node.name)
