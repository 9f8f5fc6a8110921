"""Jobs that fail as a test says, in the small cell. Must not know what a test is after."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec import structs

from common.failure_rules import read_rules
from common.model import (
    CheckpointSpec,
    JobId,
    NodeName,
    PrerunSpec,
    RetrySpec,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import (
    Placement,
    Preempt,
    Resume,
    Start,
    Suspend,
)
from coordinator.sim.inputs.failure_table import Trouble
from coordinator.sim.run.build import Stage
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.fault_injection import Failing, FailureFigures
from coordinator.sim.run.runtime import RunRules
from coordinator.sim.run.simulation import Submission
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, start

FOR_GOOD, ONCE_OR_MORE = "semantic_error", "cuda_failure"


def fail(
    stage: Stage | EngineHarness, troubles: Mapping[JobId, Trouble], runs: Mapping[JobId, float]
) -> None:
    """Let these jobs fail and no others."""
    sim = stage.sim
    sim.failing = Failing(troubles, read_rules().failure, sim.loop, sim.nodes, sim.runtime, runs)


def harness(
    *times_s: float, rules: RunRules | None = None, delays: Delays | None = None, **job: object
) -> tuple[EngineHarness, JobEntry]:
    """A job of 1,000 s on a node's 8 GPUs, whose attempts fail after these times; where there
    is one, all of them for good.
    """
    settings = EngineSettings(policy="fifo", min_runtime_s=0.0, retry_by_failure_class=False)
    made = EngineHarness(training=2, inference=0, rules=rules, delays=delays, settings=settings)
    trials = len(times_s) if len(times_s) > 1 else None
    reason = FOR_GOOD if trials is None else ONCE_OR_MORE
    fail(
        made,
        {JobId("j"): Trouble(reason=reason, trials=trials, times_s=times_s)},
        {JobId("j"): 1e3},
    )
    asked: dict[str, object] = {"work_s": 1000.0, "max_restarts": 5, **job}
    return made, made.submit("j", **asked)  # type: ignore[arg-type]  # as the test says


def figures(made: EngineHarness) -> FailureFigures:
    """What has failed up to now."""
    assert made.sim.failing is not None
    return made.sim.failing.figures()


def preempt(job: JobEntry) -> Preempt:
    """Take its GPUs."""
    return Preempt(job_id=job.job_id, reason="the test says so")


def put_aside(made: EngineHarness, job: JobEntry) -> JobEntry:
    """Suspend it and let another one compute on its GPUs, which is told."""
    [worker] = job.workers.values()
    other = made.submit("other", work_s=1e4, gpus_per_worker=len(worker.gpu_uuids))
    aside = Suspend(job_id=job.job_id, reason="the test says so")
    made.decide(aside, beside(other, job))
    return other


def take_up(made: EngineHarness, job: JobEntry, other: JobEntry) -> None:
    """Let them change."""
    aside = Suspend(job_id=other.job_id, reason="the test says so")
    made.decide(aside, Resume(job_id=job.job_id, reason="the test says so"))


def beside(job: JobEntry, host: JobEntry, *, is_packed: bool = False) -> Start:
    """Start a job of one worker on the GPUs of another one."""
    [worker] = host.workers.values()
    seat = Placement(node=NodeName("t0"), worker_count=1, gpu_uuids=worker.gpu_uuids)
    return structs.replace(start(job, "t0"), placements=(seat,), is_packed=is_packed)


def fails_in(made: EngineHarness, seconds: float, gpu_s: float) -> None:
    """The next failure comes after so long and not before, and it cost so much."""
    before = figures(made)
    made.wait(seconds - 1.0)
    assert figures(made).trials == before.trials
    made.wait(1.5)
    assert figures(made).trials == before.trials + 1
    assert figures(made).gpu_s - before.gpu_s == pytest.approx(gpu_s)


def with_pre_run(prerun_s: float, fails_after_s: float) -> tuple[EngineHarness, JobEntry]:
    """A job of 8 GPUs that saves and runs on one of them first; it fails after so long."""
    made = EngineHarness(training=1, inference=0)
    trouble = Trouble(reason=ONCE_OR_MORE, trials=1, times_s=(fails_after_s,))
    fail(made, {JobId("j"): trouble}, {JobId("j"): 1e3})
    spec = make_spec(
        gpus_per_worker=8,
        retry=RetrySpec(max_restarts=1),
        checkpoint=CheckpointSpec(path="/saves"),
        prerun=PrerunSpec(time_s=prerun_s),
    )
    made.sim.submit([Submission(at_s=0.0, job_id=JobId("j"), spec=spec, work_s=1e3)])
    made.settle()
    return made, made.engine.state.jobs[JobId("j")]
