"""The start gate of a job: its hold and its dependencies keep it out of the queue while it waits.

A job behind a shut gate is put to no policy, so a pass costs the same however many there are. A
dependency is settled at the instant at which the job that it names starts or ends, and stays
settled: that job may be forgotten afterwards. Time behind a shut gate is no queueing time.

An array has a gate of its own: while it is shut, no task enters the line. A dependency may name an
array or a task, also one that waits in its array or is known to it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from common.model import FINAL_JOB_STATES, Dependency, DependencyKind, Gate, JobId, JobState
from coordinator.engine.state import usage
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import ClusterState, JobEntry
from coordinator.policies.contract.text import some

Gated = JobEntry | ArrayEntry
"""What has a start gate."""
NAMED_MAX = 3
"""The most dependencies of a job that one sentence names."""
_VERBS = {
    DependencyKind.STARTED: "start",
    DependencyKind.OK: "succeed",
    DependencyKind.NOT_OK: "fail",
    DependencyKind.ENDED: "end",
}

_ENDS = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
}


class Standing(NamedTuple):
    """How far a job, an array or a task of one has come."""

    name: str
    state: JobState
    has_started: bool

    @property
    def in_words(self) -> str:
        """Such as `is running` or `succeeded`."""
        return _ENDS.get(self.state, f"is {self.state}")


def standing(state: ClusterState, name: str) -> Standing | None:
    """How far what a dependency names has come; None: it is not known, or not any more."""
    job = state.jobs.get(JobId(name))
    if job is not None:
        return Standing(job.spec.name, job.state, job.started_at_s is not None)
    array = _array_of(state, name)
    if array is None:
        return None
    place = array.place_of(name)
    if place is None:
        return Standing(array.spec.name, array.state, array.started_at_s is not None)
    ends = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    ended = next((end for end in ends if place in array.ended(end)), None)
    return Standing(array.spec.name, ended or JobState.PENDING, has_started=False)


def _array_of(state: ClusterState, name: str) -> ArrayEntry | None:
    """The array of this id, or with a task of this id."""
    array = state.arrays.get(JobId(name))
    if array is not None:
        return array
    array = state.arrays.get(JobId(name.rpartition("_")[0]))
    return None if array is None or array.place_of(name) is None else array


def gated(state: ClusterState, name: str) -> Gated | None:
    """The job or the array of an id."""
    return state.jobs.get(JobId(name)) or state.arrays.get(JobId(name))


def id_of(one: Gated) -> JobId:
    """The id of a job or an array."""
    return one.job_id if isinstance(one, JobEntry) else one.array_id


def holds(when: DependencyKind, of: Standing | None) -> bool | None:
    """Whether a dependency holds; None: not yet.

    False is final. A job that is not known, because records of the journal are lost, never fulfils
    anything.
    """
    if of is None:
        return False
    has_ended = of.state in FINAL_JOB_STATES
    match when:
        case DependencyKind.STARTED:
            return True if has_ended or of.has_started else None
        case DependencyKind.ENDED:
            return True if has_ended else None
        case DependencyKind.OK | DependencyKind.NOT_OK:
            is_wanted = (of.state == JobState.SUCCEEDED) == (when == DependencyKind.OK)
            return is_wanted if has_ended else None


def submitted(ctx: Context, one: Gated) -> None:
    """A new job or array: its gate is shut where its spec asks for a hold or for dependencies."""
    if one.spec.is_held:
        one.gate.held_by = f"{one.tenant}/{one.user}"
    if one.spec.depends_on:
        _wait_for(ctx, one, one.spec.depends_on)
    if one.gate.is_shut:
        if isinstance(one, JobEntry):
            ctx.state.gated_jobs[one.job_id] = None
        else:
            one.shut_since_s = ctx.now_s
        if one.gate.held_by:
            ctx.log_event(id_of(one), "held", f"by {one.gate.held_by}")


def hold(ctx: Context, one: Gated, by: str) -> None:
    """Hold a job that waits, or that will wait once its workers have left; or an array."""
    was_shut = one.gate.is_shut
    one.gate.held_by = by
    ctx.log_event(id_of(one), "held", f"by {by}")
    _moved(ctx, one, was_shut=was_shut)


def release(ctx: Context, one: Gated, by: str) -> None:
    """End the hold of a job or an array; its dependencies stay."""
    was_shut = one.gate.is_shut
    one.gate.held_by = ""
    ctx.log_event(id_of(one), "released", f"by {by}")
    _moved(ctx, one, was_shut=was_shut)


def depend_on(ctx: Context, one: Gated, dependencies: Iterable[Dependency]) -> None:
    """Replace the dependencies of a job or an array; those that hold are settled at once."""
    was_shut = one.gate.is_shut
    forget(ctx.state, one)
    one.gate.depends_on, one.gate.never = [], ""
    _wait_for(ctx, one, dependencies)
    _moved(ctx, one, was_shut=was_shut)


def _wait_for(ctx: Context, one: Gated, dependencies: Iterable[Dependency]) -> None:
    gate = one.gate
    for each in dict.fromkeys(dependencies):
        of = standing(ctx.state, each.job)
        is_held = holds(each.when, of)
        if is_held:
            continue
        gate.depends_on.append(each)
        if is_held is None:
            ctx.state.dependents.setdefault(JobId(each.job), {})[id_of(one)] = None
        elif not gate.never:
            _never(ctx, one, each, of)


def passed(ctx: Context, job_id: JobId) -> None:
    """A job, an array or a task of one has started or ended: settle the dependencies on it."""
    state = ctx.state
    of = standing(state, job_id)
    if of is None:
        return
    for other in list(state.dependents.get(job_id, ())):
        waiting = gated(state, other)
        if waiting is not None:
            _settle(ctx, waiting, job_id, of)
    if of.state in FINAL_JOB_STATES:
        state.dependents.pop(job_id, None)
        if (own := gated(state, job_id)) is not None:
            forget(state, own)


def _settle(ctx: Context, one: Gated, name: JobId, of: Standing) -> None:
    """Settle what a waiting job or array asks of another one that has moved."""
    gate, left = one.gate, list[Dependency]()
    for each in gate.depends_on:
        is_held = holds(each.when, of) if each.job == name else None
        if is_held:
            continue
        left.append(each)
        if is_held is False and not gate.never:
            _never(ctx, one, each, of)
    if len(left) == len(gate.depends_on):
        return
    gate.depends_on = left
    if not left:
        ctx.log_event(id_of(one), "dependencies hold", f"{name} {of.in_words}")
    _moved(ctx, one, was_shut=True)


def _never(ctx: Context, one: Gated, each: Dependency, of: Standing | None) -> None:
    found = "is not known" if of is None else of.in_words
    one.gate.never = f"it waits for {each.job} to {_VERBS[each.when]}, which {found}"
    _changed(ctx, one)
    ctx.log_event(id_of(one), "dependency never holds", one.gate.never)


def _changed(ctx: Context, one: Gated) -> None:
    (ctx.changed_jobs if isinstance(one, JobEntry) else ctx.changed_arrays)[id_of(one)] = None


def _moved(ctx: Context, one: Gated, *, was_shut: bool) -> None:
    """A gate may have been shut or opened; time in the queue counts while it is open."""
    _changed(ctx, one)
    is_shut = one.gate.is_shut
    if not is_shut:
        ctx.needs_pass = True
    if isinstance(one, ArrayEntry):
        if is_shut != was_shut:
            _array_moved(ctx, one)
        return
    if is_shut:
        ctx.state.gated_jobs[one.job_id] = None
    else:
        ctx.state.gated_jobs.pop(one.job_id, None)
    if is_shut == was_shut or one.attempt.ran_at_s is not None:
        return  # of an attempt that runs, the wait begins when its workers have left
    waited_s = ctx.now_s - one.wait.pending_since_s
    if is_shut and waited_s > 0:
        one.wait.queueing_s += waited_s
        said = f"it waited {waited_s:.0f} s"
        ctx.log_event(one.job_id, "left the queue", said, detail=usage.waited(ctx, one))
    one.wait.pending_since_s = ctx.now_s


def _array_moved(ctx: Context, array: ArrayEntry) -> None:
    since_s, array.shut_since_s = array.shut_since_s, ctx.now_s if array.gate.is_shut else None
    if since_s is not None:
        until_s = ctx.now_s if array.started_at_s is None else array.started_at_s
        array.gated_s += max(0.0, until_s - since_s)


def forget(state: ClusterState, one: Gated) -> None:
    """The gate of a job or an array matters no more."""
    own = id_of(one)
    if isinstance(one, JobEntry):
        state.gated_jobs.pop(own, None)
    for each in one.gate.depends_on:
        waiting = state.dependents.get(JobId(each.job))
        if waiting is None:
            continue
        waiting.pop(own, None)
        if not waiting:
            del state.dependents[JobId(each.job)]


def kind(one: Gated) -> Gate | None:
    """What keeps a waiting job, or the waiting tasks of an array, out of the queue; None: nothing
    does, or it does not wait."""
    gate = one.gate
    waits = one.state == JobState.PENDING if isinstance(one, JobEntry) else bool(one.waiting)
    if not waits or not gate.is_shut:
        return None
    if gate.held_by:
        return Gate.HELD
    return Gate.NEVER if gate.never else Gate.DEPENDENCY


def why_shut(state: ClusterState, one: Gated, *, advises: bool = True) -> tuple[str, ...]:
    """In words, what keeps a waiting job or array out of the queue; empty: nothing does.

    advises: name the command that helps; not of a job that is not submitted.
    """
    gate, own, said = one.gate, id_of(one), list[str]()
    if gate.held_by:
        said.append(f"held by {gate.held_by}" + f": aryl job release {own}" * advises)
    if gate.never:
        help_ = f": aryl job change {own} --after ..., or aryl job cancel {own}" * advises
        said.append(f"it can never start: {gate.never}{help_}")
    elif gate.depends_on:
        said.append(f"it waits for {_awaited(state, gate.depends_on)}")
    return tuple(said)


def _awaited(state: ClusterState, dependencies: list[Dependency]) -> str:
    return some([_one(state, each) for each in dependencies], NAMED_MAX)


def _one(state: ClusterState, each: Dependency) -> str:
    of = standing(state, each.job)
    now = "is not known any more" if of is None else f"{of.name} is {of.state}"
    return f"{each.job} to {_VERBS[each.when]} ({now})"


def leads_to(state: ClusterState, dependencies: Iterable[Dependency], job_id: JobId) -> bool:
    """Whether a chain of dependencies that do not hold yet comes to a job: it would wait for
    itself.

    An array and its tasks are one here: tasks wait for their array's gate, the end of an array for
    all its tasks, and a task that waits has one of the places that its throttle gives.
    """
    own = _whole(state, job_id)
    rest, seen = [each.job for each in dependencies], set[str]()
    while rest:
        name = _whole(state, rest.pop())
        if name == own:
            return True
        if name not in seen:
            seen.add(name)
            rest += [each.job for each in _asked(state, name)]
    return False


def _whole(state: ClusterState, name: str) -> str:
    """The id of the array of a task, and any other as it is."""
    array = _array_of(state, name)
    return name if array is None else array.array_id


def _asked(state: ClusterState, name: str) -> Iterator[Dependency]:
    """What a job, or an array and its tasks, wait for."""
    one = gated(state, name)
    if one is None:
        return
    yield from one.gate.depends_on
    for job_id in one.live if isinstance(one, ArrayEntry) else ():
        yield from state.jobs[job_id].gate.depends_on
