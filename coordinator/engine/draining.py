"""Drains: a node takes no more work, and what runs there may go on until a deadline, if it has one.

The deadline is an instant of engine time, kept in the state: it outlives every leader and replays.
It is an order, not a decision, so it also holds while the cell is frozen. Must not know who ordered
it, nor what a node is drained for.
"""

from __future__ import annotations

from coordinator.engine import loans
from coordinator.engine.context import Context
from coordinator.engine.state import ClusterState, DrainEntry, NodeEntry


def begin(ctx: Context, node: NodeEntry, said: str, deadline_s: float | None) -> None:
    """Drain a node that was cordoned; an earlier drain of it is forgotten.

    Flexible workers leave at once in any case: they cost their jobs no restart.

    Args:
        said: by whom, and why.
        deadline_s: seconds for which base workers may go on; None: they are preempted at once.
    """
    reason = f"{node.name} is drained {said}"
    node.is_draining = True
    ctx.state.drains.pop(node.name, None)
    if deadline_s is None:
        loans.clear_node(ctx, node, reason)
        return
    ctx.state.drains[node.name] = DrainEntry(until_s=ctx.now_s + deadline_s, reason=reason)
    loans.release_flexible(ctx, node)


def end(ctx: Context, node: NodeEntry) -> None:
    """The node may be used again; whoever still runs there runs on."""
    node.is_draining = False
    ctx.state.drains.pop(node.name, None)


def settle(ctx: Context) -> None:
    """Preempt, with its grace, what still runs where a deadline is over."""
    for name, drain in sorted(ctx.state.drains.items()):
        if ctx.now_s < drain.until_s:
            continue
        del ctx.state.drains[name]
        node = ctx.state.nodes[name]  # one that is removed takes its drain along
        held = {job.job_id for job, _ in loans.held_on(ctx, node)}
        ctx.tell(name, "drain deadline", f"still there: {', '.join(sorted(held)) or 'nothing'}")
        loans.clear_node(ctx, node, f"{drain.reason}, and its deadline is over")


def next_s(state: ClusterState) -> float | None:
    """The first deadline."""
    return min((drain.until_s for drain in state.drains.values()), default=None)
