"""Jobs that the cell has forgotten, from its history, as rows beside those that it knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from common.api import EndedJobs, JobRow, ListEndedJobs, RequestRow
from common.errors import ArylError
from common.failures import Failure, RetryClass
from common.history import JobRecord
from common.model import JobState
from coordinator.cli.slurm.cell import note
from coordinator.client import Client

NUMBERS_ASKED = 1000
"""Numbers of jobs in one question."""
SLACK_S = 1.0
"""Instants of a command have whole seconds, and the end of a span is excluded."""


async def forgotten(
    client: Client,
    known: Collection[str],
    *,
    numbers: Sequence[int],
    span: tuple[float, float],
    user: str,
) -> list[JobRow]:
    """The ended jobs of a span of time that are not known, in the order of their ends.

    Without a history the list is empty, and a note on stderr says so.

    Args:
        known: ids of the jobs and arrays that the cell knows.
        numbers: only jobs or tasks of arrays with these numbers; empty: any.
        span: first and last instant at which a job waited or ran; seconds since 1970.
        user: only jobs of this one; empty: of any.
    """
    begin_s, end_s = span
    request = ListEndedJobs(since_at_s=begin_s, submitted_until_at_s=end_s + SLACK_S, user=user)
    rows: list[JobRow] = []
    missing = 0
    try:
        for part in _parts(numbers):
            found = await client.ask(replace(request, job_numbers=part or UNSET), EndedJobs)
            rows += [row_of(one.job) for one in found.rows if not _is_known(one.job, known)]
            missing = found.missing_lines or 0
    except ArylError as error:
        note("sacct", f"jobs that the cell has forgotten are missing: {error}")
        return []
    if missing:
        note("sacct", f"jobs that ended lately may be missing: the history reads {missing} lines")
    return rows


def _parts(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for first in range(0, max(1, len(numbers)), NUMBERS_ASKED):
        yield tuple(numbers[first : first + NUMBERS_ASKED])


def _is_known(job: JobRecord, known: Collection[str]) -> bool:
    """Whether the cell shows a job; tasks that share an account are shown by their array."""
    array_id, bracket, _ = job.job_id.partition("_[")
    return (array_id if bracket else job.job_id) in known


def row_of(job: JobRecord) -> JobRow:
    """The account of a job as a row in full; of an earlier version as far as it has the fields."""
    asked, is_task = job.requested, job.array_indices.isdecimal()
    request = RequestRow(
        priority=asked.priority,
        time_limit_s=asked.time_limit_s,
        deadline_s=None,
        grace_s=0.0,
        gpu_types=asked.gpu_types,
        cpus_per_worker=asked.cpus_per_worker,
        memory_bytes_per_worker=asked.memory_bytes_per_worker,
        workdir=asked.workdir,
        title=asked.title,
        comment=asked.comment,
        ran_on=job.nodes,
        ran_workers=job.workers,
        most_workers=job.workers,
        worker_s=job.worker_s,
        array_number=job.array_number if is_task and job.array_number else None,
        array_index=int(job.array_indices) if is_task else None,
        attempt_started_at_s=job.attempt_started_at_s,
    )
    failure = Failure(reason=job.failure, title=job.failure, retry=RetryClass.NEVER)
    return JobRow(
        job_id=job.job_id,
        name=job.name,
        tenant=job.tenant,
        user=job.user,
        state=JobState(job.state),
        attempt=job.attempts,
        worker_count=0,
        min_workers=job.min_workers or 1,
        max_workers=job.min_workers or 1,
        gpus_per_worker=job.gpus_per_worker or job.gpus,
        gpus=0,
        nodes=(),
        submitted_at_s=job.submitted_at_s,
        started_at_s=job.started_at_s,
        finished_at_s=job.ended_at_s,
        queueing_s=job.waited_s,
        preemption_count=job.preemptions,
        exit_code=job.exit_code,
        error=job.error,
        failure=failure if job.failure else None,
        number=job.number or UNSET,
        request=request,
    )
