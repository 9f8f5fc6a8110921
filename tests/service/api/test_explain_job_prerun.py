"""What `describe` and `explain` say of a job in its pre-run, and of one that ended there."""

from __future__ import annotations

from common.api import Describe, Description
from common.failure_rules import read_rules
from common.model import JobId, JobState, PrerunSpec
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Preempt
from coordinator.service.api import explain_job, rows
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.simulation import Submission
from tests.cli.fake_cell import FakeCell, aryl
from tests.engine.jobs.test_prerun import TIME_S, cell, submit
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, start, state
from tests.tables import each_row

RULES = read_rules()
GANG = "its gang of 2 workers with 16 GPUs"


def fail(harness: EngineHarness, job: JobEntry, reason: str) -> None:
    """Its pre-run runs for a minute and fails for this reason."""
    harness.start(job, "t0")
    harness.wait(60.0)
    worker = job.workers[0]
    harness.sim.nodes[worker.node].exited(worker.key, 1, RULES.failure(reason))
    harness.settle()


def test_a_pre_run_that_failed_is_told_with_what_its_gang_was_spared() -> None:
    """On how many GPUs and for how long it computed, and that the gang held none."""
    harness = cell()
    job = submit(harness)
    fail(harness, job, "gpu_out_of_memory")
    assert state(job) == JobState.FAILED
    assert explain_job.reasons(harness.engine, job)[-1] == (
        f"it failed in its pre-run, on 1 GPU (60 GPU-s of computing in 1 try): {GANG} never started"
    )


def test_every_try_of_a_pre_run_counts() -> None:
    """A fault that may pass leads to another pre-run: meanwhile it is said what comes next, in the
    end what all of them took."""
    harness = cell()
    job = submit(harness)
    fail(harness, job, "cuda_failure")
    assert state(job) == JobState.PENDING
    assert explain_job.reasons(harness.engine, job)[-1] == (
        f"its latest pre-run, on 1 GPU, ended without a result: it is retried before {GANG}"
    )
    fail(harness, job, "gpu_out_of_memory")
    assert (
        f"(120 GPU-s of computing in 2 tries): {GANG} never"
        in explain_job.reasons(harness.engine, job)[-1]
    )


def test_a_pre_run_says_what_comes_after_it() -> None:
    """While it waits and while it runs, and nothing more once the job is a gang."""
    harness = cell()
    job = submit(harness)
    assert f"it waits for its pre-run, on 1 GPU: {GANG} comes after that" in explain_job.reasons(
        harness.engine, job
    )
    harness.start(job, "t0")
    assert explain_job.reasons(harness.engine, job)[-1] == (
        f"this is its pre-run, on 1 GPU: {GANG} waits for its turn after {TIME_S:g} s or a "
        "checkpoint"
    )
    harness.wait(TIME_S)
    assert not any("pre-run" in reason for reason in explain_job.reasons(harness.engine, job))
    harness.decide(start(job, "t0", "t1"))
    assert not any("pre-run" in reason for reason in explain_job.reasons(harness.engine, job))


def test_a_pre_run_that_is_over_is_told_while_its_worker_leaves() -> None:
    """It was stopped because it went well, and the gang is next."""
    harness = cell(delays=Delays(stop_s=3.0))
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(TIME_S)
    assert job.workers
    said = f"its pre-run on 1 GPU succeeded: {GANG} waits next"
    assert explain_job.reasons(harness.engine, job)[-1] == said
    harness.wait(3.0)
    assert not job.workers
    assert said not in explain_job.reasons(harness.engine, job)


def test_a_pre_run_that_was_cancelled_did_not_fail() -> None:
    """Neither before it began nor while it ran."""
    for runs, said in (
        (False, f"it ended before its pre-run, on 1 GPU: {GANG} never started"),
        (True, f"it ended in its pre-run, on 1 GPU (0 GPU-s of computing in 1 try): {GANG} "
               "never started"),
    ):  # fmt: skip
        harness = cell()
        job = submit(harness)
        if runs:
            harness.start(job, "t0")
        harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
        harness.settle()
        assert state(job) == JobState.CANCELLED
        assert explain_job.reasons(harness.engine, job)[-1] == said


LARGER = "its gang of 2 workers with 16 GPUs"
"""By its least size, though it may have four."""


def larger(harness: EngineHarness, *, time_limit_s: float | None = None) -> JobEntry:
    """An elastic gang whose pre-run is on two GPUs, running there."""
    spec = make_spec(
        "gang",
        workers=(2, 4),
        gpus_per_worker=8,
        expected_runtime_s=5000.0,
        time_limit_s=time_limit_s,
        prerun=PrerunSpec(time_s=TIME_S, gpus=2),
    )
    now_s = harness.sim.loop.now_s
    harness.sim.submit([Submission(at_s=now_s, job_id=JobId("j"), spec=spec, work_s=10_000.0)])
    harness.settle()
    job = harness.engine.state.jobs[JobId("j")]
    harness.start(job, "t0")
    return job


def test_a_pre_run_is_told_with_its_own_gpus_and_those_of_the_least_gang() -> None:
    """What it computed is in whole GPU-seconds."""
    harness = cell()
    job = larger(harness)
    assert (
        f"this is its pre-run, on 2 GPUs: {LARGER} waits"
        in explain_job.reasons(harness.engine, job)[-1]
    )
    harness.wait(60.2)
    worker = job.workers[0]
    harness.sim.nodes[worker.node].exited(worker.key, 1, RULES.failure("semantic_error"))
    harness.settle()
    assert explain_job.reasons(harness.engine, job)[-1] == (
        "it failed in its pre-run, on 2 GPUs (120 GPU-s of computing in 1 try): "
        f"{LARGER} never started"
    )


def test_a_pre_run_that_ends_is_told_as_ended_while_its_worker_leaves() -> None:
    """Cancelled it did not fail, at its time limit it did; nothing more comes after either."""
    for time_limit_s, said in ((None, "it ended"), (60.0, "it failed")):
        harness = cell(delays=Delays(stop_s=3.0))
        job = larger(harness, time_limit_s=time_limit_s)
        harness.wait(61.0)
        if time_limit_s is None:
            harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
            harness.settle()
        assert job.workers
        told = [line for line in explain_job.reasons(harness.engine, job) if "pre-run" in line]
        assert [line.partition(", on")[0] for line in told] == [f"{said} in its pre-run"]
        harness.wait(3.0)
        assert not job.workers
        assert explain_job.reasons(harness.engine, job)[-1].startswith(
            f"{said} in its pre-run, on 2 GPUs ("
        )


def test_a_pre_run_that_was_preempted_did_not_come_to_nothing() -> None:
    """It was nobody's fault: the job waits as before its first try."""
    harness = cell()
    job = larger(harness)
    harness.wait(60.0)
    harness.decide(Preempt(job_id=job.job_id, reason="for others"))
    assert state(job) == JobState.PENDING
    told = [line for line in explain_job.reasons(harness.engine, job) if "pre-run" in line]
    assert told == [f"it waits for its pre-run, on 2 GPUs: {LARGER} comes after that"]


@each_row("form", [(), ("-o", "json")], ids=["text", "json"])
@each_row("verb", ["describe", "explain"])
def test_every_form_of_output_tells_of_the_pre_run(verb: str, form: tuple[str, ...]) -> None:
    """Of one that failed, in `describe` as in `explain`, for people as for programs."""
    harness = cell()
    job = submit(harness)
    fail(harness, job, "gpu_out_of_memory")
    row = rows.job_row(harness.engine, job, now_s=harness.engine.state.now_s)
    why = explain_job.reasons(harness.engine, job)
    found = Description(kind="job", name="j", job=row, why=why)
    args = ("job", "describe", "j") if verb == "describe" else ("explain", "job", "j")
    assert why[-1] in aryl(FakeCell({Describe: found}), *args, *form).out.replace("\n", " ")
