"""Explains a job's special states: pre-run, drain, stop and suspension. Pure.

A pre-run is a try on a few GPUs (`coordinator.engine.jobs.prerun`). Rows show the job as it runs,
with one worker, so the text explains to a submitter of a gang that this is not the whole gang. For
a drain the text covers the node and the jobs on it. For a job that stops it gives the next state
and the deadline. For a suspended job it gives the start of the suspension and the jobs on its GPUs.
"""

from __future__ import annotations

from common.model import FINAL_JOB_STATES, JobState
from coordinator.engine.engine import Engine
from coordinator.engine.jobs import prerun_spec
from coordinator.engine.jobs import retry as jobs_retry
from coordinator.engine.state.tables import AfterVacating, JobEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.text import counted
from coordinator.service.api import explain_windows

COMPUTING = (JobState.STARTING, JobState.RUNNING, JobState.RESIZING)


def suspension_reason(engine: Engine, entry: JobEntry, *, now_s: float) -> str:
    """One sentence. now_s: engine time."""
    others = sorted(
        job_id
        for job_id in {
            key.job_id
            for worker in entry.workers.values()
            for slot in engine.state.nodes[worker.node].gpus
            if slot.uuid in worker.gpu_uuids
            for key in (slot.holder, *slot.guests)
            if key is not None
        }
        if engine.state.jobs[job_id].state in COMPUTING
    )
    since_s = 0.0 if entry.suspension.since_s is None else now_s - entry.suspension.since_s
    return (
        f"it keeps its GPUs and has been suspended for {since_s:.0f} s while "
        f"{', '.join(others) or 'no job'} computes on them"
    )


WORKERS_NAMED = 4
"""At most this many of the workers that still stop are named: those with the longest grace."""


def stopping_reasons(job: JobEntry, *, now_s: float) -> tuple[str, ...]:
    """The next state after the last worker's end, and the grace of the remaining workers.

    Empty for a job that is not ending. now_s: engine time.
    """
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
            return f"cancelled by {job.cancelled_by or 'an unknown user'}: it ends"
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
    told = (
        f"worker {worker.key.worker_index} on {worker.node} was ordered to stop {since_s:.0f} s ago"
    )
    return f"{told} and {grace}"


def _left_s(worker: WorkerEntry, now_s: float) -> float:
    return max(0.0, worker.stop_ordered_at_s + worker.stop_grace_s - now_s)


def closed_reasons(engine: Engine, entry: NodeEntry, now_s: float) -> list[str]:
    """Why no new work comes to a node: by whose order, and until when running work may go on.

    now_s: engine time.
    """
    if not entry.cordon.is_cordoned:
        return []
    if not entry.cordon.is_draining:
        return [f"cordoned {entry.cordon.reason}"]
    drain = engine.state.drains.get(entry.name)
    if drain is None:
        return [f"drained {entry.cordon.reason}"]
    left_s = max(0.0, drain.until_s - now_s)
    return [
        f"drained {entry.cordon.reason}; what runs there may go on for {left_s:.0f} s, and is "
        "preempted then"
    ]


def drain_reasons(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    """When a job has to leave nodes that are drained, or will be. now_s: engine time."""
    held = (*entry.workers.values(), *((entry.store,) if entry.store else ()))
    said: list[str] = []
    for name in sorted({worker.node for worker in held}):
        drain = engine.state.drains.get(name)
        if drain is not None:
            left_s = max(0.0, drain.until_s - now_s)
            said.append(
                f"{drain.reason}: unless it ends in {left_s:.0f} s, it is preempted and waits again"
            )
    return said + explain_windows.of_job(engine, entry, now_s)


def prerun_reasons(job: JobEntry) -> tuple[str, ...]:
    """Sentences about a pre-run: that it is one, its GPUs, and the next state of its gang.

    Empty for any other job, and for one that is a gang by now.
    """
    if not prerun_spec.is_on(job):
        return ()
    gpus = counted(job.spec.gpus_per_worker, "GPU")
    match job.state:
        case _ if _is_final(job):
            return (_ended(job, gpus),)
        case JobState.PENDING:
            return (_waits(job, gpus),)
        case _ if job.retry.is_prerun_over:
            return (f"its pre-run on {gpus} succeeded: {_gang(job)} waits next",)
        case _:
            until = f"after {job.spec.prerun.time_s:g} s or a checkpoint"
            return (f"this is its pre-run, on {gpus}: {_gang(job)} waits for its turn {until}",)


def _is_final(job: JobEntry) -> bool:
    """True if it has ended, or will when its worker has left."""
    again = (None, AfterVacating.REQUEUE)
    return job.state in FINAL_JOB_STATES or job.after_vacating not in again


def _waits(job: JobEntry, gpus: str) -> str:
    gang = _gang(job)
    if jobs_retry.why_failed(job):
        return f"its latest pre-run, on {gpus}, ended without a result: it is retried before {gang}"
    return f"it waits for its pre-run, on {gpus}: {gang} comes after that"


def _ended(job: JobEntry, gpus: str) -> str:
    tries = counted(job.attempt.number, "try", "tries")
    what = "it failed in its pre-run" if _has_failed(job) else "it ended in its pre-run"
    if not job.attempt.number:
        return f"it ended before its pre-run, on {gpus}: {_gang(job)} never started"
    took = f"{job.clock.attained_gpu_s:.0f} GPU-s of computing in {tries}"
    return f"{what}, on {gpus} ({took}): {_gang(job)} never started"


def _has_failed(job: JobEntry) -> bool:
    return job.state == JobState.FAILED or job.after_vacating == AfterVacating.FAIL


def _gang(job: JobEntry) -> str:
    """The user's gang, by its minimum size."""
    spec = prerun_spec.submitted(job)
    workers = counted(spec.workers.min, "worker")
    return f"its gang of {workers} with {counted(spec.base_demand_gpus, 'GPU')}"
