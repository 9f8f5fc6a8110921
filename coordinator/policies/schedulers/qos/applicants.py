"""The jobs that a GPU type must count with: with a promise, asking for one, or without deadline."""

from __future__ import annotations

from collections.abc import Container, Iterable

from msgspec import Struct, structs

from common.model import JobState, Preemptibility
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import JobView


class Applicants(Struct, frozen=True, kw_only=True):
    """Jobs by their answers so far.

    promised: their deadlines. newcomers: they ask for that, in order of submission. soft: they have
        no deadline, or run without a promise.
    """

    promised: tuple[JobView, ...]
    newcomers: tuple[JobView, ...]
    soft: tuple[JobView, ...]


def applicants(
    jobs: Iterable[JobView], let_in: Container[str], unpromised: Container[str] = ()
) -> Applicants:
    """The present jobs by their answers.

    A job that has run is not refused any more, whatever policy admitted it.

    Args:
        let_in: jobs with an earlier promise, met or not; none of these is refused.
        unpromised: jobs admitted without a promise: each asks again until it runs, and goes on so.
    """
    promised: list[JobView] = []
    newcomers: list[JobView] = []
    soft: list[JobView] = []
    for job in jobs:
        if job.deadline_at_s is None:
            soft.append(job)
        elif job.job_id in let_in:
            promised.append(job)
        elif _has_begun(job):
            (soft if job.job_id in unpromised else promised).append(job)
        else:
            newcomers.append(job)
    newcomers.sort(key=lambda job: (job.submitted_at_s, job.job_id))
    return Applicants(promised=tuple(promised), newcomers=tuple(newcomers), soft=tuple(soft))


def _has_begun(job: JobView) -> bool:
    return job.attempt.first_started_at_s is not None or job.state != JobState.PENDING


def is_start_of_gang(job: JobView) -> bool:
    """Whether it is a pre-run that has a deadline, which is that of its gang."""
    return job.behind is not None and job.deadline_at_s is not None


def gang_of(job: JobView) -> JobView:
    """The planned job: the gang behind a pre-run that has a deadline, else the job itself."""
    behind = job.behind
    if behind is None or not is_start_of_gang(job):
        return job
    return structs.replace(
        job,
        workers=behind.workers,
        gpus_per_worker=behind.gpus_per_worker,
        estimate=structs.replace(
            job.estimate, remaining_work_s=behind.work_s, estimated_left_s=None
        ),
        behind=None,
    )


def fixed_gpus(job: JobView) -> int:
    """GPUs that it holds and cannot be asked to give back; it is no part of any plan."""
    is_planned = job.preemptibility == Preemptibility.FULL or is_start_of_gang(job)
    if is_planned or job.state == JobState.PENDING:
        return 0
    return present_workers(job) * job.gpus_per_worker
