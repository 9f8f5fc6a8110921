"""The engine as a conversation: facts in, desired states out, at a cost that does not grow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from common.messages import GpuHealth, OrderPhase, WorkerOrder, WorkerPhase
from common.model import (
    GpuUuid,
    JobId,
    JobState,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    StopReason,
    WorkerKey,
)
from coordinator.engine.engine import Engine
from coordinator.engine.state.commands import AskLedger, PushDesired
from coordinator.engine.state.events import (
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    NodeReported,
    OrdersRecovered,
    PassDue,
    WorkerFact,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT
from tests.policies.counted_calls import calls

JOB = JobId("j1")


def report(name: str, *, generation: int, workers: tuple[WorkerFact, ...] = ()) -> NodeReported:
    return NodeReported(
        node=NodeName(name),
        boot_id="b",
        home_pool=Pool.TRAINING,
        role=NodeRole.TRAINING,
        epoch=1,
        generation=generation,
        gpus=tuple(GpuFact(f"{name}-{i}", "H100") for i in range(8)),  # type: ignore[arg-type]
        workers=workers,
    )


def test_a_job_goes_from_submit_to_success_through_ready() -> None:
    """A gang runs only when each of its nodes is ready, and succeeds when its workers exit 0."""
    engine = Engine(EngineSettings(policy="fifo"))
    engine.handle(LeaderStarted(epoch=1, holder="t"), now_s=0.0)
    for name in ("n1", "n2"):
        engine.handle(report(name, generation=0), now_s=1.0)
    spec = make_spec("a", workers=(2, 2), gpus_per_worker=8)
    engine.handle(JobSubmitted(job_id=JOB, spec=spec, tenant="t", user="u"), now_s=2.0)
    outcome = engine.handle(PassDue(), now_s=3.0)
    pushed = [engine.desired(c.node) for c in outcome.commands if isinstance(c, PushDesired)]
    assert [d.node for d in pushed] == ["n1", "n2"]
    assert {w.phase for d in pushed for w in d.workers} == {OrderPhase.RESERVE}
    job = engine.state.jobs[JOB]
    for phase, state in (
        (WorkerPhase.READY, JobState.RUNNING),
        (WorkerPhase.RUNNING, JobState.RUNNING),
        (WorkerPhase.EXITED, JobState.SUCCEEDED),
    ):
        for worker in list(job.workers.values()):
            node = engine.state.nodes[worker.node]
            code = 0 if phase == WorkerPhase.EXITED else None
            fact = WorkerFact(key=worker.key, phase=phase, exit_code=code)
            if phase == WorkerPhase.READY:
                assert job.state == JobState.STARTING
            engine.handle(
                report(worker.node, generation=node.desired.generation, workers=(fact,)), now_s=4.0
            )
            assert engine.check() == []
        assert job.state == state


def running_again() -> Engine:
    """An engine whose job lost its first attempt with a reboot of n1 and runs again on n2."""
    engine = Engine(EngineSettings(policy="fifo"))
    engine.handle(LeaderStarted(epoch=1, holder="t"), now_s=0.0)
    engine.handle(report("n1", generation=0), now_s=1.0)
    spec = make_spec("a", gpus_per_worker=8)
    engine.handle(JobSubmitted(job_id=JOB, spec=spec, tenant="t", user="u"), now_s=2.0)
    run(engine, "n1")
    engine.handle(report("n2", generation=0), now_s=6.0)
    engine.handle(rebooted(), now_s=7.0)
    run(engine, "n2")
    job = engine.state.jobs[JOB]
    assert (job.state, job.attempt.number, job.counts.node_faults) == (JobState.RUNNING, 2, 1)
    return engine


def rebooted(*workers: WorkerFact) -> NodeReported:
    """What n1 says after its reboot: its GPUs are sick, so that nothing is placed there."""
    heard = report("n1", generation=99, workers=workers)
    sick = tuple(replace(gpu, health=GpuHealth.LOST) for gpu in heard.gpus)
    return replace(heard, boot_id="b2", gpus=sick)


def run(engine: Engine, node: str) -> None:
    """A pass places the job, and the node says that its worker is ready and runs."""
    engine.handle(PassDue(), now_s=5.0)
    for phase in (WorkerPhase.READY, WorkerPhase.RUNNING):
        (worker,) = engine.state.jobs[JOB].workers.values()
        fact = WorkerFact(key=worker.key, phase=phase)
        engine.handle(report(node, generation=99, workers=(fact,)), now_s=5.0)


@pytest.mark.parametrize("phase", [WorkerPhase.RUNNING, WorkerPhase.EXITED])
def test_word_of_an_older_attempt_is_not_taken_for_the_present_one(phase: WorkerPhase) -> None:
    """What still runs of it is told to stop, what ended is acknowledged; the new one goes on."""
    engine = running_again()
    old = WorkerFact(key=WorkerKey(JOB, 1, 0), phase=phase, exit_code=1)
    engine.handle(rebooted(old), now_s=8.0)
    job, desired = engine.state.jobs[JOB], engine.desired(NodeName("n1"))
    assert (job.state, job.attempt.number, job.counts.own_faults) == (JobState.RUNNING, 2, 0)
    assert job.workers[0].phase == WorkerPhase.RUNNING
    is_over = phase == WorkerPhase.EXITED
    assert [stop.key for stop in desired.stops] == ([] if is_over else [old.key])
    assert list(desired.acknowledged) == ([old.key] if is_over else [])
    assert engine.check() == []


def test_an_attempt_newer_than_ours_is_asked_for_and_not_taken_for_ours() -> None:
    """The journal lost something: the node's ledger is read before anything is placed there."""
    engine = running_again()
    newer = WorkerFact(key=WorkerKey(JOB, 7, 0), phase=WorkerPhase.EXITED, exit_code=1)
    outcome = engine.handle(rebooted(newer), now_s=8.0)
    assert AskLedger(NodeName("n1")) in outcome.commands
    assert engine.state.nodes[NodeName("n1")].ledger.unknown_workers == [newer.key]
    job = engine.state.jobs[JOB]
    assert (job.state, job.attempt.number, job.counts.own_faults) == (JobState.RUNNING, 2, 0)
    assert engine.check() == []


def test_a_worker_that_waits_for_its_gpus_is_adopted_when_they_are_free() -> None:
    """A new engine finds two workers promised one node: the ledger gives it the first, nothing is
    ordered for the second as long as it waits, and it is adopted once the first is gone."""
    engine = Engine(EngineSettings(policy="fifo"))
    engine.handle(LeaderStarted(epoch=1, holder="t"), now_s=0.0)
    spec = make_spec("a", gpus_per_worker=8)
    orders = [
        WorkerOrder(
            key=WorkerKey(JobId(name), 1, 0),
            spec=spec,
            tenant="t",
            user="u",
            submitted_at_s=0.0,
            gpu_uuids=tuple(gpu.uuid for gpu in report("n1", generation=0).gpus),
            gpu_type="H100",
            is_flexible=False,
            phase=OrderPhase.RUN,
            worker_count=1,
        )
        for name in ("leaving", "waiting")
    ]
    phases = (WorkerPhase.STOPPING, WorkerPhase.RESERVING)
    facts = [
        WorkerFact(key=order.key, phase=phase) for order, phase in zip(orders, phases, strict=True)
    ]
    ledger = OrdersRecovered(node=NodeName("n1"), orders=tuple(orders))
    engine.handle(report("n1", generation=0, workers=tuple(facts)), now_s=1.0)
    assert engine.handle(ledger, now_s=1.0).commands
    assert list(engine.state.live_jobs) == ["leaving"]
    engine.handle(report("n1", generation=1, workers=tuple(facts)), now_s=2.0)
    assert engine.handle(ledger, now_s=2.0).commands == ()
    gone = WorkerFact(key=orders[0].key, phase=WorkerPhase.EXITED, stop_reason=StopReason.PREEMPT)
    engine.handle(report("n1", generation=1, workers=(gone, facts[1])), now_s=3.0)
    engine.handle(ledger, now_s=3.0)
    assert list(engine.state.jobs[JobId("waiting")].workers) == [0]
    assert engine.check() == []


FEW, MANY = 20, 200
NOW_S = 1000.0


def _engine(*, nodes: int) -> Engine:
    service = ServiceSettings(name=CHAT, capacity_per_node=10.0, mode=Mode.ACT)
    engine = Engine(EngineSettings(policy="fifo", services=(service,)))
    engine.handle(LeaderStarted(epoch=1, holder="one"), now_s=NOW_S)
    for number in range(nodes):
        name = NodeName(f"t{number:04}")
        gpus = tuple(GpuFact(GpuUuid(f"{name}-{index}"), "H100") for index in range(8))
        report = NodeReported(
            node=name, boot_id="b", home_pool=Pool.TRAINING, role=NodeRole.TRAINING,
            epoch=1, generation=0, gpus=gpus,
        )  # fmt: skip
        engine.handle(report, now_s=NOW_S)
    return engine


def _submit(engine: Engine, number: int, *, workers: int = 1) -> JobId:
    spec = make_spec(f"j{number}", workers=(workers, workers), gpus_per_worker=8)  # fmt: skip
    job_id = JobId(f"j{number:05}")
    engine.handle(JobSubmitted(job_id=job_id, spec=spec, tenant="t", user="u"), now_s=NOW_S)
    return job_id


def _ratio(cost: Callable[[int], int]) -> float:
    return cost(MANY) / cost(FEW)


def _submission(*, nodes: int, jobs: int) -> int:
    """Calls for one more submission, and for what it warns of."""
    engine = _engine(nodes=nodes)
    for number in range(jobs):
        engine.explain.why_never(_submit(engine, number, workers=nodes + 1))
    return calls(lambda: engine.explain.why_never(_submit(engine, jobs, workers=nodes + 1)))


def test_a_submission_costs_the_same_however_many_jobs_wait() -> None:
    """Neither the jobs before it, which no pass has seen yet, nor the nodes are gone through."""
    assert _ratio(lambda jobs: _submission(nodes=4, jobs=jobs)) < 1.5
    assert _ratio(lambda nodes: _submission(nodes=nodes, jobs=4)) < 1.5


def _fault(*, nodes: int) -> int:
    """Calls for the report of a node that does not hold the worker that it was ordered."""
    engine = _engine(nodes=nodes)
    job = engine.state.jobs[_submit(engine, 0)]
    engine.handle(PassDue(), now_s=NOW_S)
    (worker,) = job.workers.values()
    node = engine.state.nodes[worker.node]
    report = NodeReported(
        node=node.name, boot_id="b", home_pool=Pool.TRAINING, role=NodeRole.TRAINING,
        epoch=1, generation=node.desired.generation,
        gpus=tuple(GpuFact(slot.uuid, "H100") for slot in node.gpus),
    )  # fmt: skip
    count = calls(lambda: engine.handle(report, now_s=NOW_S + 1.0))
    assert job.retry.node_faults == 1
    return count


def test_a_worker_that_a_node_lost_costs_the_same_however_many_nodes_there_are() -> None:
    """Whether its job fits elsewhere is known after as many nodes as it needs."""
    assert _ratio(lambda nodes: _fault(nodes=nodes)) < 1.5
