"""What is said of a job whose workers were told to stop: what becomes of it, and by when. Pure."""

from __future__ import annotations

from common.model import FINAL_JOB_STATES
from coordinator.engine.state.tables import AfterVacating, JobEntry, WorkerEntry

WORKERS_NAMED = 4
"""Of those that still stop, the ones whose grace lasts longest."""


def stopping_reasons(job: JobEntry, *, now_s: float) -> tuple[str, ...]:
    """What follows its last worker's end, and the grace of those that are left; empty of a job that
    is not ending. now_s: engine time."""
    if job.after_vacating is None or job.state in FINAL_JOB_STATES:
        return ()
    left = sorted(
        (worker for worker in job.workers.values() if worker.stop is not None),
        key=lambda worker: (-_left_s(worker, now_s), worker.key),
    )
    nodes = ", ".join(sorted({worker.node for worker in job.workers.values()}))
    return (
        f"{_what(job)} when its workers have left {nodes}",
        *(_of_worker(worker, now_s) for worker in left[:WORKERS_NAMED]),
    )


def _what(job: JobEntry) -> str:
    match job.after_vacating:
        case AfterVacating.CANCEL:
            return f"cancelled by {job.cancelled_by or 'nobody known'}: it ends"
        case AfterVacating.FAIL:
            why = job.error or f"exit code {job.exit_code}"
            return f"it failed ({why}) and is not tried again: it ends"
        case AfterVacating.SUCCEED:
            return "its work is done: it ends"
        case _ if job.migration is not None:
            nodes = ", ".join(sorted({name for name, _ in job.migration.gpus}))
            return f"it starts again on {nodes}"
        case _:
            return "it waits again"


def _of_worker(worker: WorkerEntry, now_s: float) -> str:
    since_s, left_s = now_s - worker.stop_ordered_at_s, _left_s(worker, now_s)
    grace = (
        f"has {left_s:.0f} s of its grace of {worker.stop_grace_s:g} s left"
        if left_s > 0
        else f"is past its grace of {worker.stop_grace_s:g} s, at whose end its node kills it"
    )
    told = f"worker {worker.key.worker_index} on {worker.node} was told to stop {since_s:.0f} s ago"
    return f"{told} and {grace}"


def _left_s(worker: WorkerEntry, now_s: float) -> float:
    return max(0.0, worker.stop_ordered_at_s + worker.stop_grace_s - now_s)
