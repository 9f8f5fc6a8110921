"""What the life of a task changes in its array, and what makes a task a job. Knows no other job.

A task is an ordinary job: its spec has the array's variables among its own and a checkpoint path of
its own, so that agents know nothing of arrays.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from common.arrays import INDEX_MARK
from common.model import JobSpec, JobState
from coordinator.engine.jobs import start_gate
from coordinator.engine.state import context as state_context
from coordinator.engine.state.array_entry import ArrayEntry, ArrayTask
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.text import counted

ORDER_S = 1e-6
"""Tasks count as submitted one after another, this long apart and the last one at its array's
submission: every policy then takes them in the order of their indices."""


def task_of(array: ArrayEntry, place: int) -> ArrayTask:
    """The task at a place."""
    return ArrayTask(array_id=array.array_id, index=array.indices.at(place), place=place)


def task_spec(array: ArrayEntry, place: int) -> JobSpec:
    """The spec of the job that a task is; docs/job-contract.md describes the variables."""
    spec, every = array.spec, array.indices
    index = str(every.at(place))
    variables = {
        "ARYL_ARRAY_ID": str(array.array_id),
        "ARYL_ARRAY_NUMBER": str(array.number),
        "ARYL_ARRAY_INDEX": index,
        "ARYL_ARRAY_COUNT": str(len(every)),
        "ARYL_ARRAY_MIN": str(every.first),
        "ARYL_ARRAY_MAX": str(every.last),
    }
    path = spec.checkpoint.path
    checkpoint = spec.checkpoint
    if path is not None:
        checkpoint = replace(checkpoint, path=path.replace(INDEX_MARK, index))
    return replace(
        spec,
        array=UNSET,
        depends_on=UNSET,  # its array's, as is the hold
        is_held=UNSET,
        env=spec.env | variables,
        checkpoint=checkpoint,
    )


def submitted_at_s(array: ArrayEntry, place: int) -> float:
    """When a task counts as submitted, see `ORDER_S`; never after its array."""
    return array.submitted_at_s - (len(array.indices) - 1 - place) * ORDER_S


def array_of(ctx: Context, job: JobEntry) -> ArrayEntry | None:
    """The live array that a job is a task of; None: of none."""
    task = job.array_task
    if task is None or task.array_id not in ctx.state.live_arrays:
        return None
    return ctx.state.arrays[task.array_id]


def entered(ctx: Context, array: ArrayEntry, job: JobEntry) -> None:
    """A task is a job from now on."""
    assert job.array_task is not None
    array.live[job.job_id] = job.array_task.place
    note(ctx, job)


def note(ctx: Context, job: JobEntry) -> None:
    """A job changed; if it is a task, its array may let another one into the line."""
    array = array_of(ctx, job)
    if array is None or job.job_id not in array.live:
        return
    if job.state == JobState.PENDING:
        array.in_line[job.job_id] = None
    else:
        array.in_line.pop(job.job_id, None)
    _started(ctx, array, job)
    ctx.changed_arrays[array.array_id] = None


def _started(ctx: Context, array: ArrayEntry, job: JobEntry) -> None:
    """An array starts with the first of its tasks that does."""
    if array.started_at_s is None and job.started_at_s is not None:
        array.started_at_s = job.started_at_s
        start_gate.passed(ctx, array.array_id)


def waits_again(ctx: Context, job: JobEntry) -> None:
    """The workers of a task have left, and it waits: outside the queue if its array is held."""
    array = array_of(ctx, job)
    if array is not None and array.gate.held_by and not job.gate.held_by:
        start_gate.hold(ctx, job, array.gate.held_by)


def ended(ctx: Context, job: JobEntry) -> None:
    """A task has ended; the array counts it once, by its final state."""
    array = array_of(ctx, job)
    if array is None or job.job_id not in array.live:
        return
    array.in_line.pop(job.job_id, None)
    array.ended(job.state).add(array.live.pop(job.job_id))
    _started(ctx, array, job)
    if job.state == JobState.FAILED and job.exit_code is not None:
        array.exit_code = max(array.exit_code or 0, job.exit_code, key=abs)
    ctx.changed_arrays[array.array_id] = None
    end_if_over(ctx, array)


def end_if_over(ctx: Context, array: ArrayEntry) -> None:
    """An array ends with its last task."""
    outcome = array.outcome
    if outcome is None or array.array_id not in ctx.state.live_arrays:
        return
    array.finished_at_s = ctx.now_s
    del ctx.state.live_arrays[array.array_id]
    ctx.log_event(array.array_id, f"array {outcome}", _in_words(array))
    start_gate.passed(ctx, array.array_id)
    state_context.forget_arrays(ctx)


def _in_words(array: ArrayEntry) -> str:
    """How many of its tasks ended how: `15 tasks: 14 succeeded, 1 failed`."""
    ends = (
        (len(array.succeeded), "succeeded"),
        (len(array.failed), "failed"),
        (len(array.cancelled), "cancelled"),
    )
    parts = ", ".join(f"{count} {end}" for count, end in ends if count)
    return f"{counted(len(array.indices), 'task')}: {parts}"
