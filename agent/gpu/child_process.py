"""The NVML child as an operating-system process: its pipes and its command line.

This module does not import `agent.gpu.nvml`, which would bring pynvml into the agent.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

import agent
from agent.gpu.fake.fleet import load_fleet
from agent.gpu.reader import ProcessStarter, ReaderProcess
from agent.gpu.wire import ASK, HEADER, ChildSettings, payload_bytes
from common.children import send_signal


class ChildProcess:
    """A running `agent.gpu.nvml_child`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self) -> bytes:
        """One question and its answer's payload.

        Raises:
            OSError, EOFError: the child has ended.
            ProtocolError: the child's output is not a frame.
        """
        self._stdin.write(ASK)
        await self._stdin.drain()
        header = await self._stdout.readexactly(HEADER.size)
        return await self._stdout.readexactly(payload_bytes(header))

    def close_input(self) -> None:
        self._stdin.close()

    def urge(self, number: signal.Signals) -> None:
        send_signal(self._process, number)

    async def wait(self) -> int:
        return await self._process.wait()


def child_starter(
    node: str,
    *,
    now_s: Callable[[], float],
    fake_fleet: Path | None = None,
    gpu_deadline_s: float = 0.5,
) -> ProcessStarter:
    """A function that starts the child of this node; with `fake_fleet`, on fake GPUs.

    The script of the fakes begins with the first child and continues over a restart.

    Raises:
        ConfigError: the fleet file is invalid; better now than in the child.
    """
    if fake_fleet is not None:
        load_fleet(fake_fleet)
    # Absolute, as the child has another working directory.
    fleet_path = "" if fake_fleet is None else str(fake_fleet.resolve())
    first_start_s: float | None = None

    async def start() -> ReaderProcess:
        nonlocal first_start_s
        start_s = now_s()
        if first_start_s is None:
            first_start_s = start_s
        settings = ChildSettings(
            node=node,
            fake_fleet=fleet_path,
            fake_age_s=start_s - first_start_s,
            gpu_deadline_s=gpu_deadline_s,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agent.gpu.nvml_child",
            msgspec.json.encode(settings).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # `-m` searches the working directory first: the child is of the agent's own release.
            cwd=Path(agent.__file__).parents[1],
        )
        return ChildProcess(process)

    return start
