"""Commands that the operator configured, run with a time limit. An edge; must not know why."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from agent.commands import ended
from agent.left_commands import CommandRecord
from common.clock import Clock

ERROR_TEXT_BYTES = 300
LEAST_OUTPUT_BYTES = 64 * 1024
WAITS = 'read -r word && exec "$@" </dev/null'
"""The first words of a command's process: it becomes the command once it is written down, and ends
where its agent ended before that."""


class Commands(Protocol):
    """Runs a command to its end."""

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        """Empty when it exited with 0, else what went wrong in one line.

        variables: added to the environment.
        """
        ...


class SystemCommands:
    """Commands as processes, without a shell, in a session of their own.

    Their output goes to a file and not to a pipe: a command that leaves a daemon behind would keep
    a pipe open for ever.

    Args:
        state_dir: where the one that runs is written down for the agent that comes next, see
            `agent.left_commands`; None: nowhere.
    """

    def __init__(self, clock: Clock, *, state_dir: Path | None = None) -> None:
        self._clock = clock
        self._record = None if state_dir is None else CommandRecord(state_dir)

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        """Empty when it exited with 0, else what went wrong in one line.

        variables: added to the environment.
        """
        with _output() as output:
            try:
                process = await self._start(argv, output, variables)
            except OSError as error:
                return f"{argv[0]}: {error.strerror}"
            try:
                status = await ended(process, clock=self._clock, timeout_s=timeout_s)
            except TimeoutError:
                return f"{argv[0]} did not end within {timeout_s:g} s"
            if status == 0:
                return ""
            output.seek(max(0, output.seek(0, os.SEEK_END) - ERROR_TEXT_BYTES))
            said = output.read().decode(errors="replace").strip().splitlines()
            return f"{argv[0]} exited with {status}" + (f": {said[-1]}" if said else "")

    async def _start(
        self, argv: Sequence[str], output: IO[bytes], variables: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """The command's process, which does nothing before it is written down.

        Raises:
            OSError: it cannot be started.
        """
        _find(argv[0])
        wait_fd, go_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", WAITS, argv[0], *argv,
                stdin=wait_fd,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **variables},
            )  # fmt: skip
            if self._record is not None:
                self._record.write(process.pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(go_fd, b"\n")
        finally:
            os.close(wait_fd)
            os.close(go_fd)
        return process


class OneCommand:
    """One command at a time, which can be ended before its time limit."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._running: asyncio.Task[str] | None = None

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        """Like `Commands.run`; of one that was ended it says so."""
        doing = self._commands.run(argv, timeout_s=timeout_s, variables=variables)
        running = asyncio.create_task(doing, name=f"command {argv[0]}")
        self._running = running
        try:
            return await running
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            return f"{argv[0]} was ended: its node is wanted back"

    def end(self) -> None:
        """End the one that runs, if one does; `run` returns when it is gone."""
        if self._running is not None:
            self._running.cancel()


def _find(program: str) -> None:
    """Look whether there is such a program; the shell that becomes it would not say which it was.

    Raises:
        OSError: there is none, or it cannot be run.
    """
    if shutil.which(program) is None:
        code = errno.EACCES if Path(program).exists() else errno.ENOENT
        raise OSError(code, os.strerror(code))


def _output() -> IO[bytes]:
    """Where a command writes: a file without a name, or memory where no disk takes it.

    A command that could not say what it does would fail, and its node would not come home.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            os.posix_fallocate(file.fileno(), 0, LEAST_OUTPUT_BYTES)
            file.truncate(0)
        except OSError:
            stack.close()
            return os.fdopen(os.memfd_create("output of a command"), "w+b")
        stack.pop_all()
        return file
