"""The engine as a conversation: facts in, desired states out."""

from __future__ import annotations

from common.messages import OrderPhase, WorkerPhase
from common.model import JobId, JobSpec, JobState, NodeName, NodeRole, Pool, WorkerRange
from coordinator.engine.commands import PushDesired
from coordinator.engine.engine import Engine
from coordinator.engine.events import (
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    NodeReported,
    PassDue,
    WorkerFact,
)
from coordinator.engine.settings import EngineSettings

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
    spec = JobSpec(
        name="a", command=("true",), workers=WorkerRange(min=2, max=2), gpus_per_worker=8
    )
    engine.handle(JobSubmitted(job_id=JOB, spec=spec, tenant="t", user="u"), now_s=2.0)
    outcome = engine.handle(PassDue(), now_s=3.0)
    pushed = [c.desired for c in outcome.commands if isinstance(c, PushDesired)]
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
                report(worker.node, generation=node.generation, workers=(fact,)), now_s=4.0
            )
            assert engine.check() == []
        assert job.state == state
