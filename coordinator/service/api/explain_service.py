"""Explains a service to an operator: the nodes that it needs, lends and reclaims. Pure.

Every sentence comes from the state that decisions use; the policy itself gives the reason why a
service lends nothing. The module also covers a service for which Aryl does not act alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from common.api import LoanRow
from common.model import Mode, NodeRole, ServiceName
from coordinator.engine.engine import Engine
from coordinator.engine.loans import unknown_loads
from coordinator.engine.nodes.membership import unknown_services
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.context import sick_slots
from coordinator.engine.state.tables import LoanEntry, NodeEntry
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.infeasible import lends, most_lent
from coordinator.service.api.name_lookup import Refusal, unknown

RECOMMENDED = "recommended"


def observe_reasons(engine: Engine, name: str) -> tuple[str, ...]:
    """The observations or recommendations, as sentences."""
    entry = engine.state.services[ServiceName(name)]
    said: list[str] = []
    if entry.mode == Mode.OBSERVE:
        away = [n for n, s in engine.state.shadow_loans.items() if s.service == name]
        said.append(
            f"only watched: {counted(entry.shadow_loan_count, 'loan')} would have been made and "
            f"{entry.shadow_reclaim_count} taken back, {entry.shadow_late_count} of them late"
        )
        if away:
            said.append(f"would be lent now: {', '.join(sorted(away))}")
    said += [
        f"recommends to lend {row.node}: {row.reason} (aryl loan approve {row.node})"
        for row in recommended(engine)
        if row.service == name
    ]
    return tuple(said)


def recommended(engine: Engine) -> tuple[LoanRow, ...]:
    """Loans that an operator can approve now, as rows; without a lease its node names each."""
    return tuple(
        LoanRow(
            lease_id=name,
            node=name,
            service=found.service,
            state=RECOMMENDED,
            decided_at_s=found.at_s,
            begun_at_s=None,
            reclaim_ordered_at_s=None,
            returned_at_s=None,
            reclaim_deadline_s=None,
            reclaim_s=None,
            lapse_s=None,
            is_late=False,
            reason=found.reason,
            reclaim_reason="",
            predicted_preemptions=0,
            realised_preemptions=0,
            predicted_cost_gpu_s=0.0,
            realised_cost_gpu_s=0.0,
        )
        for name, found in engine.explain.recommended().items()
    )


COUNTED = 8
"""Beyond this number nodes are counted and not named."""
RETURNED_SHOWN = 3
STORY_LINES = 30


def not_there(engine: Engine, name: str, known: Sequence[str]) -> Refusal:
    """Sentences that the cell has no settings of a service.

    For one that nodes name, with these nodes.
    """
    naming = dict(unknown_services(engine.state, engine.settings))
    refusal = unknown("service", name, known)
    by = naming.get(ServiceName(name))
    if by is None:
        return refusal
    why = f"{name} is not in the settings of this cell, so it is not lent; named by {by}"
    return Refusal(refusal.error.code, f"{refusal.error.message}; {why}", refusal.error.field)


def nodes_of(engine: Engine, name: str) -> list[NodeEntry]:
    """The nodes of a service, by name."""
    nodes = engine.state.nodes
    return [nodes[key] for key in sorted(nodes) if nodes[key].service == name]


def loans_of(engine: Engine, name: str) -> list[LoanEntry]:
    """The loans of a service, oldest first: all that are out, and the last few that were
    returned.
    """
    mine = [loan for loan in engine.state.loans.values() if loan.service == name]
    home = [loan for loan in mine if loan.returned_at_s is not None][-RETURNED_SHOWN:]
    return [loan for loan in mine if loan.returned_at_s is None or loan in home]


def why(engine: Engine, name: str, *, now_s: float) -> tuple[str, ...]:
    """The nodes that it needs, keeps and wants back, with reasons, and the unwell ones."""
    nodes = nodes_of(engine, name)
    return (
        *_frozen(engine),
        *_lending(engine, nodes),
        *observe_reasons(engine, name),
        *_recalled(engine, name),
        *_unknown_loads(engine, name, now_s=now_s),
        *_wanted_back(engine, name, now_s=now_s),
        *_unwell(nodes),
    )


def limit(engine: Engine, name: str) -> tuple[str, ...]:
    """The most nodes that a service ever lends; empty for one without settings."""
    found = engine.snapshot()
    return tuple(
        lends(service, len(own), most_lent(service, own))
        for service in found.services
        if service.name == name and (own := [n for n in found.nodes if n.service == name])
    )


def _frozen(engine: Engine) -> list[str]:
    """A sentence that its promise holds all the same."""
    if not engine.state.is_frozen:
        return []
    said = "nothing more is lent, and nodes that its load needs still come home"
    return [f"the cell is frozen: {said} (aryl freeze --off)"]


def _lending(engine: Engine, nodes: Sequence[NodeEntry]) -> tuple[str, ...]:
    """The balance of a service, and why the node that would be lent first is not."""
    serving = [node for node in nodes if node.role == NodeRole.SERVING]
    if not nodes:
        return ("it has no node here: none whose agent names it was ever heard",)
    if not serving:
        return ("none of its nodes serves now, so none can be lent",)
    # In the order of a loan pass: the longest serving first, without nodes that have their own
    # obstacle.
    first = min(
        serving,
        key=lambda n: (
            n.cordon.is_cordoned
            or n.cordon.is_closing
            or bool(
                n.ledger.error or n.failed_starts.closed_reason or sick_slots(n) or n.trespassed
            )
            or n.name in engine.state.unknown_loads,
            inf if n.serving_since_s is None else n.serving_since_s,
            n.name,
        ),
    )
    balance, *reasons = engine.explain.why_kept(first.name) or (
        "it is not in the settings of this cell",
    )
    return (balance, *(f"{first.name}, the first to be lent: {reason}" for reason in reasons))


def _unknown_loads(engine: Engine, name: str, *, now_s: float) -> list[str]:
    """Each node whose load is unknown: since when, and its last known load."""
    found = unknown_loads.of_service(engine.state, ServiceName(name))
    said = [
        f"the load of {one.node} is unknown for {now_s - one.since_s:.0f} s, "
        + ("never known" if one.load is None else f"last known {one.load:.4g} per second")
        + f": {one.why}"
        for one in found[:COUNTED]
    ]
    left = len(found) - COUNTED
    return said if left <= 0 else [*said, f"and of {counted(left, 'more node', 'more nodes')}"]


def _recalled(engine: Engine, name: str) -> list[str]:
    entry = engine.state.services[ServiceName(name)]
    # In a recall of all it would end this service's part, and leave services that are added later.
    whose = "--all" if engine.state.is_recalled else f"--service {name}"
    undo = f"aryl recall {whose} --off"
    return [f"recalled: it lends nothing until {undo}"] if entry.is_recalled else []


def _wanted_back(engine: Engine, name: str, *, now_s: float) -> list[str]:
    """Each node that was recalled and does not serve yet, with its deadline."""
    said: list[str] = []
    for loan in engine.state.loans.values():
        ordered_at_s, deadline_s = loan.reclaim_ordered_at_s, loan.reclaim_deadline_s
        is_asked = loan.service == name and loan.returned_at_s is None
        if not is_asked or ordered_at_s is None or deadline_s is None:
            continue
        since_s, late_s = now_s - ordered_at_s, loan_outcome.overdue_s(loan, now_s)
        due = f"LATE by {late_s:.0f} s" if late_s else f"{deadline_s - since_s:.0f} s left"
        said.append(
            f"{loan.node} has been wanted back for {since_s:.0f} s, {due} of {deadline_s:g} s: "
            f"{loan.reclaim_reason}"
        )
    for node in engine.state.awaited:
        wait = engine.state.awaited[node]
        if wait.decision.service == name:
            left_s = max(0.0, wait.until_s - now_s)
            said.append(
                f"{node} comes home when its jobs have ended, or in {left_s:.0f} s: "
                f"{wait.decision.reason}"
            )
    return said


def _unwell(nodes: Sequence[NodeEntry]) -> list[str]:
    """Nodes that count for nothing now, each with its own reason."""
    said: list[str] = []
    for node in nodes:
        if node.role in (NodeRole.LOST, NodeRole.QUARANTINED):
            said.append(_with_detail(f"{node.name} is {node.role}", node.detail))
        elif not node.contact.is_heard:
            said.append(f"{node.name} was not heard by this coordinator yet")
        elif node.role == NodeRole.SERVING and node.serving_since_s is None:
            said.append(_with_detail(f"the server of {node.name} is down", node.detail))
        elif node.cordon.is_cordoned:
            said.append(_with_detail(f"{node.name} is cordoned", node.cordon.reason))
        elif node.cordon.is_closing:
            said.append(f"{node.name} closes soon, and counts as gone already")
        elif why := node.ledger.error or node.failed_starts.closed_reason:
            said.append(_with_detail(f"{node.name} takes nothing new", why))
        elif sick := sick_slots(node):
            said.append(f"{node.name} has {counted(len(sick), 'GPU')} not well: it is not lent")
        elif used := len(node.trespassed):
            gpus = counted(used, "GPU")
            said.append(f"{node.name} has {gpus} used by a foreign process: it is not lent")
    left = len(said) - COUNTED
    return (
        said
        if left <= 0
        else [*said[:COUNTED], f"and {counted(left, 'more node is', 'more nodes are')} not well"]
    )


def _with_detail(said: str, detail: str) -> str:
    return f"{said}: {detail}" if detail else said
