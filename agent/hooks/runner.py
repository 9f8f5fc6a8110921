"""Runs the operator's commands, each with a time limit. An edge."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from agent.hooks.running_command import OUTPUT_PREFIX
from agent.proc.commands import ended, left_behind, started
from common.clock import Clock

ERROR_TEXT_BYTES = 300
LEAST_OUTPUT_BYTES = 64 * 1024
WAITS = 'read -r word && exec "$@" </dev/null'
"""The first words of a command's process: it becomes the command once it is recorded, and exits if
its agent ends before that."""
WAITER = Path(__file__).parents[1] / "proc/waiting_command.py"
"""Does the same for twenty times the cost, 6 to 13 ms, and not at all without an agent's
interpreter. A shell such as dash drops a variable whose name it could not use itself."""
SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Commands(Protocol):
    """Runs a command to its end."""

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        """Run a command; empty when it exited with 0, else the error in one line.

        variables: added to the environment.

        Raises:
            TimeoutError: it had not ended within `timeout_s`, and is ended. Its remains are
                reported as by `agent.proc.commands.left_behind`, also after a cancellation.
        """
        ...


class Record(Protocol):
    """Records the running command on disk; see `agent.hooks.running_command`."""

    def write(self, pid: int) -> None:
        """Record the leader of a command's session, before it does anything."""
        ...


class SystemCommands:
    """Commands as processes, without a shell, in a session of their own.

    Their output goes to a file and not to a pipe: a command that leaves a daemon behind would keep
    a pipe open for ever.

    Args:
        record: where the running command is recorded for the next agent; None: nowhere.
    """

    def __init__(self, clock: Clock, *, record: Record | None = None) -> None:
        self._clock = clock
        self._record = record

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        """Run a command; empty when it exited with 0, else the error in one line.

        variables: added to the environment.

        Raises:
            TimeoutError: as `Commands.run`.
        """
        with _output() as output:
            try:
                process = await self._start(argv, output, variables)
            except OSError as error:
                return f"{argv[0]}: {error.strerror}"
            status = await ended(process, name=argv[0], clock=self._clock, timeout_s=timeout_s)
            if status == 0:
                return ""
            output.seek(max(0, output.seek(0, os.SEEK_END) - ERROR_TEXT_BYTES))
            lines = output.read().decode(errors="replace").strip().splitlines()
            return f"{argv[0]} exited with {status}" + (f": {lines[-1]}" if lines else "")

    async def _start(
        self, argv: Sequence[str], output: IO[bytes], variables: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        """Start the command's process, which waits until it is recorded.

        Raises:
            OSError: it cannot be started.
        """
        _find(argv[0])
        environment = {**os.environ, **variables}
        wait_fd, go_fd = os.pipe()
        try:
            starting = asyncio.create_subprocess_exec(
                *_waiting(argv, environment),
                stdin=wait_fd,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
            process = await started(starting, name=argv[0], clock=self._clock)
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
        self.left = ""
        """Processes left of the latest command if it was ended and did not end, as text."""

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        """Like `Commands.run`; the error of a command that was ended or timed out states that."""
        self.left = ""

        async def doing() -> str:
            try:
                return await self._commands.run(argv, timeout_s=timeout_s, variables=variables)
            except asyncio.CancelledError as error:
                self.left = "; ".join(left_behind(error))
                raise
            except TimeoutError as error:
                self.left = "; ".join(left_behind(error))
                return f"{argv[0]} did not end within {timeout_s:g} s"

        running = asyncio.create_task(doing(), name=f"command {argv[0]}")
        self._running = running
        try:
            return await running
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            return f"{argv[0]} was ended: its node is wanted back"

    def end(self) -> None:
        """End the running command, if any; `run` returns when it is gone."""
        if self._running is not None:
            self._running.cancel()


def _waiting(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command line of a process that waits and then becomes this command."""
    if all(map(SHELL_NAME.fullmatch, environment)):
        return ["/bin/sh", "-c", WAITS, argv[0], *argv]
    return [sys.executable, "-I", "-S", str(WAITER), *argv]


def _find(program: str) -> None:
    """Check that the program exists; the shell that becomes it would not name a missing one.

    Raises:
        OSError: the program is missing, or it cannot be run.
    """
    if shutil.which(program) is None:
        code = errno.EACCES if Path(program).exists() else errno.ENOENT
        raise OSError(code, os.strerror(code))


def _output() -> IO[bytes]:
    """A file for a command's output: one without a name, or memory where no disk takes it.

    A command without a place for its output would fail, and its node would not come home.
    """
    with contextlib.ExitStack() as stack:
        try:
            fd, path = tempfile.mkstemp(prefix=OUTPUT_PREFIX)
            file = stack.enter_context(os.fdopen(fd, "w+b"))
            Path(path).unlink()
            os.posix_fallocate(file.fileno(), 0, LEAST_OUTPUT_BYTES)
            file.truncate(0)
        except OSError:
            stack.close()
            return os.fdopen(os.memfd_create(f"{OUTPUT_PREFIX}output"), "w+b")
        stack.pop_all()
        return file
