"""What a failure's kind decides on the next try: whether, where and when."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from msgspec.structs import replace

from common.failure_rules import read_rules
from common.failures import Failure
from common.model import JobId, JobState, NodeName, RetrySpec
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs.retry import restarts_used
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Resize
from coordinator.policies.registry import policy
from coordinator.service.api import explain_job
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.outages import Crash
from tests.harness.cluster.engine import EngineHarness, state
from tests.tables import each_row

RULES = read_rules()
BACKOFF_S = 30.0


def settings(**changed: object) -> EngineSettings:
    """Those of a cell with nothing but training nodes."""
    return replace(EngineSettings(policy="fifo", min_runtime_s=0.0), **changed)


def rest(harness: EngineHarness, job: JobEntry) -> float:
    """Wait until its pause is over; how long that was."""
    at_s = job.retry.at_s
    if at_s is None:
        return 0.0
    wait_s = at_s - harness.engine.state.now_s
    harness.wait(wait_s)
    return wait_s


def again(harness: EngineHarness, job: JobEntry) -> float:
    """The same, and have it run once more on a node that it does not leave alone."""
    wait_s = rest(harness, job)
    harness.start(job, "t0" if "t0" not in job.retry.avoid_nodes else "t1")
    harness.settle()
    assert state(job) == JobState.RUNNING
    return wait_s


def why(harness: EngineHarness, job: JobEntry) -> str:
    """What its user reads of it."""
    return "; ".join(explain_job.reasons(harness.engine, job))


def running(
    harness: EngineHarness, *nodes: str, max_restarts: int = 5, codes: tuple[int, ...] = ()
) -> JobEntry:
    """A gang on whole nodes that may fail so often."""
    job = harness.submit(workers=(len(nodes), len(nodes)), work_s=1e6, max_restarts=max_restarts)
    job.spec = replace(job.spec, retry=RetrySpec(max_restarts=max_restarts, on_exit_codes=codes))
    harness.start(job, *nodes)
    harness.settle()
    assert state(job) == JobState.RUNNING
    return job


def fail(
    harness: EngineHarness, job: JobEntry, failure: Failure | str | None, index: int = 0
) -> None:
    """A worker of the job ends by itself with exit code 1, and its node says why."""
    worker = job.workers[index]
    said = RULES.failure(failure) if isinstance(failure, str) else failure
    harness.sim.nodes[worker.node].exited(worker.key, 1, said)
    harness.settle()


@each_row(
    ("reason", "tries"),
    [("syntax_error", 0), ("no_signature", 3), ("cuda_failure", 3), (None, 3)],
)
def test_the_class_decides_within_the_job_s_own_budget(reason: str | None, tries: int) -> None:
    """Hopeless failures are not tried again, others as often as their user allows."""
    harness = EngineHarness(training=3, inference=0, settings=settings())
    job = running(harness, "t0", max_restarts=3)
    for _ in range(tries):
        fail(harness, job, reason)
        assert state(job) == JobState.PENDING
        rest(harness, job)
        harness.start(job, "t0" if "t0" not in job.retry.avoid_nodes else "t1")
    fail(harness, job, reason)
    assert state(job) == JobState.FAILED
    assert job.counts.own_faults == tries + 1


def test_exit_codes_that_a_user_listed_are_tried_again_in_any_case() -> None:
    """The list is the user's own word: the class only says where and when."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0", max_restarts=2, codes=(1,))
    fail(harness, job, "syntax_error")
    assert state(job) == JobState.PENDING


def test_an_exit_code_that_is_not_listed_is_not_tried_again() -> None:
    """Whatever the class says."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0", codes=(7,))
    fail(harness, job, "cuda_failure")
    assert state(job) == JobState.FAILED


def test_the_setting_leaves_all_to_the_budget() -> None:
    """Without classes a hopeless failure is tried again, at once and anywhere."""
    harness = EngineHarness(
        training=2, inference=0, settings=settings(retry_by_failure_class=False)
    )
    job = running(harness, "t0", max_restarts=1)
    fail(harness, job, "gpu_out_of_memory")
    assert state(job) == JobState.PENDING
    assert (job.retry.at_s, job.retry.avoid_nodes) == (None, [])
    assert job.retry.failure is not None  # it is told all the same
    harness.start(job, "t0")
    fail(harness, job, "job_preempted")
    assert state(job) == JobState.FAILED


def test_a_preemption_by_others_costs_no_budget() -> None:
    """A log that names it is believed; a mere signal is not, since any program can send one."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0", max_restarts=0)
    fail(harness, job, "job_preempted")
    assert (state(job), job.counts.own_faults) == (JobState.PENDING, 0)
    harness.wait(BACKOFF_S)
    harness.start(job, "t0")
    fail(harness, job, RULES.failure("job_preempted", is_explicit=False))
    assert state(job) == JobState.FAILED


def test_back_off_doubles_up_to_its_limit_and_no_policy_sees_the_job_before() -> None:
    """A policy cannot start what it does not see; the engine wakes when it may."""
    harness = EngineHarness(training=2, inference=0, settings=settings(retry_backoff_max_s=100.0))
    job = running(harness, "t0", max_restarts=9)
    for wait_s in (30.0, 60.0, 100.0, 100.0):
        fail(harness, job, "mpi_error")
        assert job.retry.at_s == harness.engine.state.now_s + wait_s
        assert not harness.engine.snapshot().jobs
        which = f"restart {job.counts.own_faults} of 9"
        told = (f"tries again in {wait_s:.0f} s ({which}): MPI error (t0)",)
        assert harness.engine.explain.blockers(job.job_id) == told
        harness.wait(wait_s - 1.0)
        assert not harness.engine.snapshot().jobs
        harness.wait(1.0)
        assert [seen.job_id for seen in harness.engine.snapshot().jobs] == [job.job_id]
        harness.start(job, "t0")
        assert state(job) == JobState.RUNNING


def test_a_failure_of_the_node_is_avoided_by_every_placing_rule() -> None:
    """The node of the worker that failed is no place for the next attempt, the others are."""
    harness = EngineHarness(training=3, inference=0, settings=settings())
    job = running(harness, "t0", "t1")
    fail(harness, job, "cuda_failure", index=1)
    assert job.retry.avoid_nodes == ["t1"]
    snapshot = harness.engine.snapshot()
    assert snapshot.jobs[0].nodes.avoided == ("t1",)
    for name in ("fifo", "sjf", "srtf", "aryl"):
        decisions = policy(name).allocate(snapshot, b"").decisions
        placed = {p.node for d in decisions for p in getattr(d, "placements", ())}
        assert placed == {"t0", "t2"}, name


def test_a_node_is_not_avoided_where_nobody_else_has_room() -> None:
    """A gang that needs every node would wait for ever."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0", "t1")
    fail(harness, job, "cuda_failure")
    assert job.retry.avoid_nodes == []


def test_a_job_does_not_wait_for_ever_for_another_node() -> None:
    """After `retry_avoid_s` of waiting the node on which it failed will do."""
    harness = EngineHarness(training=2, inference=0, settings=settings(retry_avoid_s=500.0))
    job = running(harness, "t0")
    fail(harness, job, "cuda_failure")
    harness.wait(499.0)
    assert harness.engine.snapshot().jobs[0].nodes.avoided == ("t0",)
    harness.wait(1.0)
    assert harness.engine.snapshot().jobs[0].nodes.avoided == ()


@pytest.mark.parametrize("is_act", [True, False])
def test_a_node_with_bad_memory_is_cordoned_or_named(is_act: bool) -> None:
    """The operator chooses: a job writes its own log, and could name any node in it."""
    harness = EngineHarness(training=2, inference=0, settings=settings(cordon_suspect_nodes=is_act))
    job = running(harness, "t0")
    fail(harness, job, "gpu_ecc_error")
    assert harness.node("t0").cordon.is_cordoned == is_act
    told = [line.what for line in harness.engine.state.stories if line.subject == "t0"]
    assert ("cordoned" if is_act else "cordon recommended") in told


def test_the_root_cause_of_a_gang_counts_whoever_speaks_first() -> None:
    """A peer sees the connection break before the node of the cause has reported it."""
    harness = EngineHarness(training=2, inference=0, settings=settings(), delays=Delays(stop_s=5.0))
    job = running(harness, "t0", "t1")
    cause = job.workers[1]
    fail(harness, job, "mpi_error", index=0)
    assert harness.engine.state.jobs[JobId("j")].retry.at_s is not None
    node = harness.sim.nodes[cause.node]
    held = node._held[cause.key]  # it had ended before the order to stop came
    held.stop_reason = None
    node.exited(cause.key, 1, RULES.failure("gpu_out_of_memory"))
    harness.wait(10.0)
    assert state(job) == JobState.FAILED
    assert job.retry.failure is not None
    assert job.retry.failure.reason == "gpu_out_of_memory"
    assert (job.counts.own_faults, job.retry.counts["mpi_error"]) == (1, 0)


def test_an_echo_after_the_cause_changes_nothing() -> None:
    """What is less telling comes too late."""
    harness = EngineHarness(training=2, inference=0, settings=settings(), delays=Delays(stop_s=5.0))
    job = running(harness, "t0", "t1")
    echo = job.workers[1]
    fail(harness, job, "gpu_out_of_memory", index=0)
    node = harness.sim.nodes[echo.node]
    node._held[echo.key].stop_reason = None
    node.exited(echo.key, 1, RULES.failure("mpi_error"))
    harness.wait(10.0)
    assert state(job) == JobState.FAILED
    assert job.retry.failure is not None
    assert job.retry.failure.reason == "gpu_out_of_memory"


def test_what_is_remembered_of_failures_outlives_the_leader() -> None:
    """Back-off, avoided nodes and counts are part of the saved state."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0")
    fail(harness, job, "mpi_error")
    reborn = Engine(settings(), decode_state(harness.engine.encode_state()))
    assert reborn.state.jobs[job.job_id].retry == job.retry
    assert reborn.explain.blockers(job.job_id)
    assert NodeName("t0") in reborn.state.nodes


@each_row("reason", ["no_signature", "traceback_from_crash", "mpi_error", None])
def test_sixty_restarts_are_sixty_with_a_pause_that_grows(reason: str | None) -> None:
    """Whatever passes is tried as often as its user says, never sixty times in a minute."""
    harness = EngineHarness(training=2, inference=0, settings=settings(retry_avoid_s=1.0))
    job = running(harness, "t0", max_restarts=60)
    pauses: list[float] = []
    for _ in range(60):
        fail(harness, job, reason)
        assert state(job) == JobState.PENDING
        pauses.append(again(harness, job))
    fail(harness, job, reason)
    assert state(job) == JobState.FAILED
    assert pauses == sorted(pauses)
    assert pauses[1:3] == ([60.0, 120.0] if reason == "mpi_error" else [30.0, 60.0])
    assert pauses[-1] == harness.engine.settings.retry_backoff_max_s
    assert "60 restarts of retry.max_restarts used, none is left" in why(harness, job)


@given(
    runs=st.lists(st.sampled_from([60.0, 3599.0, 3600.0, 9000.0]), max_size=6),
    resets=st.booleans(),
)
@example(runs=[60.0, 60.0, 9000.0, 60.0], resets=True)
@settings_of(max_examples=20)
def test_good_running_sets_back_the_pause_and_the_budget_where_its_user_says_so(
    runs: list[float], *, resets: bool
) -> None:
    """A fault that comes after each two hours would be tried for ever: only a user knows better."""
    harness = EngineHarness(training=2, inference=0, settings=settings(retry_avoid_s=1.0))
    job = running(harness, "t0", max_restarts=2)
    if resets:
        retry = replace(job.spec.retry, reset_after_s=7200.0)
        job.spec = replace(job.spec, retry=retry)
    used = row = 0
    for ran_s in runs:
        harness.wait(ran_s)
        fail(harness, job, None)
        row = 1 if ran_s >= 3600.0 else row + 1
        used = 1 if ran_s >= 7200.0 and resets else used + 1
        assert (job.retry.in_a_row, restarts_used(job)) == (row, used)
        if used > 2:
            assert state(job) == JobState.FAILED
            return
        assert again(harness, job) == (0.0 if row == 1 else 30.0 * 2 ** (row - 2))


def test_a_job_in_its_pause_can_be_cancelled_and_says_what_it_waits_for() -> None:
    """Which restart, of how many, and when."""
    harness = EngineHarness(training=2, inference=0, settings=settings(retry_avoid_s=1.0))
    job = running(harness, "t0", max_restarts=60)
    fail(harness, job, None)
    again(harness, job)
    assert "1 of 60 restarts used" in why(harness, job)
    fail(harness, job, None)
    assert "tries again in 30 s (restart 2 of 60): exit code 1" in why(harness, job)
    harness.engine.handle(
        JobCancelRequested(job_id=job.job_id, by="t/u"), now_s=harness.engine.state.now_s
    )
    harness.settle()
    assert state(job) == JobState.CANCELLED


@each_row(
    ("reason", "retry", "said"),
    [
        ("syntax_error", RetrySpec(max_restarts=3), "list 1 in retry.on_exit_codes"),
        ("syntax_error", RetrySpec(max_restarts=3), "3 of 3 restarts left unused"),
        ("cuda_failure", RetrySpec(max_restarts=3, on_exit_codes=(7,)), "list 1 there"),
        ("cuda_failure", RetrySpec(), "retry.max_restarts is 0"),
        ("once", RetrySpec(max_restarts=9), "most_retries of its rule"),
    ],
)
def test_what_ended_a_job_is_told_with_the_way_out(
    reason: str, retry: RetrySpec, said: str
) -> None:
    """A user reads which rule it was, and what to write for another end."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0")
    job.spec = replace(job.spec, retry=retry)
    failure = RULES.failure("cuda_failure" if reason == "once" else reason)
    if reason == "once":
        failure = replace(failure, most_retries=0)
    fail(harness, job, failure)
    assert state(job) == JobState.FAILED
    assert said in why(harness, job)


def test_a_job_that_its_own_fault_did_not_end_tells_no_rule_of_retries() -> None:
    """One that was cancelled after a fault has nothing to set right."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0", max_restarts=3)
    fail(harness, job, None)
    harness.engine.handle(
        JobCancelRequested(job_id=job.job_id, by="t/u"), now_s=harness.engine.state.now_s
    )
    harness.settle()
    assert state(job) == JobState.CANCELLED
    assert "retry." not in why(harness, job)


@pytest.mark.parametrize(
    ("reason", "after_s", "is_free"),
    [("mpi_error", 5.0, True), ("mpi_error", 31.0, False), ("traceback_from_crash", 5.0, False)],
)
def test_a_survivor_that_loses_a_peer_which_left_costs_no_restart(
    reason: str, after_s: float, *, is_free: bool
) -> None:
    """A flexible worker was asked to leave: the connection that breaks then is no fault of the
    job's. Later, or with another failure, it is."""
    harness = EngineHarness(training=3, inference=0, settings=settings())
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t0", flexible=("t1",))
    harness.settle()
    flexible = job.workers[1]
    harness.decide(
        Resize(job_id=job.job_id, removed_workers=(flexible.key.worker_index,), reason="test")
    )
    harness.wait(after_s)
    fail(harness, job, reason)
    assert state(job) == (JobState.PENDING if is_free else JobState.FAILED)
    assert restarts_used(job) == (0 if is_free else 1)


def test_a_base_worker_that_is_done_early_makes_no_fault_free() -> None:
    """A gang whose first worker leaves with success would else break, free, for ever."""
    harness = EngineHarness(training=2, inference=0, settings=settings())
    job = running(harness, "t0", "t1", max_restarts=0)
    harness.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 0)
    harness.settle()
    fail(harness, job, "mpi_error", index=1)
    assert state(job) == JobState.FAILED


@pytest.mark.parametrize(("reason", "is_node_s"), [("mpi_error", True), ("cuda_failure", False)])
def test_a_node_that_was_lost_explains_what_its_peers_saw(reason: str, *, is_node_s: bool) -> None:
    """The others' connection breaks at once; that a node is dead is known later. It is the node's
    fault then, free of charge, also where the job has no restart; another failure stays its own."""
    harness = EngineHarness(training=3, inference=0, settings=settings(), delays=Delays(stop_s=5.0))
    job = running(harness, "t0", "t1", max_restarts=0)
    harness.toggle_deaf(NodeName("t1"))
    fail(harness, job, reason, index=0)
    harness.sim.nodes[NodeName("t1")].boot()
    harness.wait(10.0)
    assert state(job) == (JobState.PENDING if is_node_s else JobState.FAILED)
    assert restarts_used(job) == (0 if is_node_s else 1)
    assert job.counts.node_faults == int(is_node_s)
    assert ("t1" in job.retry.avoid_nodes) == is_node_s


DOWN_S = 30.0


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (0, []),
        (1, ["its nodes failed it 1 time, which costs it no try"]),
        (2, ["its nodes failed it 2 times, which costs it no try"]),
    ],
)
def test_a_waiting_job_says_how_often_its_nodes_failed_it(times: int, said: list[str]) -> None:
    """Each loss of a node counts once, and a job that lost none says nothing of it."""
    harness = EngineHarness()
    job = harness.submit("j", workers=(1, 1), work_s=1e6)
    for _ in range(times):
        harness.start(job, "t0")
        harness.wait(5.0)
        harness.sim.crash(
            [Crash(node=NodeName("t0"), at_s=harness.sim.loop.now_s + 1.0, down_s=DOWN_S)]
        )
        harness.wait(DOWN_S + 60.0)
    assert state(job) == JobState.PENDING
    assert [why for why in explain_job.reasons(harness.engine, job) if "failed it" in why] == said
