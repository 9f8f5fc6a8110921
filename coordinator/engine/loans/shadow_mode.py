"""Shadow loans and recommendations: for services on which Aryl may not act.

In mode observe, each loan that would have been made is recorded as a *shadow loan*. It keeps its
node out of the next loan pass and changes nothing else. In mode recommend, loans wait for an
operator's approval.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.model import Mode, NodeName, NodeRole, ServiceName
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import Recommendation, ServiceEntry, ShadowLoan
from coordinator.policies.contract.decisions import Advice, Decision, Recommend


def take(ctx: Context, decision: Recommend) -> str:
    """Keep what would be done, by the mode of the service; returns why not, or an empty string."""
    service = ctx.state.services.get(decision.service)
    if service is None:
        return f"there is no service {decision.service}"
    if service.mode == Mode.OBSERVE:
        return _watch(ctx, service, decision)
    why = loans_lifecycle.why_not_lent(ctx, decision.node)
    if why:
        return why  # as for an approved loan whose node still serves
    if decision.node not in ctx.state.recommendations:
        ctx.log_event(decision.node, f"recommend {decision.action}", decision.reason)
        ctx.state.recommendations[decision.node] = Recommendation(
            service=decision.service, at_s=ctx.now_s, reason=decision.reason
        )
    return ""


def _watch(ctx: Context, service: ServiceEntry, decision: Recommend) -> str:
    shadow = ctx.state.shadow_loans.get(decision.node)
    if decision.action == Advice.LEND and shadow is None:
        ctx.state.shadow_loans[decision.node] = ShadowLoan(service=decision.service)
        service.shadow_loan_count += 1
    elif decision.action == Advice.RECLAIM and shadow is not None and shadow.reclaimed_at_s is None:
        shadow.reclaimed_at_s = ctx.now_s
        service.shadow_reclaim_count += 1
    else:
        return f"{decision.node} is not there for a shadow {decision.action}"
    ctx.changed_nodes[decision.node] = None
    ctx.log_event(decision.node, f"would {decision.action}", decision.reason)
    if service.load:
        _judge(ctx, service, service.load[-1].load)
    return ""


def tidy(ctx: Context) -> None:
    """End the shadow loans that mean nothing any more, before the next reckoning."""
    for name, shadow in list(ctx.state.shadow_loans.items()):
        node = ctx.state.nodes.get(name)
        service = ctx.state.services.get(shadow.service)
        is_known = ctx.service_settings(shadow.service) is not None
        is_watched = is_known and service is not None and service.mode == Mode.OBSERVE
        is_there = node is not None and node.role == NodeRole.SERVING
        if not is_watched or not is_there or (service is not None and service.is_recalled):
            _end(ctx, name)


def standing(ctx: Context, decisions: Iterable[Decision]) -> dict[NodeName, Recommendation]:
    """Recommendations that an approval would carry out now, by node.

    decisions: what a loan pass would decide now. A recommendation is as old as the pass that made
        it, and since then the load, the node or an order may have changed.
    """
    proposed = {(d.node, d.service) for d in decisions if isinstance(d, Recommend)}
    return {
        name: found
        for name, found in sorted(ctx.state.recommendations.items())
        if (name, found.service) in proposed
        and ctx.state.services[found.service].mode == Mode.RECOMMEND
        and not loans_lifecycle.why_not_lent(ctx, name)
    }


def withdraw(ctx: Context) -> None:
    """A recommendation stands as long as each loan pass makes it again.

    Call it when all decisions of a loan pass are carried out or refused.
    """
    made = {decision.node for decision in ctx.decisions if isinstance(decision, Recommend)}
    for name in [name for name in ctx.state.recommendations if name not in made]:
        del ctx.state.recommendations[name]
        why = loans_lifecycle.why_not_lent(ctx, name) or "the last loan pass did not make it again"
        ctx.log_event(name, "recommendation withdrawn", why)


def load_measured(ctx: Context, name: ServiceName, load: float) -> None:
    """Follow shadow reclaims: home after the longest way, or late when the load came first.

    A reclaim would have been late if the load needs more nodes than would have served while the
    node was still on its way (`EngineSettings.return_s`, the longest way home).
    """
    service, settings = ctx.state.services.get(name), ctx.service_settings(name)
    away = {n: s for n, s in ctx.state.shadow_loans.items() if s.service == name}
    if service is None or settings is None or not away:
        return
    return_s = ctx.settings.return_s(settings)
    for node_name, shadow in away.items():
        if shadow.reclaimed_at_s is not None and ctx.now_s >= shadow.reclaimed_at_s + return_s:
            _end(ctx, node_name)
            took = "too late" if shadow.is_late else "in time"
            ctx.log_event(
                node_name, "would be home again", f"{took}, after {return_s:.0f} s at most"
            )
    _judge(ctx, service, load)


def _judge(ctx: Context, service: ServiceEntry, load: float) -> None:
    """Compare a load with what would carry it now."""
    settings = ctx.service_settings(service.name)
    away = {n: s for n, s in ctx.state.shadow_loans.items() if s.service == service.name}
    if settings is None:
        return
    serving = _serving(ctx, service.name) - len(away)
    capacity = serving * settings.capacity_per_node
    is_any_out = any(shadow.reclaimed_at_s is None for shadow in away.values())
    if is_any_out and load > capacity * (1.0 - settings.headroom_ratio):
        ctx.needs_loan_pass = True
    if load <= capacity:
        return
    for node_name, shadow in away.items():
        if shadow.reclaimed_at_s is None or shadow.is_late:
            continue
        shadow.is_late = True
        service.shadow_late_count += 1
        left_s = shadow.reclaimed_at_s + ctx.settings.return_s(settings) - ctx.now_s
        ctx.log_event(
            node_name,
            "reclaim would have been late",
            f"load {load:.4g} is more than {serving} nodes carry, and it would be on its way for "
            f"up to {left_s:.0f} s more",
        )


def _serving(ctx: Context, name: ServiceName) -> int:
    nodes = ctx.state.nodes.values()
    return sum(1 for n in nodes if n.service == name and n.serving_since_s is not None)


def _end(ctx: Context, name: NodeName) -> None:
    del ctx.state.shadow_loans[name]
    if name in ctx.state.nodes:
        ctx.changed_nodes[name] = None
