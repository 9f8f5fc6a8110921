"""The roles of a node and the events that change them, as a table.

Agent, coordinator and simulator obey it. The diagram in docs/architecture.md is drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from common.errors import TransitionError
from common.model import NodeRole

R = NodeRole


class NodeEvent(StrEnum):
    """The events of a node."""

    LEND = "lend"  # desired: on loan
    LOAD_ROSE = "load_rose"  # the service wants it back before the loan began
    DRAINED = "drained"  # nothing running, nothing waiting, server stopped, device free
    VACATE = "vacate"  # reclaim, return, or the lease ended
    DEVICE_FREE = "device_free"  # no compute process, memory free
    DEVICE_STUCK = "device_stuck"  # busy past device_free_timeout_s
    HEALTHY = "healthy"  # the server answers its health check
    WARM_UP_FAILED = "warm_up_failed"
    FAULT = "fault"
    VALIDATED = "validated"  # an inference node was checked after a quarantine
    VALIDATED_TRAINING = "validated_training"
    BOOTED = "booted"  # a new boot id: earlier processes are gone
    BOOTED_TRAINING = "booted_training"
    SILENT = "silent"  # no report for lost_after_s
    HEARD_TRAINING = "heard_training"
    HEARD_SERVING = "heard_serving"
    HEARD_DRAINING = "heard_draining"
    HEARD_ON_LOAN = "heard_on_loan"
    HEARD_VACATING = "heard_vacating"
    HEARD_WARMING = "heard_warming"
    HEARD_QUARANTINED = "heard_quarantined"


E = NodeEvent

_ANYWHERE: dict[NodeEvent, NodeRole] = {
    E.FAULT: R.QUARANTINED,
    E.SILENT: R.LOST,
    E.BOOTED: R.WARMING,
    E.BOOTED_TRAINING: R.TRAINING,
}

NODE_TRANSITIONS: Mapping[NodeRole, Mapping[NodeEvent, NodeRole]] = {
    R.TRAINING: _ANYWHERE,
    R.SERVING: {**_ANYWHERE, E.LEND: R.DRAINING},
    R.DRAINING: {**_ANYWHERE, E.LOAD_ROSE: R.SERVING, E.DRAINED: R.ON_LOAN, E.VACATE: R.VACATING},
    R.ON_LOAN: {**_ANYWHERE, E.VACATE: R.VACATING},
    R.VACATING: {**_ANYWHERE, E.DEVICE_FREE: R.WARMING, E.DEVICE_STUCK: R.QUARANTINED},
    R.WARMING: {**_ANYWHERE, E.HEALTHY: R.SERVING, E.WARM_UP_FAILED: R.QUARANTINED},
    R.QUARANTINED: {
        **_ANYWHERE,
        E.VALIDATED: R.WARMING,
        E.VALIDATED_TRAINING: R.TRAINING,
    },
    R.LOST: {
        **_ANYWHERE,
        E.HEARD_TRAINING: R.TRAINING,
        E.HEARD_SERVING: R.SERVING,
        E.HEARD_DRAINING: R.DRAINING,
        E.HEARD_ON_LOAN: R.ON_LOAN,
        E.HEARD_VACATING: R.VACATING,
        E.HEARD_WARMING: R.WARMING,
        E.HEARD_QUARANTINED: R.QUARANTINED,
    },
}


def next_role(role: NodeRole, event: NodeEvent, *, who: str) -> NodeRole:
    """The role after `event`.

    Raises:
        TransitionError: the table lacks the event in this role; the text names all three.
    """
    try:
        return NODE_TRANSITIONS[role][event]
    except KeyError:
        raise TransitionError(f"node {who}: no transition from {role} on {event}") from None


HEARD: Mapping[NodeRole, NodeEvent] = {
    R.TRAINING: E.HEARD_TRAINING,
    R.SERVING: E.HEARD_SERVING,
    R.DRAINING: E.HEARD_DRAINING,
    R.ON_LOAN: E.HEARD_ON_LOAN,
    R.VACATING: E.HEARD_VACATING,
    R.WARMING: E.HEARD_WARMING,
    R.QUARANTINED: E.HEARD_QUARANTINED,
}
"""The event that brings a LOST node back to the role that its agent reports."""


def node_path(old: NodeRole, new: NodeRole) -> tuple[NodeEvent, ...]:
    """The fewest events that lead a node from one role to another; () when none do.

    Reboots and silence are left out, and a fault counts only where QUARANTINED is the end: a caller
    that plans a path does not know of them.
    """
    if new == R.QUARANTINED:
        return (E.FAULT,)
    paths: dict[NodeRole, tuple[NodeEvent, ...]] = {old: ()}
    waiting = [old]
    while waiting:
        role = waiting.pop(0)
        for event, then in NODE_TRANSITIONS[role].items():
            if event not in _ANYWHERE and then not in paths:
                paths[then] = (*paths[role], event)
                waiting.append(then)
    return paths.get(new, ())
