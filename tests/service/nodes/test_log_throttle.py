"""A fleet that sends what does not fit fills no log: one line of a kind, and then how many."""

from __future__ import annotations

import logging

import msgspec
import pytest

from common import subjects
from common.clock import Clock
from common.log import REPEAT_PERIOD_S
from coordinator.service.nodes.log_throttle import KEPT, NAMED, Complaints
from tests.harness.cluster.coordinator import CELL, Cell
from tests.harness.fakes import FakeClock

NODES = 300
WHY = "NodeReport: Object contains unknown field `colour`"


def complaints(clock: Clock) -> Complaints:
    """Of reports."""
    return Complaints(clock, "bad reports")


async def for_(
    clock: FakeClock, said: Complaints, seconds: int, *, nodes: int = NODES, why: str = WHY
) -> None:
    """So many nodes send the same each second."""
    for _ in range(seconds):
        for number in range(nodes):
            said.note(f"n{number}", why)
        await clock.advance(1.0)


async def test_a_fleet_that_does_the_same_wrong_is_one_line_a_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one at once, with its reason; after that who, how often, and how many in all."""
    clock = FakeClock()
    said = complaints(clock)
    await for_(clock, said, int(3 * REPEAT_PERIOD_S) + 1)
    assert len(caplog.messages) == 4
    assert caplog.messages[0] == f"bad reports of n0: {WHY} (1)"
    more = NODES - NAMED
    times = NODES * int(REPEAT_PERIOD_S)
    for number, line in enumerate(caplog.messages[1:], start=1):
        who = "n1, n2, n3" if number == 1 else caplog.messages[2].split(" of ")[1].split(" and")[0]
        assert line.startswith(f"bad reports of {who} and {more} more, {times} in 30 s: {WHY} (")
        assert line.endswith(f" ({number * times + 1})")


async def test_one_that_is_alone_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A message that was garbled on its way says nothing more at the end of the period; another one
    a while later is told like the first."""
    clock = FakeClock()
    said = complaints(clock)
    for _ in range(2):
        said.note("n0", WHY)
        for _ in range(3):
            await clock.advance(REPEAT_PERIOD_S)
            said.look()
    assert caplog.messages == [f"bad reports of n0: {WHY} ({count})" for count in (1, 2)]


async def test_a_burst_is_told_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Also what came after its first line, though nobody does it again."""
    clock = FakeClock()
    said = complaints(clock)
    await for_(clock, said, 1)
    for _ in range(2):
        await clock.advance(REPEAT_PERIOD_S)
        said.look()
    [_, rest] = caplog.messages
    assert f"and {NODES - 1 - NAMED} more, {NODES - 1} in " in rest
    assert rest.endswith(f": {WHY} ({NODES})")


async def test_what_a_sender_did_last_is_known_for_a_period() -> None:
    """Of as many senders as are kept at all."""
    clock = FakeClock()
    said = complaints(clock)
    said.note("n0", "first")
    said.note("n0", "second")
    assert (said.of("n0"), said.of("n1")) == ("second", "")
    await clock.advance(REPEAT_PERIOD_S)
    assert said.of("n0") == ""
    for number in range(KEPT + 1):
        said.note(f"n{number}", WHY)
    assert (said.of("n0"), said.of("n1"), said.of(f"n{KEPT}")) == ("", WHY, WHY)


@pytest.mark.parametrize("senders", [1, 2 * KEPT], ids=["one", "many"])
async def test_whatever_the_words_lines_and_memory_are_bounded(
    senders: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a peer that says something else each time the log has what it says most."""
    clock = FakeClock()
    said = complaints(clock)
    for number in range(2 * KEPT):
        said.note(f"n{number % senders}", f"reason {number}")
    await clock.advance(REPEAT_PERIOD_S)
    said.note("last", "reason 7")
    assert len(caplog.messages) == 2
    assert f": reason 7, and {KEPT - 1} other reasons ({2 * KEPT + 1})" in caplog.messages[1]


@pytest.mark.parametrize("is_leading", [True, False], ids=["leads", "stands by"])
async def test_a_half_done_upgrade_floods_no_log(
    is_leading: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its reports is counted, and the log has a few lines of all of them."""
    async with Cell() as cell:
        if not is_leading:
            await cell.lead("other")
            cell.launch("standby")
            await cell.clock.advance(1.0)
        coordinator = cell.leaders[-1].coordinator if not is_leading else await cell.lead()
        counted = coordinator.bad_reports
        report = msgspec.msgpack.encode({"type": "node_report", "v": 1, "colour": "blue"})
        with caplog.at_level(logging.WARNING):
            for _ in range(40):
                for number in range(20):
                    await cell.caller.publish(subjects.node_report(CELL, f"x{number}"), report)
                await cell.clock.advance(1.0)
        lines = [line for line in caplog.messages if line.startswith("bad reports of x")]
        assert coordinator.bad_reports - counted == 800
        per_coordinator = len(lines) / len(cell.leaders)
        assert 1 <= per_coordinator <= 3, lines
        assert any("and 17 more" in line for line in lines)
