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
from tests.engine.house import House
from tests.engine.stopped_jobs import gone_report

JOB = JobId("j")


def running(house: House) -> list[str]:
    """The nodes on which a worker computes."""
    return [name for name, node in house.sim.nodes.items() if node.keys(WorkerPhase.RUNNING)]


def found(house: House) -> JobEntry:
    """The job as the coordinator knows it now."""
    return house.engine.state.jobs[JOB]


def test_a_part_of_a_gang_that_never_ran_waits_for_the_rest() -> None:
    """One worker is ready and its partner's node is dead: alone it is never told to run."""
    house = House()
    house.sim.nodes[NodeName("t0")].crash()
    house.start(house.submit(workers=(2, 2)), "t0", "t1")
    house.lose_journal()
    house.wait(10.0 * house.engine.settings.gang_ready_timeout_s)
    assert running(house) == []
    assert found(house).state == JobState.STARTING
    house.sim.handle(JobCancelRequested(job_id=JOB, by="a/b"))
    house.wait(1.0)
    assert found(house).state == JobState.CANCELLED
    assert house.engine.check() == []


def test_a_gang_that_was_getting_ready_runs_when_all_of_it_is() -> None:
    """Both workers are found in the ledgers while they reserve: later both run, at once."""
    house = House(delays=Delays(ready_s=20.0))
    house.start(house.submit(workers=(2, 2)), "t0", "t1")
    house.wait(5.0)
    house.lose_journal()
    assert running(house) == []
    assert found(house).attempt.gang_deadline_s is not None
    house.wait(20.0)
    assert running(house) == ["t0", "t1"]
    assert (found(house).state, found(house).attempt.number) == (JobState.RUNNING, 1)
    assert house.engine.check() == []


def test_a_gang_that_was_told_to_run_in_part_runs_whole() -> None:
    """The order to run reached one node of two: it proves that the gang was ready."""
    house = House(delays=Delays(ready_s=1.0))
    house.start(house.submit(workers=(2, 2)), "t0", "t1")
    house.toggle_deaf(NodeName("t0"))
    house.wait(5.0)
    assert running(house) == ["t1"]
    [order] = house.sim.nodes[NodeName("t0")].orders()
    assert order.phase == OrderPhase.RESERVE
    house.deaf.clear()
    house.lose_journal()
    assert running(house) == ["t0", "t1"]
    assert (found(house).state, found(house).attempt.number) == (JobState.RUNNING, 1)
    assert house.engine.check() == []


@pytest.mark.parametrize("deaf", [None, "t1"])
def test_a_job_whose_workers_were_told_of_its_cancel_does_not_run_again(deaf: str | None) -> None:
    """The journal that had it is lost while they stop: the node that was told tells it when its
    worker has gone, and the rest of the gang ends, too."""
    house = House(delays=Delays(stop_s=20.0))
    house.start(house.submit(workers=(2, 2)), "t0", "t1")
    house.wait(5.0)
    if deaf:
        house.toggle_deaf(NodeName(deaf))
    house.sim.handle(JobCancelRequested(job_id=JOB, by="a/b"))
    house.wait(1.0)
    house.lose_journal()
    if deaf:
        house.toggle_deaf(NodeName(deaf))
    assert found(house).state == JobState.RUNNING
    house.wait(50.0)
    assert (found(house).state, found(house).counts.preemptions) == (JobState.CANCELLED, 0)
    assert found(house).cancelled_by == "an order to t0"
    assert house.engine.check() == []


@pytest.mark.parametrize("deaf", [None, "t1"])
def test_a_job_whose_workers_were_told_of_its_time_limit_does_not_run_again(
    deaf: str | None,
) -> None:
    """It has had its time; the limit that began anew with what was found would be a second one."""
    house = House(delays=Delays(stop_s=20.0))
    job = house.submit(workers=(2, 2))
    job.spec = replace(job.spec, time_limit_s=60.0)
    house.start(job, "t0", "t1")
    house.wait(59.0)
    if deaf:
        house.toggle_deaf(NodeName(deaf))
    house.wait(3.0)
    assert found(house).after_vacating == AfterVacating.FAIL
    house.lose_journal()
    if deaf:
        house.toggle_deaf(NodeName(deaf))
    assert found(house).state == JobState.RUNNING
    house.wait(50.0)
    assert (found(house).state, found(house).counts.preemptions) == (JobState.FAILED, 0)
    assert found(house).error == "ran into its time_limit_s of 60 s"
    assert house.engine.check() == []


def test_a_gang_that_was_given_up_before_it_was_ready_is_told_so_and_went_nowhere() -> None:
    """Its nodes are where they were: nobody went home, and no preemption is counted."""
    house = House(delays=Delays(ready_s=1e6))
    house.start(house.submit(workers=(2, 2)), "t0", "t1")
    house.wait(5.0)
    house.lose_journal()
    assert found(house).state == JobState.STARTING
    report = gone_report(house, found(house), "t0", stop_reason=StopReason.GANG_TIMEOUT)
    house.sim.handle(report)
    told = [line.reason for line in house.engine.state.stories if line.subject == JOB]
    assert not [said for said in told if "went home" in said]
    assert "its gang was not ready in time, by an earlier order to t0" in told
    assert (found(house).counts.preemptions, found(house).counts.node_faults) == (0, 0)
    assert found(house).after_vacating in (None, AfterVacating.REQUEUE)
    assert house.engine.check() == []


@pytest.mark.parametrize("reason", [StopReason.PREEMPT, StopReason.GANG_TIMEOUT])
def test_a_worker_that_was_not_ready_in_time_was_not_released(reason: StopReason) -> None:
    """Its loan did not end by it; one whose node went home by itself gave up what it had."""
    house = House()
    job = house.submit(workers=(1, 2), work_s=1e6)
    house.start(job, "t0")
    added = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    house.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    house.wait(30.0)
    assert running(house) == ["t0", "t1"]
    house.sim.handle(gone_report(house, job, "t1", stop_reason=reason))
    assert (job.running_workers, job.counts.preemptions) == (1, 0)
    is_released = reason != StopReason.GANG_TIMEOUT
    assert house.engine.state.counters.flexible_workers_released == is_released
    assert house.engine.check() == []
