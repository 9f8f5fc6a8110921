"""What the figures count: every job that was submitted, and all its time in the queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, NodeRole, StopReason
from coordinator.engine.state.accounting import Durations, ReclaimTimes, figures, plain, queueing_s
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.job_groups import AttemptEntry, WaitEntry
from coordinator.engine.state.tables import ClusterState, JobEntry
from coordinator.policies.contract.decisions import Loan, Preempt, Reclaim
from coordinator.policies.contract.snapshot import JobView
from coordinator.sim.run.cluster import Delays
from tests.engine.stopped_jobs import gone_report, lend
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT, EngineHarness, state
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


def cell_of(*jobs: JobEntry) -> ClusterState:
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
    found = figures(cell_of(WAITS, RUNS, AGAIN, DONE, GIVEN_UP, FAILED))
    assert found.queueing_s.mean == pytest.approx((60 + 20 + 15 + 10 + 30 + 1) / 6)
    assert found.jct_s == Durations(mean=40.0, p50=40.0, p95=40.0)
    only_waiting = figures(cell_of(WAITS))
    assert only_waiting.queueing_s.p95 == 60.0


def test_what_nobody_measured_is_none_and_not_zero() -> None:
    """A script that compares times must not take a cell without any for the fastest."""
    found = figures(cell_of(WAITS))
    assert found.jct_s == Durations()
    assert found.reclaim_s == found.lapse_s == ReclaimTimes()
    assert plain(found)["jct_s"] == {"mean": None, "p50": None, "p95": None}
    assert figures(cell_of()).queueing_s == Durations()


def test_waits_count_until_the_instant_that_is_asked_for() -> None:
    """Between two events time passes, and who waits has waited longer."""
    assert figures(cell_of(WAITS), now_s=190.0).queueing_s.mean == 90.0


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
    found = figures(cell_of(structs.replace(job, spec=spec)))
    assert (found.deadlines_due, found.deadlines_met) == (due, met)


T0, I0 = NodeName("t0"), NodeName("i0")
SUBMITTED_S = 20.0


def seen(harness: EngineHarness, job: JobEntry) -> JobView:
    """The job as a policy sees it."""
    return next(view for view in harness.engine.snapshot().jobs if view.job_id == job.job_id)


def not_in_time(harness: EngineHarness, job: JobEntry) -> None:
    """The node hears of its worker too late."""
    harness.toggle_deaf(T0)
    harness.start(job, T0)
    harness.wait(harness.engine.settings.gang_ready_timeout_s)
    assert harness.engine.state.counters.gang_timeouts == 1
    harness.toggle_deaf(T0)


def node_dies(harness: EngineHarness, job: JobEntry) -> None:
    """The node reboots while it makes ready."""
    harness.start(job, T0)
    harness.sim.nodes[T0].crash()
    harness.sim.nodes[T0].boot()


def fails_to_start(harness: EngineHarness, job: JobEntry) -> None:
    """Its worker ends before it ran, by the job's own fault, and may be tried again."""
    harness.start(job, T0)
    harness.sim.nodes[T0].exited(next(iter(job.workers.values())).key, 1)


def gives_way(harness: EngineHarness, job: JobEntry) -> None:
    """It is preempted before it ran."""
    harness.start(job, T0)
    harness.decide(Preempt(job_id=job.job_id, reason="test"))


def node_goes_home(harness: EngineHarness, job: JobEntry) -> None:
    """Its node is lent, and is called back while the job starts there."""
    harness.decide(Loan(node=I0, service=CHAT, reason="test"), lend=True)
    harness.wait(1.0)
    harness.start(job, I0)
    reclaim = Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="test")
    harness.decide(reclaim, lend=True)


WAYS = (not_in_time, node_dies, fails_to_start, gives_way, node_goes_home)


@each_row("undone", WAYS)
def test_a_start_that_came_to_nothing_is_part_of_the_wait(
    undone: Callable[[EngineHarness, JobEntry], None],
) -> None:
    """The job has waited all the time, for the figures and for whoever lets it age."""
    harness = EngineHarness(delays=Delays(ready_s=5.0))
    harness.wait(SUBMITTED_S)
    job = harness.submit(max_restarts=1)
    harness.wait(100.0)
    undone(harness, job)
    harness.wait(harness.engine.settings.retry_backoff_s + 1.0)
    assert (state(job), job.attempt.ran_at_s) == (JobState.PENDING, None)
    assert seen(harness, job).waiting_since_s == SUBMITTED_S
    harness.start(job, "t1")
    harness.wait(5.0)
    assert state(job) == JobState.RUNNING
    assert job.started_at_s is not None
    assert job.wait.queueing_s == job.started_at_s - SUBMITTED_S > 100.0


def test_an_attempt_that_ran_is_no_wait() -> None:
    """What it computed is not queueing: the next wait begins when it has left its nodes."""
    harness = EngineHarness(delays=Delays(stop_s=7.0))
    job = harness.submit()
    harness.wait(30.0)
    harness.start(job, T0)
    harness.wait(200.0)
    harness.decide(Preempt(job_id=job.job_id, reason="test"))
    harness.wait(17.0)  # 7 of them to stop
    assert seen(harness, job).waiting_since_s == 237.0
    assert queueing_s(job, harness.sim.loop.now_s) == 30.0 + 10.0
    harness.engine.handle(JobCancelRequested(job_id=job.job_id, by="ops/me"), now_s=250.0)
    assert queueing_s(job, 1000.0) == 30.0 + 13.0


def hears_late(harness: EngineHarness, job: JobEntry, ended_ago_s: float) -> float:
    """i0 is heard to have gone home by itself, with its worker's end so long ago; now."""
    harness.wait(400.0)
    home = StopReason.PREEMPT
    report = gone_report(harness, job, "i0", ended_ago_s=ended_ago_s, stop_reason=home)
    harness.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    return harness.sim.loop.now_s


@each_row(("ended_ago_s", "waited_s"), [(200.0, 200.0), (15.0, 15.0), (14.0, 0.0), (1e6, 400.0)])
def test_a_wait_that_began_while_nobody_led_is_counted_from_its_beginning(
    ended_ago_s: float, waited_s: float
) -> None:
    """Its node went home when its lease had run out, and could tell nobody: that outage is part of
    the wait, for the figures and for whoever lets the job age. A report is always a little late,
    and no wait is longer than since the attempt began to run."""
    harness = EngineHarness()
    lend(harness, "i0")
    job = harness.submit(work_s=1e6)
    harness.wait(30.0)
    harness.start(job, I0)
    now_s = hears_late(harness, job, ended_ago_s)
    assert (state(job), job.attempt.ran_at_s) == (JobState.PENDING, None)
    assert seen(harness, job).waiting_since_s == now_s - waited_s
    assert queueing_s(job, now_s + 10.0) == 30.0 + waited_s + 10.0
    assert harness.engine.check() == []


def test_a_gang_waits_from_the_end_of_its_last_worker() -> None:
    """The other node went on until it was told, and held its GPUs."""
    harness = EngineHarness(delays=Delays(stop_s=7.0))
    lend(harness, "i0")
    job = harness.submit(workers=(2, 2), work_s=1e6)
    harness.start(job, I0, T0)
    now_s = hears_late(harness, job, 200.0)
    assert state(job) == JobState.PREEMPTING
    harness.wait(10.0)
    assert seen(harness, job).waiting_since_s == now_s + 7.0
