"""Nodes that do not get ready for a gang in time, and GPUs that somebody else uses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.messages import WorkerPhase
from common.model import JobState, Launcher, NodeName
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs.gpu_sharing import why_not_on
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import OperatorAction, PassDue, WorkerFact
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.service.api.explain_job import reasons as explain_job
from coordinator.service.api.explain_node import reasons as explain_node
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, state
from tests.harness.cluster.scripted_nodes import BACK_OFF_S, GPUS, REST_S, SETTINGS, BlackHole

IN_USE = "GPU t0-GPU-0 is used by process 4242"
TIMEOUT_S = SETTINGS.gang_ready_timeout_s


def cell_of(nodes: int) -> BlackHole:
    """Nodes that start what they get ready for."""
    cell = BlackHole(nodes=nodes)
    cell.bad = set()
    return cell


def makes_ready(cell: BlackHole, job: JobEntry, *slow: str, why: str = IN_USE) -> list[str]:
    """A pass, and the first words of the nodes that it chose; `slow` ones wait for something."""
    cell.handle(PassDue())
    names = sorted({str(worker.node) for worker in job.workers.values()})
    for name in names:
        is_slow = name in slow
        phase = WorkerPhase.RESERVING if is_slow else WorkerPhase.READY
        held = [worker for worker in job.workers.values() if worker.node == name]
        cell.report(
            name,
            *(
                WorkerFact(key=w.key, phase=phase, endpoint="h:1", error=why if is_slow else "")
                for w in held
            ),
        )
    return names


def gives_up(cell: BlackHole, job: JobEntry) -> None:
    """The gang's time is over, and its nodes end what they had for it, before anything starts."""
    cell.operate(OperatorAction.FREEZE)
    cell.now_s += TIMEOUT_S
    cell.handle(PassDue())
    assert state(job) == JobState.PENDING
    for name in cell.boots:
        cell.report(name)
        assert cell.node(name).ledger.left_reservations == []
    cell.operate(OperatorAction.THAW)


def test_a_job_whose_node_was_not_ready_goes_to_another() -> None:
    """It costs nothing but the time; its story and its error say what the node waited for."""
    cell = cell_of(2)
    job = cell.submit("j")
    assert makes_ready(cell, job, "t0") == ["t0"]
    assert f"worker 0 on t0 is reserving: {IN_USE}" in explain_job(cell.engine, job)
    [worker] = job.workers.values()
    said = replace(cell.fact(worker, WorkerPhase.RESERVING), error="something else")
    cell.report("t0", said)
    assert "worker 0 on t0 is reserving: something else" in explain_job(cell.engine, job)
    cell.report("t0", replace(said, error=IN_USE))
    gives_up(cell, job)
    assert job.retry.avoid_nodes == ["t0"]
    assert job.error == f"not ready: t0 ({IN_USE})"
    told = [line.reason for line in cell.engine.state.stories if line.what.startswith("gang_")]
    assert told == [job.error]
    counts = (job.counts.node_faults, job.counts.own_faults, job.counts.preemptions)
    assert counts == (0, 0, 0)
    cell.passes()
    assert (state(job), {w.node for w in job.workers.values()}) == (JobState.RUNNING, {"t1"})


def test_only_nodes_that_were_not_ready_are_left_alone() -> None:
    """A gang takes the others again, and nobody else keeps off any: the job may be the cause."""
    cell = cell_of(3)
    job = cell.submit("j", workers=2)
    assert makes_ready(cell, job, "t0") == ["t0", "t1"]
    gives_up(cell, job)
    assert job.retry.avoid_nodes == ["t0"]
    assert [cell.node(name).failed_starts.closed_reason for name in ("t0", "t1")] == ["", ""]
    other = cell.submit("other", workers=3)
    assert makes_ready(cell, job) == ["t1", "t2"]
    assert state(job) == JobState.RUNNING
    assert state(other) == JobState.PENDING


def test_a_node_on_which_only_the_rendezvous_store_was_not_ready_is_left_alone_too() -> None:
    """The gang cannot meet there, though all of its workers could run."""
    cell = cell_of(2)
    job = cell.submit("j", most=2)
    job.spec = replace(job.spec, launcher=Launcher.TORCHRUN)
    cell.operate(OperatorAction.CORDON, "t1")
    cell.handle(PassDue())
    cell.operate(OperatorAction.UNCORDON, "t1")
    (worker,) = job.workers.values()
    assert job.store is not None
    cell.report(
        "t0",
        WorkerFact(key=worker.key, phase=WorkerPhase.READY, endpoint="h:1"),
        WorkerFact(key=job.store.key, phase=WorkerPhase.RESERVING, error="its port is taken"),
    )
    assert "its rendezvous store on t0 is reserving: its port is taken" in explain_job(
        cell.engine, job
    )
    gives_up(cell, job)
    assert job.retry.avoid_nodes == ["t0"]
    assert job.error == "not ready: the rendezvous store on t0 (its port is taken)"


def test_a_job_that_fits_nowhere_else_waits_longer_from_try_to_try() -> None:
    """A try takes its time already: only what is to be waited beyond that is a rest."""
    cell = cell_of(1)
    job = cell.submit("j")
    rests_s: list[float] = []
    for _ in range(6):
        assert makes_ready(cell, job, "t0") == ["t0"]
        gives_up(cell, job)
        assert job.retry.avoid_nodes == []
        rest_s = 0.0 if job.retry.at_s is None else job.retry.at_s - cell.now_s
        rests_s.append(rest_s)
        cell.now_s += rest_s + 1.0
    doubled = [min(BACK_OFF_S * 2.0**n, REST_S) for n in range(6)]
    expected = [wait_s if wait_s > TIMEOUT_S else 0.0 for wait_s in doubled]
    assert rests_s == [pytest.approx(rest_s, abs=1.0) for rest_s in expected]
    assert max(expected) > 0.0 == min(expected)


def test_a_job_does_not_grow_onto_a_node_that_was_not_ready_again_at_once() -> None:
    """It leaves that alone for the back-off and computes on; then the node may be ready."""
    harness = EngineHarness(delays=Delays(ready_s=1.0))
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    harness.wait(2.0)
    harness.toggle_deaf(NodeName("t1"))
    added = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    assert state(job) == JobState.RESIZING
    harness.wait(TIMEOUT_S + 1.0)
    assert job.retry.avoid_nodes == ["t1"]
    harness.toggle_deaf(NodeName("t1"))
    harness.wait(2.0)
    assert (state(job), job.running_workers, job.counts.node_faults) == (JobState.RUNNING, 1, 0)
    told = [line.reason for line in harness.engine.state.stories if line.what == "does not grow"]
    assert told == ["not ready: t1"]
    harness.wait(BACK_OFF_S)
    assert job.retry.avoid_nodes == []


def test_a_job_that_grew_is_not_told_that_it_does_not() -> None:
    """Its new workers run; only what it released at the same time takes its grace to end."""
    harness = EngineHarness(training=3, delays=Delays(ready_s=1.0, stop_s=2.0 * TIMEOUT_S))
    job = harness.submit(workers=(1, 2), work_s=1e6, grace_s=4.0 * TIMEOUT_S)
    harness.start(job, "t0", flexible=("t1",))
    harness.wait(2.0)
    added = (Placement(node=NodeName("t2"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, removed_workers=(1,), reason="moves"))
    harness.wait(TIMEOUT_S + 2.0)
    assert state(job) == JobState.RESIZING
    assert "does not grow" not in {line.what for line in harness.engine.state.stories}
    assert (job.retry.node_faults, job.retry.avoid_nodes) == (0, [])
    harness.wait(2.0 * TIMEOUT_S)
    assert (state(job), job.running_workers) == (JobState.RUNNING, 2)


def test_no_new_worker_gets_a_gpu_that_somebody_else_uses() -> None:
    """Its node would wait for it for ever; the other GPUs are given away as before."""
    cell = cell_of(2)
    cell.report("t0", trespassed=GPUS[:1])
    said = f"GPU t0-{GPUS[0]} is used by process 77, which no worker was granted it for"
    assert any(line.startswith(said) for line in explain_node(cell.engine, cell.node("t0")))
    whole, part = cell.submit("whole"), cell.submit("part", gpus=1)
    cell.handle(PassDue())
    assert {worker.node for worker in whole.workers.values()} == {"t1"}
    assert [worker.gpu_uuids for worker in part.workers.values()] == [(f"t0-{GPUS[1]}",)]
    (seen, *_) = cell.engine.snapshot().nodes
    assert (seen.name, seen.trespassed_gpus) == ("t0", 1)
    late = cell.submit("late", gpus=1)
    cell.handle(PassDue())
    assert state(late) == JobState.PENDING
    named = Placement(
        node=NodeName("t0"), worker_count=1, gpu_uuids=(cell.node("t0").gpus[0].uuid,)
    )
    ctx = Context(cell.engine.state, SETTINGS, cell.now_s)
    assert "is used by process 77" in why_not_on(ctx, late, named, 1)
    saved = decode_state(cell.engine.encode_state())
    assert Engine(SETTINGS, saved).state.nodes[NodeName("t0")].trespassed == {f"t0-{GPUS[0]}": 77}
    facts = (cell.fact(worker, WorkerPhase.RESERVING) for worker in part.workers.values())
    assert cell.report("t0", *facts).needs_pass
    assert cell.engine.handle(PassDue(), now_s=cell.now_s).decisions
    assert [worker.gpu_uuids for worker in late.workers.values()] == [(f"t0-{GPUS[0]}",)]


def test_a_boot_ends_what_was_there() -> None:
    """No process outlives it, and its last word was of before."""
    cell = cell_of(1)
    cell.report("t0", trespassed=GPUS)
    cell.boots[NodeName("t0")] = "b2"
    cell.report("t0")
    job = cell.submit("j")
    cell.passes()
    assert state(job) == JobState.RUNNING
