"""Gangs that a coordinator without a journal finds on the nodes: they run whole or not at all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.messages import OrderPhase, WorkerPhase
from common.model import JobId, JobState, NodeName, StopReason
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.tables import AfterVacating, JobEntry
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.sim.run.cluster import Delays
from tests.engine.stopped_jobs import gone_report
from tests.harness.cluster.engine import EngineHarness

JOB = JobId("j")


def running(harness: EngineHarness) -> list[str]:
    """The nodes on which a worker computes."""
    return [name for name, node in harness.sim.nodes.items() if node.keys(WorkerPhase.RUNNING)]


def found(harness: EngineHarness) -> JobEntry:
    """The job as the coordinator knows it now."""
    return harness.engine.state.jobs[JOB]


def test_a_part_of_a_gang_that_never_ran_waits_for_the_rest() -> None:
    """One worker is ready and its partner's node is dead: alone it is never told to run."""
    harness = EngineHarness()
    harness.sim.nodes[NodeName("t0")].crash()
    harness.start(harness.submit(workers=(2, 2)), "t0", "t1")
    harness.lose_journal()
    harness.wait(10.0 * harness.engine.settings.gang_ready_timeout_s)
    assert running(harness) == []
    assert found(harness).state == JobState.STARTING
    harness.sim.handle(JobCancelRequested(job_id=JOB, by="a/b"))
    harness.wait(1.0)
    assert found(harness).state == JobState.CANCELLED
    assert harness.engine.check() == []


def test_a_gang_that_was_getting_ready_runs_when_all_of_it_is() -> None:
    """Both workers are found in the ledgers while they reserve: later both run, at once."""
    harness = EngineHarness(delays=Delays(ready_s=20.0))
    harness.start(harness.submit(workers=(2, 2)), "t0", "t1")
    harness.wait(5.0)
    harness.lose_journal()
    assert running(harness) == []
    assert found(harness).attempt.gang_deadline_s is not None
    harness.wait(20.0)
    assert running(harness) == ["t0", "t1"]
    assert (found(harness).state, found(harness).attempt.number) == (JobState.RUNNING, 1)
    assert harness.engine.check() == []


def test_a_gang_that_was_told_to_run_in_part_runs_whole() -> None:
    """The order to run reached one node of two: it proves that the gang was ready."""
    harness = EngineHarness(delays=Delays(ready_s=1.0))
    harness.start(harness.submit(workers=(2, 2)), "t0", "t1")
    harness.toggle_deaf(NodeName("t0"))
    harness.wait(5.0)
    assert running(harness) == ["t1"]
    [order] = harness.sim.nodes[NodeName("t0")].orders()
    assert order.phase == OrderPhase.RESERVE
    harness.deaf.clear()
    harness.lose_journal()
    assert running(harness) == ["t0", "t1"]
    assert (found(harness).state, found(harness).attempt.number) == (JobState.RUNNING, 1)
    assert harness.engine.check() == []


@pytest.mark.parametrize("deaf", [None, "t1"])
def test_a_job_whose_workers_were_told_of_its_cancel_does_not_run_again(deaf: str | None) -> None:
    """The journal that had it is lost while they stop: the node that was told tells it when its
    worker has gone, and the rest of the gang ends, too."""
    harness = EngineHarness(delays=Delays(stop_s=20.0))
    harness.start(harness.submit(workers=(2, 2)), "t0", "t1")
    harness.wait(5.0)
    if deaf:
        harness.toggle_deaf(NodeName(deaf))
    harness.sim.handle(JobCancelRequested(job_id=JOB, by="a/b"))
    harness.wait(1.0)
    harness.lose_journal()
    if deaf:
        harness.toggle_deaf(NodeName(deaf))
    assert found(harness).state == JobState.RUNNING
    harness.wait(50.0)
    assert (found(harness).state, found(harness).counts.preemptions) == (JobState.CANCELLED, 0)
    assert found(harness).cancelled_by == "an order to t0"
    assert harness.engine.check() == []


@pytest.mark.parametrize("deaf", [None, "t1"])
def test_a_job_whose_workers_were_told_of_its_time_limit_does_not_run_again(
    deaf: str | None,
) -> None:
    """It has had its time: where no node reports its start, the limit that begins again with what
    was found would be a second one."""
    harness = EngineHarness(delays=Delays(stop_s=20.0))
    job = harness.submit(workers=(2, 2))
    job.spec = replace(job.spec, time_limit_s=60.0)
    harness.start(job, "t0", "t1")
    harness.wait(59.0)
    if deaf:
        harness.toggle_deaf(NodeName(deaf))
    harness.wait(3.0)
    assert found(harness).after_vacating == AfterVacating.FAIL
    for node in harness.sim.nodes.values():
        node.began_ago_s = dict  # type: ignore[method-assign]  # a node that does not know
    harness.lose_journal()
    if deaf:
        harness.toggle_deaf(NodeName(deaf))
    assert found(harness).state == JobState.RUNNING
    harness.wait(50.0)
    assert (found(harness).state, found(harness).counts.preemptions) == (JobState.FAILED, 0)
    assert found(harness).error == "ran into its time_limit_s of 60 s"
    assert harness.engine.check() == []


def test_a_gang_that_was_given_up_before_it_was_ready_is_told_so_and_went_nowhere() -> None:
    """Its nodes are where they were: nobody went home, and no preemption is counted."""
    harness = EngineHarness(delays=Delays(ready_s=1e6))
    harness.start(harness.submit(workers=(2, 2)), "t0", "t1")
    harness.wait(5.0)
    harness.lose_journal()
    assert found(harness).state == JobState.STARTING
    report = gone_report(harness, found(harness), "t0", stop_reason=StopReason.GANG_TIMEOUT)
    harness.sim.handle(report)
    told = [line.reason for line in harness.engine.state.stories if line.subject == JOB]
    assert not [said for said in told if "went home" in said]
    assert "its gang was not ready in time, by an earlier order to t0" in told
    assert (found(harness).counts.preemptions, found(harness).counts.node_faults) == (0, 0)
    assert found(harness).after_vacating in (None, AfterVacating.REQUEUE)
    assert harness.engine.check() == []


@pytest.mark.parametrize("reason", [StopReason.PREEMPT, StopReason.GANG_TIMEOUT])
def test_a_worker_that_was_not_ready_in_time_was_not_released(reason: StopReason) -> None:
    """Its loan did not end by it; one whose node went home by itself gave up what it had."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    added = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    harness.wait(30.0)
    assert running(harness) == ["t0", "t1"]
    harness.sim.handle(gone_report(harness, job, "t1", stop_reason=reason))
    assert (job.running_workers, job.counts.preemptions) == (1, 0)
    is_released = reason != StopReason.GANG_TIMEOUT
    assert harness.engine.state.counters.flexible_workers_released == is_released
    assert harness.engine.check() == []
