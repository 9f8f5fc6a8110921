"""What Themis remembers: the lease of a job that grows, and the record of an app."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    AppRecord,
    Attendance,
    Work,
)
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.leases import Memory
from tests.builders import NOW_S, make_worker_view
from tests.policies.schedulers.themis.test_policy import cluster, running, waiting

SEARCH = "app team/search"


def test_workers_by_which_a_job_grows_have_the_lease_of_its_gang() -> None:
    """They begin none of their own, or who grows a little each time would never be asked to go."""
    job = running(waiting("a", workers=(1, 8)), ["n1"], started_s_ago=300.0)
    memory = Memory(leases={job.job_id: NOW_S + 900.0})
    arbiter = Arbiter(ThemisKnobs(lease_s=1200.0), cluster({"n1": 8}, [job]), memory)
    arbiter.run()
    arbiter.plan()
    (given,) = arbiter.sale.given.values()
    assert sum(placement.worker_count for placement in given.more) == 7
    assert arbiter.memory.leases == {job.job_id: NOW_S + 900.0}


@pytest.mark.parametrize("waited_s", [(100.0, 500.0), (500.0, 100.0)])
def test_an_app_was_submitted_with_its_first_trial(waited_s: tuple[float, float]) -> None:
    """Also where a pass meets several of them at once, in whatever order."""
    trials = [
        replace(waiting(f"t{at}", waited_s=ago, app="search"), tenant="team")
        for at, ago in enumerate(waited_s)
    ]
    attendance = Attendance()
    attendance.note(cluster({"n1": 8}, trials))
    assert attendance.apps[SEARCH].submitted_at_s == NOW_S - 500.0


@pytest.mark.parametrize(("trials", "is_new"), [(1, True), (2, False)])
def test_a_gang_after_its_prerun_has_had_nothing_yet(trials: int, is_new: bool) -> None:
    """What one worker was given in the pre-run was another gang's. Of an app of several trials it
    was the app's."""
    jobs = [
        replace(waiting(f"t{at}", workers=(4, 4), app="search"), tenant="team")
        for at in range(trials)
    ]
    before = {JobId(job.job_id): Work(60.0, 1) for job in jobs}
    record = AppRecord(NOW_S - 60.0, 0.0, before, granted_at_s=NOW_S - 50.0, rho=2.0)
    attendance = Attendance(at_s=NOW_S - 60.0, apps={SEARCH: record})
    attendance.note(cluster({"n1": 8}, jobs))
    found = attendance.apps[SEARCH]
    assert (found.granted_at_s, found.rho) == ((None, inf) if is_new else (NOW_S - 50.0, 2.0))
    assert {work.gpus for work in found.jobs.values()} == {4}


@pytest.mark.parametrize(
    ("first_s", "since_s", "placed", "granted_at_s"),
    [
        pytest.param(None, NOW_S - 300.0, False, None, id="who never ran"),
        pytest.param(NOW_S - 200.0, NOW_S - 40.0, False, NOW_S - 40.0, id="who ran and waits"),
        pytest.param(NOW_S - 200.0, None, True, NOW_S, id="who runs"),
    ],
)
def test_who_comes_from_another_policy_has_had_what_that_gave(
    first_s: float | None, since_s: float | None, placed: bool, granted_at_s: float | None
) -> None:
    """Until then it was served; only who never was is infinitely poor."""
    made = waiting("j", waited_s=300.0)
    job = replace(made, first_started_at_s=first_s, waiting_since_s=since_s)
    if placed:
        job = replace(job, placed=(make_worker_view("j", 0, "n1"),), state=JobState.RUNNING)
    attendance = Attendance()
    attendance.note(cluster({"n1": 8}, [job]))
    [record] = attendance.apps.values()
    assert (record.granted_at_s, record.rho) == (granted_at_s, inf)
