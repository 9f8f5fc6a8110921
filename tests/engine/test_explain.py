"""What the fleet could never run, and what a policy that is asked remembers."""

from __future__ import annotations

import msgspec
import pytest

from common.model import JobId, NodeName
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import LeaderStarted, PassDue
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState
from coordinator.policies.schedulers.tiresias.policy import Memory
from tests.harness.cluster.scripted_nodes import BlackHole


def test_what_could_never_run_can_when_a_node_joins() -> None:
    """Who asked before is answered by the fleet as it is now."""
    cell = BlackHole(nodes=1)
    job = cell.submit("gang", workers=2, gpus=2)
    [why] = cell.engine.explain.why_never(job.job_id)
    assert why.startswith("can never run here")
    cell.boots[NodeName("t1")] = "b1"
    cell.report("t1")
    assert cell.engine.explain.why_never(job.job_id) == ()


def test_what_could_never_run_can_when_a_node_has_more_gpus() -> None:
    """One that was added to it, or that it did not see before."""
    cell = BlackHole(nodes=1)
    job = cell.submit("large", gpus=3)
    assert cell.engine.explain.why_never(job.job_id)
    cell.report("t0", gpus=("x0", "x1", "x2"))
    assert cell.engine.explain.why_never(job.job_id) == ()


OWN = msgspec.msgpack.encode(Memory(skews={"vgg16": 0.743}))


def remembered(policy: str, memory: bytes, of: str) -> Engine:
    """An engine after one pass of a policy, with what was remembered before."""
    state = ClusterState(policy_memory=memory, policy_memory_of=of)
    engine = Engine(EngineSettings(policy=policy), state)
    engine.handle(LeaderStarted(epoch=2, holder="test"), now_s=10.0)
    engine.handle(PassDue(), now_s=10.0)
    return engine


@pytest.mark.parametrize("memory", [b"\xc1", msgspec.msgpack.encode({"skews": 1}), OWN])
def test_a_policy_gets_nothing_of_another_ones_memory(memory: bytes) -> None:
    """After a switch the new policy begins afresh, whether it could read the old bytes or not."""
    engine = remembered("tiresias", memory, of="gandiva")
    assert msgspec.msgpack.decode(engine.state.policy_memory, type=Memory).skews == {}
    assert engine.state.policy_memory_of == "tiresias"


def test_a_turned_knob_keeps_the_memory() -> None:
    """The same policy with other knobs goes on with what it knows."""
    engine = remembered("tiresias:promote=8", OWN, of="tiresias")
    after = msgspec.msgpack.decode(engine.state.policy_memory, type=Memory)
    assert after.skews == {"vgg16": 0.743}


def test_who_asks_why_a_job_waits_gets_the_same_memory() -> None:
    """`explain` before the first pass after a switch does not read the old bytes either."""
    state = ClusterState(policy_memory=b"\xc1", policy_memory_of="gandiva")
    engine = Engine(EngineSettings(policy="tiresias"), state)
    assert engine.explain.queue_place(JobId("j1")) is None
