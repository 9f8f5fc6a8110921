"""Orders of operators: freeze, recall, cordon, drain, confirm-dead, remove, revoke, mode, label.

The driver has checked the caller and the names; here an unknown target changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from common import node_labels
from common.model import LeaseId, Mode, NodeName, NodeRole, ServiceName
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.loans import recall as loans_recall
from coordinator.engine.nodes import (
    gpu_faults,
    lost_records,
    rebuilt_gangs,
    start_failures,
)
from coordinator.engine.nodes import (
    lost as nodes_lost,
)
from coordinator.engine.nodes import (
    maintenance as nodes_maintenance,
)
from coordinator.engine.nodes import windows as nodes_windows
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import NodeEntry
from coordinator.policies.contract.decisions import Loan

A = OperatorAction


def act(ctx: Context, event: OperatorAsked, why_not_approved: Callable[[NodeName], str]) -> None:
    """Carry out one human action and tell it.

    Args:
        why_not_approved: why the recommended loan of a node may not be made now; empty when it may.
    """
    ctx.log_event(event.target or "cell", _ordered(event), _said(event))
    match event.action:
        case A.FREEZE | A.THAW:
            ctx.state.is_frozen = event.action == A.FREEZE
        case A.RECALL | A.END_RECALL | A.SET_MODE:
            _services(ctx, event)
        case A.REVOKE_LOAN:
            _revoke(ctx, event)
        case A.APPROVE_LOAN:
            _approve(ctx, event, why_not_approved)
        case A.LABEL:
            _label(ctx, event)
        case A.CORDON | A.UNCORDON | A.DRAIN | A.DRAIN_AT | A.CONFIRM_DEAD | A.REMOVE:
            node = ctx.state.nodes.get(NodeName(event.target))
            if node is not None:
                _node(ctx, node, event)
            if event.action == A.CONFIRM_DEAD:
                rebuilt_gangs.confirm_dead(ctx, NodeName(event.target), event.by)
    ctx.needs_pass = True
    ctx.needs_loan_pass = True


def _ordered(event: OperatorAsked) -> str:
    begins = "" if event.in_s is None else f"in {event.in_s:.0f} s"
    within = "" if event.deadline_s is None else f"within {event.deadline_s:.0f} s"
    verb = "drain" if event.action == A.DRAIN_AT else event.action
    return " ".join(word for word in (verb, event.value, begins, within) if word)


def _said(event: OperatorAsked) -> str:
    return f"by {event.by}" + (f": {event.reason}" if event.reason else "")


def _services(ctx: Context, event: OperatorAsked) -> None:
    if event.action != A.SET_MODE and not event.target:
        ctx.state.is_recalled = event.action == A.RECALL
    for name, service in sorted(ctx.state.services.items()):
        if event.target not in ("", name):
            continue
        if event.action == A.SET_MODE:
            service.mode = Mode(event.value)
        else:
            service.is_recalled = event.action == A.RECALL
    if event.action == A.RECALL:
        for node in list(ctx.state.nodes.values()):
            if event.target in ("", ServiceName(node.service or "")):
                loans_recall.call_home(ctx, node, f"recalled {_said(event)}")


def _revoke(ctx: Context, event: OperatorAsked) -> None:
    loan = ctx.state.loans.get(LeaseId(event.target))
    if loan is not None and loan.returned_at_s is None:
        loans_recall.call_home(ctx, ctx.state.nodes[loan.node], f"revoked {_said(event)}")


def _approve(
    ctx: Context, event: OperatorAsked, why_not_approved: Callable[[NodeName], str]
) -> None:
    """Carry out a recommendation; it has no effect once it was withdrawn, or holds no more."""
    name = NodeName(event.target)
    found = ctx.state.recommendations.get(name)
    if found is None:
        return
    decision = Loan(
        node=name, service=found.service, reason=f"{found.reason}; approved {_said(event)}"
    )
    ctx.is_deciding = True
    why = why_not_approved(name) or loans_lifecycle.lend(ctx, decision)
    ctx.is_deciding = False
    if why:
        ctx.log_event(decision.node, "not lent", why)
    else:
        ctx.decisions.append(decision)


def _label(ctx: Context, event: OperatorAsked) -> None:
    """Set labels of a node; workers that are there stay."""
    node = ctx.state.nodes.get(NodeName(event.target))
    if node is None:
        return
    if event.value == node_labels.RESET:
        node.labels.ordered = {}
    else:
        ordered = node.labels.ordered | node_labels.parse_changes(event.value.split())
        node.labels.ordered = {
            key: ordered[key]
            for key in sorted(ordered)
            if ordered[key] is not None or key in node.labels.reported
        }
    ctx.changed_nodes[node.name] = None


def _node(ctx: Context, node: NodeEntry, event: OperatorAsked) -> None:
    match event.action:
        case A.UNCORDON:
            nodes_maintenance.end(ctx, node)
            nodes_windows.cancel(ctx, node)
            start_failures.forget(ctx, node, _said(event))
            gpu_faults.mended(ctx, node, _said(event))
            node.cordon.is_cordoned = False
            node.cordon.reason = ""
            if node.desired.role == NodeRole.QUARANTINED:
                node.desired.role = node.home_role
            if node.role == NodeRole.QUARANTINED:
                node.desired.validation = max(node.desired.validation + 1, int(ctx.now_s))
        case A.CONFIRM_DEAD:
            if node.role == NodeRole.LOST:
                lost_records.confirm_dead(ctx.state, node.name)
                nodes_lost.confirm_dead(ctx, node.name, event.by)
        case A.REMOVE:
            nodes_maintenance.remove(ctx, node, _said(event))
        case A.DRAIN_AT:
            nodes_windows.order(
                ctx, node, _said(event), in_s=event.in_s or 0.0, deadline_s=event.deadline_s
            )
        case _:
            node.cordon.is_cordoned = True
            node.cordon.reason = _said(event)
            if event.action == A.DRAIN:
                nodes_windows.cancel(ctx, node)
                nodes_maintenance.begin(ctx, node, _said(event), event.deadline_s)
    ctx.touch(node.name)
