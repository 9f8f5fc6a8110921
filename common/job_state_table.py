"""The states of a job and the events that change them, as a table.

Coordinator and simulator obey this table. The diagram in docs/architecture.md is drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from common.errors import TransitionError
from common.model import JobState

S = JobState


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


def next_state(state: JobState, event: JobEvent, *, who: str) -> JobState:
    """The state after `event`.

    Raises:
        TransitionError: the table lacks the event in this state; the text names all three.
    """
    try:
        return JOB_TRANSITIONS[state][event]
    except KeyError:
        raise TransitionError(f"job {who}: no transition from {state} on {event}") from None
