"""Timers of jobs: a heap of instants, and what happens when one passes.

A gang that is not ready in time is stopped, and a job that reached its time limit ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from common.job_state_table import JobEvent
from common.messages import OrderPhase
from common.model import JobId, JobState, StopReason
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.jobs import (
    prerun,
    rendezvous,
)
from coordinator.engine.jobs import (
    retry as jobs_retry,
)
from coordinator.engine.nodes import lost_records
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import AfterVacating, ClusterState, JobEntry, WorkerEntry


class Deadlines:
    """The next deadline of every live job; derived from the state, never saved.

    An instant that no longer is its job's deadline is dropped when it comes to the top, as is one
    that a pass has seen.
    """

    def __init__(self, state: ClusterState) -> None:
        self._heap: list[tuple[float, JobId]] = []
        self._known_s: dict[JobId, float] = {}
        self._seen_s = -inf
        self.note(state, state.live_jobs)

    def note(self, state: ClusterState, changed: Iterable[JobId]) -> None:
        """Learn which jobs an event changed."""
        for job_id in changed:
            job = state.jobs.get(job_id)
            at_s = None if job is None or job_id not in state.live_jobs else deadline_s(job)
            if at_s is None:
                self._known_s.pop(job_id, None)
            elif self._known_s.get(job_id) != at_s:
                self._known_s[job_id] = at_s
                heapq.heappush(self._heap, (at_s, job_id))

    def seen(self, now_s: float) -> None:
        """A pass at this instant looked at all due jobs.

        It could do nothing about jobs that are still due. Each later pass looks again, but they
        cause no wake-up; otherwise they would hide all later instants.
        """
        self._seen_s = now_s

    def next_s(self) -> float | None:
        """The earliest instant that no pass has seen; None if time alone changes nothing."""
        heap, known_s = self._heap, self._known_s
        while heap:
            at_s, job_id = heap[0]
            if at_s > self._seen_s and known_s.get(job_id) == at_s:
                return at_s
            heapq.heappop(heap)
        return None

    def due(self, state: ClusterState, now_s: float) -> list[JobEntry]:
        """Jobs whose deadline is over, by job id."""
        over = sorted(job_id for job_id, at_s in self._known_s.items() if at_s <= now_s)
        return [state.jobs[job_id] for job_id in over]


def deadline_s(job: JobEntry) -> float | None:
    """The next instant at which time alone changes something about a job."""
    if job.attempt.gang_deadline_s is not None:
        return job.attempt.gang_deadline_s
    retry_s = jobs_retry.deadline_s(job)
    if job.state == JobState.PENDING:
        return retry_s
    # A limit may be over before the pre-run is.
    found = (retry_s, prerun.deadline_s(job), _limit_s(job))
    return min((at_s for at_s in found if at_s is not None), default=None)


def _limit_s(job: JobEntry) -> float | None:
    """When a job runs into its own limit."""
    limit_s, ran_at_s = job.spec.time_limit_s, job.attempt.ran_at_s
    if limit_s is None or ran_at_s is None or job.after_vacating is not None:
        return None
    return ran_at_s + limit_s


def time_is_up(ctx: Context, job: JobEntry) -> None:
    """A job's deadline is over: its gang was not ready in time, or it ran into its own limit."""
    if job.attempt.gang_deadline_s is not None and job.attempt.gang_deadline_s <= ctx.now_s:
        _gang_timeout(ctx, job)
    jobs_retry.time_is_up(ctx, job)
    prerun.time_is_up(ctx, job)
    limit_s = _limit_s(job)
    if limit_s is None or job.state not in jobs_lifecycle.ACTIVE_JOB_STATES:
        return
    if limit_s <= ctx.now_s:
        jobs_lifecycle.at_time_limit(job)
        jobs_lifecycle.stop_workers(ctx, job, StopReason.TIME_LIMIT)


def _gang_timeout(ctx: Context, job: JobEntry) -> None:
    """A gang or a resize was not ready in time; free of charge.

    While it may run unseen, its deadline stays: a pass looks again when its nodes were heard.
    """
    if lost_records.may_run_unseen(ctx.state, job):
        return
    job.attempt.gang_deadline_s = None
    ctx.changed_jobs[job.job_id] = None
    if job.state == JobState.STARTING:
        ctx.state.counters.gang_timeouts += 1
        late = [worker for worker in job.workers.values() if not jobs_lifecycle.is_ready(worker)]
        waiting = [_not_ready(worker) for worker in late]
        if job.store is not None and not rendezvous.is_ready(job):
            late.append(job.store)
            waiting.append(f"the rendezvous store on {_not_ready(job.store)}")
        job.error = f"not ready: {', '.join(waiting)}"
        jobs_retry.not_ready(ctx, job, {worker.node for worker in late})
        jobs_lifecycle.fire(ctx, job, JobEvent.GANG_TIMEOUT, job.error)
        job.after_vacating = AfterVacating.REQUEUE
        jobs_lifecycle.stop_workers(ctx, job, StopReason.GANG_TIMEOUT)
        jobs_lifecycle.finish_attempt_if_empty(ctx, job)
    elif job.state == JobState.RESIZING:
        added = {
            index: worker
            for index, worker in job.workers.items()
            if worker.order == OrderPhase.RESERVE and worker.stop is None
        }
        late = [worker for worker in added.values() if not jobs_lifecycle.is_ready(worker)]
        if not late:
            return  # it has grown, or does not: its released workers are still in their grace
        ctx.log_event(job.job_id, "does not grow", f"not ready: {', '.join(map(_not_ready, late))}")
        jobs_retry.left_for_now(ctx, job, {worker.node for worker in late})
        jobs_lifecycle.stop_workers(ctx, job, StopReason.GANG_TIMEOUT, only=tuple(added))


def _not_ready(worker: WorkerEntry) -> str:
    """The node of a worker that was not ready in time, and what the node reported as the cause."""
    return f"{worker.node} ({worker.waits_for})" if worker.waits_for else str(worker.node)
