"""Ends a command that takes too long or has lost its caller."""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Coroutine

from agent.proc import sessions
from common.clock import Clock

log = logging.getLogger(__name__)


async def started(
    starting: Coroutine[object, object, Process], *, name: str, clock: Clock
) -> Process:
    """Start a process; if the caller is cancelled meanwhile, the process ends as well.

    A start that is cancelled half-way would end the process and leave its children running.

    name: of the command, for people.

    Raises:
        OSError: it cannot be started.
    """
    task = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_kill_started)  # also when this wait is cancelled again
        await asyncio.wait({task})
        if (process := _started(task)) is not None:
            await _gone(process, name=name, clock=clock)
        raise


def _started(task: asyncio.Future[Process]) -> Process | None:
    """The process that a finished start has started; None if the start failed."""
    return None if task.cancelled() or task.exception() is not None else task.result()


def _kill_started(task: asyncio.Future[Process]) -> None:
    if (process := _started(task)) is not None:
        _kill(process)


async def ended(process: Process, *, name: str, clock: Clock, timeout_s: float) -> int:
    """Wait for the end of a process that leads its own session; return its exit code.

    However the wait ends, the process and its session end with it, so none goes on without a
    waiter. The exception is a process that the kernel holds. It is left to the kernel and reported
    in the log and by a note of the error, see `left_behind`.

    name: of the command, for people.

    Raises:
        TimeoutError: it had not ended within `timeout_s`.
    """
    try:
        async with clock.timeout(timeout_s):
            return await process.wait()
    except BaseException as error:
        if process.returncode is None:
            _kill(process)
            if left := await _gone(process, name=name, clock=clock):
                error.add_note(left)
        raise


def left_behind(error: BaseException) -> list[str]:
    """The processes that survived a command whose `ended` raised this, as text; usually empty."""
    return list(getattr(error, "__notes__", ()))


async def _gone(process: Process, *, name: str, clock: Clock) -> str:
    """Return when a process that got SIGKILL is gone with its session.

    Returns the processes left after `sessions.END_S`. For a script that is usually not the shell,
    but the step that it waited for.
    """
    try:
        async with clock.timeout(sessions.END_S):
            await process.wait()
            await sessions.emptied(process.pid, clock)
    except TimeoutError:
        left = f"{sessions.left(process.pid)} did not end and was left behind"
        log.error("command %s: %s", name, left)
        return left
    return ""


def _kill(process: Process) -> None:
    """Kill the process and its session; it may end in this very moment."""
    try:
        sessions.end(process.pid)
    except PermissionError as error:
        log.error("command %d: cannot kill a process of it: %s", process.pid, error)
