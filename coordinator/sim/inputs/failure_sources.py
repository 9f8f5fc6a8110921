"""Sources of failures by name, and a workload's jobs with failures of one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import structs

from common.failure_rules import FailureRules, read_rules
from common.failures import RetryClass
from common.model import JobId, PrerunSpec, RetrySpec
from coordinator.sim.inputs.failure_table import PhillyFailures, Trouble
from coordinator.sim.run.fault_injection import Failing
from coordinator.workloads.records import WorkloadJob

if TYPE_CHECKING:
    from coordinator.sim.run.simulation import Simulation


class FailureSource(StrEnum):
    """The source of job failures.

    `philly`: the table of the Philly study; with a reason whose class is never to retry, every
    attempt fails. `philly-drawn`: for every reason as many attempts fail as the table's mean.
    """

    NONE = "none"
    PHILLY = "philly"
    PHILLY_DRAWN = "philly-drawn"


def failing(
    sim: Simulation, jobs: Sequence[WorkloadJob], source: FailureSource, *, seed: int
) -> Failing | None:
    """The failures of these jobs in a simulation; None without any."""
    if source == FailureSource.NONE:
        return None
    rules = read_rules()
    hopeless = _hopeless(rules) if source == FailureSource.PHILLY else frozenset[str]()
    drawn = PhillyFailures(seed, hopeless)
    # A trace that does not tell its users would have all of them make the mistakes of one.
    has_users = len({job.user for job in jobs}) > 1
    troubles: dict[JobId, Trouble] = {}
    for job in jobs:
        user = job.user if has_users else job.job_id
        trouble = drawn.trouble(job.job_id, user, job.spec.base_demand_gpus)
        if trouble is not None:
            troubles[job.job_id] = trouble
    runs_s = {job.job_id: job.work_s / job.speedup.rate(job.spec.workers.min) for job in jobs}
    return Failing(troubles, rules.failure, sim.loop, sim.nodes, sim.runtime, runs_s)


def _hopeless(rules: FailureRules) -> frozenset[str]:
    reasons = rules.reasons.values()
    return frozenset(reason.name for reason in reasons if reason.retry == RetryClass.NEVER)


def that_may_fail(
    jobs: Sequence[WorkloadJob], *, restarts: int, prerun_s: float | None
) -> tuple[WorkloadJob, ...]:
    """The jobs with this many retries after failures, and with a pre-run if that is set."""
    retry, prerun = RetrySpec(max_restarts=restarts), PrerunSpec(time_s=prerun_s)
    return tuple(
        structs.replace(job, spec=structs.replace(job.spec, retry=retry, prerun=prerun))
        for job in jobs
    )
