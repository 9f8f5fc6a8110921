"""Deeds that end soon once they are told to, whatever they wait for. Must not know what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from common.clock import Clock


async def until_told(
    doing: Coroutine[object, object, None], *, told: asyncio.Event, limit_s: float, clock: Clock
) -> bool:
    """Do it to its end; after `told` is set it has `limit_s` for that, then it is cancelled.

    Returns:
        Whether it came to its end by itself.

    Raises:
        Exception: what it raised, also while it was cancelled.
    """
    running = asyncio.create_task(doing, name="until told")
    telling = asyncio.create_task(told.wait(), name="told")
    try:
        await asyncio.wait({running, telling}, return_when=asyncio.FIRST_COMPLETED)
        try:
            async with clock.timeout(limit_s):
                await asyncio.wait({running})
        except TimeoutError:
            running.cancel()
    finally:
        is_late = running.cancelling() > 0
        telling.cancel()
        running.cancel()
        await asyncio.gather(telling, running, return_exceptions=True)
    if not running.cancelled():
        running.result()
    return not is_late


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has ended, however it does."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
