"""Recall of lent nodes outside any policy's choice: on an order, or because they are of no use.

An order names when the node must be back and at what price.

A node that can start nothing, and on which nothing runs, returns at once. `idle_return` has the
rule for usable nodes. A node that an operator drains stays lent: no server may start on a machine
that is about to be worked on.
"""

from __future__ import annotations

from math import fsum

from common.model import JobId, NodeRole
from coordinator.engine.jobs import estimates
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.state.context import Context, keys_on
from coordinator.engine.state.tables import JobEntry, NodeEntry
from coordinator.policies.contract.decisions import Reclaim


def settle(ctx: Context) -> None:
    """Call home whichever of the nodes that this event has changed is so now."""
    for name in sorted(ctx.changed_nodes):
        node = ctx.state.nodes.get(name)
        if node is None or node.lease is None or not node.failed_starts.closed_reason:
            continue
        if is_idle(node):
            call_home(ctx, node, f"nothing runs on it: {node.failed_starts.closed_reason}")


def is_lent(node: NodeEntry) -> bool:
    """True if the node is on loan, reachable, and not recalled."""
    is_there = node.role == NodeRole.ON_LOAN and node.desired.role == NodeRole.ON_LOAN
    return node.lease is not None and is_there and not node.homecoming.is_awaited


def is_idle(node: NodeEntry) -> bool:
    """True if nothing runs on the node, and no operator drains it."""
    return not (
        node.cordon.is_cordoned
        or keys_on(node)
        or node.ledger.stores
        or node.ledger.unknown_workers
    )


def call_home(ctx: Context, node: NodeEntry, reason: str) -> None:
    """Take a lent node back; one that is not lent stays as it is.

    An order, not a decision: it also holds while the cell is frozen.
    """
    if node.lease is None:
        return
    hit, released = _hit(ctx, node)
    decision = Reclaim(
        node=node.name,
        service=node.lease.service,
        deadline_s=loans_lifecycle.reclaim_s(ctx, node.lease.service),
        predicted_preemptions=len(hit),
        predicted_cost_gpu_s=fsum(estimates.lost_if_preempted(job, ctx.now_s) for job in hit),
        released_workers=released,
        reason=reason,
    )
    if not loans_lifecycle.reclaim(ctx, decision):
        ctx.decisions.append(decision)


def _hit(ctx: Context, node: NodeEntry) -> tuple[list[JobEntry], int]:
    """Jobs that an order now would preempt, each once, and how many workers it would release.

    As they count when it is carried out: a gang that has not run yet is no preemption.
    """
    hit: dict[JobId, JobEntry] = {}
    released = 0
    for job, worker in loans_lifecycle.held_on(ctx, node):
        if worker.stop is not None or job.after_vacating is not None:
            continue
        if worker.is_flexible:
            released += 1
        elif job.state in jobs_lifecycle.ACTIVE_JOB_STATES and job.attempt.ran_at_s is not None:
            hit[job.job_id] = job
    return list(hit.values()), released
