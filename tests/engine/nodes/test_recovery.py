"""Jobs that a coordinator without a journal finds on the same GPUs: packed, or one gives way."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.messages import WorkerPhase
from common.model import JobId, JobState, NodeName
from coordinator.engine.state.events import OrdersRecovered
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Start, Suspend
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, start


def beside(job: JobEntry, host: JobEntry, node: str, *, is_packed: bool = False) -> Start:
    """Start a job of one worker on the GPUs that another one has on a node."""
    [worker] = [worker for worker in host.workers.values() if worker.node == node]
    placement = Placement(node=worker.node, worker_count=1, gpu_uuids=worker.gpu_uuids)
    return structs.replace(start(job, node), placements=(placement,), is_packed=is_packed)


def found(harness: EngineHarness, name: str) -> JobEntry:
    """A job as the coordinator knows it now."""
    return harness.engine.state.jobs[JobId(name)]


@pytest.mark.parametrize("delays", [None, Delays(report_s=0.5, ready_s=60.0, start_s=2.0)])
def test_a_lost_journal_finds_a_packed_pair_as_packed(delays: Delays | None) -> None:
    """Two whom the ledger has computing on the same GPUs count as packed and have half of each."""
    harness = EngineHarness(training=1, inference=0, delays=delays)
    harness.wait(2.0)
    host = harness.submit("host")
    harness.start(host, "t0")
    harness.wait(100.0)
    harness.decide(beside(harness.submit("guest"), host, "t0", is_packed=True))
    harness.wait(5.0)
    harness.lose_journal()
    assert found(harness, "host").state == JobState.RUNNING
    harness.wait(100.0)
    pair = [found(harness, name) for name in ("host", "guest")]
    assert [(job.state, job.attempt.is_packed) for job in pair] == [(JobState.RUNNING, True)] * 2
    assert [job.workers[0].share for job in pair] == [0.5, 0.5]
    assert len(harness.sim.nodes[NodeName("t0")].keys(WorkerPhase.RUNNING)) == 2
    assert harness.engine.check() == []


def test_jobs_that_take_turns_are_not_found_as_packed() -> None:
    """One of two on the same GPUs is suspended: it computes beside nobody."""
    harness = EngineHarness(training=1, inference=0)
    first = harness.submit("first")
    harness.start(first, "t0")
    harness.wait(5.0)
    aside = Suspend(job_id=first.job_id, reason="the test says so")
    harness.decide(aside, beside(harness.submit("second"), first, "t0"))
    harness.wait(5.0)
    harness.lose_journal()
    assert found(harness, "first").state == JobState.SUSPENDED
    assert found(harness, "second").state == JobState.RUNNING
    assert not any(job.attempt.is_packed for job in harness.engine.state.jobs.values())


@pytest.mark.parametrize(("deaf", "shared"), [("t0", "t1"), ("t1", "t0")])
def test_a_gang_of_which_one_node_missed_the_suspension_is_put_aside(
    deaf: str, shared: str
) -> None:
    """Whichever ledger is read first, it does not compute beside the one that had its turn."""
    harness = EngineHarness(inference=0)
    wide = harness.submit("wide", workers=(2, 2))
    harness.start(wide, "t0", "t1")
    harness.wait(5.0)
    harness.toggle_deaf(NodeName(deaf))
    aside = Suspend(job_id=wide.job_id, reason="the test says so")
    harness.decide(aside, beside(harness.submit("narrow"), wide, shared))
    harness.wait(5.0)
    harness.deaf.clear()
    harness.lose_journal()
    assert found(harness, "wide").state == JobState.SUSPENDED
    assert found(harness, "narrow").state == JobState.RUNNING
    assert not any(job.attempt.is_packed for job in harness.engine.state.jobs.values())
    [computing] = [
        key for node in harness.sim.nodes.values() for key in node.keys(WorkerPhase.RUNNING)
    ]
    assert computing.job_id == "narrow"
    assert harness.engine.check() == []


def test_who_was_there_before_a_ledger_was_read_is_not_packed_by_it() -> None:
    """A second reading of a ledger finds nobody, and leaves a host beside its guest as it is."""
    harness = EngineHarness(training=1, inference=0)
    host = harness.submit("host")
    harness.start(host, "t0")
    harness.decide(beside(harness.submit("guest"), host, "t0", is_packed=True))
    harness.wait(5.0)
    orders = harness.sim.nodes[NodeName("t0")].orders()
    harness.sim.handle(OrdersRecovered(node=NodeName("t0"), orders=orders))
    assert (host.attempt.is_packed, found(harness, "guest").attempt.is_packed) == (False, True)
