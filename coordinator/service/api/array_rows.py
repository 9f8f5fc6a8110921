"""Shows and explains a job array: its tasks counted by state, and why those that wait do. Pure."""

from __future__ import annotations

from itertools import islice

from msgspec import UNSET
from msgspec.structs import replace

from common.api import ArrayRow, Description, JobRow
from common.model import JobState
from coordinator.engine.engine import Engine
from coordinator.engine.jobs import array_tasks, start_gate
from coordinator.engine.state.array_entry import ArrayEntry, Places
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.text import counted
from coordinator.service.api.rows import array_request

FAILED_NAMED = 8
"""Failed tasks that a row names."""


def row(
    engine: Engine,
    array: ArrayEntry,
    *,
    now_s: float,
    has_ranges: bool = False,
    in_full: bool = False,
) -> JobRow:
    """One array as a job that sums up its tasks; times are engine time."""
    jobs = [engine.state.jobs[job_id] for job_id in array.live]
    return JobRow(
        job_id=array.array_id,
        name=array.spec.name,
        tenant=array.tenant,
        user=array.user,
        state=array.state,
        attempt=0,
        worker_count=sum(job.running_workers for job in jobs),
        min_workers=array.spec.workers.min,
        max_workers=array.spec.workers.max,
        gpus_per_worker=array.spec.gpus_per_worker,
        gpus=sum(len(worker.gpu_uuids) for job in jobs for worker in job.workers.values()),
        nodes=(),  # those of its tasks
        submitted_at_s=array.submitted_at_s,
        started_at_s=array.started_at_s,
        finished_at_s=array.finished_at_s,
        queueing_s=array.queueing_s(now_s),
        preemption_count=sum(job.counts.preemptions for job in jobs),
        exit_code=_exit_code(array),
        error=_error(array),
        blockers=_blockers(engine, array) if in_full or array.state == JobState.PENDING else (),
        gate=start_gate.kind(array) or UNSET,
        array=_counts(array, has_ranges=has_ranges or in_full, in_full=in_full),
        number=array.number if in_full else UNSET,
        request=array_request(engine, array) if in_full else UNSET,
    )


def _counts(array: ArrayEntry, *, has_ranges: bool, in_full: bool) -> ArrayRow:
    running = Places()
    for job_id, place in array.live.items() if has_ranges else ():
        if job_id not in array.in_line:
            running.add(place)
    waiting = Places(spans=list(array.waiting.spans))
    for job_id in array.in_line if has_ranges else ():
        waiting.add(array.live[job_id])
    by_state = {
        "waiting": waiting,
        "running": running,
        "succeeded": array.succeeded,
        "failed": array.failed,
        "cancelled": array.cancelled,
    }
    return ArrayRow(
        indices=str(array.indices),
        throttle=array.throttle,
        tasks=len(array.indices),
        waiting=len(array.waiting) + len(array.in_line),
        running=len(array.live) - len(array.in_line),
        succeeded=len(array.succeeded),
        failed=len(array.failed),
        cancelled=len(array.cancelled),
        ranges={
            state: array.text_of(places) for state, places in by_state.items() if places
        } if has_ranges else {},
        unstarted=UNSET
        if array.unstarted is None or not in_full
        else array.text_of(array.unstarted),
    )  # fmt: skip


def _exit_code(array: ArrayEntry) -> int | None:
    """0 if all tasks succeeded; else that of the failed tasks; None while it lives."""
    if not array.is_over:
        return None
    return 0 if array.state == JobState.SUCCEEDED else array.exit_code


def _error(array: ArrayEntry) -> str:
    """Which tasks failed, the first of them by index."""
    if not array.failed:
        return ""
    count = len(array.failed)
    first = islice((array.indices.at(place) for place in array.failed), FAILED_NAMED)
    named = ", ".join(map(str, first))
    if count > FAILED_NAMED:
        return f"{count} tasks failed: {named}, ..."
    return f"{'task' if count == 1 else 'tasks'} {named} failed"


def _first_waiting(engine: Engine, array: ArrayEntry) -> JobEntry | None:
    """The task of the line that comes first."""
    first = min(array.in_line, key=lambda job_id: array.live[job_id], default=None)
    return None if first is None else engine.state.jobs[first]


def _blockers(engine: Engine, array: ArrayEntry) -> tuple[str, ...]:
    """Why the tasks that wait do not start, also while others run."""
    if start_gate.kind(array) is not None:
        return start_gate.why_shut(engine.state, array)
    first = _first_waiting(engine, array)
    if first is not None:
        return engine.explain.blockers(first.job_id)
    return (_bound(array),) if array.waiting else ()


def _bound(array: ArrayEntry) -> str:
    """What keeps tasks out of the line while the gate is open."""
    is_full = array.throttle is not None and len(array.live) >= array.throttle
    return f"at most {array.throttle} at once (throttle)" if is_full else "behind those in line"


def why(engine: Engine, array: ArrayEntry) -> tuple[str, ...]:
    """Sentences: how it ended, or what its tasks wait for."""
    said: list[str] = []
    if array.cancelled_by:
        said.append(f"cancelled by {array.cancelled_by}")
    if array.failed:
        said.append(_error(array))
    if array.is_over:
        return tuple(said)
    if start_gate.kind(array) is not None:
        said += start_gate.why_shut(engine.state, array)
    elif array.waiting:
        behind = counted(len(array.waiting), "task is", "tasks are")
        said.append(f"{behind} not in the line yet: {_bound(array)}")
    return (*said, *_why_first(engine, array))


def _why_first(engine: Engine, array: ArrayEntry) -> list[str]:
    """Why the first task of the line waits; empty: none is in it."""
    first = _first_waiting(engine, array)
    if first is None:
        return []
    blockers = engine.explain.blockers(first.job_id) or ("it starts in the next pass",)
    return [f"task {first.job_id} waits: {blocker}" for blocker in blockers]


def described(
    engine: Engine, array: ArrayEntry, *, now_s: float, in_full: bool = False
) -> Description:
    """Everything about an array, but its story."""
    return Description(
        kind="job",
        name=array.array_id,
        job=row(engine, array, now_s=now_s, has_ranges=True, in_full=in_full),
        why=why(engine, array),
        spec=array.spec,
    )


def task_described(
    engine: Engine, array: ArrayEntry, place: int, *, in_full: bool = False
) -> Description:
    """A task that is not in the line yet: what it asks for, and the reasons of its array.

    It has the number of its array, as in Slurm: its own it gets in the line.
    """
    shut = start_gate.why_shut(engine.state, array)
    said = shut or (f"it is not in the line yet: {_bound(array)}", *_why_first(engine, array))
    spec, job_id = array_tasks.task_spec(array, place), array.task_id(place)
    index = array.indices.at(place)
    request = replace(array_request(engine, array), array_number=array.number, array_index=index)
    return Description(
        kind="job",
        name=job_id,
        job=JobRow(
            job_id=job_id,
            name=spec.name,
            tenant=array.tenant,
            user=array.user,
            state=JobState.PENDING,
            attempt=0,
            worker_count=0,
            min_workers=spec.workers.min,
            max_workers=spec.workers.max,
            gpus_per_worker=spec.gpus_per_worker,
            gpus=0,
            nodes=(),
            submitted_at_s=array.submitted_at_s,
            started_at_s=None,
            finished_at_s=None,
            queueing_s=0.0,  # it waits in its array
            preemption_count=0,
            blockers=said,
            gate=start_gate.kind(array) or UNSET,
            array_id=array.array_id,
            array_index=index,
            number=array.number if in_full else UNSET,
            request=request if in_full else UNSET,
        ),
        why=said,
        spec=spec,
    )
