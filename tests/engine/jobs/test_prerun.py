"""A gang whose command never succeeded is first tried on one GPU; afterwards it is another gang."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.failure_rules import read_rules
from common.jobspec import misfit
from common.model import (
    Checkpoint,
    JobId,
    JobState,
    NodeRole,
    PrerunGang,
    PrerunSpec,
    Progress,
    RetrySpec,
    WorkerRange,
)
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs.deadlines import Deadlines
from coordinator.engine.state.events import NodeReported, ProgressReported
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Allocation, Resume, Suspend
from coordinator.policies.contract.estimates import Source
from coordinator.policies.contract.job_groups import Behind
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.simulation import Submission
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, start, state

RULES = read_rules()
GANG = WorkerRange(min=2, max=2)
TIME_S = 600.0


def cell(*, delays: Delays | None = None) -> EngineHarness:
    """Two training nodes of 8 GPUs."""
    settings = EngineSettings(policy="fifo", min_runtime_s=0.0)
    return EngineHarness(training=2, inference=0, settings=settings, delays=delays)


def taking_turns() -> EngineHarness:
    """The same cell under a policy that suspends."""
    harness = cell()
    harness.engine.policy = replace(harness.engine.policy, shares_gpus=True)
    return harness


def submit(
    harness: EngineHarness,
    name: str = "j",
    *,
    time_s: float | None = TIME_S,
    gpus: int = 8,
    workers: int = 2,
    command: str = "train",
) -> JobEntry:
    """A gang that asks for a pre-run."""
    spec = make_spec(
        "gang",
        workers=(workers, workers),
        gpus_per_worker=gpus,
        expected_runtime_s=5000.0,
        retry=RetrySpec(max_restarts=2),
        prerun=PrerunSpec(time_s=time_s),
    )
    spec = replace(spec, command=(command,))
    now_s = harness.sim.loop.now_s
    harness.sim.submit(
        [Submission(at_s=now_s, job_id=JobId(name), spec=spec, work_s=5000.0 * workers)]
    )
    harness.settle()
    return harness.engine.state.jobs[JobId(name)]


def test_a_gang_waits_as_a_job_of_one_gpu_first() -> None:
    """Every policy sees it so, with no more work than its pre-run can do."""
    harness = cell()
    job = submit(harness)
    [view] = harness.engine.snapshot().jobs
    assert (view.workers.min, view.workers.max, view.gpus_per_worker) == (1, 1, 1)
    assert view.work_left_s(harness.engine.state.now_s) == TIME_S
    assert job.spec.prerun.gang == PrerunGang(workers=GANG, gpus_per_worker=8)


@pytest.mark.parametrize(
    ("time_s", "gpus", "workers"), [(None, 8, 2), (TIME_S, 1, 1)], ids=["not asked", "one GPU"]
)
def test_who_asks_for_none_or_is_no_gang_has_none(
    time_s: float | None, gpus: int, workers: int
) -> None:
    """A job of one GPU would learn nothing by it."""
    job = submit(cell(), time_s=time_s, gpus=gpus, workers=workers)
    assert (job.spec.workers.min, job.spec.gpus_per_worker) == (workers, gpus)


def test_after_its_time_the_gang_waits_for_its_turn() -> None:
    """Stopped exactly then, free of charge, and the second attempt is the whole gang."""
    harness = cell()
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(TIME_S - 1.0)
    assert (state(job), job.running_workers) == (JobState.RUNNING, 1)
    harness.wait(1.0)
    assert (state(job), job.spec.workers, job.spec.gpus_per_worker) == (JobState.PENDING, GANG, 8)
    assert (job.counts.preemptions, job.counts.own_faults) == (0, 0)
    harness.decide(start(job, "t0", "t1"))
    assert (state(job), job.running_workers) == (JobState.RUNNING, 2)
    harness.wait(TIME_S * 2)
    assert state(job) == JobState.RUNNING  # nothing is left of the pre-run


@pytest.mark.parametrize(
    ("limit_s", "expected"),
    [(TIME_S - 1.0, JobState.FAILED), (TIME_S, JobState.PENDING), (TIME_S + 1.0, JobState.PENDING)],
)
def test_a_time_limit_holds_in_a_pre_run_too(limit_s: float, expected: JobState) -> None:
    """One that is over first ends the job at that very instant; a pre-run that came so far is over
    and well, and the gang's attempt has all of its own limit."""
    harness = cell()
    job = submit(harness)
    job.spec = replace(job.spec, time_limit_s=limit_s)
    harness.start(job, "t0")
    harness.wait(min(limit_s, TIME_S))
    assert state(job) == expected
    if expected == JobState.PENDING:
        harness.decide(start(job, "t0", "t1"))
        harness.wait(limit_s - 1.0)
        assert state(job) == JobState.RUNNING
        harness.wait(1.0)
        assert state(job) == JobState.FAILED


def test_a_verified_checkpoint_ends_it_sooner() -> None:
    """A save is the proof that was waited for; an unverified word is none."""
    harness = cell()
    job = submit(harness)
    harness.start(job, "t0")
    for is_verified, expected in ((False, JobState.RUNNING), (True, JobState.PENDING)):
        saved = Checkpoint(step=10, path="/c", is_verified=is_verified)
        harness.sim.handle(ProgressReported(job_id=job.job_id, attempt=1, checkpoint=saved))
        harness.settle()
        assert state(job) == expected
    assert job.spec.workers == GANG


def test_a_failure_in_it_costs_one_gpu_and_is_classed_as_any() -> None:
    """What is hopeless ends there; another fault leads to another pre-run."""
    harness = cell()
    job = submit(harness)
    for reason, expected in (
        ("cuda_failure", JobState.PENDING),
        ("gpu_out_of_memory", JobState.FAILED),
    ):
        harness.start(job, "t0")
        worker = job.workers[0]
        assert len(worker.gpu_uuids) == 1
        harness.sim.nodes[worker.node].exited(worker.key, 1, RULES.failure(reason))
        harness.settle()
        assert state(job) == expected
        assert job.spec.prerun.gang is not None


def test_a_job_that_ends_well_in_it_has_ended() -> None:
    """Its last word, a checkpoint, does not make a gang of it again."""
    harness = cell()
    job = submit(harness)
    harness.start(job, "t0")
    worker = job.workers[0]
    node = harness.sim.nodes[worker.node]
    tell, saved = node._tell, Checkpoint(step=10, path="/c", is_verified=True)

    def with_last_word(report: NodeReported) -> None:
        workers = tuple(replace(fact, checkpoint=saved) for fact in report.workers)
        tell(replace(report, workers=workers))

    node._tell = with_last_word
    node.exited(worker.key, 0)
    harness.settle()
    assert state(job) == JobState.SUCCEEDED


def test_a_command_that_succeeded_before_needs_none() -> None:
    """The same name and command of the same tenant; another command is tried first."""
    harness = cell()
    job = submit(harness, "a", time_s=None, workers=1)
    harness.start(job, "t0")
    harness.wait(5000.0)
    assert state(job) == JobState.SUCCEEDED
    assert submit(harness, "b").spec.prerun.gang is None
    assert submit(harness, "c", command="other").spec.prerun.gang is not None


def test_a_preemption_in_it_leads_to_another_one() -> None:
    """What was not seen to its end proves nothing."""
    harness = cell(delays=Delays(stop_s=3.0))
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(100.0)
    harness.sim.nodes[harness.node("t0").name].crash()
    assert harness.node("t0").role == NodeRole.TRAINING
    harness.sim.nodes[harness.node("t0").name].boot()
    harness.wait(10.0)
    assert state(job) == JobState.PENDING
    assert job.spec.prerun.gang is not None


def test_its_time_stands_still_while_it_is_suspended() -> None:
    """It has computed for all of it before it is over, whoever has its GPU in between."""
    harness = taking_turns()
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(400.0)
    harness.decide(Suspend(job_id=job.job_id, reason="another one's turn"))
    harness.wait(1000.0)
    harness.sim.ask_pass()
    harness.settle()
    [view] = harness.engine.snapshot().jobs
    assert (state(job), view.estimate.work_rate) == (JobState.SUSPENDED, 0)
    assert view.work_left_s(harness.engine.state.now_s) == TIME_S - 400.0
    harness.decide(Resume(job_id=job.job_id, reason="its turn"))
    harness.wait(199.0)
    assert state(job) == JobState.RUNNING
    harness.wait(1.0)
    assert (state(job), job.spec.workers) == (JobState.PENDING, GANG)


def test_only_suspensions_of_the_same_attempt_prolong_it() -> None:
    """A second pre-run computes as long as the first one was to."""
    harness = taking_turns()
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(10.0)
    harness.decide(Suspend(job_id=job.job_id, reason="another one's turn"))
    harness.wait(300.0)
    harness.decide(Resume(job_id=job.job_id, reason="its turn"))
    harness.sim.nodes[job.workers[0].node].exited(
        job.workers[0].key, 1, RULES.failure("cuda_failure")
    )
    harness.settle()
    harness.start(job, "t0")
    harness.wait(TIME_S - 1.0)
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)
    harness.wait(1.0)
    assert job.spec.workers == GANG


def test_a_suspended_one_hides_no_later_wake() -> None:
    """What the policy asked to be woken for comes, also when the pre-run's time were over."""
    harness = taking_turns()
    job = submit(harness)
    harness.start(job, "t0")
    harness.decide(Suspend(job_id=job.job_id, reason="another one's turn"))
    passes: list[float] = []

    def every_minute(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        passes.append(snapshot.now_s)
        return Allocation(decisions=(), wake_at_s=snapshot.now_s + 60.0)

    harness.engine.policy = replace(harness.engine.policy, allocate=every_minute)
    harness.sim.ask_pass()
    harness.wait(TIME_S * 2)
    assert passes == [60.0 * count for count in range(21)]


def test_an_instant_that_a_pass_has_seen_wakes_nobody() -> None:
    """It would hide all later ones; the next pass looks at its job all the same."""
    harness = cell()
    first = submit(harness, "a")
    harness.start(first, "t0")
    harness.wait(10.0)
    harness.start(submit(harness, "b"), "t1")
    deadlines, held = Deadlines(harness.engine.state), harness.engine.state
    assert deadlines.next_s() == TIME_S
    deadlines.seen(TIME_S)
    assert deadlines.next_s() == TIME_S + 10.0
    assert deadlines.due(held, TIME_S) == [first]


def test_a_lost_journal_forgets_neither_the_gang_nor_its_pre_run() -> None:
    """The nodes' ledgers have the spec, which says both."""
    harness = cell()
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(10.0)
    harness.lose_journal()
    again = harness.engine.state.jobs[job.job_id]
    assert again.spec.prerun.gang == PrerunGang(workers=GANG, gpus_per_worker=8)
    harness.wait(TIME_S)
    assert again.spec.workers == GANG
    saved = decode_state(harness.engine.encode_state())
    assert Engine(harness.engine.settings, saved).state.jobs[job.job_id].spec == again.spec


def test_a_user_cannot_set_what_is_the_coordinator_s() -> None:
    """A spec that claims to be in its pre-run is refused."""
    spec = make_spec(workers=(GANG.min, GANG.max))
    forged = replace(spec, prerun=PrerunSpec(gang=PrerunGang(workers=GANG, gpus_per_worker=8)))
    found = misfit(forged)
    assert found is not None
    assert "prerun.gang" in str(found)


WORK_S = 10_000.0
"""Worker-seconds of the gang of `submit`, which has two workers."""


def view(harness: EngineHarness, name: str = "j") -> JobView:
    """A job as policies see it."""
    return next(job for job in harness.engine.snapshot().jobs if job.job_id == name)


def fails_on(harness: EngineHarness, job: JobEntry, node: str) -> None:
    """Its pre-run fails there by what another node may do better."""
    harness.start(job, node)
    worker = job.workers[0]
    harness.sim.nodes[worker.node].exited(worker.key, 1, RULES.failure("cuda_failure"))
    harness.settle()
    assert job.retry.avoid_nodes == [node]


@pytest.mark.parametrize(("nodes", "avoided"), [(2, []), (3, ["t0"])])
def test_a_node_is_left_alone_only_where_the_others_take_the_gang(
    nodes: int, avoided: list[str]
) -> None:
    """One worker fits without it, a gang of all nodes does not; it may start at once then."""
    settings = EngineSettings(policy="fifo", min_runtime_s=0.0)
    harness = EngineHarness(training=nodes, inference=0, settings=settings)
    job = submit(harness)
    fails_on(harness, job, "t0")
    harness.start(job, "t1")
    harness.wait(TIME_S)
    assert job.spec.workers == GANG
    assert job.retry.avoid_nodes == list(view(harness).nodes.avoided) == avoided


def test_of_two_nodes_the_one_to_be_left_for_longer_is() -> None:
    """Where the gang can do without one of them alone."""
    settings = EngineSettings(policy="fifo", min_runtime_s=0.0)
    harness = EngineHarness(training=3, inference=0, settings=settings)
    job = submit(harness)
    fails_on(harness, job, "t0")
    known = job.retry.avoided
    harness.start(job, "t1")
    for name in ("t0", "t1"):  # as if another node had failed it too, later
        until_s = harness.engine.state.now_s + (5000.0 if name == "t1" else 4000.0)
        known[harness.node(name).name] = replace(next(iter(known.values())), until_s=until_s)
    harness.wait(TIME_S)
    assert job.spec.workers == GANG
    assert job.retry.avoid_nodes == ["t1"]


def test_the_pace_of_one_worker_is_no_pace_of_the_gang() -> None:
    """Its length is what was declared, and no step time is known, whatever the pre-run told."""
    harness = cell()
    job = submit(harness)
    harness.start(job, "t0")
    for step in (10, 20, 30):
        harness.wait(100.0)
        told = Progress(step=step, total_steps=1_000_000)
        harness.sim.handle(ProgressReported(job_id=job.job_id, attempt=1, progress=told))
    seen = view(harness)
    assert seen.estimate.source == Source.PRERUN
    assert (seen.steps.step_time_s, seen.steps.steps_left) == (None, None)
    harness.wait(TIME_S)
    seen = view(harness)
    assert (seen.workers, seen.gpus_per_worker) == (GANG, 8)
    assert (seen.steps.step_time_s, seen.steps.steps_left, seen.steps.workers) == (None, None, 0)
    assert (seen.estimate.remaining_work_s, seen.estimate.source) == (WORK_S, Source.DECLARED)


def test_a_pre_run_that_is_longer_than_its_gang_does_not_outlive_it() -> None:
    """So many seconds on one GPU are not so many on all."""
    harness = cell()
    job = submit(harness, time_s=3 * WORK_S)
    harness.start(job, "t0")
    harness.wait(3 * WORK_S)
    assert job.spec.workers == GANG
    assert view(harness).estimate.remaining_work_s == WORK_S


def test_a_pre_run_shows_the_gang_behind_it() -> None:
    """Its own length is the pre-run's; what comes after it can be planned, until it has come."""
    harness = cell()
    job = submit(harness)
    seen = view(harness)
    assert seen.estimate.whole_work_s == seen.estimate.remaining_work_s == TIME_S
    assert seen.behind == Behind(
        workers=GANG, gpus_per_worker=8, work_s=WORK_S, estimate_source=Source.DECLARED
    )
    harness.start(job, "t0")
    harness.wait(TIME_S)
    seen = view(harness)
    assert (seen.behind, seen.estimate.whole_work_s) == (None, WORK_S)


def test_a_gang_that_succeeds_after_its_pre_run_is_remembered() -> None:
    """Its like needs no pre-run any more, and is as long as it was."""
    harness = cell()
    job = submit(harness, "a")
    harness.start(job, "t0")
    harness.wait(TIME_S)
    harness.decide(start(job, "t0", "t1"))
    harness.wait(WORK_S)
    assert state(job) == JobState.SUCCEEDED
    again = submit(harness, "b")
    assert again.spec.prerun.gang is None
    assert again.estimate.expected_work_s == pytest.approx(WORK_S)


def test_work_of_a_pre_run_that_was_all_counts_in_workers_of_the_gang() -> None:
    """800 s on one GPU are 100 s of a worker of eight."""
    harness = cell()
    job = submit(harness, "a", time_s=1000.0)
    harness.start(job, "t0")
    harness.wait(800.0)
    worker = job.workers[0]
    harness.sim.nodes[worker.node].exited(worker.key, 0)
    harness.settle()
    assert state(job) == JobState.SUCCEEDED
    assert submit(harness, "b").estimate.expected_work_s == pytest.approx(100.0)


def test_a_lost_journal_forgets_no_work_of_the_gang() -> None:
    """While its pre-run is on a ledger tells of one worker, and of how many there will be."""
    harness = cell()
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(10.0)
    harness.lose_journal()
    assert harness.engine.state.jobs[JobId("j")].estimate.expected_work_s == WORK_S


def test_a_pre_run_that_is_over_has_nothing_left_while_it_stops() -> None:
    """However early its checkpoint ended it: its gang comes next, and not another one."""
    harness = cell(delays=Delays(stop_s=3.0))
    job = submit(harness)
    harness.start(job, "t0")
    harness.wait(100.0)
    assert view(harness).work_left_s(harness.sim.loop.now_s) == pytest.approx(TIME_S - 100.0)
    saved = Checkpoint(step=10, path="/c", is_verified=True)
    harness.sim.handle(ProgressReported(job_id=job.job_id, attempt=1, checkpoint=saved))
    harness.settle()
    assert state(job) == JobState.PREEMPTING
    assert view(harness).work_left_s(harness.sim.loop.now_s) == 0.0
    harness.wait(10.0)
    assert job.spec.workers == GANG
