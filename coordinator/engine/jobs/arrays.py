"""The life of a job array: submit, refill the line, throttle, cancel.

Theory of operation. An array of 10,000 tasks is one entry (`state.array_entry`). A task becomes a
job when it may start soon: as many tasks as `WINDOW` wait in the line, and of an array with a
throttle no more than that live at once. So policies, views, passes and snapshots see a window,
however many tasks there are. As one leaves the line, a follow-up lets in the next, in the order of
the indices.
"""

from __future__ import annotations

from common import arrays as array_text
from common.model import ArraySpec, JobId, JobState
from coordinator.engine.jobs import array_tasks, numbers, prerun_spec, start_gate
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.state import usage
from coordinator.engine.state.array_entry import ArrayEntry, Places
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import ArrayThrottled, JobCancelRequested, JobSubmitted
from coordinator.engine.state.tables import ClusterState, JobEntry
from coordinator.policies.contract.text import counted

WINDOW = 64
"""Most tasks of one array in the line. A pass sees no more of it; one that starts all of them is
followed by the next pass at once."""


def is_array(event: JobSubmitted) -> bool:
    """Whether a submitted job is an array."""
    return isinstance(event.spec.array, ArraySpec)


def submit(ctx: Context, event: JobSubmitted) -> None:
    """A new array; a repeated id is the same array."""
    if event.job_id in ctx.state.arrays:
        return
    asked = event.spec.array
    assert isinstance(asked, ArraySpec)
    array = ArrayEntry(
        array_id=event.job_id,
        spec=event.spec,
        tenant=event.tenant,
        user=event.user,
        submitted_at_s=ctx.now_s,
        throttle=asked.throttle,
        unstarted=Places(),
    )
    count = len(array.indices)
    array.waiting.add(0, count - 1)
    numbers.give(ctx.state, array)
    ctx.state.arrays[array.array_id] = array
    ctx.state.live_arrays[array.array_id] = None
    ctx.changed_arrays[array.array_id] = None
    at_once = "" if array.throttle is None else f", {array.throttle} at once"
    said = f"by {event.tenant}/{event.user}: {counted(count, 'task')}{at_once}"
    ctx.log_event(array.array_id, "array submitted", said)
    start_gate.submitted(ctx, array)
    ctx.needs_pass = True


def settle(ctx: Context) -> None:
    """Let tasks into the line where others have left it or ended."""
    for job_id in list(ctx.changed_jobs):  # the start of an array changes those that wait for it
        job = ctx.job(job_id)
        if job is not None and job.array_task is not None:
            array_tasks.note(ctx, job)
    for array_id in list(ctx.changed_arrays):
        if array_id in ctx.state.live_arrays:
            _refill(ctx, ctx.state.arrays[array_id])


def refill(ctx: Context) -> None:
    """Let tasks into the line before a pass: what kept them out may be over without an event."""
    for array_id in list(ctx.state.live_arrays):
        array = ctx.state.arrays[array_id]
        if array.waiting and not array.gate.is_shut and len(array.in_line) < WINDOW:
            _refill(ctx, array)


def _refill(ctx: Context, array: ArrayEntry) -> None:
    if array.gate.is_shut:
        return
    room = _room(array)
    # After a loss of records, a task that the array has as waiting may run on such a node.
    if not room or not array.waiting or ctx.state.doubted_nodes:
        return
    aside = array.waiting.take(_unread(ctx, array))
    while room > 0 and array.waiting:
        _enter(ctx, array, array.waiting.take_first())
        room -= 1
    for first, last in aside.spans:
        array.waiting.add(first, last)


def _unread(ctx: Context, array: ArrayEntry) -> Places:
    """Places of tasks that a node has, and whose orders its ledger has not reported yet."""
    found = Places()
    for node in ctx.state.nodes.values():
        for key in node.ledger.unknown_workers:
            place = array.place_of(key.job_id)
            if place is not None:
                found.add(place)
    return found


def _enter(ctx: Context, array: ArrayEntry, place: int) -> None:
    job_id = array.task_id(place)
    if (known := ctx.job(job_id)) is not None:
        _adopt(ctx, array, known, place)
        return
    event = JobSubmitted(
        job_id=job_id,
        spec=array_tasks.task_spec(array, place),
        tenant=array.tenant,
        user=array.user,
    )
    jobs_lifecycle.submit(
        ctx,
        event,
        submitted_at_s=array_tasks.submitted_at_s(array, place),
        task=array_tasks.task_of(array, place),
    )
    if array.taken_back.take(_only(place)):  # it was counted when it was in the line before
        ctx.state.counters.jobs_submitted -= 1
    array_tasks.entered(ctx, array, ctx.state.jobs[job_id])


def _adopt(ctx: Context, array: ArrayEntry, job: JobEntry, place: int) -> None:
    """A task is a job already: its array was lost, and was submitted again by the same request."""
    job.array_task = array_tasks.task_of(array, place)
    array_tasks.entered(ctx, array, job)
    if job.job_id not in ctx.state.live_jobs:
        array_tasks.ended(ctx, job)


def recovered(ctx: Context, job: JobEntry) -> None:
    """A job was rebuilt from a ledger: it may be a task that its array still has as waiting."""
    array_id = JobId(job.job_id.rpartition("_")[0])
    array = ctx.state.arrays.get(array_id)
    place = None if array is None else array.place_of(job.job_id)
    if array is None or place is None or array_id not in ctx.state.live_arrays:
        return
    if job.job_id not in array.live and not array.waiting.take(_only(place)):
        return  # it had ended before: it is counted already
    _adopt(ctx, array, job, place)


def cancel(ctx: Context, event: JobCancelRequested) -> None:
    """End an array, or some tasks of it: those that wait never start, live ones are stopped."""
    array = ctx.state.arrays.get(event.job_id)
    if array is None or array.array_id not in ctx.state.live_arrays:
        return
    if event.indices:
        chosen = places_of(array, event.indices)
    else:
        chosen = _every(array)
        array.cancelled_by = array.cancelled_by or event.by
    what = f"cancelling {event.indices}" if event.indices else "cancelling"
    ctx.log_event(array.array_id, what, f"asked by {event.by}")
    taken = array.waiting.take(chosen)
    for first, last in taken.spans:
        array.cancelled.add(first, last)
        if array.unstarted is not None:
            array.unstarted.add(first, last)
    if taken:
        usage.record_cancelled_tasks(ctx, array, taken)
    for job_id in list(ctx.state.dependents):
        place = array.place_of(job_id)
        if place is not None and place in taken:  # no job's end settles what others ask of it
            start_gate.passed(ctx, job_id)
    for job_id, place in list(array.live.items()):
        if place in chosen:
            jobs_lifecycle.cancel(ctx, JobCancelRequested(job_id=job_id, by=event.by))
    ctx.changed_arrays[array.array_id] = None
    array_tasks.end_if_over(ctx, array)


def places_of(array: ArrayEntry, text: str) -> Places:
    """The places of those indices of a text that the array has."""
    found = Places()
    every = array.indices
    for index in array_text.indices(text):
        place = every.place(index)
        if place is not None:
            found.add(place)
    return found


def _every(array: ArrayEntry) -> Places:
    return Places(spans=[(0, len(array.indices) - 1)])


def _only(place: int) -> Places:
    return Places(spans=[(place, place)])


def throttle(ctx: Context, event: ArrayThrottled) -> None:
    """Change how many tasks may be live at once. Those beyond it leave the line again; running ones
    go on, and so do those that have run before.
    """
    array = ctx.state.arrays.get(event.job_id)
    if array is None or array.array_id not in ctx.state.live_arrays:
        return
    array.throttle = event.throttle
    said = "no bound" if event.throttle is None else f"{event.throttle} at once"
    ctx.log_event(array.array_id, f"throttle: {said}", f"by {event.by}")
    ctx.changed_arrays[array.array_id] = None
    if event.throttle is None:
        return
    take_back(ctx, array, f"throttle of {array.array_id}", until=event.throttle)


def take_back(ctx: Context, array: ArrayEntry, why: str, *, until: int = 0) -> None:
    """Tasks that never started leave the line again, the last ones first, until no more than
    `until` tasks are live.

    A task that a person held or changed by itself stays a job: its array knows nothing of that.
    """
    for job_id in sorted(array.in_line, key=lambda job_id: -array.live[job_id]):
        if len(array.live) <= until:
            break
        job = ctx.state.jobs[job_id]
        is_new = job.state == JobState.PENDING and not job.attempt.number
        as_new = array_tasks.task_spec(array, array.live[job_id])
        is_own = job.gate.is_shut or prerun_spec.submitted(job) != as_new
        if is_new and not is_own and job_id not in ctx.state.doubted_jobs:
            _take_back(ctx, array, job, why)


def _take_back(ctx: Context, array: ArrayEntry, job: JobEntry, why: str) -> None:
    """A task that never started waits in its array again, as if it had not been in the line."""
    place = array.live.pop(job.job_id)
    array.waiting.add(place)
    array.in_line.pop(job.job_id, None)
    array.taken_back.add(place)
    del ctx.state.jobs[job.job_id]
    ctx.state.live_jobs.pop(job.job_id, None)
    ctx.changed_jobs[job.job_id] = None
    ctx.log_event(job.job_id, "left the line", why)


def waiting_counts(state: ClusterState, tenant: str) -> int:
    """How many waiting jobs the tasks of a tenant's arrays count as that have not entered the line;
    those in it are jobs.

    One for each array that has some. Behind a shut gate those count as well that enter when it
    opens, so that no release goes beyond a limit that held at submission.
    """
    live = (state.arrays[array_id] for array_id in state.live_arrays)
    return sum(_counts(array) for array in live if array.tenant == tenant)


def _counts(array: ArrayEntry) -> int:
    if not array.gate.is_shut or not array.waiting:
        return bool(array.waiting)
    entering = min(_room(array), len(array.waiting))
    return entering + (entering < len(array.waiting))


def _room(array: ArrayEntry) -> int:
    """How many tasks may enter the line beside those in it and those that run."""
    room = WINDOW - len(array.in_line)
    if array.throttle is not None:
        room = min(room, array.throttle - len(array.live))
    return max(0, room)


def waiting_tasks(state: ClusterState, tenant: str | None = None, user: str | None = None) -> int:
    """Tasks that have not entered the line, of a tenant and a user; None: of any."""
    live = (state.arrays[array_id] for array_id in state.live_arrays)
    return sum(
        len(array.waiting)
        for array in live
        if tenant in (None, array.tenant) and user in (None, array.user)
    )
