"""Orders of people about an array as a whole: hold, release, requeue, change.

An order changes the array for the tasks to come, and each live task as far as it fits that one.
Orders about one task are those about a job, see `person_orders`.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from common.jobspec import Misfit, misfit
from common.model import JobChange, JobState
from coordinator.engine.jobs import arrays, changes, person_orders, start_gate
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import JobChanged, JobsHeld, JobsReleased, JobsRequeued
from coordinator.engine.state.tables import ClusterState, JobEntry


def act(ctx: Context, event: JobsHeld | JobsReleased | JobsRequeued | JobChanged) -> None:
    """Carry out one order for each of its arrays that it still fits."""
    names = (event.job_id,) if isinstance(event, JobChanged) else event.job_ids
    for array_id in dict.fromkeys(names):
        array = ctx.state.arrays.get(array_id)
        if array is not None:
            _act(ctx, event, array)


def _act(
    ctx: Context, event: JobsHeld | JobsReleased | JobsRequeued | JobChanged, array: ArrayEntry
) -> None:
    state = ctx.state
    match event:
        case JobsHeld() if not why_not_held(array):
            _hold(ctx, array, event.by)
        case JobsReleased() if not why_not_released(state, array):
            _release(ctx, array, event.by)
        case JobsRequeued() if not why_not_requeued(state, array, is_held=event.is_held):
            for job in _requeued(state, array, is_held=event.is_held):
                person_orders.requeue(ctx, job, event)
            if event.is_held:
                _hold(ctx, array, event.by)
        case JobChanged() if why_not_changed(state, array, event.change) is None:
            _change(ctx, array, event.change, event.by)
        case _:
            pass


def _live(state: ClusterState, array: ArrayEntry) -> list[JobEntry]:
    return [state.jobs[job_id] for job_id in array.live]


def _why_over(array: ArrayEntry) -> str:
    if array.is_over:
        return f"array {array.array_id} is {array.state}"
    return f"array {array.array_id} is ending" if array.cancelled_by else ""


# --- hold and release -----------------------------------------------------------------------------


def why_not_held(array: ArrayEntry) -> str:
    """Why an array cannot be held, as a sentence; empty when it can."""
    return _why_over(array)


def _hold(ctx: Context, array: ArrayEntry, by: str) -> None:
    """Tasks that never started leave the line, those that wait after a run are held each, and those
    that run go on."""
    start_gate.hold(ctx, array, by)
    arrays.take_back(ctx, array, f"{array.array_id} is held")
    for job in _live(ctx.state, array):
        if not job.gate.held_by and not person_orders.why_not_held(job):
            person_orders.hold(ctx, job, by)


def why_not_released(state: ClusterState, array: ArrayEntry) -> str:
    """Why the hold of an array cannot be ended, as a sentence; empty when it can."""
    if array.is_over:
        return f"array {array.array_id} is {array.state}"
    if array.gate.held_by or held_tasks(state, array):
        return ""
    return f"array {array.array_id} is not held"


def held_tasks(state: ClusterState, array: ArrayEntry) -> list[JobEntry]:
    """The tasks that are held as jobs."""
    return [job for job in _live(state, array) if job.gate.held_by]


def _release(ctx: Context, array: ArrayEntry, by: str) -> None:
    for job in held_tasks(ctx.state, array):
        start_gate.release(ctx, job, by)
    if array.gate.held_by:
        start_gate.release(ctx, array, by)


# --- requeue --------------------------------------------------------------------------------------


def why_not_requeued(state: ClusterState, array: ArrayEntry, *, is_held: bool) -> str:
    """Why no task of an array can be requeued, as a sentence; empty when one can."""
    if array.is_over:
        return f"array {array.array_id} is {array.state}: submit it again"
    if why := _why_over(array):
        return why
    if _requeued(state, array, is_held=is_held):
        return ""
    hint = f": aryl job hold {array.array_id} holds it" if is_held else ""
    return f"no task of array {array.array_id} runs{hint}"


def _requeued(state: ClusterState, array: ArrayEntry, *, is_held: bool) -> list[JobEntry]:
    live = _live(state, array)
    return [job for job in live if not person_orders.why_not_requeued(job, is_held=is_held)]


# --- change ---------------------------------------------------------------------------------------


def why_not_changed(state: ClusterState, array: ArrayEntry, change: JobChange) -> Misfit | None:
    """As `changes.why_not`, of an array. Its dependencies change until its first task starts."""
    if why := _why_over(array):
        return Misfit("job_id", why)
    if change == JobChange():
        return changes.NOTHING
    if (found := misfit(changes.changed(array.spec, change))) is not None:
        return found
    if what := changes.deadline_misfit(state, array.submitted_at_s, change):
        return Misfit("deadline_s", what)
    if change.depends_on is UNSET:
        return None
    starts = array.failed or any(job.attempt.number for job in _live(state, array))
    if change.depends_on and (starts or array.started_at_s is not None):
        return Misfit("depends_on", f"tasks of array {array.array_id} have started")
    what = changes.dependency_misfit(state, array.array_id, change.depends_on)
    return Misfit("depends_on", what) if what else None


def _change(ctx: Context, array: ArrayEntry, change: JobChange, by: str) -> None:
    before = array.spec
    if array.submitted_spec is None:
        array.submitted_spec = before
    if change.depends_on is not UNSET:
        start_gate.depend_on(ctx, array, change.depends_on)
        if array.gate.is_shut:
            arrays.take_back(ctx, array, f"{array.array_id} waits for other jobs")
    array.spec = changes.changed(before, change)
    ctx.changed_arrays[array.array_id] = None
    ctx.log_event(array.array_id, "changed", f"by {by}: {changes.in_words(before, change)}")
    for job in _live(ctx.state, array):
        waits = job.state == JobState.PENDING and (array.gate.depends_on or job.gate.depends_on)
        _change_task(ctx, job, change if waits else replace(change, depends_on=UNSET), by)


def _change_task(ctx: Context, job: JobEntry, change: JobChange, by: str) -> None:
    """Change the fields that a live task allows; its story names the others."""
    while (found := changes.why_not(ctx.state, job, change)) is not None:
        if change == JobChange():
            return
        ctx.log_event(job.job_id, "not changed", f"{found.field}: {found.what}")
        if getattr(change, found.field, UNSET) is UNSET:
            return
        change = replace(change, **{found.field: UNSET})
    changes.carry_out(ctx, job, change, by)
