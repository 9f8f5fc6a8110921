"""The parts of ElasticFlow beside its plans: who asks for a promise, for what, and what is told."""

from __future__ import annotations

from math import inf

import pytest
from msgspec import structs

from common.model import JobState, Preemptibility, WorkerRange
from common.profile import JobProfile
from coordinator.policies.contract.job_groups import Behind
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.qos.applicants import applicants, fixed_gpus
from coordinator.policies.schedulers.qos.claims import Claims
from coordinator.policies.schedulers.qos.elasticflow import Settled
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.overheads import Overhead
from coordinator.policies.schedulers.qos.reasons import grant_reason, refusal, waiting_reason
from coordinator.policies.schedulers.qos.sizes import least_in_time
from coordinator.policies.schedulers.qos.timeline import Piece
from tests.harness.builders import NOW_S, job_with, make_job_view, make_snapshot, make_worker_view
from tests.tables import each_row

PLAN = (Piece(NOW_S + 20.0, NOW_S + 50.0, 1), Piece(NOW_S + 50.0, NOW_S + 90.0, 2))


def asking(name: str, *, came_s: float = 0.0, **changed: object) -> JobView:
    """A job with a deadline that waits."""
    job = make_job_view(name, submitted_at_s=NOW_S + came_s)
    return job_with(job, **{"deadline_at_s": NOW_S + 100.0, **changed})


# --- who asks -------------------------------------------------------------------------------------


@each_row(
    ("within_s", "margin", "speedup", "expected"),
    [
        (400.0, 1.0, (), 1),
        (120.0, 1.0, (), 4),
        (100.0, 1.0, (), 4),
        (100.0, 1.1, (), 5),
        (50.0, 1.0, (), 8),
        (49.0, 1.0, (), 1),
        (-1.0, 1.0, (), 1),
        (200.0, 1.0, ((1, 1.0), (2, 1.5), (4, 2.0), (8, 1.9)), 4),
        (199.0, 1.0, ((1, 1.0), (2, 1.5), (4, 2.0), (8, 1.9)), 1),
    ],
)
def test_the_fewest_workers_in_time_are_the_base_gang_where_none_are(
    within_s: float, margin: float, speedup: tuple[tuple[int, float], ...], expected: int
) -> None:
    """Of 400 s of work, by its profile, else in proportion."""
    job = asking("j", workers=WorkerRange(min=1, max=8), remaining_work_s=400.0)
    job = structs.replace(job, profile=JobProfile(speedup=speedup), deadline_at_s=NOW_S + within_s)
    assert least_in_time(job, NOW_S, margin) == expected


def test_a_pre_run_and_who_has_no_deadline_begin_with_their_base_gang() -> None:
    """A deadline is that of the gang behind a pre-run, whose own work is no measure of it."""
    job = asking("j", workers=WorkerRange(min=1, max=8), remaining_work_s=400.0)
    gang = Behind(workers=job.workers, gpus_per_worker=1, work_s=1.0, estimate_source="declared")
    assert least_in_time(structs.replace(job, deadline_at_s=None), NOW_S) == 1
    pre_run = structs.replace(job, deadline_at_s=NOW_S + 100.0, behind=gang)
    assert least_in_time(pre_run, NOW_S) == 1


def test_newcomers_ask_in_order_of_submission_and_of_equals_by_id() -> None:
    """Whatever order they are given in."""
    jobs = (asking("c"), asking("b"), asking("a", came_s=5.0))
    found = applicants(jobs, ())
    assert [job.job_id for job in found.newcomers] == ["b", "c", "a"]
    assert not found.promised and not found.soft


@pytest.mark.parametrize(
    "begun", [{"state": JobState.STARTING}, {"first_started_at_s": NOW_S - 9.0}]
)
def test_who_has_begun_asks_no_more(begun: dict[str, object]) -> None:
    """It starts, or ran once and waits again: it is not refused, whoever let it in."""
    job = job_with(asking("a"), **begun)
    assert applicants((job,), ()).promised == (job,)


def test_who_was_let_in_before_asks_no_more() -> None:
    """It was promised its deadline and has not begun yet."""
    job, other = asking("a"), asking("b")
    found = applicants((job, other), {"a"})
    assert (found.promised, found.newcomers) == ((job,), (other,))


def test_without_a_deadline_there_is_nothing_to_promise() -> None:
    """Whether it runs or waits."""
    jobs = (
        asking("a", deadline_at_s=None),
        asking("b", deadline_at_s=None, state=JobState.RUNNING),
    )
    assert applicants(jobs, {"a", "b"}).soft == jobs


@pytest.mark.parametrize(
    ("state", "preemptibility", "gpus"),
    [
        (JobState.RUNNING, Preemptibility.SEMI, 4),
        (JobState.RUNNING, Preemptibility.FULL, 0),
        (JobState.PENDING, Preemptibility.SEMI, 0),
    ],
)
def test_only_who_runs_and_cannot_be_stopped_is_no_part_of_plans(
    state: JobState, preemptibility: Preemptibility, gpus: int
) -> None:
    """Two workers of two GPUs that stay; the one that leaves gives its GPUs back."""
    workers = [make_worker_view("a", at, "n0", gpus=2, is_leaving=at == 2) for at in range(3)]
    job = make_job_view(
        "a",
        state=state,
        preemptibility=preemptibility,
        gpus_per_worker=2,
        placed=() if state == JobState.PENDING else workers,
    )
    assert fixed_gpus(job) == gpus


# --- what they claim ------------------------------------------------------------------------------


def claimed(job: JobView, gpus: int = 8, *, start_s: float = 0.0, unseen_s: float = 0.0) -> Claim:
    """Of so many GPUs; of its attempt so much was counted as done that nobody did."""
    snapshot = structs.replace(make_snapshot(nodes=[], jobs=[job]), start_s=start_s)
    known = Overhead(attempt=job.attempt.number, has_run=True, workers=1, unseen_s=unseen_s)
    made = Claims(
        snapshot,
        {job.job_id: known},
        margin=2.0,
        restart_s=30.0,
        powers_of_two=True,
        tenancy=None,
    )
    return made.of(job, "H100", gpus)


def running() -> JobView:
    """100 s of work are left to one worker of up to four, by its estimate."""
    job = make_job_view(
        "a", state=JobState.RUNNING, workers=(1, 4), placed=[make_worker_view("a", 0, "n0")]
    )
    return job_with(job, estimated_left_s=100.0, as_of_s=NOW_S, started_at_s=NOW_S - 50.0)


def test_what_an_estimate_does_not_see_is_claimed_where_changes_take_time() -> None:
    """With the margin upon it; where nothing takes time the estimate is all."""
    assert claimed(running(), start_s=15.0, unseen_s=40.0).work_s == pytest.approx(2 * 140.0)
    assert claimed(running(), unseen_s=40.0).work_s == pytest.approx(2 * 100.0)


def test_sizes_are_those_that_the_pool_holds() -> None:
    """Where a worker stands for two on this type each has twice the GPUs."""
    assert claimed(running()).sizes == (1, 2, 4)
    assert claimed(running(), gpus=3).sizes == (1, 2)
    twice = structs.replace(running(), gpu=make_job_view("b", multiplier={"H100": 2}).gpu)
    found = claimed(twice, gpus=3)
    assert (found.sizes, found.gpus_per_worker) == ((1,), 2)


# --- what is told ---------------------------------------------------------------------------------


def test_a_refusal_names_what_was_asked_for_and_what_could_be_promised() -> None:
    """Both from submission, in whole seconds; the tenant where its quota binds."""
    job = asking("a", came_s=-10.0)
    found = refusal(job, NOW_S + 100.0, NOW_S + 290.0000001, "lab")
    assert found.earliest_s == 300.0
    assert found.reason == (
        "its deadline 110 s after submission cannot be met without breaking a promise to another "
        "job or within what tenant lab may be promised; the earliest that can be promised is 300 s "
        "after submission"
    )


def test_where_no_date_can_be_promised_a_refusal_names_none() -> None:
    """Its gang is too large for the pool."""
    found = refusal(asking("a"), NOW_S + 100.0, inf, "")
    assert found.earliest_s is None
    assert found.reason.endswith("cannot be met at all: its base gang never fits")


def test_a_grant_tells_the_share_of_now_and_what_is_to_spare() -> None:
    """Its plan ends 10 s before its deadline; in the first 20 s it needs no worker."""
    job = asking("a")
    assert grant_reason(job, 2, PLAN, NOW_S) == (
        "2 now: minimum share 0 workers, 10 s before its deadline"
    )
    assert "minimum share 1 worker," in grant_reason(job, 2, PLAN, NOW_S + 30.0)
    assert "without a promise" in grant_reason(job, 2, None, NOW_S)


def test_who_waits_on_a_promise_is_told_when_it_starts_at_the_latest() -> None:
    """By its plan; without one there is no room."""
    assert "starts in 20 s at the latest, with 1 worker;" in waiting_reason(PLAN, NOW_S)
    for nothing in (None, ()):
        assert waiting_reason(nothing, NOW_S).endswith("leave no room for its base gang")


@each_row(
    ("now_s", "rests_until_s"), [(100.0, None), (100.5, 130.0), (129.9, 130.0), (130.0, None)]
)
def test_shares_rest_between_rounds_until_a_plan_wants_otherwise(
    now_s: float, rests_until_s: float | None
) -> None:
    """At the instant at which they were settled they are again: jobs stop and start then."""
    for other_s in (130.0, 160.0, inf):
        for settled in (Settled(100.0, 130.0, other_s), Settled(100.0, other_s, 130.0)):
            assert settled.rests_until_s(now_s) == rests_until_s
    assert Settled().rests_until_s(0.0) is None
