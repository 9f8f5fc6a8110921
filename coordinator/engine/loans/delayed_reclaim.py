"""Delayed reclaims: a lent node takes no more work, and its jobs may end by themselves first.

The deadline runs from the order. When the last base worker has ended, or the delay is over, the
node is reclaimed as usual. The policy that chose the delay left enough of the deadline for that.
"""

from __future__ import annotations

from msgspec.structs import replace

from common.model import NodeName, NodeRole
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import Awaited, ClusterState, NodeEntry
from coordinator.policies.contract.decisions import Reclaim


def begin(ctx: Context, decision: Reclaim) -> str:
    """Commit a reclaim that waits; returns why not, or an empty string."""
    node = ctx.state.nodes.get(decision.node)
    if node is None or node.lease is None or node.desired.role != NodeRole.ON_LOAN:
        return f"{decision.node} is not lent"
    if node.homecoming.is_awaited:
        return f"{decision.node} is on its way home"
    loan = ctx.state.loans[node.lease.lease_id]
    loans_lifecycle.note_order(ctx, loan, decision)
    node.homecoming.is_awaited = True
    ctx.state.awaited[node.name] = Awaited(
        decision=decision, began_at_s=ctx.now_s, until_s=ctx.now_s + decision.wait_s
    )
    ctx.changed_nodes[node.name] = None
    loans_lifecycle.release_flexible(ctx, node)
    ctx.log_event(node.name, f"waits for its jobs, up to {decision.wait_s:.0f} s", decision.reason)
    return ""


def settle(ctx: Context) -> None:
    """Reclaim the nodes whose delay is over."""
    for name, wait in sorted(ctx.state.awaited.items()):
        node = ctx.state.nodes.get(name)
        if node is None or node.lease is None:  # it went home, by itself or by another order
            _end(ctx, name)
        elif ctx.now_s >= wait.until_s or not _is_held(ctx, node):
            _take_back(ctx, node, wait)


def next_s(state: ClusterState) -> float | None:
    """When the first wait ends at the latest."""
    return min((wait.until_s for wait in state.awaited.values()), default=None)


def _end(ctx: Context, name: NodeName) -> None:
    del ctx.state.awaited[name]
    node = ctx.state.nodes.get(name)
    if node is not None:
        node.homecoming.is_awaited = False
        ctx.changed_nodes[name] = None


def _is_held(ctx: Context, node: NodeEntry) -> bool:
    return any(not worker.is_flexible for _, worker in loans_lifecycle.workers_on(ctx, node))


def _take_back(ctx: Context, node: NodeEntry, wait: Awaited) -> None:
    _end(ctx, node.name)
    loans_lifecycle.reclaim(ctx, replace(wait.decision, wait_s=0.0))
