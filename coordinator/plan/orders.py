"""Whether an order about jobs still fits the jobs of a run in which it comes at its old instant.

The engine takes each order and carries it out for the jobs that it fits; one that fits none changes
nothing. In a run under other settings a job may have ended, or may not have started, by then.
"""

from __future__ import annotations

from common.model import JobId
from coordinator.engine.jobs import array_orders, arrays, changes, person_orders
from coordinator.engine.jobs.start_gate import Gated, gated
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.events import (
    ArrayThrottled,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
)
from coordinator.engine.state.tables import ClusterState

JobOrder = JobCancelRequested | JobsHeld | JobsReleased | JobsRequeued | JobChanged | ArrayThrottled


def fits(state: ClusterState, order: JobOrder) -> bool:
    """True if an order fits each job or array that it names.

    A task that has not entered the line is no job, so that no order about it fits but a cancel.
    """
    if isinstance(order, JobsHeld | JobsReleased | JobsRequeued):
        return all(_fits_one(state, order, job_id) for job_id in order.job_ids)
    return _fits_one(state, order, order.job_id)


def _fits_one(state: ClusterState, order: JobOrder, job_id: JobId) -> bool:
    one = gated(state, job_id)
    if one is None or one.finished_at_s is not None:
        return False
    match order:
        case JobCancelRequested():
            return not order.indices or _has_any(one, order.indices)
        case ArrayThrottled():
            return isinstance(one, ArrayEntry)
        case JobChanged():
            if isinstance(one, ArrayEntry):
                return array_orders.why_not_changed(state, one, order.change) is None
            return changes.why_not(state, one, order.change) is None
        case JobsHeld() | JobsReleased() | JobsRequeued():
            return not _why_not(state, order, one)


def _has_any(one: Gated, indices: str) -> bool:
    """Whether any of these tasks of an array has not ended."""
    if not isinstance(one, ArrayEntry):
        return False
    places = arrays.places_of(one, indices)
    return any(place in one.waiting or one.task_id(place) in one.live for place in places)


def _why_not(state: ClusterState, order: JobsHeld | JobsReleased | JobsRequeued, one: Gated) -> str:
    match order:
        case JobsHeld():
            if isinstance(one, ArrayEntry):
                return array_orders.why_not_held(one)
            return person_orders.why_not_held(one)
        case JobsReleased():
            if isinstance(one, ArrayEntry):
                return array_orders.why_not_released(state, one)
            return person_orders.why_not_released(one)
        case JobsRequeued():
            if isinstance(one, ArrayEntry):
                return array_orders.why_not_requeued(state, one, is_held=order.is_held)
            return person_orders.why_not_requeued(one, is_held=order.is_held)
