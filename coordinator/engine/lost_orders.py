"""Stops that nobody here knows of: what a worker's node says that it was stopped for. Must not know
how a journal comes to be lost.

An order to stop is in the journal; where that was lost during the grace, the answer of the node is
all that is left of it.
"""

from __future__ import annotations

from common.model import NodeName, StopReason
from coordinator.engine.state import AfterVacating, JobEntry


def carried_out(job: JobEntry, node: NodeName, reason: StopReason) -> bool:
    """Whether its node stopped a worker for what ends its job, which is ended then as it was to."""
    if reason == StopReason.CANCEL:
        job.after_vacating, job.cancelled_by = AfterVacating.CANCEL, f"an order to {node}"
    elif reason == StopReason.TIME_LIMIT:
        at_time_limit(job)
    else:
        return False
    return True


def at_time_limit(job: JobEntry) -> None:
    """A job has run for as long as it may."""
    limit_s = job.spec.time_limit_s
    job.error = "ran into its time_limit_s" + ("" if limit_s is None else f" of {limit_s:g} s")
    job.after_vacating = AfterVacating.FAIL


def why_stopped(node: NodeName, reason: StopReason) -> str:
    """In words, why a node stopped a worker of a job that goes on."""
    if reason == StopReason.GANG_TIMEOUT:
        return f"its gang was not ready in time, by an earlier order to {node}"
    return f"{node} went home by itself ({reason})"
