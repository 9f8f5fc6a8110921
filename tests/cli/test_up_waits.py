"""`aryl up` waits for its cell or for the word to stop, and leaves nothing of that running."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.cli.up import is_ready_first
from tests.inbox import PATIENCE_S


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
