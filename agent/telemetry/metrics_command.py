"""Runs a site's command that prints a server's load, once for each sample. An edge.

The command runs as the agent's own user, in a session of its own and without a shell. A command
that takes too long, or prints too much, is killed with its session.
"""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence

from agent.proc.commands import ended, started
from common.clock import Clock
from common.errors import ProtocolError, Unavailable

MAX_OUTPUT_BYTES = 65_536
CHUNK_BYTES = 16_384
ERROR_CHARS = 200


async def output_of(argv: Sequence[str], *, clock: Clock, timeout_s: float) -> str:
    """The output of a command that exits with 0 within a time.

    Raises:
        Unavailable: it cannot be started, exits with another status, or takes too long.
        ProtocolError: it prints more than `MAX_OUTPUT_BYTES`, or no UTF-8.
    """
    name = argv[0]
    with _Output() as out, _Output() as errors:
        try:
            starting = asyncio.create_subprocess_exec(
                *argv,
                stdin=DEVNULL,
                stdout=out.write_fd,
                stderr=errors.write_fd,
                start_new_session=True,
            )
            process = await started(starting, name=name, clock=clock)
        except OSError as error:
            raise Unavailable(f"{name}: {error.strerror}") from None
        try:
            status = await ended(process, name=name, clock=clock, timeout_s=timeout_s)
        except TimeoutError:
            if out.is_full:  # it has been waiting for a reader since
                raise _too_much(name) from None
            raise Unavailable(f"{name}: did not end within {timeout_s:g} s; killed") from None
        data, said = out.rest(), errors.rest()
    if status != 0:
        lines = said.decode(errors="replace").strip().splitlines()
        why = f": {lines[-1][:ERROR_CHARS]}" if lines else ""
        raise Unavailable(f"{name}: exited with {status}{why}")
    if len(data) > MAX_OUTPUT_BYTES:
        raise _too_much(name)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{name}: prints no UTF-8: {error}") from None


def _too_much(name: str) -> ProtocolError:
    return ProtocolError(f"{name}: prints more than {MAX_OUTPUT_BYTES} bytes")


class _Output:
    """A command's output, until the command has ended.

    A daemon that it leaves behind may keep the pipe open for ever.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.is_full = False

    def __enter__(self) -> _Output:
        self._loop.add_reader(self._read_fd, self._more)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        os.close(self.write_fd)

    def _more(self) -> bool:
        """Read the available output; True if there may be more."""
        try:
            chunk = os.read(self._read_fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._data += chunk
        if len(self._data) > MAX_OUTPUT_BYTES:
            self.is_full = True
            self._loop.remove_reader(self._read_fd)
        return bool(chunk) and not self.is_full

    def rest(self) -> bytes:
        """All of it, up to one chunk more than the most."""
        while not self.is_full and self._more():
            pass
        return bytes(self._data)
