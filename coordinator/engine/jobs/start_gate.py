"""The start gate of a job: its hold and its dependencies keep it out of the queue while it waits.

A job behind a shut gate is put to no policy, so a pass costs the same however many there are. A
dependency is settled at the instant at which the job that it names starts or ends, and stays
settled: that job may be forgotten afterwards. Time behind a shut gate is no queueing time.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.model import FINAL_JOB_STATES, Dependency, DependencyKind, Gate, JobId, JobState
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import ClusterState, JobEntry
from coordinator.policies.contract.text import some

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


def holds(when: DependencyKind, job: JobEntry | None) -> bool | None:
    """Whether a dependency on a job holds; None: not yet.

    False is final. A job that is not known, because records of the journal are lost, never fulfils
    anything.
    """
    if job is None:
        return False
    has_ended = job.state in FINAL_JOB_STATES
    match when:
        case DependencyKind.STARTED:
            return True if has_ended or job.started_at_s is not None else None
        case DependencyKind.ENDED:
            return True if has_ended else None
        case DependencyKind.OK | DependencyKind.NOT_OK:
            is_wanted = (job.state == JobState.SUCCEEDED) == (when == DependencyKind.OK)
            return is_wanted if has_ended else None


def submitted(ctx: Context, job: JobEntry) -> None:
    """A new job: its gate is shut where its spec asks for a hold or for dependencies."""
    if job.spec.is_held:
        job.gate.held_by = f"{job.tenant}/{job.user}"
    if job.spec.depends_on:
        _wait_for(ctx, job, job.spec.depends_on)
    if job.gate.is_shut:
        ctx.state.gated_jobs[job.job_id] = None
        if job.gate.held_by:
            ctx.log_event(job.job_id, "held", f"by {job.gate.held_by}")


def hold(ctx: Context, job: JobEntry, by: str) -> None:
    """Hold a job that waits, or that will wait once its workers have left."""
    was_shut = job.gate.is_shut
    job.gate.held_by = by
    ctx.log_event(job.job_id, "held", f"by {by}")
    _moved(ctx, job, was_shut=was_shut)


def release(ctx: Context, job: JobEntry, by: str) -> None:
    """End the hold of a job; its dependencies stay."""
    job.gate.held_by = ""
    ctx.log_event(job.job_id, "released", f"by {by}")
    _moved(ctx, job, was_shut=True)


def depend_on(ctx: Context, job: JobEntry, dependencies: Iterable[Dependency]) -> None:
    """Replace the dependencies of a job; those that hold already are settled at once."""
    was_shut = job.gate.is_shut
    forget(ctx.state, job)
    job.gate.depends_on, job.gate.never = [], ""
    _wait_for(ctx, job, dependencies)
    _moved(ctx, job, was_shut=was_shut)


def _wait_for(ctx: Context, job: JobEntry, dependencies: Iterable[Dependency]) -> None:
    gate = job.gate
    for each in dict.fromkeys(dependencies):
        of = ctx.job(JobId(each.job))
        is_held = holds(each.when, of)
        if is_held:
            continue
        gate.depends_on.append(each)
        if is_held is None:
            ctx.state.dependents.setdefault(JobId(each.job), {})[job.job_id] = None
        elif not gate.never:
            _never(ctx, job, each, of)


def passed(ctx: Context, job: JobEntry) -> None:
    """A job has started or ended: settle the dependencies on it."""
    state = ctx.state
    for job_id in list(state.dependents.get(job.job_id, ())):
        waiting = state.jobs.get(job_id)
        if waiting is not None:
            _settle(ctx, waiting, job)
    if job.state in FINAL_JOB_STATES:
        state.dependents.pop(job.job_id, None)
        forget(state, job)


def _settle(ctx: Context, job: JobEntry, of: JobEntry) -> None:
    """Settle what a waiting job asks of another one that has moved."""
    gate, left = job.gate, list[Dependency]()
    for each in gate.depends_on:
        is_held = holds(each.when, of) if each.job == of.job_id else None
        if is_held:
            continue
        left.append(each)
        if is_held is False and not gate.never:
            _never(ctx, job, each, of)
    if len(left) == len(gate.depends_on):
        return
    gate.depends_on = left
    if not left:
        now = _ENDS.get(of.state, f"is {of.state}")
        ctx.log_event(job.job_id, "dependencies hold", f"{of.job_id} {now}")
    _moved(ctx, job, was_shut=True)


def _never(ctx: Context, job: JobEntry, each: Dependency, of: JobEntry | None) -> None:
    found = "is not known" if of is None else _ENDS.get(of.state, f"is {of.state}")
    job.gate.never = f"it waits for {each.job} to {_VERBS[each.when]}, which {found}"
    ctx.changed_jobs[job.job_id] = None
    ctx.log_event(job.job_id, "dependency never holds", job.gate.never)


def _moved(ctx: Context, job: JobEntry, *, was_shut: bool) -> None:
    """The gate of a job may have been shut or opened; its time in the queue counts while open."""
    ctx.changed_jobs[job.job_id] = None
    is_shut, wait = job.gate.is_shut, job.wait
    if is_shut:
        ctx.state.gated_jobs[job.job_id] = None
    else:
        ctx.state.gated_jobs.pop(job.job_id, None)
        ctx.needs_pass = True
    if is_shut == was_shut or job.attempt.ran_at_s is not None:
        return  # of an attempt that runs, the wait begins when its workers have left
    if is_shut:
        wait.queueing_s += ctx.now_s - wait.pending_since_s
    wait.pending_since_s = ctx.now_s


def forget(state: ClusterState, job: JobEntry) -> None:
    """The gate of a job matters no more."""
    state.gated_jobs.pop(job.job_id, None)
    for each in job.gate.depends_on:
        waiting = state.dependents.get(JobId(each.job))
        if waiting is None:
            continue
        waiting.pop(job.job_id, None)
        if not waiting:
            del state.dependents[JobId(each.job)]


def kind(job: JobEntry) -> Gate | None:
    """What keeps a waiting job out of the queue; None: nothing does, or it does not wait."""
    gate = job.gate
    if job.state != JobState.PENDING or not gate.is_shut:
        return None
    if gate.held_by:
        return Gate.HELD
    return Gate.NEVER if gate.never else Gate.DEPENDENCY


def why_shut(state: ClusterState, job: JobEntry) -> tuple[str, ...]:
    """In words, what keeps a waiting job out of the queue; empty: nothing does."""
    gate, said = job.gate, list[str]()
    if gate.held_by:
        said.append(f"held by {gate.held_by}: aryl job release {job.job_id}")
    if gate.never:
        said.append(
            f"it can never start: {gate.never}: aryl job change {job.job_id} --after ..., or "
            f"aryl job cancel {job.job_id}"
        )
    elif gate.depends_on:
        said.append(f"it waits for {_awaited(state, gate.depends_on)}")
    return tuple(said)


def _awaited(state: ClusterState, dependencies: list[Dependency]) -> str:
    return some([_one(state, each) for each in dependencies], NAMED_MAX)


def _one(state: ClusterState, each: Dependency) -> str:
    of = state.jobs.get(JobId(each.job))
    now = "is not known any more" if of is None else f"{of.spec.name} is {of.state}"
    return f"{each.job} to {_VERBS[each.when]} ({now})"


def leads_to(state: ClusterState, dependencies: Iterable[Dependency], job_id: JobId) -> bool:
    """Whether a chain of dependencies that do not hold yet comes to a job: it would wait for
    itself."""
    rest, seen = [each.job for each in dependencies], set[str]()
    while rest:
        name = rest.pop()
        if name == job_id:
            return True
        if name not in seen:
            seen.add(name)
            of = state.jobs.get(JobId(name))
            rest += [each.job for each in of.gate.depends_on] if of is not None else ()
    return False
