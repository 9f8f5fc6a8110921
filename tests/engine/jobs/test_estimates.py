"""How much work is left: by what was done before, by the pace, by the GPU type, by the source."""

from __future__ import annotations

import pytest
from msgspec import structs
from msgspec.structs import replace

from common.messages import OrderPhase
from common.model import (
    Checkpoint,
    GpuRequest,
    JobId,
    JobSpec,
    JobState,
    NodeName,
    Progress,
    StopReason,
    WorkerKey,
    WorkerRange,
)
from common.profile import JobProfile
from coordinator.engine.jobs import estimates
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.job_groups import AttemptEntry, WaitEntry, WorkEstimate
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, JobEntry, WorkerEntry
from coordinator.policies.aryl.reclaim.preemption_cost import LEAST_WAIT_S, Costs
from coordinator.policies.contract.estimates import LATE_RATIOS, Source, late_ratio
from coordinator.policies.registry import policy
from coordinator.service.api import explain_job
from coordinator.sim.run.simulation import Submission
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_snapshot,
    make_spec,
    make_worker_view,
)
from tests.harness.cluster.engine import EngineHarness, state
from tests.tables import each_row

JOB = JobId("j")
WORK_S = 1000.0
STEPS = 10_000


def entry(
    *, gpu_type: str = "V100", multiplier: dict[str, int] | None = None, workers: int = 1
) -> JobEntry:
    """A job of 1000 worker-seconds whose gang has run since instant 0."""
    spec = make_spec(gpu=GpuRequest(worker_multiplier=multiplier or {}))
    return JobEntry(
        job_id=JOB,
        spec=spec,
        tenant="t",
        user="u",
        submitted_at_s=0.0,
        wait=WaitEntry(pending_since_s=0.0),
        state=JobState.RUNNING,
        attempt=AttemptEntry(number=1, ran_at_s=0.0, gpu_type=gpu_type),
        estimate=WorkEstimate(expected_work_s=WORK_S),
        workers={
            index: WorkerEntry(
                key=WorkerKey(JOB, 1, index),
                node=NodeName("n"),
                gpu_uuids=(),
                is_flexible=False,
                order=OrderPhase.RUN,
            )
            for index in range(workers)
        },
    )


def left_s(job: JobEntry, now_s: float) -> float:
    """Worker-seconds left."""
    return estimates.remaining_work(job, now_s)[0]


def say(job: JobEntry, step: int, now_s: float) -> None:
    """The job says how far it is."""
    job.progress = Progress(step=step, total_steps=STEPS)
    estimates.measure(job, now_s)


@each_row(
    ("done", "left"), [(0.5, 0.5), (0.96, 0.05), (1.0, 0.05), (1.04, 0.05), (1.3, 0.3), (2.0, 1.0)]
)
def test_a_job_that_outlives_its_estimate_has_as_much_left_as_it_ran_over(
    done: float, left: float
) -> None:
    """Nobody is thought to be done before it is; all in parts of the estimate."""
    assert left_s(entry(), done * WORK_S) == pytest.approx(left * WORK_S)


def test_only_what_is_more_than_the_least_counts_as_outlived() -> None:
    """A job at the very end of its estimate is no news to anybody."""
    assert estimates.outlived_s(entry(), 1.04 * WORK_S) == 0.0
    assert estimates.outlived_s(entry(), 1.3 * WORK_S) == pytest.approx(0.3 * WORK_S)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_what_was_saved_before_is_no_part_of_the_least(is_waiting: bool) -> None:
    """A job that resumes with 1 % to do has 1 % left, waiting or just started."""
    job = entry()
    job.progress = Progress(step=STEPS * 99 // 100, total_steps=STEPS)
    job.saves.checkpoint = Checkpoint(step=job.progress.step, path="/c", is_verified=True)
    job.attempt.start_step = job.progress.step
    if is_waiting:
        job.attempt.ran_at_s, job.workers = None, {}
    assert left_s(job, 0.0) == pytest.approx(WORK_S * 0.01)


def test_warming_up_is_work_only_until_the_second_word() -> None:
    """A minute of warming up, then ten steps a second: the pace is that of the steps."""
    job = entry()
    say(job, 100, 70.0)
    assert left_s(job, 70.0) == pytest.approx((STEPS - 100) * 70.0 / 100)
    say(job, 700, 130.0)
    assert left_s(job, 130.0) == pytest.approx((STEPS - 700) / 10.0)


def test_a_word_that_tells_nothing_new_keeps_the_pace_of_the_whole_attempt() -> None:
    """The same step again, after a stall: what is left has not become less."""
    job = entry()
    say(job, 100, 10.0)
    say(job, 100, 20.0)
    assert left_s(job, 20.0) == pytest.approx((STEPS - 100) * 20.0 / 100)


def test_words_that_are_heard_late_never_make_a_job_look_nearly_done() -> None:
    """Ten steps a second after 2 s of warming up, each word up to 2 s old: what is left is never
    told much too short, nor longer than at first, and is right once they span ten seconds."""
    job = entry()
    told: list[float] = []
    words = ((3.9, 1.6), (4.0, 0.1), (6.0, 1.9), (8.0, 0.2), (13.0, 1.0), (18.0, 0.5))
    for heard_s, age_s in words:
        step = int((heard_s - age_s - 2.0) * 10.0)
        say(job, step, heard_s)
        told.append(left_s(job, heard_s))
        assert told[-1] >= 0.8 * (STEPS - step) / 10.0
    assert max(told) == told[0]
    assert told[-1] == pytest.approx((STEPS - 155) / 10.0, rel=0.15)


def tell_to_stop(job: JobEntry, at_s: float) -> None:
    """It is preempted, and goes on computing until it has saved."""
    job.state = JobState.PREEMPTING
    for worker in job.workers.values():
        worker.stop, worker.stop_ordered_at_s = StopReason.PREEMPT, at_s


def test_a_last_word_changes_no_measured_pace() -> None:
    """A job that is stopped goes on computing for a while, which nobody counts."""
    job = entry()
    say(job, 20, 4.0)
    tell_to_stop(job, 4.0)
    say(job, 60, 6.0)
    assert job.estimate.measured_work_s == pytest.approx(STEPS * 4.0 / 20)


def test_an_only_word_counts_what_was_computed_since_the_stop() -> None:
    """Forty steps until 6 s, of which 1 s was before the order to stop: seven steps a second."""
    job = entry()
    estimates.settle_work(job, 1.0)
    tell_to_stop(job, 1.0)
    say(job, 40, 6.0)
    assert job.estimate.measured_work_s == pytest.approx(STEPS * 6.0 / 40)


def test_the_first_word_of_a_next_attempt_makes_no_job_longer() -> None:
    """It warms up anew, and how fast it is then was measured already."""
    job = entry()
    say(job, 100, 10.0)
    say(job, 300, 30.0)
    estimates.attempt_ended(job)
    job.attempt.ran_at_s = job.clock.at_s = 60.0
    job.clock.worker_s, job.attempt.start_step, job.attempt.number = 0.0, 300, 2
    say(job, 310, 100.0)
    assert left_s(job, 100.0) == pytest.approx((STEPS - 310) / 10.0)


def test_the_pace_after_a_resize_is_of_the_words_after_it() -> None:
    """A second worker is no gain: its job has as many seconds left, so twice the worker-seconds."""
    job = entry()
    for now_s in (10.0, 110.0):
        say(job, int(now_s), now_s)
    job.workers[1] = structs.replace(job.workers[0], key=WorkerKey(JOB, 1, 1))
    job.counts.resizes += 1
    for now_s in (111.0, 113.0, 123.0):
        say(job, int(now_s), now_s)
    assert left_s(job, 123.0) == pytest.approx((STEPS - 123) * 2.0)


def test_the_first_word_after_a_resize_ends_what_was_measured_before_it() -> None:
    """Else warming up would count again until the new gang has told its pace."""
    job = entry()
    say(job, 100, 70.0)
    job.counts.resizes += 1
    say(job, 700, 130.0)
    assert left_s(job, 130.0) == pytest.approx((STEPS - 700) / 10.0)
    say(job, 720, 132.0)
    assert left_s(job, 132.0) == pytest.approx((STEPS - 720) / 10.0)


def test_who_has_steps_to_do_is_never_told_to_have_nothing_left() -> None:
    """Its words may be late, or it stands still: a step is left at least until it has done all."""
    job = entry()
    say(job, STEPS - 200, 100.0)
    say(job, STEPS - 100, 150.0)
    for now_s in (199.9, 200.0, 200.1):
        assert left_s(job, now_s) == pytest.approx(0.5)
    say(job, STEPS, 201.0)
    assert left_s(job, 201.0) == 0.0


def test_what_an_attempt_told_of_the_job_holds_when_it_is_over() -> None:
    """Ten steps a second are a thousand seconds for the whole job, also for one that lost them all
    and was thought to be shorter; waiting, and running again without a word."""
    job = entry()
    job.estimate.expected_work_s = 10.0
    say(job, 100, 10.0)
    say(job, 200, 20.0)
    job.attempt.ran_at_s, job.workers, job.estimate.measured_left_s = None, {}, None
    assert estimates.remaining_work(job, 50.0) == (1000.0, "progress of an earlier attempt")
    job.attempt.ran_at_s = job.clock.at_s = 60.0
    job.clock.worker_s = 0.0
    assert left_s(job, 60.0) == 1000.0


@pytest.mark.parametrize(("declared_s", "left_after_s"), [(WORK_S, WORK_S), (None, 4000.0)])
def test_one_word_of_an_attempt_is_better_than_a_guess_only(
    declared_s: float | None, left_after_s: float
) -> None:
    """A save that is all it ever said counts its warming up: what was declared stays, and what was
    taken from the jobs of others does not."""
    job = entry()
    job.spec = structs.replace(job.spec, expected_runtime_s=declared_s)
    say(job, 100, 40.0)
    job.attempt.ran_at_s, job.workers, job.estimate.measured_left_s = None, {}, None
    assert left_s(job, 50.0) == left_after_s


def test_a_type_that_needs_twice_the_workers_does_half_the_work() -> None:
    """Two workers of the slower type do the work of one reference worker."""
    job = entry(gpu_type="T4", multiplier={"T4": 2}, workers=2)
    assert estimates.attempt_worker_s(job, 100.0) == 100.0
    assert left_s(job, 100.0) == WORK_S - 100.0
    estimates.settle_work(job, 100.0)
    assert job.clock.worker_s == 100.0


def test_a_job_that_scales_badly_is_estimated_by_its_profile() -> None:
    """Four workers that do the work of two and a half take 400 s for 1000 worker-seconds."""
    job = entry(workers=4)
    profile = JobProfile(speedup=((1, 10.0), (4, 25.0)))
    job.spec = structs.replace(job.spec, workers=WorkerRange(min=1, max=4), profile=profile)
    assert estimates.pace(job) == 2.5
    assert left_s(job, 100.0) == WORK_S - 250.0


def test_the_word_of_a_job_that_is_being_stopped_is_no_pace() -> None:
    """Most of a short attempt was warming up: what was declared says better what is left."""
    job = entry()
    job.spec = structs.replace(job.spec, expected_runtime_s=WORK_S)
    job.state, job.progress = JobState.PREEMPTING, Progress(step=100, total_steps=STEPS)
    estimates.measure(job, 50.0)
    assert estimates.estimated_left(job, 50.0) == WORK_S - 50.0
    job.state = JobState.RUNNING
    estimates.measure(job, 50.0)
    assert estimates.estimated_left(job, 50.0) == 99 * 50.0


def spec(*, expected_runtime_s: float | None = None) -> JobSpec:
    """A job of one GPU."""
    return make_spec(expected_runtime_s=expected_runtime_s)


def test_what_the_engine_writes_is_known_to_policies() -> None:
    """The history of like jobs and what was declared may be trusted; a size's median and the
    default are guesses."""
    settings, told, short = EngineSettings(), spec(expected_runtime_s=60.0), spec()
    nothing, history, size = ClusterState(), ClusterState(), ClusterState()
    history.history[estimates.history_key("t", told)] = [50.0, 70.0]
    size.history[estimates.size_class(short)] = [50.0, 70.0, 90.0]
    written = {
        Source.HISTORY: estimates.whole_work(history, settings, "t", told)[1],
        Source.DECLARED: estimates.whole_work(nothing, settings, "t", told)[1],
        Source.SIZE: estimates.whole_work(size, settings, "t", short)[1],
        Source.DEFAULT: estimates.whole_work(nothing, settings, "t", short)[1],
    }
    assert written[Source.HISTORY] == "history of 2 runs"
    for source, text in written.items():
        assert text.startswith(source)
        assert late_ratio(text) == LATE_RATIOS.get(source)


@each_row(
    ("source", "latest_s"),
    [
        ("live progress", 125.0),
        ("length of its pre-run", 100.0),
        ("progress of an earlier attempt", 150.0),
        ("declared", 150.0),
        ("history of 5 runs", 200.0),
        ("median of 4 jobs of this size", None),
        ("an earlier attempt that outlived the estimate (history of 5 runs)", None),
        ("recovered from a node's ledger", None),
        ("default", None),
        ("words of nobody", None),
        ("", None),
    ],
)
def test_a_running_job_is_waited_for_by_the_source_of_its_estimate(
    source: str, latest_s: float | None
) -> None:
    """Of 100 s left by each source a reclaim allows for so many; it waits for no guess."""
    worker = make_worker_view("job", 0, "n1", gpus=1)
    job = make_job_view("job", state=JobState.RUNNING, remaining_work_s=100.0, placed=[worker])
    job = job_with(job, estimate_source=source)
    costs = Costs(make_snapshot(nodes=[], jobs=[job]))
    assert costs.ends_within_s(job.job_id) == latest_s
    assert latest_s is None or latest_s > LEAST_WAIT_S


SPEC = make_spec("long", workers=(2, 40), gpus_per_worker=8)
THOUGHT_S = 20.0
"""The default running time of this cell: nobody says how long its jobs take."""


def cell(name: str = "aryl", *, training: int = 4) -> EngineHarness:
    """A cell under a real policy."""
    settings = EngineSettings(
        policy=name, min_runtime_s=0.0, default_expected_runtime_s=THOUGHT_S, resize_cooldown_s=0.0
    )
    harness = EngineHarness(training=training, inference=0, settings=settings)
    harness.engine.policy = policy(name)
    return harness


def submit(harness: EngineHarness, spec: JobSpec = SPEC, *, work_s: float = 1200.0) -> JobEntry:
    """A job whose length nobody knows."""
    job_id = JobId(spec.name)
    now_s = harness.sim.loop.now_s
    harness.sim.submit([Submission(at_s=now_s, job_id=job_id, spec=spec, work_s=work_s)])
    harness.settle()
    return harness.engine.state.jobs[job_id]


def passes(harness: EngineHarness, seconds: float) -> None:
    """Time passes, and then a scheduling pass."""
    harness.wait(seconds)
    harness.sim.ask_pass()
    harness.settle()


def seen_left_s(harness: EngineHarness, job: JobEntry) -> float:
    """Worker-seconds left, as policies see it in a snapshot whose views are as old as may be."""
    passes(harness, 0.0)
    snapshot = harness.engine.snapshot()
    [view] = [view for view in snapshot.jobs if view.job_id == job.job_id]
    found = view.work_left_s(snapshot.now_s)
    assert found == pytest.approx(estimates.remaining_work(job, snapshot.now_s)[0])
    return found


def test_what_is_left_is_the_estimate_and_then_what_it_ran_over() -> None:
    """It falls to a share of the estimate and grows with the time by which that was outlived."""
    harness = cell("fifo", training=2)
    job = submit(harness)
    found: list[float] = []
    for _ in range(6):
        found.append(seen_left_s(harness, job))
        harness.wait(10.0)
    assert found == [40.0, 20.0, 2.0, 20.0, 40.0, 60.0]


def test_an_elastic_job_that_outlived_its_estimate_grows_into_idle_gpus() -> None:
    """The cell was full when it started; a resize costs it less than what is left by then."""
    harness = cell()
    submit(harness, replace(SPEC, name="block", workers=WorkerRange(min=2, max=2)), work_s=80.0)
    job = submit(harness)
    passes(harness, 39.0)  # the other nodes are free from 40 s on
    assert (state(job), job.running_workers) == (JobState.RUNNING, 2)
    found: list[int] = []
    for seconds in (2.0, 10.0):
        passes(harness, seconds)
        found.append(job.running_workers)
    assert found == [3, 4]


def test_explain_says_that_the_estimate_was_outlived_and_what_is_assumed() -> None:
    """Before that, and of a job that says how far it is, there is nothing to say."""
    harness = cell("fifo", training=2)
    job = submit(harness)
    passes(harness, 15.0)
    assert explain_job.estimate(harness.engine, job) == "5 s left with 2 workers (source: default)"
    passes(harness, 20.0)
    assert explain_job.estimate(harness.engine, job) == (
        "15 s left with 2 workers (source: default; it has outlived that by 15 s, and as much "
        "again is assumed)"
    )


@pytest.mark.parametrize(
    ("after_s", "knobs", "said"),
    [
        (16.0, "", "it does not grow: one worker more would save 1.3 s of its estimated"),
        (60.0, "", "it does not grow: no node that its flexible workers may use has 8 free GPUs"),
        (30.0, ":grows_when_idle=true", "it does not grow while jobs wait"),
    ],
)
def test_explain_says_why_a_job_does_not_grow(after_s: float, knobs: str, said: str) -> None:
    """What a resize costs it, that there is no room, or that others come first."""
    harness = cell(f"aryl{knobs}", training=2)
    job = submit(harness, work_s=1e5)
    if knobs:
        submit(harness, replace(SPEC, name="waits", workers=WorkerRange(min=2, max=2)))
    passes(harness, after_s)
    reasons = explain_job.reasons(harness.engine, job)
    assert [reason for reason in reasons if reason.startswith(said)], reasons


def test_explain_says_nothing_of_growth_where_a_job_has_all_that_it_can_use() -> None:
    """It is at its maximum since it started."""
    harness = cell(training=3)
    job = submit(harness, replace(SPEC, workers=WorkerRange(min=2, max=3)))
    passes(harness, 30.0)
    assert (job.running_workers, harness.engine.explain.standing(job.job_id)) == (3, ())


def test_what_an_attempt_showed_of_a_jobs_length_holds_for_the_next() -> None:
    """A job that ran three times its estimate and was stopped is not as short as that again."""
    harness = cell("fifo", training=2)
    job = submit(harness)
    passes(harness, 60.0)
    name = next(iter(job.workers.values())).node
    drain = OperatorAsked(action=OperatorAction.DRAIN, by="ops/me", target=str(name))
    harness.sim.handle(drain)
    harness.settle()
    assert state(job) == JobState.PENDING
    assert estimates.remaining_work(job, harness.engine.state.now_s) == (
        120.0,
        "an earlier attempt that outlived the estimate (default)",
    )
