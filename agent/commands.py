"""How a command that takes too long, or that nobody waits for, ends. Must not know what it does."""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Coroutine

from agent import sessions
from common.clock import Clock

log = logging.getLogger(__name__)


async def started(starting: Coroutine[object, object, Process]) -> Process:
    """The process that is being started; one whose caller is cancelled meanwhile ends as well.

    A start that is cancelled half-way would end the process and leave its children running.

    Raises:
        OSError: it cannot be started.
    """
    task = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            _kill(task.result())
            await task.result().wait()
        raise


async def ended(process: Process, *, clock: Clock, timeout_s: float) -> int:
    """The exit code of a process that leads a session of its own, once it has ended.

    Whatever ends the wait ends the process and its session with it: none goes on that nobody waits
    for, but for one that the kernel holds, which is left to the kernel.

    Raises:
        TimeoutError: it had not ended within `timeout_s`.
    """
    try:
        async with clock.timeout(timeout_s):
            return await process.wait()
    finally:
        if process.returncode is None:
            _kill(process)
            try:
                async with clock.timeout(sessions.END_S):
                    await process.wait()
            except TimeoutError:
                log.error("pid %d does not end; left behind", process.pid)


def _kill(process: Process) -> None:
    """The process and its session; it may end in this very moment."""
    try:
        sessions.end(process.pid)
    except PermissionError as error:
        log.error("command %d: a process of it cannot be ended: %s", process.pid, error)
