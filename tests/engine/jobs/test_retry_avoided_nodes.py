"""Nodes that a job leaves alone after a fault: each for a time of its own, whatever comes after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.faults import Fault
from common.model import JobState, NodeName
from coordinator.engine.jobs import retry as jobs_retry
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import GpuFact, NodeReported, OperatorAction, PassDue
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import Avoided, JobEntry, RetryEntry
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.service.api.explain_job import reasons as explain_job
from coordinator.sim.run.cluster import Delays
from tests.engine.jobs.test_retry import fail
from tests.harness.cluster.engine import EngineHarness, state
from tests.harness.cluster.scripted_nodes import BACK_OFF_S, SETTINGS, BlackHole, Refusal

MISSING = Refusal("workdir: no such directory: /data/x", Fault.JOB, "workdir")
AVOID_S = SETTINGS.retry_avoid_s
TIMEOUT_S, REST_S = 10.0, 100.0
T0, T1, T2 = (NodeName(f"t{number}") for number in range(3))


def harness_of(nodes: int = 4) -> EngineHarness:
    """Training nodes with which a test does as it likes."""
    settings = EngineSettings(
        policy="fifo",
        min_runtime_s=0.0,
        gang_ready_timeout_s=TIMEOUT_S,
        retry_backoff_s=REST_S,
    )
    return EngineHarness(training=nodes, inference=0, delays=Delays(ready_s=1.0), settings=settings)


def started(harness: EngineHarness) -> JobEntry:
    """A job that runs on t0, could grow, and may fail by its own fault."""
    job = harness.submit(workers=(1, 3), work_s=1e7, max_restarts=3)
    harness.start(job, "t0")
    harness.wait(2.0)
    assert state(job) == JobState.RUNNING
    return job


def grows_in_vain(harness: EngineHarness, job: JobEntry, name: NodeName) -> float:
    """A job that runs waits for a node until its time is over; when that was."""
    harness.toggle_deaf(name)
    added = (Placement(node=name, worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    assert state(job) == JobState.RESIZING
    ends_s = harness.sim.loop.now_s + TIMEOUT_S
    harness.wait(TIMEOUT_S + 0.5)
    harness.toggle_deaf(name)
    harness.wait(2.0)
    assert state(job) == JobState.RUNNING
    return ends_s


def grown(cell: BlackHole) -> JobEntry:
    """A job that runs on t0 and was refused one more worker by t1 for want of its directory."""
    job = cell.submit("j", most=2)
    cell.operate(OperatorAction.CORDON, "t1")
    cell.passes()
    cell.passes()
    assert job.running_workers == 1
    cell.operate(OperatorAction.UNCORDON, "t1")
    cell.now_s += SETTINGS.resize_cooldown_s
    cell.handle(PassDue())
    here = [worker for worker in job.workers.values() if worker.node == "t1"]
    assert here
    cell.report("t1", *map(MISSING.of, here))
    cell.report("t1")
    assert (state(job), job.retry.avoid_nodes) == (JobState.RUNNING, ["t1"])
    return job


def test_a_job_that_runs_grows_again_onto_a_node_whose_time_is_over() -> None:
    """What it did not find there may be mounted by then; it does not have to end for that."""
    cell = BlackHole(nodes=2)
    cell.bad = set()
    job = grown(cell)
    until_s = job.retry.avoided[T1].until_s
    assert until_s == pytest.approx(cell.now_s + AVOID_S, abs=1.0)
    cell.now_s = until_s - 1.0
    assert cell.handle(PassDue()).wake_at_s == until_s
    assert (job.retry.avoid_nodes, len(job.workers)) == (["t1"], 1)
    cell.now_s = until_s
    cell.handle(PassDue())
    assert (job.retry.avoid_nodes, len(job.workers)) == ([], 2)


def test_it_says_where_it_does_not_grow_and_for_how_long() -> None:
    """Whoever asks why it is small is told of each node that may have it again, and when."""
    cell = BlackHole(nodes=2)
    cell.bad = set()
    job = grown(cell)
    left_s = job.retry.avoided[T1].until_s - cell.now_s
    assert f"it may grow onto t1 again in {left_s:.0f} s" in explain_job(cell.engine, job)


def test_each_node_that_was_not_ready_has_its_own_time() -> None:
    """A second one does not end the first one's, nor makes it longer; both are left alone."""
    harness = harness_of()
    job = started(harness)
    first_s = grows_in_vain(harness, job, T1) + REST_S
    second_s = grows_in_vain(harness, job, T2) + 2.0 * REST_S
    assert job.retry.avoided == {T1: Avoided(first_s), T2: Avoided(second_s)}
    harness.wait(first_s - harness.sim.loop.now_s - 1.0)
    assert harness.engine.snapshot().jobs[0].nodes.avoided == (T1, T2)
    harness.wait(1.0)
    assert harness.engine.snapshot().jobs[0].nodes.avoided == (T2,)
    harness.wait(second_s - first_s)
    assert harness.engine.snapshot().jobs[0].nodes.avoided == ()
    assert state(job) == JobState.RUNNING


def test_the_node_of_its_own_fault_is_not_forgotten_for_one_that_was_not_ready() -> None:
    """A job that runs elsewhere does not grow there, however long it has left another alone."""
    harness = harness_of()
    job = started(harness)
    fail(harness, job, "cuda_failure")
    harness.start(job, "t1")
    harness.wait(2.0)
    grows_in_vain(harness, job, T2)
    assert job.retry.avoid_nodes == [T0, T2]
    harness.wait(REST_S)
    assert job.retry.avoid_nodes == [T0]
    harness.wait(2.0 * AVOID_S)
    assert (state(job), job.retry.avoid_nodes) == (JobState.RUNNING, [T0])
    said = "it does not grow onto t0, where it failed by its own fault"
    assert said in explain_job(harness.engine, job)


def test_the_node_of_its_own_fault_is_not_forgotten_for_a_fault_of_another() -> None:
    """Its next try is made on neither, where it fits elsewhere; else it forgets its own first."""
    for nodes, avoided in ((3, [T0, T1]), (2, [T1])):
        harness = harness_of(nodes)
        job = started(harness)
        fail(harness, job, "cuda_failure")
        harness.start(job, "t1")
        harness.wait(2.0)
        reboot(harness, T1)
        assert (state(job), job.retry.avoid_nodes) == (JobState.PENDING, avoided)
        assert job.retry.at_s is None


def test_where_not_all_can_be_left_alone_the_node_of_its_own_fault_is_tried_first() -> None:
    """Two others have just failed the job, and the third may do as well as before."""
    harness = harness_of(3)
    job = started(harness)
    fail(harness, job, "cuda_failure")
    for name in (T1, T2):
        harness.start(job, name)
        harness.wait(2.0)
        reboot(harness, name)
    assert (state(job), job.retry.avoid_nodes, job.retry.at_s) == (JobState.PENDING, [T1, T2], None)


def reboot(harness: EngineHarness, name: NodeName) -> None:
    """A node boots anew, and holds nothing."""
    node = harness.node(name)
    harness.sim.handle(
        NodeReported(
            node=name,
            boot_id="another",
            home_pool=node.home_pool,
            role=node.role,
            epoch=harness.engine.state.epoch,
            generation=node.desired.generation,
            gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in node.gpus),
        )
    )


def test_a_job_that_waits_takes_the_first_node_whose_time_is_over() -> None:
    """Refused by two, it is tried again on the first while the second is still left alone; it says
    when each may have it."""
    cell = BlackHole(nodes=3)
    cell.bad = {"t0", "t1"}
    job = cell.submit("j")
    cell.passes()
    cell.passes()
    assert job.retry.avoid_nodes == [T0, T1]
    cell.operate(OperatorAction.CORDON, "t2")
    first_s, second_s = (job.retry.avoided[name].until_s for name in (T0, T1))
    assert second_s - first_s > BACK_OFF_S / 2
    outcome = cell.handle(PassDue())
    assert (outcome.wake_at_s, job.attempt.number) == (first_s, 2)
    left_s = [f"{until_s - cell.now_s:.0f} s" for until_s in (first_s, second_s)]
    said = f"tries t0 again in {left_s[0]}, t1 again in {left_s[1]}, others at once: "
    assert cell.engine.explain.blockers(job.job_id)[0].startswith(said)
    cell.now_s = first_s
    cell.handle(PassDue())
    assert ({worker.node for worker in job.workers.values()}, job.attempt.number) == ({"t0"}, 3)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["leave", "own", "wait", "run"]), st.integers(0, 3),
                  st.floats(0.0, 50.0)),
        max_size=12,
    )
)  # fmt: skip
def test_nothing_shortens_the_time_for_which_a_node_is_left_alone(
    steps: list[tuple[str, int, float]],
) -> None:
    """Each node is avoided up to the last instant that was said of it and not beyond; that of an
    own fault for as long as the job runs; and the next one to end is the one to wake for."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    ends_s: dict[NodeName, float] = {}
    own: set[NodeName] = set()
    for what, number, seconds in steps:
        name = NodeName(f"n{number}")
        ctx = Context(cell.engine.state, SETTINGS, cell.now_s)
        match what:
            case "wait":
                cell.now_s += seconds
            case "run":
                job.state = JobState.PENDING if number % 2 else JobState.RUNNING
            case _:
                own |= {name} if what == "own" else set()
                is_own = what == "own"
                jobs_retry.leave(job.retry, [name], cell.now_s + seconds, is_own_fault=is_own)
                ends_s[name] = max(ends_s.get(name, 0.0), cell.now_s + seconds)
        ctx.now_s = cell.now_s
        jobs_retry.stop_avoiding(ctx, job)
        stays = own if job.state == JobState.RUNNING else set[NodeName]()
        ends_s = {n: end for n, end in ends_s.items() if end > cell.now_s or n in stays}
        own &= ends_s.keys()
        assert job.retry.avoid_nodes == sorted(ends_s)
        due = [end for n, end in ends_s.items() if n not in stays]
        assert jobs_retry.avoids_until_s(job) == min(due, default=None)


def test_all_nodes_are_told_with_their_own_times() -> None:
    """The first to end comes first, those that end together stand together, and not all of many."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    jobs_retry.leave(job.retry, [T2, T1], 30.0)
    jobs_retry.leave(job.retry, [T0], 60.0)
    assert jobs_retry.told(job, 10.0) == "t1, t2 again in 20 s, t0 again in 50 s"
    for number in range(3, 9):
        jobs_retry.leave(job.retry, [NodeName(f"t{number}")], 100.0 * number)
    said = jobs_retry.told(job, 10.0)
    assert said.startswith("t1, t2 again in 20 s, t0 again in 50 s, t3 again in 290 s, ")
    assert said.endswith(" and 4 later")


def test_who_is_to_blame_is_so_until_its_time_is_over() -> None:
    """A node that may be used again says nothing of where a job fits; what its own fault closed is
    not the node's matter."""
    retry = RetryEntry(
        avoided={T0: Avoided(5.0), T1: Avoided(6.0), T2: Avoided(9.0, is_own_fault=True)}
    )
    assert jobs_retry.blamed(retry, 4.9) == [T0, T1]
    assert jobs_retry.blamed(retry, 5.0) == [T1]
    assert jobs_retry.blamed(retry, 6.0) == []
