"""Real demo processes for the demo's tests: started on free ports, ended by pid."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "coordinator" / "demo"
LIMIT_S = 20.0
"""A test that waits this long has failed; nothing here is timed."""


@dataclass
class Running:
    """One process that listens."""

    process: asyncio.subprocess.Process
    url: str

    async def terminate(self) -> int:
        """SIGTERM, then its exit status."""
        self.process.terminate()
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()


@asynccontextmanager
async def listening(
    module: str, *arguments: str, until: bytes = b"", environment: Mapping[str, str] | None = None
) -> AsyncIterator[Running]:
    """A demo module on a free port once it has said `until`, ended with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"coordinator.demo.{module}",
        "--port=0",
        *arguments,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stderr=asyncio.subprocess.PIPE,
    )
    reading: asyncio.Task[bytes] | None = None
    try:
        assert process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            said = b""
            while not (found := re.search(rb"listening .*port=(\d+)\n", said)) or until not in said:
                line = await process.stderr.readline()
                assert line, f"{module} ended: {said.decode()}"
                said += line
        # Nobody else reads the pipe: a full one would stop the process.
        reading = asyncio.create_task(process.stderr.read())
        yield Running(process, f"http://127.0.0.1:{int(found[1])}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if reading is not None:
            await reading


async def run_script(
    name: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """A hook as the agent runs it: isolated, without site-packages; exit status and stdout."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(DEMO / name),
        *arguments,
        env={**os.environ, **(environment or {})},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def get_json(session: ClientSession, url: str) -> dict[str, object]:
    """A page's JSON object."""
    async with session.get(url) as reply:
        values = await reply.json()
        assert isinstance(values, dict)
        return values


def lines_of(data: bytes) -> list[dict[str, object]]:
    """Newline JSON."""
    return [json.loads(line) for line in data.splitlines()]
