"""What a policy says of a job that has GPUs: its own measure, and why it is not stopped."""

from __future__ import annotations

from common.model import JobId
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.registry import POLICIES, policy
from coordinator.service.api import explain_job
from tests.harness.cluster.engine import EngineHarness
from tests.tables import each_row


def harness_of(name: str, *, path: str | None = None) -> EngineHarness:
    """A node whose GPUs one job has held for ten minutes while another one waits."""
    harness = EngineHarness(
        training=1, inference=0, settings=EngineSettings(policy=name, min_runtime_s=0.0)
    )
    harness.engine.policy = policy(name)
    harness.submit("runs", work_s=9000.0, path=path)
    harness.wait(1.0)
    harness.submit("waits", work_s=9000.0)
    harness.wait(599.0)
    harness.decide()
    return harness


@each_row(
    ("name", "said"),
    [
        ("themis", "rho of its job runs is 0.50 with what it holds"),
        ("themis", "its lease ends in 600 s"),
        ("themis-simple", "rho of its job runs on its share from now on is 0.97"),
        ("las:round_s=7200", "it should run 100% of the time"),
        ("themis-lp:round_s=7200", "it should run 100% of the time"),
    ],
)
def test_a_running_job_is_told_how_it_stands(name: str, said: str) -> None:
    """`explain` has the policy's own words beside the count of workers."""
    harness = harness_of(name)
    reasons = explain_job.reasons(harness.engine, harness.engine.state.jobs[JobId("runs")])
    assert "1 worker runs, 0 of them flexible" in reasons
    assert [reason for reason in reasons if said in reason], reasons


@each_row("name", ["themis", "themis-simple", "las:round_s=7200", "afs-p"])
def test_it_is_told_that_its_work_keeps_it_where_it_does(name: str) -> None:
    """A job that never saves has its GPU-seconds named; one that saves when asked does not."""
    kept = "it keeps its base gang when its turn ends: a stop would lose 4800 GPU-s of work"
    never, saves = (
        harness.engine.explain.standing(JobId("runs"))
        for harness in (harness_of(name), harness_of(name, path="/saves"))
    )
    assert [reason for reason in never if reason.startswith(kept)], never
    assert not [reason for reason in saves if reason.startswith("it keeps its base gang")]


@each_row("name", sorted(POLICIES))
def test_who_is_not_there_has_no_standing(name: str) -> None:
    """Of an unknown job no policy says anything, and none fails."""
    assert harness_of("fifo").engine.explain.standing(JobId("nobody")) == ()
    harness = EngineHarness(training=1, inference=0, settings=EngineSettings(policy=name))
    assert policy(name).standing(harness.engine.snapshot(), b"", JobId("nobody")) == ()
