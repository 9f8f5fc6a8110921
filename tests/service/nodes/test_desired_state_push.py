"""What comes twice counts once, and what is on its way is not sent a second time."""

from __future__ import annotations

import asyncio

import msgspec

from common import subjects
from common.bus import BusMessage
from common.errors import Fenced
from common.messages import DesiredReply, DesiredState, NodeReport, decode, encode
from common.model import NodeName
from coordinator.service.nodes.desired_state_push import Dispatcher
from coordinator.service.nodes.report_folding import Folder
from tests.harness.fakes import FakeBus, FakeClock, FakeNetwork
from tests.service.wire import example

CELL = "c"


def never(_error: Fenced) -> None:
    """No agent here knows a higher epoch."""
    raise AssertionError


def test_a_report_that_comes_again_says_nothing() -> None:
    """It is counted and dropped: a repeated packet is no sign that its node lives on."""
    folder = Folder(lost_after_s=5.0, load_period_s=2.0, progress_period_s=2.0)
    report = msgspec.convert(example(NodeReport), NodeReport)
    node = NodeName(report.node)
    assert folder.fold(report, now_s=0.0) is not None
    assert folder.fold(report, now_s=3.0) is None
    assert folder.stale_count == 1
    assert folder.silent_s(node, now_s=4.0) == 4.0
    folder.fold(msgspec.structs.replace(report, sequence=report.sequence + 1), now_s=4.0)
    assert folder.stale_count == 1
    assert folder.silent_s(node, now_s=4.0) == 0.0


class SlowNode:
    """An agent that has not answered yet, and what it was sent."""

    def __init__(self, network: FakeNetwork, clock: FakeClock) -> None:
        self.got: list[DesiredState] = []
        self.may_answer = asyncio.Event()
        self.bus = FakeBus(network, clock=clock)

    async def take(self, message: BusMessage) -> None:
        """A desired state; its answer waits."""
        desired = decode(message.data, DesiredState)
        self.got.append(desired)
        await self.may_answer.wait()
        reply = DesiredReply(
            is_accepted=True, epoch=desired.epoch, generation=desired.generation, error=""
        )
        await message.respond(encode(reply))


async def test_one_push_is_in_flight_per_node_and_then_the_newest_wins() -> None:
    """What was decided while one was on its way leaves once it is answered, in one push."""
    clock, network = FakeClock(), FakeNetwork()
    node = SlowNode(network, clock)
    order = msgspec.convert(example(DesiredState), DesiredState)
    subject = subjects.node_desired(CELL, order.node)
    await node.bus.subscribe(subject, node.take)
    sender = FakeBus(network, clock=clock)
    dispatcher = Dispatcher(
        cell=CELL,
        bus=sender,
        clock=clock,
        timeout_s=2.0,
        retry_s=2.0,
        may_act=lambda: True,
        fenced=never,
        instance=lambda _node: msgspec.UNSET,
    )
    running = asyncio.create_task(dispatcher.run())
    try:
        for generation in (1, 2, 3):
            dispatcher.push(msgspec.structs.replace(order, generation=generation))
            await clock.settle()
        assert [decode(data, DesiredState).generation for _, data in network.sent] == [1]
        node.may_answer.set()
        await clock.settle()
        assert [desired.generation for desired in node.got] == [1, 3]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await sender.close()
        await node.bus.close()
