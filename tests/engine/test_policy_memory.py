"""What a policy remembers when the operator turns it or switches to another one."""

from __future__ import annotations

import msgspec
import pytest

from common.model import JobId
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import LeaderStarted, PassDue
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState
from coordinator.policies.schedulers.tiresias.policy import Memory

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
