"""What an event or a question costs does not grow with how many jobs or nodes there are."""

from __future__ import annotations

from collections.abc import Callable

from common.model import GpuUuid, JobId, Mode, NodeName, NodeRole, Pool
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import (
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    NodeReported,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from tests.builders import make_spec
from tests.engine.house import CHAT
from tests.policies.counted_calls import calls

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
