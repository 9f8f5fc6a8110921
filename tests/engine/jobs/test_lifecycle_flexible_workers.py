"""Node faults of flexible workers: the gang shrinks to what is left and goes on."""

from __future__ import annotations

import pytest

from common.faults import Fault
from common.messages import OrderPhase, WorkerPhase
from common.model import JobState, Launcher, NodeName, StopReason
from coordinator.engine.nodes.lost import certain_end_s
from coordinator.engine.state.events import (
    GpuFact,
    NodeReported,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    WorkerFact,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Preempt, Resize
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, state
from tests.tables import each_row

BASE, FLEXIBLE = NodeName("t0"), NodeName("t1")


def grown(
    harness: EngineHarness, *, launcher: Launcher = Launcher.NONE, max_restarts: int = 0
) -> JobEntry:
    """A job that runs with its base on t0 and a flexible worker on t1."""
    job = harness.submit(
        workers=(1, 2),
        work_s=1e6,
        launcher=launcher,
        stop_after_s=60.0,
        max_restarts=max_restarts,
    )
    harness.start(job, BASE)
    harness.decide(Resize(job_id=job.job_id, added=(on(FLEXIBLE),), reason="room"))
    harness.wait(10.0)
    assert job.running_workers == 2
    return job


def on(node: NodeName) -> Placement:
    """One flexible worker more."""
    return Placement(node=node, worker_count=1, is_flexible=True)


def ends(
    harness: EngineHarness,
    name: NodeName,
    job: JobEntry,
    *,
    exit_code: int,
    error: str = "",
    fault: Fault = Fault.NONE,
    stop_reason: StopReason | None = None,
) -> None:
    """A node says that its worker of the job has ended."""
    node = harness.node(name)
    key = next(worker.key for worker in job.workers.values() if worker.node == name)
    gone = WorkerFact(
        key=key,
        phase=WorkerPhase.EXITED,
        error=error,
        exit_code=exit_code,
        fault=fault,
        stop_reason=stop_reason,
    )
    harness.sim.handle(
        NodeReported(
            node=name,
            boot_id=node.boot_id,
            home_pool=node.home_pool,
            role=node.role,
            epoch=node.contact.epoch,
            generation=node.contact.generation,
            gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in node.gpus),
            workers=(gone,),
        )
    )


@pytest.mark.parametrize("name", [BASE, FLEXIBLE])
def test_a_worker_whose_node_is_to_blame_did_not_succeed_whatever_its_exit_code(
    name: NodeName,
) -> None:
    """What its shim says last may be its exit code alone; the fault that the node tells counts."""
    harness = EngineHarness()
    job = grown(harness)
    ends(harness, name, job, error="", exit_code=0, fault=Fault.SHIM_LOST)
    assert job.attempt.succeeded_workers == []
    assert job.counts.node_faults == 1
    harness.settle()
    assert state(job) != JobState.SUCCEEDED
    assert harness.engine.check() == []


def strike(harness: EngineHarness, name: NodeName, job: JobEntry, how: str) -> None:
    """A node takes its worker along, in one of the ways in which the engine can learn of it."""
    if how == "said":
        why = "the supervisor is gone"
        ends(harness, name, job, error=why, exit_code=0, fault=Fault.SHIM_LOST)
        return
    harness.sim.nodes[name].crash()
    if how == "rebooted":
        harness.sim.nodes[name].boot()
        harness.settle()
        return
    harness.sim.handle(NodeSilent(node=name, silent_s=20.0))
    assert job.running_workers == 2  # silence alone proves nothing
    if how == "silent":
        unanswered_s = certain_end_s(harness.engine.settings, job.spec)
        assert unanswered_s is not None
        harness.sim.handle(NodeSilent(node=name, silent_s=unanswered_s, unanswered_s=unanswered_s))
    else:
        dead = OperatorAction.CONFIRM_DEAD
        harness.sim.handle(OperatorAsked(action=dead, by="ops/me", target=name))


WAYS = ("said", "rebooted", "silent", "confirmed dead")


@each_row("how", WAYS)
def test_a_lost_flexible_worker_only_shrinks_its_gang(how: str) -> None:
    """The attempt goes on with its base, which is told the new worker count; nobody is charged."""
    harness = EngineHarness()
    job = grown(harness, launcher=Launcher.TORCHRUN)
    store, endpoint = job.store, job.attempt.endpoint
    strike(harness, FLEXIBLE, job, how)
    assert (state(job), job.attempt.number, job.running_workers) == (JobState.RUNNING, 1, 1)
    assert (job.counts.node_faults, job.counts.own_faults, job.counts.preemptions) == (1, 0, 0)
    assert (job.store, job.attempt.endpoint) == (store, endpoint)
    harness.settle()
    (order,) = (o for o in harness.engine.desired(BASE).workers if not o.key.is_store)
    assert (order.phase, order.worker_count) == (OrderPhase.RUN, 1)
    held = harness.sim.nodes[BASE].orders(WorkerPhase.RUNNING)
    assert [order.worker_count for order in held if not order.key.is_store] == [1]
    told = [line.what for line in harness.engine.state.stories if line.subject == job.job_id]
    assert "flexible worker lost" in told


def test_a_job_grows_again_after_it_lost_a_flexible_worker() -> None:
    """Another resize gives it another worker, with a key that was never used."""
    harness = EngineHarness()
    job = grown(harness)
    strike(harness, FLEXIBLE, job, "rebooted")
    harness.decide(Resize(job_id=job.job_id, added=(on(FLEXIBLE),), reason="room again"))
    assert (state(job), job.running_workers, sorted(job.workers)) == (JobState.RUNNING, 2, [0, 2])


@each_row("how", WAYS)
def test_a_lost_base_worker_ends_the_attempt(how: str) -> None:
    """Without its base a gang cannot go on; its flexible worker is told to stop."""
    harness = EngineHarness()
    job = grown(harness)
    strike(harness, BASE, job, how)
    harness.wait(1.0)
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 1)
    assert harness.sim.nodes[FLEXIBLE].keys(WorkerPhase.RUNNING) == []


@pytest.mark.parametrize("error", ["", "its program crashed"])
def test_a_flexible_worker_that_fails_by_itself_is_its_jobs_own_fault(error: str) -> None:
    """The program is the same on every node, so that its failure is no node's."""
    harness = EngineHarness()
    job = grown(harness)
    ends(harness, FLEXIBLE, job, error=error, exit_code=1)
    harness.wait(1.0)
    assert (state(job), job.counts.own_faults, job.counts.node_faults) == (JobState.FAILED, 1, 0)


def test_a_flexible_worker_that_is_lost_while_it_comes_ends_the_resize() -> None:
    """The others never stopped, and go on as if nobody had been asked to join."""
    harness = EngineHarness(delays=Delays(ready_s=5.0))
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, BASE)
    harness.wait(6.0)
    harness.decide(Resize(job_id=job.job_id, added=(on(FLEXIBLE),), reason="room"))
    assert state(job) == JobState.RESIZING
    strike(harness, FLEXIBLE, job, "rebooted")
    harness.wait(1.0)
    assert (state(job), job.attempt.number, job.running_workers) == (JobState.RUNNING, 1, 1)
    assert job.attempt.gang_deadline_s is None


def test_a_gang_that_never_ran_is_requeued_without_its_flexible_worker() -> None:
    """Nothing was done that could go on: a start is whole or it is none."""
    harness = EngineHarness(delays=Delays(ready_s=5.0))
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, BASE, flexible=(FLEXIBLE,))
    harness.wait(1.0)
    strike(harness, FLEXIBLE, job, "rebooted")
    harness.wait(6.0)
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 1)


# --- a flexible worker that finished by itself ----------------------------------------------------


@pytest.mark.parametrize(("max_restarts", "after"), [(3, JobState.PENDING), (0, JobState.FAILED)])
def test_a_flexible_worker_that_finished_does_not_stand_for_a_base_that_failed(
    max_restarts: int, after: JobState
) -> None:
    """The base alone does the work: its failure is retried, or fails the job."""
    harness = EngineHarness()
    job = grown(harness, max_restarts=max_restarts)
    ends(harness, FLEXIBLE, job, exit_code=0)
    assert (state(job), job.running_workers) == (JobState.RUNNING, 1)
    ends(harness, BASE, job, exit_code=1)
    assert (state(job), job.counts.own_faults) == (after, 1)
    assert harness.engine.check() == []


@pytest.mark.parametrize("is_ordered_first", [False, True])
def test_a_flexible_worker_that_finished_does_not_stand_for_a_base_that_was_preempted(
    *, is_ordered_first: bool
) -> None:
    """A base that leaves for the order has work left, whenever its flexible worker ended."""
    harness = EngineHarness()
    job = grown(harness)
    harness.toggle_deaf(BASE)
    harness.toggle_deaf(FLEXIBLE)
    if not is_ordered_first:
        ends(harness, FLEXIBLE, job, exit_code=0)
    harness.decide(Preempt(job_id=job.job_id, reason="room for others"))
    if is_ordered_first:
        ends(harness, FLEXIBLE, job, exit_code=0)
    assert state(job) == JobState.PREEMPTING
    ends(harness, BASE, job, exit_code=0, stop_reason=StopReason.PREEMPT)
    assert (state(job), job.attempt.succeeded_workers) == (JobState.PENDING, [])


def test_the_next_attempt_of_a_grown_job_counts_its_own_finished_workers_only() -> None:
    """A finished base worker of an attempt that failed is none of the next attempt."""
    harness = EngineHarness(training=3)
    job = harness.submit(workers=(2, 3), work_s=1e6, max_restarts=3)
    harness.start(job, BASE, FLEXIBLE)
    harness.decide(Resize(job_id=job.job_id, added=(on(NodeName("t2")),), reason="room"))
    harness.wait(10.0)
    ends(harness, BASE, job, exit_code=0)
    assert job.attempt.succeeded_workers == [0]
    ends(harness, FLEXIBLE, job, exit_code=1)
    harness.wait(1.0)
    assert (state(job), job.attempt.succeeded_workers) == (JobState.PENDING, [])
    harness.wait(60.0)
    harness.start(job, BASE, FLEXIBLE)
    harness.wait(10.0)
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)
    ends(harness, BASE, job, exit_code=0)
    assert state(job) == JobState.RUNNING
    ends(harness, FLEXIBLE, job, exit_code=0)
    assert state(job) == JobState.SUCCEEDED


def test_a_base_that_finished_ends_its_flexible_worker_well() -> None:
    """What the flexible worker does after that changes nothing."""
    harness = EngineHarness()
    job = grown(harness)
    harness.toggle_deaf(FLEXIBLE)
    ends(harness, BASE, job, exit_code=0)
    ends(harness, FLEXIBLE, job, exit_code=1)
    assert (state(job), job.counts.own_faults) == (JobState.SUCCEEDED, 0)
