"""Life cycles of node roles and job states, as tables.

An event that is not in the table raises `TransitionError` and changes nothing. The diagrams in
docs/architecture.md are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from common.errors import TransitionError
from common.model import JobState, NodeRole

R = NodeRole
S = JobState


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


class JobEvent(StrEnum):
    """The events of a job."""

    START = "start"  # a gang was placed: reserve
    GANG_READY = "gang_ready"  # every node is ready: run
    GANG_TIMEOUT = "gang_timeout"  # not ready in time: back to the queue, free of charge
    RESIZE = "resize"
    RESIZED = "resized"
    PREEMPT = "preempt"
    MIGRATE = "migrate"  # it saves and stops, to start again where a place is held for it
    VACATED = "vacated"  # its last worker is gone: back to the queue
    SUSPEND = "suspend"
    RESUME = "resume"
    WORKER_FAILED = "worker_failed"  # own fault or node fault, budget left: stop the rest, requeue
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    REJECT = "reject"  # its deadline cannot be promised; it never ran


J = JobEvent

_LIVE: dict[JobEvent, JobState] = {J.CANCEL: S.CANCELLED, J.FAIL: S.FAILED, J.SUCCEED: S.SUCCEEDED}
_HELD: dict[JobEvent, JobState] = {
    **_LIVE,
    J.PREEMPT: S.PREEMPTING,
    J.WORKER_FAILED: S.PREEMPTING,
}

JOB_TRANSITIONS: Mapping[JobState, Mapping[JobEvent, JobState]] = {
    S.PENDING: {J.START: S.STARTING, J.CANCEL: S.CANCELLED, J.FAIL: S.FAILED, J.REJECT: S.FAILED},
    S.STARTING: {**_HELD, J.GANG_READY: S.RUNNING, J.GANG_TIMEOUT: S.PREEMPTING},
    S.RUNNING: {
        **_HELD,
        J.RESIZE: S.RESIZING,
        J.SUSPEND: S.SUSPENDED,
        J.MIGRATE: S.PREEMPTING,
    },
    S.RESIZING: {**_HELD, J.RESIZE: S.RESIZING, J.RESIZED: S.RUNNING},
    S.PREEMPTING: {**_LIVE, J.VACATED: S.PENDING},
    S.SUSPENDED: {**_HELD, J.RESUME: S.RUNNING, J.MIGRATE: S.PREEMPTING},
    S.SUCCEEDED: {},
    S.FAILED: {},
    S.CANCELLED: {},
}

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)


def advance(
    table: Mapping[StateT, Mapping[EventT, StateT]], state: StateT, event: EventT, *, who: str
) -> StateT:
    """The state after `event`, or `TransitionError` naming state, event and id."""
    try:
        return table[state][event]
    except KeyError:
        raise TransitionError(f"{who}: no transition from {state} on {event}") from None


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
