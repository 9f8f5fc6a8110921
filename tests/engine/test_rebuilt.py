"""Gangs that a coordinator without a journal finds on the nodes: they run whole or not at all."""

from __future__ import annotations

import pytest

from common.messages import OrderPhase, WorkerPhase
from common.model import JobId, JobState, NodeName
from coordinator.engine.events import JobCancelRequested
from coordinator.engine.state import JobEntry
from coordinator.sim.cluster import Delays
from tests.engine.house import House

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
    assert found(house).gang_deadline_s is not None
    house.wait(20.0)
    assert running(house) == ["t0", "t1"]
    assert (found(house).state, found(house).attempt) == (JobState.RUNNING, 1)
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
    assert (found(house).state, found(house).attempt) == (JobState.RUNNING, 1)
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
    assert (found(house).state, found(house).preemption_count) == (JobState.CANCELLED, 0)
    assert found(house).cancelled_by == "an order to t0"
    assert house.engine.check() == []
