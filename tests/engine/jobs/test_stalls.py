"""Jobs that tell no progress any more: when they are STALLED, when no longer, and what then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.failures import RetryClass
from common.model import JobState, NodeName, Progress, RetrySpec, StopReason
from coordinator.engine.jobs import gpu_sharing
from coordinator.engine.jobs.step_gaps import StepGaps
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import ProgressReported, ProgressStopped
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Resize
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, state
from tests.tables import each_row

FLOOR_S = 120.0
"""`stalled_after_s` by default."""


def told(harness: EngineHarness, *, gap_s: float = 10.0, words: int = 5) -> JobEntry:
    """A job that runs and has told some steps."""
    job = harness.submit("j", workers=(1, 2), work_s=1e6, max_restarts=2)
    harness.start(job, "t0")
    for step in range(1, words + 1):
        harness.wait(gap_s)
        tells(harness, job, step)
    return job


def tells(harness: EngineHarness, job: JobEntry, step: int) -> None:
    """It tells a step."""
    progress = Progress(step=step)
    harness.sim.handle(
        ProgressReported(job_id=job.job_id, attempt=job.attempt.number, progress=progress)
    )


def quiet(harness: EngineHarness, job: JobEntry, quiet_s: float) -> None:
    """The driver has seen that a job told nothing for so long."""
    harness.sim.handle(
        ProgressStopped(job_id=job.job_id, attempt=job.attempt.number, quiet_s=quiet_s)
    )


def lines(harness: EngineHarness, *what: str) -> list[str]:
    """What was told of stalls, in order."""
    return [line.what for line in harness.engine.state.stories if line.what in what]


def is_stalled(job: JobEntry) -> bool:
    """Whether it is now; a call, because type checkers think that an attribute stays."""
    return job.gaps.stalled_since_s is not None


def is_watched(harness: EngineHarness, job: JobEntry) -> bool:
    """Whether the driver is to look at its silence now."""
    return job.job_id in harness.engine.watched_stalls(harness.sim.loop.now_s)


@given(gap_s=st.sampled_from([1.0, 10.0, 30.0]), longest_s=st.sampled_from([0.0, 200.0]))
def test_much_longer_than_usual_is_ten_gaps_or_two_pauses(gap_s: float, longest_s: float) -> None:
    """Never below the floor; a pause that was seen once, as of a save, may be twice as long."""
    gaps = StepGaps()
    at_s = 0.0
    for number in range(12):
        at_s += longest_s if longest_s and number == 6 else gap_s
        gaps.told(at_s, attempt=1)
    after_s = gaps.stall_after_s(1, floor_s=FLOOR_S, resize_s=30.0, start_s=50.0)
    assert after_s == max(FLOOR_S, 10.0 * gap_s, 2.0 * longest_s)
    gaps.changed(at_s + 1.0)
    resized_s = gaps.stall_after_s(1, floor_s=FLOOR_S, resize_s=30.0, start_s=50.0)
    restarted_s = gaps.stall_after_s(2, floor_s=FLOOR_S, resize_s=30.0, start_s=50.0)
    start_s = max(50.0, 2.0 * gap_s)  # its first word came a gap after its start
    assert (resized_s, restarted_s) == (after_s + 30.0, after_s + start_s)


def test_a_job_is_stalled_after_much_longer_than_usual_until_its_next_word() -> None:
    """Its story has the begin and the end, and the cell counts it."""
    harness = EngineHarness(training=2, inference=0)
    job = told(harness)
    harness.wait(FLOOR_S - 1.0)
    assert not is_watched(harness, job)
    harness.wait(1.0)
    assert is_watched(harness, job)
    assert not is_stalled(job)  # nobody has said that it is silent
    quiet(harness, job, FLOOR_S)
    assert job.gaps.stalled_since_s == harness.sim.loop.now_s - FLOOR_S
    assert not is_watched(harness, job)
    quiet(harness, job, FLOOR_S + 1.0)
    assert lines(harness, "stalled", "stall over") == ["stalled"]
    [began] = [line for line in harness.engine.state.stories if line.what == "stalled"]
    assert began.reason == "no step after 5 for 120 s; its usual interval is 10 s"
    harness.wait(500.0)
    tells(harness, job, 5)  # the same again, as to a new leader, is no news
    assert is_stalled(job)
    tells(harness, job, 6)
    assert not is_stalled(job)
    assert lines(harness, "stalled", "stall over") == ["stalled", "stall over"]
    assert harness.engine.state.counters.stalls == 1


@each_row("what", ["resized", "suspended", "another attempt", "not long enough"])
def test_a_job_that_is_expected_to_be_silent_is_not_stalled(what: str) -> None:
    """Only a running attempt can stall, and silence counts from when its gang is as it is."""
    harness = EngineHarness(training=2, inference=0)
    job = told(harness)
    harness.wait(FLOOR_S)
    if what == "resized":
        grows = Placement(node=NodeName("t1"), worker_count=1, is_flexible=True)
        harness.decide(Resize(job_id=job.job_id, added=(grows,), reason="test"))
        harness.wait(FLOOR_S)  # a first resize may take `resize_p99_s` beyond that
    elif what == "suspended":
        ctx = Context(harness.engine.state, harness.engine.settings, harness.sim.loop.now_s)
        gpu_sharing.put_aside(ctx, job, "test")
        assert state(job) == JobState.SUSPENDED
    attempt = job.attempt.number + (what == "another attempt")
    quiet_s = FLOOR_S - 1.0 if what == "not long enough" else 10.0 * FLOOR_S
    harness.sim.handle(ProgressStopped(job_id=job.job_id, attempt=attempt, quiet_s=quiet_s))
    assert not is_stalled(job)
    if what == "resized":
        assert not is_watched(harness, job)
        harness.wait(harness.engine.settings.resize_p99_s)
        assert is_watched(harness, job)


def test_a_stalled_job_that_is_resized_is_stalled_no_more() -> None:
    """Its ranks meet anew: that may be what it needed, and its silence counts from there."""
    harness = EngineHarness(training=2, inference=0)
    job = told(harness)
    harness.wait(FLOOR_S)
    quiet(harness, job, FLOOR_S)
    grows = Placement(node=NodeName("t1"), worker_count=1, is_flexible=True)
    harness.decide(Resize(job_id=job.job_id, added=(grows,), reason="test"))
    assert not is_stalled(job)
    assert lines(harness, "stalled", "stall over") == ["stalled", "stall over"]


def with_timeout(
    harness: EngineHarness, *, timeout_s: float, max_restarts: int = 2, codes: tuple[int, ...] = ()
) -> JobEntry:
    """A job with `stall_timeout_s` that has told some steps."""
    job = told(harness)
    job.spec = make_spec(
        job.spec.name,
        workers=(1, 2),
        gpus_per_worker=8,
        stall_timeout_s=timeout_s,
        retry=RetrySpec(max_restarts=max_restarts, on_exit_codes=codes),
    )
    return job


@pytest.mark.parametrize("timeout_s", [60.0, 600.0])
def test_a_stall_timeout_starts_the_attempt_again(timeout_s: float) -> None:
    """By its own fault of the class `stalled`, asked to save as before any stop, after a back-off;
    shorter than what else counts as a stall it is the user's word."""
    harness = EngineHarness(training=2, inference=0)
    job = with_timeout(harness, timeout_s=timeout_s, codes=(7,))
    harness.wait(timeout_s - 1.0)
    quiet(harness, job, timeout_s - 1.0)
    assert state(job) == JobState.RUNNING
    harness.wait(1.0)
    assert is_watched(harness, job)
    quiet(harness, job, timeout_s)
    assert state(job) == JobState.PREEMPTING
    assert {worker.stop for worker in job.workers.values()} == {StopReason.PREEMPT}
    harness.wait(10.0)
    assert state(job) == JobState.PENDING
    assert (job.counts.own_faults, job.counts.node_faults, job.counts.preemptions) == (1, 0, 0)
    failure = job.retry.failure
    assert failure is not None
    assert (failure.reason, failure.retry) == ("stalled", RetryClass.BACK_OFF)
    assert job.retry.at_s is not None
    assert not is_stalled(job)
    assert lines(harness, "stalled", "stall over") == ["stalled", "stall over"]
    assert (
        job.error
        == f"stalled: no step after 5 for {timeout_s:.0f} s; stall_timeout_s is {timeout_s:g} s"
    )


def test_stalls_use_up_the_retry_budget() -> None:
    """The job that stalls once more than `retry.max_restarts` fails."""
    harness = EngineHarness(training=2, inference=0)
    job = with_timeout(harness, timeout_s=60.0, max_restarts=1)
    job.counts.own_faults = 1
    harness.wait(60.0)
    quiet(harness, job, 60.0)
    harness.wait(10.0)
    assert state(job) == JobState.FAILED


def test_an_attempt_that_hangs_as_it_starts_is_found_too() -> None:
    """A job that told progress before is silent from the start of its next attempt on, and has as
    long as it took then, and a start."""
    harness = EngineHarness(training=2, inference=0)
    job = with_timeout(harness, timeout_s=900.0)
    harness.wait(900.0)
    quiet(harness, job, 900.0)
    harness.wait(10.0)
    harness.wait(30.0)
    harness.start(job, "t0")
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)
    harness.wait(FLOOR_S)
    assert not is_watched(harness, job)
    harness.wait(50.0)
    assert is_watched(harness, job)
    quiet(harness, job, FLOOR_S + 50.0)
    assert is_stalled(job)


def test_a_job_that_never_told_progress_is_never_watched() -> None:
    """Nothing is known of what is usual for it."""
    harness = EngineHarness(training=2, inference=0)
    job = harness.submit("j", work_s=1e6)
    harness.start(job, "t0")
    harness.wait(1e5)
    assert not is_watched(harness, job)
    quiet(harness, job, 1e5)
    assert not is_stalled(job)
