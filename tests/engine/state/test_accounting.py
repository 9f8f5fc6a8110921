"""What the figures count: every job that was submitted, also those that nobody has started."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import JobId, JobState
from coordinator.engine.state.accounting import (
    Durations,
    ReclaimTimes,
    figures,
    plain,
    queueing_s,
)
from coordinator.engine.state.job_groups import AttemptEntry, WaitEntry
from coordinator.engine.state.tables import ClusterState, JobEntry
from tests.builders import make_spec
from tests.tables import each_row

SPEC = make_spec()


def entry(job_id: str, **changes: object) -> JobEntry:
    """A job of the queue, submitted at 100 s."""
    values: dict[str, object] = {
        "submitted_at_s": 100.0,
        "wait": WaitEntry(pending_since_s=100.0),
        **changes,
    }
    return JobEntry(job_id=JobId(job_id), spec=SPEC, tenant="t", user="u", **values)  # type: ignore[arg-type]  # the test names the fields


def ran(at_s: float, queueing_s: float) -> dict[str, object]:
    """What an attempt that ran at an instant leaves behind, after that much waiting."""
    return {
        "attempt": AttemptEntry(ran_at_s=at_s),
        "wait": WaitEntry(pending_since_s=100.0, queueing_s=queueing_s),
    }


def state(*jobs: JobEntry) -> ClusterState:
    """A cell at 160 s with these jobs."""
    return ClusterState(now_s=160.0, jobs={job.job_id: job for job in jobs})


WAITS = entry("waits")
RUNS = entry("runs", state=JobState.RUNNING, **ran(120.0, 20.0))
AGAIN = entry("again", wait=WaitEntry(pending_since_s=150.0, queueing_s=5.0))
DONE = entry("done", state=JobState.SUCCEEDED, finished_at_s=140.0, **ran(110.0, 10.0))
GIVEN_UP = entry("given-up", state=JobState.CANCELLED, finished_at_s=130.0)
FAILED = entry("failed", state=JobState.FAILED, finished_at_s=150.0, **ran(101.0, 1.0))


@each_row(
    ("job", "waited_s"),
    [(WAITS, 60.0), (RUNS, 20.0), (AGAIN, 15.0), (DONE, 10.0), (GIVEN_UP, 30.0), (FAILED, 1.0)],
)
def test_queueing_time_is_all_waits_until_now_or_the_end(job: JobEntry, waited_s: float) -> None:
    """A wait that goes on counts so far, one that was given up counts until then."""
    assert queueing_s(job, 160.0) == waited_s


def test_queueing_time_counts_every_job_and_jct_those_that_succeeded() -> None:
    """A cell that starts nothing has long queues, not empty ones."""
    found = figures(state(WAITS, RUNS, AGAIN, DONE, GIVEN_UP, FAILED))
    assert found.queueing_s.mean == pytest.approx((60 + 20 + 15 + 10 + 30 + 1) / 6)
    assert found.jct_s == Durations(mean=40.0, p50=40.0, p95=40.0)
    only_waiting = figures(state(WAITS))
    assert only_waiting.queueing_s.p95 == 60.0


def test_what_nobody_measured_is_none_and_not_zero() -> None:
    """A script that compares times must not take a cell without any for the fastest."""
    found = figures(state(WAITS))
    assert found.jct_s == Durations()
    assert found.reclaim_s == found.lapse_s == ReclaimTimes()
    assert plain(found)["jct_s"] == {"mean": None, "p50": None, "p95": None}
    assert figures(state()).queueing_s == Durations()


def test_waits_count_until_the_instant_that_is_asked_for() -> None:
    """Between two events time passes, and who waits has waited longer."""
    assert figures(state(WAITS), now_s=190.0).queueing_s.mean == 90.0


@each_row(
    ("job", "deadline_s", "due", "met"),
    [
        (DONE, 40.0, 1, 1),  # it took just that
        (DONE, 39.0, 1, 0),
        (RUNS, 60.0, 0, 0),  # it may still be in time
        (RUNS, 59.0, 1, 0),
        (FAILED, 500.0, 1, 0),
        (GIVEN_UP, 10.0, 0, 0),  # nobody waits for it any more
        (DONE, None, 0, 0),
    ],
)
def test_a_deadline_is_due_when_its_job_ended_or_is_too_late(
    job: JobEntry, deadline_s: float | None, due: int, met: int
) -> None:
    """And met only by a job that succeeded in time."""
    spec = structs.replace(SPEC, deadline_s=deadline_s)
    found = figures(state(structs.replace(job, spec=spec)))
    assert (found.deadlines_due, found.deadlines_met) == (due, met)
