"""Membership of nodes: their pool and service, by the agents' settings, which the cell must know.

Settings may change while nodes are lent: an agent restarts in another pool or for another service,
or the coordinator's settings drop a service. No loan pass sees this loan, so this module ends it.
"""

from __future__ import annotations

from common.model import NodeName, NodeRole, Pool, ServiceName
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.loans import recall as loans_recall
from coordinator.engine.state.context import Context
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, NodeEntry
from coordinator.policies.contract.text import some

NAMED = 8
"""Nodes that a line names; more are counted."""


def leader_started(ctx: Context) -> None:
    """Settings may have changed: loans of services without settings end.

    Nodes that name this service are logged, service by service.
    """
    for name in sorted(ctx.state.nodes):
        settle(ctx, ctx.state.nodes[name])
    for service, by in unknown_services(ctx.state, ctx.settings):
        ctx.log_event(
            "cell", f"service {service} is not in the settings", f"it is not lent; named by {by}"
        )


def unknown_services(
    state: ClusterState, settings: EngineSettings
) -> tuple[tuple[ServiceName, str], ...]:
    """Services that nodes name and some settings have not, in order, each with who names it."""
    known = {service.name for service in settings.services}
    naming: dict[ServiceName, list[NodeName]] = {}
    for name in sorted(state.nodes):
        service = state.nodes[name].service
        if service is not None and service not in known:
            naming.setdefault(service, []).append(name)
    return tuple((service, some(names, NAMED)) for service, names in sorted(naming.items()))


def is_unknown(ctx: Context, node: NodeEntry) -> bool:
    """Whether a node names a service that is not in the settings: it is not lent."""
    return node.service is not None and ctx.service_settings(node.service) is None


def moved(
    ctx: Context, node: NodeEntry, *, old_pool: Pool | None, old_service: ServiceName | None
) -> None:
    """A node's agent may have other settings than before. old_pool: None: it has just joined."""
    if old_pool is not None and old_pool != node.home_pool:
        _other_pool(ctx, node, old_pool)
    if (old_pool is None or old_service != node.service) and is_unknown(ctx, node):
        why = "it is not lent: name it in the coordinator's settings, or another in its agent's"
        ctx.log_event(node.name, f"service {node.service} is not in the settings", why)


def _other_pool(ctx: Context, node: NodeEntry, old_pool: Pool) -> None:
    """Drop the desired state that the node had in the other pool; a loan of it is over."""
    ctx.log_event(
        node.name, f"moved: {old_pool} -> {node.home_pool}", "its agent's settings say so"
    )
    loans_lifecycle.close(ctx, node, f"its node moved to the {node.home_pool} pool")
    node.desired.role = node.home_role
    if node.role != NodeRole.TRAINING:
        loans_lifecycle.clear_node(ctx, node, f"{node.name} moved to the {node.home_pool} pool")
    ctx.touch(node.name)
    ctx.needs_pass = ctx.needs_loan_pass = True


def settle(ctx: Context, node: NodeEntry) -> None:
    """Call a lent node home that no service of the cell lends any more, in its old service's time.

    One that waits for its jobs was called already.
    """
    if node.lease is None or node.homecoming.is_awaited:
        return
    why = estranged(ctx, node)
    if why:
        loans_recall.call_home(ctx, node, why)


def estranged(ctx: Context, node: NodeEntry) -> str:
    """Why the loan of a lent node has no lender any more; empty when it has."""
    assert node.lease is not None
    service = node.lease.service
    if ctx.service_settings(service) is None:
        return f"its service {service} is not in the settings of this cell"
    if node.service != service:
        return f"its agent names service {node.service or 'none'} now, and {service} lent it"
    return ""
