"""Stalls: a job that stops reporting progress becomes STALLED, and restarts if it asked for that.

A hung collective, a dead data loader or an incomplete rendezvous looks like work from outside. A
job is STALLED after silence much longer than its usual gap between progress reports, see
`step_gaps`. Silence of an agent or of the network is no silence of the job: the driver counts only
what the reports of all its nodes show (`ProgressStopped`). Only a running job is STALLED. A job
that starts, is resized, suspended or stopped is expected to be silent.

A stall ends with the job's next progress report, or when its gang changes.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET

from common.failures import Failure, RetryClass
from common.model import JobId, JobState, NodeName, WorkerKey
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.jobs.retry import STALLED
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import ProgressStopped
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, Ending, JobEntry


class Watch(NamedTuple):
    """A job whose silence is watched: its workers, and the silence that means a stall."""

    attempt: int
    after_s: float
    workers: tuple[tuple[WorkerKey, NodeName], ...]


def watched(state: ClusterState, settings: EngineSettings, now_s: float) -> dict[JobId, Watch]:
    """Running jobs silent long enough that a `ProgressStopped` changes something.

    now_s: engine time. The driver decides whether the job really reported nothing.
    """
    found: dict[JobId, Watch] = {}
    for job_id in state.live_jobs:
        job = state.jobs[job_id]
        if job.progress is None or job.state != JobState.RUNNING:
            continue
        after_s = _next_s(job, settings)
        if after_s is None or _quiet_at_most_s(job, now_s) < after_s:
            continue
        workers = tuple((worker.key, worker.node) for worker in job.workers.values())
        found[job_id] = Watch(job.attempt.number, after_s, workers)
    return found


def stopped(ctx: Context, event: ProgressStopped) -> None:
    """A job reports no progress, though all its nodes are heard: it is STALLED, or restarts."""
    job = ctx.job(event.job_id)
    if job is None or event.attempt != job.attempt.number or job.state != JobState.RUNNING:
        return
    if job.after_vacating is not None:
        return
    quiet_s = min(event.quiet_s, _quiet_at_most_s(job, ctx.now_s))
    after_s, timeout_s = _after_s(job, ctx.settings), timeout_of(job)
    is_over = timeout_s is not None and quiet_s >= timeout_s
    is_stalled = is_over or (after_s is not None and quiet_s >= after_s)
    if is_stalled and job.gaps.stalled_since_s is None:
        job.gaps.stalled_since_s = ctx.ago(quiet_s)
        ctx.state.counters.stalls += 1
        ctx.changed_jobs[job.job_id] = None
        ctx.log_event(job.job_id, "stalled", in_words(job, ctx.now_s))
    if timeout_s is not None and is_over:
        _end_attempt(ctx, job, quiet_s, timeout_s)


def _end_attempt(ctx: Context, job: JobEntry, quiet_s: float, timeout_s: float) -> None:
    """Its own `stall_timeout_s` is over: the attempt ends, with its grace, by its own fault."""
    why = f"{_step(job)} for {quiet_s:.0f} s; stall_timeout_s is {timeout_s:g} s"
    failure = Failure(
        reason=STALLED, title="stalled", retry=RetryClass.BACK_OFF, is_explicit=False, line=why
    )
    jobs_lifecycle.end_stalled(ctx, job, Ending(error=f"stalled: {why}", failure=failure))


def _next_s(job: JobEntry, settings: EngineSettings) -> float | None:
    """The next silence that changes something; None: none does."""
    timeout_s, after_s = timeout_of(job), _after_s(job, settings)
    if job.gaps.stalled_since_s is not None or after_s is None:
        return timeout_s
    return after_s if timeout_s is None else min(after_s, timeout_s)


def _after_s(job: JobEntry, settings: EngineSettings) -> float | None:
    cost_s = job.resizes.cost_s
    return job.gaps.stall_after_s(
        job.attempt.number,
        floor_s=settings.stalled_after_s,
        resize_s=settings.resize_p99_s if cost_s is None else max(cost_s, settings.resize_p99_s),
        start_s=settings.start_p99_s + settings.restart_p99_s,
    )


def _quiet_at_most_s(job: JobEntry, now_s: float) -> float:
    """Since its last word, or since its gang is as it is if that was later."""
    return now_s - max(job.gaps.told_at_s, job.gaps.since_s)


def timeout_of(job: JobEntry) -> float | None:
    """The silence after which its attempt is ended, in seconds; None: never."""
    timeout_s = job.spec.stall_timeout_s
    return None if timeout_s is UNSET else timeout_s


def quiet_s(job: JobEntry, now_s: float) -> float | None:
    """Seconds since the last progress report of a STALLED job; None for any other job."""
    since_s = job.gaps.stalled_since_s
    return None if since_s is None else max(0.0, now_s - since_s)


def in_words(job: JobEntry, now_s: float) -> str:
    """As text: the job is STALLED, with its usual gap; empty for any other job."""
    silent_s = quiet_s(job, now_s)
    if silent_s is None:
        return ""
    usual_s = job.gaps.usual_s
    usual = "" if usual_s is None else f"; its usual interval is {usual_s:.0f} s"
    return f"{_step(job)} for {silent_s:.0f} s{usual}"


def _step(job: JobEntry) -> str:
    return f"no step after {job.progress.step if job.progress else 0}"
