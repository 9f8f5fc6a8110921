"""Runs coroutines that stop promptly when asked, whatever they are awaiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from common.clock import Clock

log = logging.getLogger(__name__)


async def until_told(
    doing: Coroutine[object, object, None], *, told: asyncio.Event, limit_s: float, clock: Clock
) -> bool:
    """Run a coroutine to its end; after `told` is set it has `limit_s`, then it is cancelled.

    Returns:
        Whether it ended by itself.

    Raises:
        Exception: its error, also while it was cancelled.
    """
    running = asyncio.create_task(doing, name="until stopped")
    is_late = False
    try:
        await is_done_first(running, told=told)
        try:
            async with clock.timeout(limit_s):
                await asyncio.wait({running})
        except TimeoutError:
            is_late = True
    finally:
        await end(running)
    return not is_late


async def is_done_first(doing: asyncio.Future[Any], *, told: asyncio.Event) -> bool:
    """Wait until the task is done or `told` is set; True if it is done.

    The task is left to the caller.
    """
    telling = asyncio.create_task(told.wait(), name="told")
    try:
        await asyncio.wait({doing, telling}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(telling)
    return doing.done()


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has ended.

    Raises:
        Exception: its error, however old: it would otherwise be lost.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


@contextlib.asynccontextmanager
async def beside(
    doing: Coroutine[object, object, None], *, name: str, broke: Callable[[], None]
) -> AsyncGenerator[None]:
    """Run a coroutine for as long as the block runs.

    broke: called as soon as it raises, because the error surfaces only at the end of the block.

    Raises:
        Exception: its error, at the end of the block.
    """

    def look(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("%s broke: %r", name, error)
            broke()

    task = asyncio.create_task(doing, name=name)
    task.add_done_callback(look)
    try:
        yield
    finally:
        await end(task)
