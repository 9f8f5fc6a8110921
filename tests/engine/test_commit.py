"""What the engine refuses of a policy's decisions, and how it ends a job that a policy rejects."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import JobId, JobState
from coordinator.engine.state.accounting import figures
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import Preempt, Reject, Resize
from coordinator.service.api import explain_job
from tests.harness.cluster.engine import EngineHarness, start, state


def harness_of(*tenants: TenantSettings) -> EngineHarness:
    """Two nodes, and a policy that knows no tenants."""
    return EngineHarness(inference=0, settings=EngineSettings(tenants=tenants, min_runtime_s=0.0))


def test_a_start_beyond_a_quota_is_refused() -> None:
    """Whatever the policy says: the job waits on, and the refusal names tenant and limit."""
    harness = harness_of(TenantSettings(name="a", guarantee_gpus=8, borrow_limit_gpus=0))
    first, second = harness.submit("j1", tenant="a"), harness.submit("j2", tenant="a")
    harness.start(first, "t0")
    (why,) = harness.refusals(start(second, "t1"))
    assert why.startswith("tenant a: 8 GPUs on top of the 8")
    assert state(second) == JobState.PENDING


def test_a_guaranteed_job_is_not_stopped_for_another_tenant() -> None:
    """Both the stop and the start on what it holds are refused."""
    harness = harness_of(TenantSettings(name="a", guarantee_gpus=8))
    safe, other = harness.submit("j1", tenant="a"), harness.submit("j2", tenant="b")
    harness.start(safe, "t0")
    whys = harness.refusals(Preempt(job_id=safe.job_id, reason="test"), start(other, "t0"))
    assert whys == [
        "tenant a is within its guarantee and loses nothing to another tenant",
        "no job starts on the GPUs it would free",
    ]
    assert state(safe) == JobState.RUNNING


def test_a_shrink_for_nobody_gives_another_tenant_nothing_a_pass_later() -> None:
    """Under any policy: the job keeps its workers, and the other's start finds no room."""
    harness = harness_of(TenantSettings(name="a", guarantee_gpus=16))
    wide = harness.submit("j1", tenant="a", workers=(1, 2))
    other = harness.submit("j2", tenant="b")
    harness.start(wide, "t0", flexible=("t1",))
    harness.wait(1.0)
    leaves = Resize(job_id=wide.job_id, removed_workers=(1,), reason="test")
    (why,) = harness.refusals(leaves)
    assert why == "tenant a is within its guarantee, and none of its jobs takes all of this"
    assert harness.refusals(start(other, "t1")) != []
    harness.wait(60.0)
    assert wide.running_workers == 2
    assert state(other) == JobState.PENDING


def test_a_stop_for_nobody_gives_another_tenant_nothing_a_pass_later() -> None:
    """Neither does a job go that has to wait for its turn again behind the other's."""
    harness = harness_of(TenantSettings(name="a", guarantee_gpus=8))
    safe, other = harness.submit("j1", tenant="a"), harness.submit("j2", tenant="b")
    harness.start(safe, "t0")
    assert len(harness.refusals(Preempt(job_id=safe.job_id, reason="test"))) == 1
    assert len(harness.refusals(start(other, "t0"))) == 1
    assert state(safe) == JobState.RUNNING


WHY = "its deadline cannot be met; the earliest that can be promised is 90 s after submission"


def reject(job_id: JobId) -> Reject:
    """What the test's policy says."""
    return Reject(job_id=job_id, earliest_s=90.0, reason=WHY)


def test_a_rejected_job_ends_and_says_the_earliest_date() -> None:
    """It has failed, and its error and `explain` name the date; it holds nothing."""
    harness = EngineHarness()
    job = harness.submit()
    harness.decide(reject(job.job_id))
    assert state(job) == JobState.FAILED
    assert (job.error, job.is_rejected) == (WHY, True)
    assert explain_job.reasons(harness.engine, job) == (WHY,)
    assert harness.engine.state.counters.jobs_rejected == 1
    assert harness.engine.state.counters.jobs_failed == 0
    assert harness.engine.check() == []


def test_a_rejected_job_is_a_figure_of_its_own() -> None:
    """What a live cell reports counts it as submitted and as rejected, and not as failed."""
    harness = EngineHarness()
    harness.submit("stays")
    harness.decide(reject(harness.submit("goes").job_id))
    found = figures(harness.engine.state)
    assert (found.jobs_submitted, found.jobs_rejected, found.jobs_failed) == (2, 1, 0)


@pytest.mark.parametrize(("at_first", "later"), [(True, False), (False, True)])
def test_a_promise_is_of_the_first_start(at_first: bool, later: bool) -> None:
    """What is said of later attempts changes nothing: whoever has begun is refused by nobody."""
    harness = EngineHarness()
    job = harness.submit()
    harness.decide(structs.replace(start(job, "t0"), is_promised=at_first))
    harness.decide(Preempt(job_id=job.job_id, reason="the test says so"))
    harness.wait(60.0)
    harness.decide(structs.replace(start(job, "t0"), is_promised=later))
    assert (job.attempt.number, job.is_promised) == (2, at_first)


def test_a_job_that_runs_is_not_rejected() -> None:
    """The decision is refused with a reason and changes nothing."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    assert harness.refusals(reject(job.job_id)) == ["j does not wait"]
    assert state(job) == JobState.RUNNING


def test_a_job_that_was_preempted_is_not_rejected() -> None:
    """Whoever was let in once stays in: only a job that never started can be refused."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    harness.decide(Preempt(job_id=job.job_id, reason="the test says so"))
    harness.wait(60.0)
    assert state(job) == JobState.PENDING
    assert harness.refusals(reject(job.job_id)) == ["j was started before: it is no longer refused"]
    assert not job.is_rejected


def test_a_job_that_is_not_there_is_not_rejected() -> None:
    """A stale decision is refused."""
    harness = EngineHarness()
    assert harness.refusals(reject(JobId("nobody"))) == ["nobody does not wait"]
