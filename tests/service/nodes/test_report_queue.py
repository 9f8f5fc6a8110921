"""Reports under overload: the newest of each agent is taken, in slices, and none is lost unseen."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from hypothesis import given

from common import subjects
from common.api import GetStatus, Status
from common.bus import BusMessage
from common.messages import NodeReport, encode
from common.model import NodeName
from coordinator.engine.state.events import NodeSilent
from coordinator.service.nodes.report_folding import Folder
from coordinator.service.nodes.report_queue import AGENTS_PER_NODE, SLICE_REPORTS, Inflow
from tests.draws import words
from tests.harness.cluster.coordinator import CELL, Cell
from tests.harness.fakes import FakeClock, FakeMessage
from tests.service.wire import example

Sent = tuple[str, str, int]
"""Node, boot and sequence number of one report."""


BASE = msgspec.convert({**example(NodeReport), "workers": []}, NodeReport)


def message(node: str, boot_id: str = "b", sequence: int = 1) -> FakeMessage:
    """A report on its subject."""
    report = msgspec.structs.replace(BASE, node=node, boot_id=boot_id, sequence=sequence)
    return FakeMessage(subjects.node_report(CELL, node), encode(report))


def sent(data: bytes) -> Sent:
    """What a report says of its sender."""
    plain = msgspec.msgpack.decode(data)
    return plain["node"], plain["boot_id"], plain["sequence"]


class Taker:
    """Takes reports, and lets other tasks count their turns meanwhile."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.taken: list[Sent] = []
        self.inflow = Inflow(self._take, clock=self.clock)

    async def _take(self, message: BusMessage, at_s: float) -> None:
        self.taken.append(sent(message.data))

    async def empty(self) -> None:
        """Run until nothing waits."""
        running = asyncio.create_task(self.inflow.run())
        await self.clock.settle()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


REPORTS = words(0, 30).map(
    lambda found: [("abc"[word % 3], "xy"[word // 3 % 2], word // 6 % 10) for word in found]
)


@pytest.mark.slow
@given(REPORTS)
def test_of_each_agent_the_newest_report_is_taken_once(reports: list[Sent]) -> None:
    """In the order in which nodes began to wait; each other report is counted as shed."""

    async def run() -> Taker:
        taker = Taker()
        for one in reports:
            await taker.inflow.put(message(*one))
        await taker.empty()
        return taker

    taker = asyncio.run(run())
    newest = {(node, boot): 0 for node, boot, _ in reports}
    for node, boot, sequence in reports:
        newest[node, boot] = max(newest[node, boot], sequence)
    assert sorted(taker.taken) == sorted((*agent, number) for agent, number in newest.items())
    order = list(dict.fromkeys(node for node, _, _ in reports))
    assert list(dict.fromkeys(node for node, _, _ in taker.taken)) == order
    assert taker.inflow.shed_count == len(reports) - len(newest)


async def test_agents_of_one_name_are_bounded() -> None:
    """A made-up boot id in each report fills no memory."""
    taker = Taker()
    for number in range(10):
        await taker.inflow.put(message("a", f"boot-{number}"))
    await taker.empty()
    assert len(taker.taken) == AGENTS_PER_NODE
    assert taker.inflow.shed_count == 10 - AGENTS_PER_NODE


@pytest.mark.slow
async def test_a_backlog_leaves_the_loop_to_others_between_two_slices() -> None:
    """A request or a renewal that arrives behind a flood waits for a slice, not for the flood."""
    taker = Taker()
    count = 5 * SLICE_REPORTS
    turns: list[int] = []

    async def turn() -> None:
        while len(taker.taken) < count:
            turns.append(len(taker.taken))
            await asyncio.sleep(0)

    for number in range(count):
        await taker.inflow.put(message(f"n{number}"))
    other = asyncio.create_task(turn())
    await taker.empty()
    await other
    assert max(after - before for before, after in itertools.pairwise(turns)) <= (SLICE_REPORTS)
    assert len(taker.taken) == count


async def test_a_report_on_which_the_taker_breaks_costs_no_other_one() -> None:
    """It is counted; what waits behind it is taken."""
    taken: list[str] = []

    async def take(message: BusMessage, at_s: float) -> None:
        if "bad" in message.subject:
            raise ValueError(message.subject)
        taken.append(message.subject)

    clock = FakeClock()
    inflow = Inflow(take, clock=clock)
    for node in ("a", "bad", "c"):
        await inflow.put(message(node))
    running = asyncio.create_task(inflow.run())
    await clock.settle()
    running.cancel()
    assert taken == [subjects.node_report(CELL, node) for node in "ac"]
    assert inflow.failures == 1


def test_a_node_whose_report_waits_is_not_silent() -> None:
    """A coordinator that is late with its reading must not call the node lost."""
    folder = Folder(lost_after_s=5.0, load_period_s=2.0, progress_period_s=2.0)
    folder.expect(NodeName("a"), now_s=0.0)
    assert folder.due(now_s=9.0, unread={"a"}) == []
    [event] = folder.due(now_s=9.0)
    assert isinstance(event, NodeSilent)


async def test_a_cell_says_that_reports_are_shed(caplog: pytest.LogCaptureFixture) -> None:
    """In its status and its log, while it happens and for a minute after."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        plain = await cell.ask(GetStatus())
        assert isinstance(plain, Status)
        assert not plain.reports_shed
        for number in range(3):
            await coordinator.inflow.put(message("t9", sequence=number))
        found = await cell.ask(GetStatus())
        assert isinstance(found, Status)
        assert found.reports_shed == 2
        await cell.clock.advance(61.0)
        assert "overload: 2 reports shed" in caplog.text
        later = await cell.ask(GetStatus())
        assert isinstance(later, Status)
        assert not later.reports_shed
