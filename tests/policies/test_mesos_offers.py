"""Mesos: what one framework refuses or cannot use comes to the others, in bounded time."""

from __future__ import annotations

import pytest

from common.model import JobId, JobState
from coordinator.policies.bundles import policy
from coordinator.policies.decisions import Start
from tests.policies.tenant_books import names
from tests.policies.tenant_passes import Asked, Cell
from tests.policies.test_never_told import WHY, cell, gang, small


def states(played: Cell) -> dict[str, JobState]:
    """Of all jobs, by name."""
    return {job_id: job.state for job_id, job in played.engine.state.jobs.items()}


def test_what_is_refused_comes_to_the_others_before_it_is_offered_again() -> None:
    """A gang waits for a node that is busy for long; smaller jobs run beside it meanwhile."""
    played = Cell("mesos", (), nodes=2)
    gang_of_two = Asked(tenant="a", at_s=1.0, workers=(2, 2), gpus=8)
    ones = [Asked(tenant="d", at_s=at_s, work_s=600.0) for at_s in (10.0, 20.0)]
    played.ask([Asked(tenant="b", gpus=8, work_s=100000.0), gang_of_two, *ones])
    played.run(until_s=5000.0)
    assert states(played) == {
        "b0": JobState.RUNNING,
        "a1": JobState.PENDING,
        "d2": JobState.SUCCEEDED,
        "d3": JobState.SUCCEEDED,
    }


@pytest.mark.parametrize("tenant", ["a", "d"])
def test_a_gang_that_can_never_run_hoards_nothing(tenant: str) -> None:
    """Neither other frameworks nor the jobs behind it wait for it."""
    played = Cell("mesos", (), nodes=1)
    never = Asked(tenant="a", workers=(2, 2), gpus=8)
    played.ask([never, Asked(tenant=tenant, at_s=10.0, work_s=600.0)])
    played.run(until_s=1000.0)
    assert states(played) == {"a0": JobState.PENDING, f"{tenant}1": JobState.SUCCEEDED}


def test_it_is_told_that_it_can_never_run() -> None:
    """The job behind it in its framework starts, and nobody is told to wait for its gang."""
    made, snapshot = policy("mesos"), cell(gang(), small("late", tenant="a"))
    assert names(made.allocate(snapshot, b"").decisions, Start) == {"late"}
    told = {hold.job_id: hold.blockers for hold in made.hold(snapshot, b"")}
    assert told[JobId("big")] == (WHY,)
    assert not any("behind big" in why for why in told.get(JobId("late"), ()))
