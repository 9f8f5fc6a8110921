"""Two agents of one name: each does what is meant for it, and keeps quiet about the rest."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from common import subjects
from common.errors import Unavailable
from common.messages import (
    DesiredReply,
    DesiredState,
    LedgerReply,
    LedgerRequest,
    LogReply,
    LogRequest,
    decode,
    encode,
)
from common.model import NodeRole
from tests.harness.cluster.agents import meanwhile
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import key, order

CELL, NODE = "c1", "n1"


def desired(instance: str | UnsetType) -> bytes:
    """An order for one worker."""
    return encode(
        DesiredState(
            node=NODE, epoch=1, generation=1, role=NodeRole.TRAINING, workers=(order(),),
            instance=instance,
        )
    )  # fmt: skip


def ledger(instance: str | UnsetType) -> bytes:
    """The question what the node holds."""
    return encode(LedgerRequest(node=NODE, instance=instance))


def logs(instance: str | UnsetType) -> bytes:
    """The question for a log."""
    return encode(LogRequest(node=NODE, key=key(), max_bytes=9, instance=instance))


async def test_each_start_says_which_one_it_is() -> None:
    """In every report, so that the coordinator can tell two agents apart."""
    async with AgentHarness(instance="a1") as harness:
        await harness.until_role(NodeRole.TRAINING)
        assert harness.report.instance == "a1"


@pytest.mark.parametrize("instance", [UNSET, "a1"])
async def test_it_obeys_what_is_meant_for_it_or_for_any(instance: str | UnsetType) -> None:
    """A coordinator that has not heard it yet names nobody."""
    async with AgentHarness(instance="a1") as harness:
        answer = await harness.ask(subjects.node_desired(CELL, NODE), desired(instance))
        assert decode(answer, DesiredReply).is_accepted
        assert [held.order.key for held in harness.life.workers.held()] == [key()]
        answer = await harness.ask(subjects.node_ledger(CELL, NODE), ledger(instance))
        assert [held.key for held in decode(answer, LedgerReply).orders] == [key()]
        harness.runner.kept_logs[key()] = b"step 1"
        answer = await harness.ask(subjects.node_logs(CELL, NODE), logs(instance))
        assert decode(answer, LogReply).text == "step 1"


async def test_a_start_says_which_one_it_follows() -> None:
    """The one that wrote the state directory last, which is over: its lock is free. So the
    coordinator need not wait to hear this one."""
    async with AgentHarness(instance="a1") as harness:
        await harness.until_role(NodeRole.TRAINING)
        assert (harness.report.follows, harness.report.period_s) == (None, 1.0)
        await harness.die()
        async with AgentHarness(instance="a2", before=harness, report_period_s=2.0) as again:
            await again.until_role(NodeRole.TRAINING)
            assert (again.report.follows, again.report.period_s) == ("a1", 2.0)
            await again.die()
            async with AgentHarness(instance="a3", before=again) as third:
                await third.until_role(NodeRole.TRAINING)
                assert third.report.follows == "a2"


async def test_a_start_that_could_write_nothing_is_followed_by_none() -> None:
    """The next one names the last that did: a proof of what is on disk, and of no more."""
    async with AgentHarness(instance="a1") as harness:
        await harness.until_role(NodeRole.TRAINING)
        await harness.die()
        async with AgentHarness(instance="a2", before=harness) as again:
            again.ledger.saved = harness.ledger.saved
            again.ledger.is_full = True
            await again.clock.advance(2.0)
            await again.die()
            again.ledger.saved = harness.ledger.saved
            async with AgentHarness(instance="a3", before=again) as third:
                await third.until_role(NodeRole.TRAINING)
                assert third.report.follows == "a1"


async def test_it_neither_obeys_nor_answers_what_is_meant_for_another() -> None:
    """Its answer could come before that of the one that was asked, and its start would be a second
    one of the same worker."""
    async with AgentHarness(instance="a1") as harness:
        for subject, data in (
            (subjects.node_desired(CELL, NODE), desired("b2")),
            (subjects.node_ledger(CELL, NODE), ledger("b2")),
            (subjects.node_logs(CELL, NODE), logs("b2")),
        ):
            with pytest.raises(Unavailable):
                await meanwhile(harness.clock, harness.peer.request(subject, data, timeout_s=2.0))
        assert harness.life.workers.held() == []
        assert (harness.life.memory.epoch, harness.runner.calls) == (0, [])


def test_what_is_meant_for_any_agent_names_none_on_the_wire() -> None:
    """Whoever starts next may take it."""
    assert "instance" not in msgspec.msgpack.decode(desired(UNSET))
    assert "instance" not in msgspec.msgpack.decode(ledger(UNSET))
    assert "instance" not in msgspec.msgpack.decode(logs(UNSET))
