"""How a command that takes too long, or that nobody waits for, ends. Must not know what it does."""

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
    """The process that is being started; one whose caller is cancelled meanwhile ends as well.

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
    """What a start that is over has started; None of one that failed."""
    return None if task.cancelled() or task.exception() is not None else task.result()


def _kill_started(task: asyncio.Future[Process]) -> None:
    if (process := _started(task)) is not None:
        _kill(process)


async def ended(process: Process, *, name: str, clock: Clock, timeout_s: float) -> int:
    """The exit code of a process that leads a session of its own, once it has ended.

    Whatever ends the wait ends the process and its session with it: none goes on that nobody waits
    for, but for one that the kernel holds, which is left to the kernel and told of: in the log, and
    by a note of the error, see `left_behind`.

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
    """What did not end of a command whose `ended` raised this; in words, mostly nothing."""
    return list(getattr(error, "__notes__", ()))


async def _gone(process: Process, *, name: str, clock: Clock) -> str:
    """Return when a process that was sent SIGKILL is gone with its session; who is left of them
    after `sessions.END_S`: of a script mostly not the shell, but the step that it waited for."""
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
    """The process and its session; it may end in this very moment."""
    try:
        sessions.end(process.pid)
    except PermissionError as error:
        log.error("command %d: cannot kill a process of it: %s", process.pid, error)
