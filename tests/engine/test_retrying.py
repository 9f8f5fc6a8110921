"""What a failure's kind decides on the next try: whether, where and when."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.failure_rules import read_rules
from common.failures import Failure
from common.model import JobId, JobState, NodeName, RetrySpec
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.settings import EngineSettings
from coordinator.engine.state import JobEntry
from coordinator.policies.bundles import policy
from coordinator.sim.cluster import Delays
from tests.engine.house import House, state

RULES = read_rules()
BACKOFF_S = 30.0


def settings(**changed: object) -> EngineSettings:
    """Those of a cell with nothing but training nodes."""
    return replace(EngineSettings(policy="fifo", min_runtime_s=0.0), **changed)


def running(
    house: House, *nodes: str, max_restarts: int = 5, codes: tuple[int, ...] = ()
) -> JobEntry:
    """A gang on whole nodes that may fail so often."""
    job = house.submit(workers=(len(nodes), len(nodes)), work_s=1e6, max_restarts=max_restarts)
    job.spec = replace(job.spec, retry=RetrySpec(max_restarts=max_restarts, on_exit_codes=codes))
    house.start(job, *nodes)
    house.settle()
    assert state(job) == JobState.RUNNING
    return job


def fail(house: House, job: JobEntry, failure: Failure | str | None, index: int = 0) -> None:
    """A worker of the job ends by itself with exit code 1, and its node says why."""
    worker = job.workers[index]
    said = RULES.failure(failure) if isinstance(failure, str) else failure
    house.sim.nodes[worker.node].exited(worker.key, 1, said)
    house.settle()


@pytest.mark.parametrize(
    ("reason", "tries"),
    [("syntax_error", 0), ("no_signature", 1), ("cuda_failure", 3), (None, 3)],
)
def test_the_class_decides_within_the_job_s_own_budget(reason: str | None, tries: int) -> None:
    """Hopeless failures are not tried again, vague ones once, others as often as allowed."""
    house = House(training=3, inference=0, settings=settings())
    job = running(house, "t0", max_restarts=3)
    for _ in range(tries):
        fail(house, job, reason)
        assert state(job) == JobState.PENDING
        house.start(job, "t0" if "t0" not in job.retry.avoid_nodes else "t1")
    fail(house, job, reason)
    assert state(job) == JobState.FAILED
    assert job.own_fault_count == tries + 1


def test_exit_codes_that_a_user_listed_are_tried_again_in_any_case() -> None:
    """The list is the user's own word: the class only says where and when."""
    house = House(training=2, inference=0, settings=settings())
    job = running(house, "t0", max_restarts=2, codes=(1,))
    fail(house, job, "syntax_error")
    assert state(job) == JobState.PENDING


def test_an_exit_code_that_is_not_listed_is_not_tried_again() -> None:
    """Whatever the class says."""
    house = House(training=2, inference=0, settings=settings())
    job = running(house, "t0", codes=(7,))
    fail(house, job, "cuda_failure")
    assert state(job) == JobState.FAILED


def test_the_setting_leaves_all_to_the_budget() -> None:
    """Without classes a hopeless failure is tried again, at once and anywhere."""
    house = House(training=2, inference=0, settings=settings(retry_by_failure_class=False))
    job = running(house, "t0", max_restarts=1)
    fail(house, job, "gpu_out_of_memory")
    assert state(job) == JobState.PENDING
    assert (job.retry.at_s, job.retry.avoid_nodes) == (None, [])
    assert job.retry.failure is not None  # it is told all the same
    house.start(job, "t0")
    fail(house, job, "job_preempted")
    assert state(job) == JobState.FAILED


def test_a_preemption_by_others_costs_no_budget() -> None:
    """A log that names it is believed; a mere signal is not, since any program can send one."""
    house = House(training=2, inference=0, settings=settings())
    job = running(house, "t0", max_restarts=0)
    fail(house, job, "job_preempted")
    assert (state(job), job.own_fault_count) == (JobState.PENDING, 0)
    house.wait(BACKOFF_S)
    house.start(job, "t0")
    fail(house, job, RULES.failure("job_preempted", is_explicit=False))
    assert state(job) == JobState.FAILED


def test_back_off_doubles_up_to_its_limit_and_no_policy_sees_the_job_before() -> None:
    """A policy cannot start what it does not see; the engine wakes when it may."""
    house = House(training=2, inference=0, settings=settings(retry_backoff_max_s=100.0))
    job = running(house, "t0", max_restarts=9)
    for wait_s in (30.0, 60.0, 100.0, 100.0):
        fail(house, job, "mpi_error")
        assert job.retry.at_s == house.engine.state.now_s + wait_s
        assert not house.engine.snapshot().jobs
        told = (f"tries again in {wait_s:.0f} s: MPI error (t0)",)
        assert house.engine.blockers(job.job_id) == told
        house.wait(wait_s - 1.0)
        assert not house.engine.snapshot().jobs
        house.wait(1.0)
        assert [seen.job_id for seen in house.engine.snapshot().jobs] == [job.job_id]
        house.start(job, "t0")
        assert state(job) == JobState.RUNNING


def test_a_failure_of_the_node_is_avoided_by_every_placing_rule() -> None:
    """The node of the worker that failed is no place for the next attempt, the others are."""
    house = House(training=3, inference=0, settings=settings())
    job = running(house, "t0", "t1")
    fail(house, job, "cuda_failure", index=1)
    assert job.retry.avoid_nodes == ["t1"]
    snapshot = house.engine.snapshot()
    assert snapshot.jobs[0].avoid_nodes == ("t1",)
    for name in ("fifo", "sjf", "srtf", "aryl"):
        decisions = policy(name).allocate(snapshot, b"").decisions
        placed = {p.node for d in decisions for p in getattr(d, "placements", ())}
        assert placed == {"t0", "t2"}, name


def test_a_node_is_not_avoided_where_nobody_else_has_room() -> None:
    """A gang that needs every node would wait for ever."""
    house = House(training=2, inference=0, settings=settings())
    job = running(house, "t0", "t1")
    fail(house, job, "cuda_failure")
    assert job.retry.avoid_nodes == []


def test_a_job_does_not_wait_for_ever_for_another_node() -> None:
    """After `retry_avoid_s` of waiting the node on which it failed will do."""
    house = House(training=2, inference=0, settings=settings(retry_avoid_s=500.0))
    job = running(house, "t0")
    fail(house, job, "cuda_failure")
    house.wait(499.0)
    assert house.engine.snapshot().jobs[0].avoid_nodes == ("t0",)
    house.wait(1.0)
    assert house.engine.snapshot().jobs[0].avoid_nodes == ()


@pytest.mark.parametrize("is_act", [True, False])
def test_a_node_with_bad_memory_is_cordoned_or_named(is_act: bool) -> None:
    """The operator chooses: a job writes its own log, and could name any node in it."""
    house = House(training=2, inference=0, settings=settings(cordon_suspect_nodes=is_act))
    job = running(house, "t0")
    fail(house, job, "gpu_ecc_error")
    assert house.node("t0").is_cordoned == is_act
    told = [line.what for line in house.engine.state.stories if line.subject == "t0"]
    assert ("cordoned" if is_act else "cordon recommended") in told


def test_the_root_cause_of_a_gang_counts_whoever_speaks_first() -> None:
    """A peer sees the connection break before the node of the cause has reported it."""
    house = House(training=2, inference=0, settings=settings(), delays=Delays(stop_s=5.0))
    job = running(house, "t0", "t1")
    cause = job.workers[1]
    fail(house, job, "mpi_error", index=0)
    assert house.engine.state.jobs[JobId("j")].retry.at_s is not None
    node = house.sim.nodes[cause.node]
    held = node._held[cause.key]  # it had ended before the order to stop came
    held.stop_reason = None
    node.exited(cause.key, 1, RULES.failure("gpu_out_of_memory"))
    house.wait(10.0)
    assert state(job) == JobState.FAILED
    assert job.retry.failure is not None
    assert job.retry.failure.reason == "gpu_out_of_memory"
    assert (job.own_fault_count, job.retry.counts["mpi_error"]) == (1, 0)


def test_an_echo_after_the_cause_changes_nothing() -> None:
    """What is less telling comes too late."""
    house = House(training=2, inference=0, settings=settings(), delays=Delays(stop_s=5.0))
    job = running(house, "t0", "t1")
    echo = job.workers[1]
    fail(house, job, "gpu_out_of_memory", index=0)
    node = house.sim.nodes[echo.node]
    node._held[echo.key].stop_reason = None
    node.exited(echo.key, 1, RULES.failure("mpi_error"))
    house.wait(10.0)
    assert state(job) == JobState.FAILED
    assert job.retry.failure is not None
    assert job.retry.failure.reason == "gpu_out_of_memory"


def test_what_is_remembered_of_failures_outlives_the_leader() -> None:
    """Back-off, avoided nodes and counts are part of the saved state."""
    house = House(training=2, inference=0, settings=settings())
    job = running(house, "t0")
    fail(house, job, "mpi_error")
    again = Engine(settings(), decode_state(house.engine.encode_state()))
    assert again.state.jobs[job.job_id].retry == job.retry
    assert again.blockers(job.job_id)
    assert NodeName("t0") in again.state.nodes
