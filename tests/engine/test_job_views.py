"""The view of a job: a group with nothing to say is shared, the others say what happened."""

from __future__ import annotations

from msgspec.structs import replace

from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Preempt
from coordinator.policies.contract.job_groups import (
    ANY_NODE,
    NO_ATTEMPT,
    NO_PREEMPTIONS,
    NO_PROGRESS,
    NO_RESIZES,
    NO_STEP_TIMES,
    NOTHING_TO_SAVE,
)
from coordinator.policies.contract.snapshot import JobView
from tests.engine.stopped_jobs import says
from tests.harness.cluster.engine import EngineHarness


def view(harness: EngineHarness, job: JobEntry) -> JobView:
    """What a policy sees of a job now."""
    [seen] = [seen for seen in harness.engine.snapshot().jobs if seen.job_id == job.job_id]
    return seen


def test_a_job_that_never_started_has_shared_groups() -> None:
    """A long line costs little memory: of its groups a waiting job owns only the estimate."""
    harness = EngineHarness(training=1, inference=0)
    seen = view(harness, harness.submit("a", work_s=100.0))
    shared = (
        (seen.nodes, ANY_NODE),
        (seen.attempt, NO_ATTEMPT),
        (seen.preemptions, NO_PREEMPTIONS),
        (seen.resizes, NO_RESIZES),
        (seen.progress, NO_PROGRESS),
        (seen.saves, NOTHING_TO_SAVE),
        (seen.steps, NO_STEP_TIMES),
    )
    assert all(group is constant for group, constant in shared)


def test_groups_say_what_happened_to_a_job() -> None:
    """While it runs, and while it waits again after a preemption."""
    harness = EngineHarness(training=1, inference=0)
    job = harness.submit("a", work_s=1e6)
    harness.start(job, "t0")
    for step in (10, 20):
        harness.wait(5.0)
        says(harness, job, step, total_steps=1000)
    runs, stopped_at_s = view(harness, job), harness.engine.state.now_s
    assert (runs.attempt.number, runs.attempt.started_at_s) == (1, job.attempt.ran_at_s)
    assert (runs.progress.step, runs.progress.computing_gpus) == (20, 8)
    assert (runs.saves.has_saved, runs.saves.unsaved_gpus) == (True, 8)
    assert (runs.steps.step_time_s, runs.steps.workers) == (0.5, 1)
    harness.decide(Preempt(job_id=job.job_id, reason="test"))
    harness.wait(60.0)
    waits = view(harness, job)
    assert waits.preemptions == replace(NO_PREEMPTIONS, count=1, latest_at_s=stopped_at_s)
    assert waits.attempt == replace(runs.attempt, started_at_s=None)
    assert waits.progress == replace(runs.progress, computing_gpus=0)
    assert waits.saves == NOTHING_TO_SAVE
