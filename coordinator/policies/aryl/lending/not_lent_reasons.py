"""Reasons why a serving node is not lent, as sentences. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from common.model import Mode, NodeName, NodeRole
from coordinator.policies.aryl.lending.balance import (
    Balance,
    balance,
    lendable,
    loan_limit,
    numbers,
    rest_left_s,
)
from coordinator.policies.aryl.lending.demand import Demand
from coordinator.policies.contract.snapshot import ClusterSnapshot, NodeView, ServiceView
from coordinator.policies.contract.text import counted


def why_kept(
    snapshot: ClusterSnapshot,
    name: NodeName,
    *,
    is_loaning: bool,
    demand: Demand | None,
    lent_next: Sequence[NodeName],
    proposed: Sequence[NodeName] = (),
) -> tuple[str, ...]:
    """The balance of the node's service, then every reason for which the node is not lent.

    Empty for a node of no service of this cell, or that does not serve.

    Args:
        is_loaning: whether the policy lends at all.
        demand: as `choose_loans` takes it.
        lent_next: the nodes that a loan pass would lend now.
        proposed: the nodes that it would recommend, or record as shadow loans in mode observe.
    """
    node = next((node for node in snapshot.nodes if node.name == name), None)
    service = next((s for s in snapshot.services if node and s.name == node.service), None)
    if node is None or service is None or node.role != NodeRole.SERVING:
        return ()
    have = balance(snapshot, service)
    found = [f"{service.name}: {numbers(service, have)}; {have.spare} spare"]
    if name in lent_next:
        return (*found, "nothing keeps it: the next loan pass lends it")
    if snapshot.is_frozen:
        found.append("the cell is frozen: nothing is lent (aryl freeze --off)")
    if service.mode != Mode.ACT:
        found.append(_of_mode(service, is_proposed=name in proposed))
    found += _of_service(snapshot, service, have)
    found += _of_node(snapshot, service, node, demand)
    if not is_loaning:
        # The last reason, because it outlasts all others: a display of one reason shows only this
        # one.
        found.append("the policy of this cell lends nothing")
    if len(found) == 1:
        found.append(_why_not_used(snapshot, lent_next))
    return tuple(found)


def _of_mode(service: ServiceView, *, is_proposed: bool) -> str:
    """The effect of a loan in a mode that does not lend by itself."""
    said = f"{service.name} is in mode {service.mode}: "
    if service.mode == Mode.RECOMMEND:
        if is_proposed:
            return f"{said}a loan pass recommends its loan, which waits for an operator"
        return f"{said}a loan of it would be recommended and wait for an operator"
    if is_proposed:
        return f"{said}none of its nodes is lent; the next loan pass records the loan it would make"
    return f"{said}none of its nodes is lent; loans it would make are only recorded"


def _why_not_used(snapshot: ClusterSnapshot, lent_next: Sequence[NodeName]) -> str:
    """A node that fits some job, and that no job would get."""
    if lent_next:
        return f"the demand is covered by {', '.join(lent_next)}"
    if any(node.role == NodeRole.DRAINING for node in snapshot.nodes):
        return "the demand is covered by nodes already on their way to training"
    return (
        "no job would use it now: those that fit on it start or grow without a loan, or their "
        "whole gang has no room even with every node that can be lent"
    )


def _of_service(snapshot: ClusterSnapshot, service: ServiceView, have: Balance) -> tuple[str, ...]:
    """Every reason for which the service lends no node at all now."""
    name = service.name
    found: list[str] = []
    if service.is_recalled:
        found.append(
            f"{name} is recalled: none of its nodes is lent (aryl service describe {name})"
        )
    if service.return_s > service.reclaim_deadline_s:
        found.append(
            f"a lent node may need {service.return_s:g} s to return, more than the deadline "
            f"of {service.reclaim_deadline_s:g} s: no node of {name} is lent"
        )
    if not service.load:
        found.append(f"the load of {name} was never measured: unknown is not idle")
    elif service.load[-1].at_s < snapshot.now_s - service.loan_period_s:
        ago_s = snapshot.now_s - service.load[-1].at_s
        found.append(f"the load of {name} was last measured {ago_s:.0f} s ago, so it is unknown")
    if have.spare == 0:
        found.append(_why_none_spare(service, have))
    else:
        found += _why_all_held_off(snapshot, service, have)
    return tuple(found)


def _why_all_held_off(
    snapshot: ClusterSnapshot, service: ServiceView, have: Balance
) -> tuple[str, ...]:
    """That nodes which just came home keep the others: none goes in the place of one of them."""
    rested = lendable(snapshot, service, have)
    if not rested or loan_limit(have, rested):
        return ()
    held_count = len(have.longest_serving) - len(rested)
    return (
        f"{have.spare} of {service.name} are spare, and {held_count} became ready less than "
        f"{service.hold_off_s:g} s ago: until their hold-off is over, no other one goes instead",
    )


def _why_none_spare(service: ServiceView, have: Balance) -> str:
    if have.unknown and have.needed_to_lend > have.needed:
        cause = "nodes of an unknown load count as full"
    elif have.needed_to_lend <= service.min_serving:
        cause = f"min_serving is {service.min_serving}"
    elif have.needed_to_lend > have.needed:
        cause = f"the peak of the last {service.loan_period_s:g} s counts before lending"
    else:
        cause = "the forecast needs them"
    return (
        f"no node of {service.name} is spare: {len(have.ready)} ready, {have.needed_to_lend} "
        f"needed ({cause})"
    )


def _of_node(
    snapshot: ClusterSnapshot, service: ServiceView, node: NodeView, demand: Demand | None
) -> tuple[str, ...]:
    """Every reason that concerns this node alone."""
    found: list[str] = []
    if node.is_drained_by_operator:
        found.append("it is cordoned: an operator keeps it from being lent")
    if node.is_closing:
        found.append("it closes soon: its service counts it as gone already")
    elif node.takes_nothing:
        found.append("it takes nothing new now, so no loan either")
    if node.is_load_unknown:
        found.append("its own load is unknown: no metrics page of it is read")
    if node.sick_gpus:
        what = counted(node.sick_gpus, "of its GPUs is", "of its GPUs are")
        found.append(f"{what} not well: once stopped, its server might not come back on it")
    if node.trespassed_gpus:
        what = counted(node.trespassed_gpus, "of its GPUs is", "of its GPUs are")
        found.append(
            f"{what} used by a process that is not its server's: no worker could have it, and its "
            "server might not find room beside it again"
        )
    left_s = rest_left_s(snapshot, service, node)
    if 0 < left_s < inf:
        found.append(
            f"it became ready less than {service.hold_off_s:g} s ago: its hold-off lasts "
            f"{left_s:.0f} s more"
        )
    if demand is not None and not demand.wanting:
        found.append("no job that waits or could grow wants more GPUs on lent nodes")
    elif demand is not None and not demand.accepts(node):
        found.append(
            f"none of {counted(len(demand.wanting), 'job that wants', 'jobs that want')} GPUs "
            "could use it: GPU type, GPUs per worker, the nodes that they may use, or a grace "
            f"above the {service.max_grace_s:g} s that {service.name} allows"
        )
    return tuple(found)
