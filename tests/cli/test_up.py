"""Options of `aryl up`: what no cell can be made from is refused by name; and what its log says."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from math import inf

import pytest
from rich.console import Console
from rich.live import Live

from common.errors import ConfigError
from coordinator.cli.up import (
    PLAIN_LINE_S,
    QUIET_LINE_S,
    ProgressLines,
    above,
    is_ready_first,
    make_plan,
)
from tests.harness.inbox import PATIENCE_S
from tests.tables import each_row


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Whoever sets logging up replaces the root's handlers; the next test gets pytest's back."""
    root = logging.getLogger()
    handlers, level, nats_level = root.handlers[:], root.level, logging.getLogger("nats").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("nats").setLevel(nats_level)


@each_row(
    ("nodes", "speed", "named"),
    [("six", 120.0, "--nodes"), ("0+6", 120.0, "--nodes"), ("100+101", 120.0, "--nodes"),
     ("6+6", inf, "--speed")],
)  # fmt: skip
def test_an_option_that_fits_no_cell_is_named(nodes: str, speed: float, named: str) -> None:
    """An endless speed would submit a whole trace at once."""
    with pytest.raises(ConfigError, match=named):
        make_plan(nodes, 8, 1, "aryl", speed=speed)


@each_row(("nodes", "headroom"), [("2+2", 0), ("2+1", 0), ("2+3", 1), ("6+6", 1)])
def test_a_small_service_keeps_no_node_of_headroom(nodes: str, headroom: int) -> None:
    """Of two nodes one serves and one would be headroom: none could ever be lent."""
    assert make_plan(nodes, 8, 1, "aryl", speed=120.0).headroom_nodes == headroom


def test_a_log_gets_a_line_when_something_changes_and_else_a_minute_later() -> None:
    """An empty cell may run for days; one that works is heard every ten seconds."""
    lines = ProgressLines()
    looks = [(float(at_s), "idle") for at_s in range(100)] + [(100.0, "busy"), (101.0, "idle")]
    said = [at_s for at_s, words in looks if lines.at(at_s, words, None)]
    assert said == [0.0, QUIET_LINE_S, 100.0]
    assert lines.at(100.0 + PLAIN_LINE_S, "idle", 200.0) == " 110 s of 200: idle"


@pytest.mark.usefixtures("logging_as_it_was")
def test_what_is_logged_during_a_live_view_is_not_painted_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is written through the view, which keeps it above itself; afterwards to standard error."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    with above(Live("the view", console=terminal, auto_refresh=False)):
        logging.getLogger("any").warning("a server ended")
    logging.getLogger("any").warning("the view is over")
    assert "a server ended" in screen.getvalue()
    said = capsys.readouterr().err
    assert "the view is over" in said
    assert "a server ended" not in said


# --- waiting for the cell ---


class Start:
    """A start that takes for ever, and says when it is over."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.is_over = False

    async def run(self) -> None:
        """Not ready until somebody ends it."""
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.is_over = True


async def test_a_cell_that_is_stopped_before_it_is_ready_is_asked_no_more() -> None:
    """What waited for it has ended when the cell is taken down."""
    start, stop = Start(), asyncio.Event()
    waiting = asyncio.create_task(is_ready_first(start.run(), stop=stop))
    await start.begun.wait()
    stop.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await waiting is False
    assert start.is_over


async def test_whoever_gives_up_waiting_for_a_cell_leaves_nothing_running() -> None:
    """A second Ctrl-C, or an error elsewhere, ends the wait in the same way."""
    start = Start()
    waiting = asyncio.create_task(is_ready_first(start.run(), stop=asyncio.Event()))
    await start.begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert start.is_over


async def test_a_cell_that_cannot_start_says_why() -> None:
    """Whatever its start raised reaches the caller."""

    async def fail() -> None:
        raise RuntimeError("no such cell")

    with pytest.raises(RuntimeError, match="no such cell"):
        await is_ready_first(fail(), stop=asyncio.Event())


async def test_a_cell_that_is_ready_is_ready() -> None:
    """Also where somebody says stop at the same moment."""
    assert await is_ready_first(asyncio.sleep(0), stop=asyncio.Event()) is True
