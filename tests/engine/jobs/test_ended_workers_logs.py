"""What the coordinator remembers of ended workers: which nodes have a job's logs, by attempt."""

from __future__ import annotations

from common.model import JobState, NodeName
from coordinator.engine.jobs import ended_workers as ended
from coordinator.engine.jobs.ended_workers import EARLIER_WORKERS_KEPT, ENDED_WORKERS_KEPT
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, state


def test_an_ended_job_remembers_which_nodes_have_its_logs() -> None:
    """Of the attempt that ran last, by worker."""
    harness = EngineHarness()
    job = harness.submit(workers=(2, 2), work_s=100.0)
    harness.start(job, "t0", "t1")
    harness.wait(10.0)
    assert job.ended.workers == {}
    harness.wait(1000.0)
    assert state(job) == JobState.SUCCEEDED
    nodes = {index: ended.node for index, ended in job.ended.workers.items()}
    assert nodes == {0: "t0", 1: "t1"}
    assert {ended.key.attempt for ended in job.ended.workers.values()} == {1}


def test_a_new_attempt_replaces_what_is_remembered_of_the_one_before() -> None:
    """Until one of its workers has ended, the logs of the failed attempt are still found."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2), work_s=1000.0, max_restarts=1)
    harness.start(job, "t0", flexible=("t1",))
    harness.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 3)
    harness.settle()
    assert state(job) == JobState.PENDING
    assert {i: (e.node, e.key.attempt) for i, e in job.ended.workers.items()} == {
        0: ("t0", 1),
        1: ("t1", 1),
    }
    harness.start(job, "t1")
    assert {ended.key.attempt for ended in job.ended.workers.values()} == {1}
    harness.wait(2000.0)
    assert state(job) == JobState.SUCCEEDED
    assert {i: (e.node, e.key.attempt) for i, e in job.ended.workers.items()} == {0: ("t1", 2)}


def attempts_on(job: JobEntry) -> dict[int, dict[int, str]]:
    """Where the logs of each attempt are: nodes by worker."""
    return {
        attempt: {i: worker.node for i, worker in ended.of_attempt(job, attempt).items()}
        for attempt in ended.attempts(job)
    }


def test_earlier_attempts_are_found_by_their_number() -> None:
    """While a later one runs and after it has ended; of an attempt that never was there is none."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 1), work_s=1000.0, max_restarts=2)
    for node in ("t0", "t1"):
        harness.start(job, node)
        harness.sim.nodes[NodeName(node)].exited(job.workers[0].key, 3)
        harness.settle()
    harness.start(job, "t0")
    assert attempts_on(job) == {1: {0: "t0"}, 2: {0: "t1"}, 3: {0: "t0"}}
    harness.wait(5000.0)
    assert state(job) == JobState.SUCCEEDED
    assert attempts_on(job) == {1: {0: "t0"}, 2: {0: "t1"}, 3: {0: "t0"}}
    assert ended.of_attempt(job, 4) == {}


def test_a_job_that_is_started_for_ever_remembers_its_newest_attempts_only() -> None:
    """The coordinator's state must not grow with time."""
    harness = EngineHarness()
    count = EARLIER_WORKERS_KEPT + 5
    job = harness.submit(workers=(1, 1), work_s=1e7, max_restarts=count)
    for _ in range(count):
        harness.start(job, "t0")
        harness.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 3)
        harness.settle()
    assert ended.attempts(job) == list(range(count - EARLIER_WORKERS_KEPT, count + 1))


def test_a_worker_that_was_never_told_to_run_is_not_remembered() -> None:
    """It has no log; the log of the attempt before it is what there is to see."""
    harness = EngineHarness(delays=Delays(ready_s=1000.0))
    job = harness.submit(workers=(2, 2))
    harness.start(job, "t0", "t1")
    harness.wait(900.0)
    assert harness.engine.state.counters.gang_timeouts >= 1
    assert (state(job), job.ended.workers) == (JobState.PENDING, {})


def test_a_job_that_grows_and_shrinks_for_months_remembers_its_newest_workers_only() -> None:
    """The coordinator's state must not grow with time."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2), work_s=1e7)
    harness.start(job, "t0")
    for _ in range(ENDED_WORKERS_KEPT + 5):
        grow = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
        harness.decide(Resize(job_id=job.job_id, added=grow, reason="room"))
        harness.wait(60.0)
        (flexible,) = (i for i, worker in job.workers.items() if worker.is_flexible)
        harness.decide(Resize(job_id=job.job_id, removed_workers=(flexible,), reason="needed"))
        harness.wait(60.0)
    last = ENDED_WORKERS_KEPT + 5
    assert list(job.ended.workers) == list(range(last - ENDED_WORKERS_KEPT + 1, last + 1))
