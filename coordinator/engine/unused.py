"""Lent nodes of no use to anybody: they are given back. Must not know policies.

One that can start nothing and on which nothing runs goes home at once. One that could, and on which
nothing ran for `idle_return_s`, goes home at the next loan pass if no job waits: its service then
has a node more to carry a burst or another node's failure. It is not lent again before a job could
use it, nor within its service's hold-off.

A loan pass looks at what a service needs, so such a node would stay away from its service, of use
to nobody, until load rises. One that an operator drains stays lent: who empties a machine to work
on it wants no server to start there.
"""

from __future__ import annotations

from common.model import JobState, NodeRole
from coordinator.engine import homeward
from coordinator.engine.context import Context, keys_on
from coordinator.engine.state import NodeEntry


def settle(ctx: Context) -> None:
    """Call home whichever of the nodes that this event has changed is so now."""
    for name in sorted(ctx.changed_nodes):
        node = ctx.state.nodes.get(name)
        if node is None or node.lease is None or not node.closed_reason:
            continue
        if _is_idle(node):
            homeward.call_home(ctx, node, f"nothing runs on it: {node.closed_reason}")


def note_idle(ctx: Context) -> None:
    """Learn which of the nodes that this event has changed are lent and idle, and since when."""
    since_s = ctx.state.idle_loans_since_s
    for name in ctx.changed_nodes:
        node = ctx.state.nodes.get(name)
        if node is not None and _is_lent(node) and _is_idle(node):
            since_s.setdefault(name, ctx.now_s)
        else:
            since_s.pop(name, None)


def give_back(ctx: Context) -> None:
    """Call home what was idle for long enough, if no job waits and the cell is not frozen."""
    limit_s = ctx.settings.idle_return_s
    if limit_s is None or ctx.state.is_frozen:
        return
    idle = [
        name for name, at_s in ctx.state.idle_loans_since_s.items() if ctx.now_s - at_s >= limit_s
    ]
    if not idle or any(job.state == JobState.PENDING for job in ctx.state.live()):
        return
    for name in sorted(idle):
        node = ctx.state.nodes.get(name)
        if node is not None and _is_lent(node) and _is_idle(node):
            idle_s = ctx.now_s - ctx.state.idle_loans_since_s[name]
            reason = f"nothing ran on it for {idle_s:.0f} s, and no job waits (idle_return_s)"
            homeward.call_home(ctx, node, reason)


def _is_lent(node: NodeEntry) -> bool:
    """Lent, there, and not told to come home."""
    is_there = node.role == NodeRole.ON_LOAN and node.desired_role == NodeRole.ON_LOAN
    return node.lease is not None and is_there and not node.is_awaited


def _is_idle(node: NodeEntry) -> bool:
    return not (node.is_cordoned or keys_on(node) or node.stores or node.unknown_workers)
