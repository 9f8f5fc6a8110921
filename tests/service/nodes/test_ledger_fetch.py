"""Ledgers are asked for one at a time for each node, and nothing of that outlives its block."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Unavailable
from common.messages import LedgerReply
from common.model import NodeName
from coordinator.service.cancellation import end
from coordinator.service.nodes.ledger_fetch import LedgerAsker

NODE = NodeName("t0")


class Nodes:
    """Nodes whose answers come when the test says so."""

    def __init__(self) -> None:
        self.asked: list[NodeName] = []
        self.got: list[NodeName] = []
        self.lacked: list[NodeName] = []
        self.ended = 0
        self.error: Exception | None = None
        self.answer = asyncio.Event()
        self.asker = LedgerAsker(
            self.fetch, got=lambda node, _: self.got.append(node), lacked=self.lacked.append
        )

    async def fetch(self, node: NodeName) -> LedgerReply:
        """An empty ledger, or the error."""
        self.asked.append(node)
        try:
            await self.answer.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        return LedgerReply(node=node, orders=())


async def turns() -> None:
    """Let whatever can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [None, Unavailable("no answer")])
async def test_a_node_is_asked_again_only_after_its_answer(error: Exception | None) -> None:
    """Each of its reports may ask; one question at a time is enough, and a failed one counts."""
    nodes = Nodes()
    nodes.error = error
    running = asyncio.create_task(nodes.asker.run())
    for _ in range(3):
        nodes.asker.ask(NODE)
        nodes.asker.ask(NODE)
        await turns()
    assert nodes.asked == [NODE]
    nodes.answer.set()
    await turns()
    assert (nodes.got, nodes.lacked) == (([NODE], []) if error is None else ([], [NODE]))
    nodes.asker.ask(NODE)
    await turns()
    assert nodes.asked == [NODE, NODE]
    await end(running)


async def test_a_question_that_is_under_way_ends_with_whoever_asks() -> None:
    """A coordinator that stops leaves nothing running."""
    nodes = Nodes()
    running = asyncio.create_task(nodes.asker.run())
    nodes.asker.ask(NODE)
    await turns()
    await end(running)
    assert nodes.ended == len(nodes.asked) == 1
    assert not nodes.got


async def test_a_defect_while_a_ledger_is_asked_for_ends_whoever_asks() -> None:
    """It must show, not look like a node that does not answer."""
    nodes = Nodes()
    nodes.error = RuntimeError("a defect")
    running = asyncio.create_task(nodes.asker.run())
    nodes.asker.ask(NODE)
    nodes.answer.set()
    await asyncio.wait({running})
    with pytest.raises(ExceptionGroup) as raised:
        running.result()
    assert raised.value.exceptions == (nodes.error,)
