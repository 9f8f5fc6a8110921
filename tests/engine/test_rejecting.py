"""A policy refuses a job: it ends by an event of its own, and only before it has run."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import JobId, JobState
from coordinator.engine.state.accounting import figures
from coordinator.policies.contract.decisions import Preempt, Reject
from coordinator.service.api import explain
from tests.engine.house import House, start, state

WHY = "its deadline cannot be met; the earliest that can be promised is 90 s after submission"


def reject(job_id: JobId) -> Reject:
    """What the test's policy says."""
    return Reject(job_id=job_id, earliest_s=90.0, reason=WHY)


def test_a_rejected_job_ends_and_says_the_earliest_date() -> None:
    """It has failed, and its error and `explain` name the date; it holds nothing."""
    house = House()
    job = house.submit()
    house.decide(reject(job.job_id))
    assert state(job) == JobState.FAILED
    assert (job.error, job.is_rejected) == (WHY, True)
    assert explain.job(house.engine, job) == (WHY,)
    assert house.engine.state.counters.jobs_rejected == 1
    assert house.engine.state.counters.jobs_failed == 0
    assert house.engine.check() == []


def test_a_rejected_job_is_a_figure_of_its_own() -> None:
    """What a live cell reports counts it as submitted and as rejected, and not as failed."""
    house = House()
    house.submit("stays")
    house.decide(reject(house.submit("goes").job_id))
    found = figures(house.engine.state)
    assert (found.jobs_submitted, found.jobs_rejected, found.jobs_failed) == (2, 1, 0)


@pytest.mark.parametrize(("at_first", "later"), [(True, False), (False, True)])
def test_a_promise_is_of_the_first_start(at_first: bool, later: bool) -> None:
    """What is said of later attempts changes nothing: whoever has begun is refused by nobody."""
    house = House()
    job = house.submit()
    house.decide(structs.replace(start(job, "t0"), is_promised=at_first))
    house.decide(Preempt(job_id=job.job_id, reason="the test says so"))
    house.wait(60.0)
    house.decide(structs.replace(start(job, "t0"), is_promised=later))
    assert (job.attempt.number, job.is_promised) == (2, at_first)


def test_a_job_that_runs_is_not_rejected() -> None:
    """The decision is refused with a reason and changes nothing."""
    house = House()
    job = house.submit()
    house.start(job, "t0")
    assert house.refusals(reject(job.job_id)) == ["j does not wait"]
    assert state(job) == JobState.RUNNING


def test_a_job_that_was_preempted_is_not_rejected() -> None:
    """Whoever was let in once stays in: only a job that never started can be refused."""
    house = House()
    job = house.submit()
    house.start(job, "t0")
    house.decide(Preempt(job_id=job.job_id, reason="the test says so"))
    house.wait(60.0)
    assert state(job) == JobState.PENDING
    assert house.refusals(reject(job.job_id)) == ["j was started before: it is no longer refused"]
    assert not job.is_rejected


def test_a_job_that_is_not_there_is_not_rejected() -> None:
    """A stale decision is refused."""
    house = House()
    assert house.refusals(reject(JobId("nobody"))) == ["nobody does not wait"]
