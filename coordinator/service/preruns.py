"""What is said of a job whose pre-run is on, or was at its end. Pure; must not know how one ends.

A pre-run is a try on a few GPUs (`coordinator.engine.jobs.prerun`). Rows show the job as it runs,
of one worker, so that whoever asked for a gang has to be told that this is not all of it.
"""

from __future__ import annotations

from common.model import FINAL_JOB_STATES, JobState
from coordinator.engine.jobs import prerun_spec
from coordinator.engine.jobs import retry as jobs_retry
from coordinator.engine.state.tables import AfterVacating, JobEntry
from coordinator.policies.contract.text import counted


def prerun_reasons(job: JobEntry) -> tuple[str, ...]:
    """That it is about its pre-run, on how many GPUs, and what becomes of its gang; empty of any
    other job, and of one that is a gang by now."""
    if not prerun_spec.is_on(job):
        return ()
    gpus = counted(job.spec.gpus_per_worker, "GPU")
    match job.state:
        case _ if _is_final(job):
            return (_ended(job, gpus),)
        case JobState.PENDING:
            return (_waits(job, gpus),)
        case _ if job.retry.is_prerun_over:
            return (f"its pre-run on {gpus} is over, and well: {_gang(job)} waits next",)
        case _:
            until = f"after {job.spec.prerun.time_s:g} s or a checkpoint"
            return (f"this is its pre-run, on {gpus}: {_gang(job)} waits for its turn {until}",)


def _is_final(job: JobEntry) -> bool:
    """Whether it has ended, or will when its worker has left."""
    again = (None, AfterVacating.REQUEUE)
    return job.state in FINAL_JOB_STATES or job.after_vacating not in again


def _waits(job: JobEntry, gpus: str) -> str:
    gang = _gang(job)
    if jobs_retry.why_failed(job):
        return f"its latest pre-run, on {gpus}, came to nothing: it is tried again before {gang}"
    return f"it waits for its pre-run, on {gpus}: {gang} comes after that"


def _ended(job: JobEntry, gpus: str) -> str:
    tries = counted(job.attempt, "try", "tries")
    what = "it failed in its pre-run" if _has_failed(job) else "it ended in its pre-run"
    if not job.attempt:
        return f"it ended before its pre-run, on {gpus}: {_gang(job)} never started"
    took = f"{job.attained_gpu_s:.0f} GPU-s of computing in {tries}"
    return f"{what}, on {gpus} ({took}): {_gang(job)} never started"


def _has_failed(job: JobEntry) -> bool:
    return job.state == JobState.FAILED or job.after_vacating == AfterVacating.FAIL


def _gang(job: JobEntry) -> str:
    """What its user asked for, by its least size."""
    spec = prerun_spec.submitted(job)
    workers = counted(spec.workers.min, "worker")
    return f"its gang of {workers} with {counted(spec.base_demand_gpus, 'GPU')}"
