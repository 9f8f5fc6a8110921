"""Lent nodes that can start nothing, and on which nothing runs: they are given back. Must not know
policies.

A loan pass looks at what a service needs, so such a node would stay away from its service, of use
to nobody, until load rises. One that an operator drains stays lent: who empties a machine to work
on it wants no server to start there.
"""

from __future__ import annotations

from coordinator.engine import homeward
from coordinator.engine.context import Context, keys_on


def settle(ctx: Context) -> None:
    """Call home whichever of the nodes that this event has changed is so now."""
    for name in sorted(ctx.changed_nodes):
        node = ctx.state.nodes.get(name)
        if node is None or node.lease is None or not node.closed_reason:
            continue
        if not (node.is_cordoned or keys_on(node) or node.stores or node.unknown_workers):
            homeward.call_home(ctx, node, f"nothing runs on it: {node.closed_reason}")
