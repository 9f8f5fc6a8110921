"""Nodes whose load is unknown, since when, and the loan pass that they trigger.

`coordinator.policies.aryl.lending.balance` decides what an unknown load means for loans. A node
whose load is read again, or that no longer serves, leaves the table at once.
"""

from __future__ import annotations

from msgspec.structs import replace

from common.model import NodeName, NodeRole, ServiceName
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import LoadUnknown
from coordinator.engine.state.tables import ClusterState, NodeEntry
from coordinator.policies.contract.snapshot import UnknownLoad
from coordinator.policies.contract.text import counted


def told(ctx: Context, event: LoadUnknown) -> None:
    """Take that the load of a node is unknown from now on, or known again."""
    table = ctx.state.unknown_loads
    known = table.get(event.node)
    if event.node in ctx.state.nodes:
        ctx.changed_nodes[event.node] = None
    if not event.why:
        if known is None:
            return
        del table[event.node]
        how = "its metrics page is read again" if event.is_read else "it does not serve any more"
        after_s = ctx.now_s - known.since_s
        ctx.log_event(event.node, "load known again", f"{how}, after {after_s:.0f} s")
        return
    node = ctx.state.nodes.get(event.node)
    if known is not None or node is None or node.service is None:
        return
    load, since_s = event.last_load, ctx.now_s - event.unknown_s
    table[event.node] = UnknownLoad(node=event.node, since_s=since_s, load=load, why=event.why)
    last = "never known" if load is None else f"last known {load:.4g} per second"
    why = f"no metrics page was read for {event.unknown_s:.0f} s: {event.why}; {last}"
    ctx.log_event(event.node, "load unknown", why)
    if any(one.service == node.service for one in ctx.state.recommendations.values()):
        ctx.needs_loan_pass = True  # no loan may rest on an unknown load


def of_service(state: ClusterState, service: ServiceName) -> tuple[UnknownLoad, ...]:
    """Its serving nodes whose load is unknown, by name."""
    return tuple(
        found
        for name, found in sorted(state.unknown_loads.items())
        if _serves(state.nodes.get(name), service)
    )


def serving_count(state: ClusterState, service: ServiceName) -> int:
    """Its nodes that are there to serve."""
    return sum(_serves(node, service) for node in state.nodes.values())


def looked(ctx: Context, service: ServiceName) -> None:
    """Once a load period: log when the whole load of a service becomes unknown or known again.

    It asks for a loan pass when lent nodes must come home because the load is unknown for too long.
    """
    entry, settings = ctx.state.services.get(service), ctx.service_settings(service)
    if entry is None or settings is None:
        return
    if not ctx.state.unknown_loads and entry.unknown_since_s is None:
        return
    found = of_service(ctx.state, service)
    serving = serving_count(ctx.state, service)
    if not serving:
        return  # as long as no node was heard, a new leader knows no more than the one before
    if len(found) == serving:
        if entry.unknown_since_s is None:
            entry.unknown_since_s = max(one.since_s for one in found)
            what = counted(serving, "serving node")
            limit_s = settings.unknown_load_s
            ctx.log_event(
                service,
                "load unknown",
                f"no metrics page of its {what} can be read: {found[0].why}; nothing more is lent, "
                f"and lent nodes come home after {limit_s:g} s",
            )
    elif entry.unknown_since_s is not None:
        after_s = ctx.now_s - entry.unknown_since_s
        entry.unknown_since_s = None
        what = counted(serving, "serving node")
        ctx.log_event(
            service,
            "load known again",
            f"after {after_s:.0f} s: the page of {serving - len(found)} of {what} is read",
        )
    _call_home(ctx, found, settings.unknown_load_s)


def _call_home(ctx: Context, found: tuple[UnknownLoad, ...], limit_s: float) -> None:
    for one in found:
        if not one.is_over and ctx.now_s - one.since_s >= limit_s:
            ctx.state.unknown_loads[one.node] = replace(one, is_over=True)
            ctx.needs_loan_pass = True


def _serves(node: NodeEntry | None, service: ServiceName) -> bool:
    return (
        node is not None
        and node.contact.is_heard
        and node.service == service
        and node.role == NodeRole.SERVING
    )


def why_not_lent(state: ClusterState, node: NodeName) -> str:
    """Why a node is not lent for its load; empty where that is known."""
    found = state.unknown_loads.get(node)
    if found is None:
        return ""
    return f"{node} is not lent: its load is unknown, as no metrics page is read: {found.why}"
