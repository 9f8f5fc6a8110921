"""Numbers of jobs: small integers that count up, for people and for Slurm's clients.

A job gets its number as it is submitted, in the order of the journal, so that each coordinator
that reads the journal gives the same one. A number is never given twice.

A worker learns it by the variable `ARYL_JOB_NUMBER`, which its order adds to the job's variables.
So agents of an older version pass it on, and a ledger gives the number back to a rebuilt job.
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from common.model import JobSpec
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.tables import ClusterState, JobEntry

VARIABLE = "ARYL_JOB_NUMBER"


class Numbered(Protocol):
    """What has a number; 0: none yet."""

    number: int


def give(state: ClusterState, job: Numbered, *, wanted: int | None = None) -> None:
    """Give a job its number: the next one, or the `wanted` one where no other job has it."""
    if wanted is not None and of_number(state, wanted) is None:
        job.number = wanted
        state.next_job_number = max(state.next_job_number, wanted + 1)
        return
    job.number = state.next_job_number
    state.next_job_number += 1


def give_missing(state: ClusterState) -> None:
    """Number the jobs of a state that an older version saved, in order of submission."""
    for job in state.jobs.values():
        if not job.number:
            give(state, job)


def of_number(state: ClusterState, number: int) -> JobEntry | ArrayEntry | None:
    """The job or the array that has a number; None: none that is remembered."""
    job = next((job for job in state.jobs.values() if job.number == number), None)
    return job or next((one for one in state.arrays.values() if one.number == number), None)


def ordered(spec: JobSpec, number: int) -> JobSpec:
    """The spec of a job with its number, as the orders of its workers carry it."""
    return replace(spec, env=spec.env | {VARIABLE: str(number)})


def recovered(spec: JobSpec) -> tuple[JobSpec, int | None]:
    """The spec of a job from the order of a worker, and its number; None: an older order."""
    text = spec.env.get(VARIABLE)
    if text is None:
        return spec, None
    env = {name: value for name, value in spec.env.items() if name != VARIABLE}
    is_number = text.isascii() and text.isdecimal() and 0 < len(text) < 16
    return replace(spec, env=env), int(text) if is_number else None
