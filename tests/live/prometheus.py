"""A real Prometheus for the block of a test, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from coordinator.demo.ports import free_ports

PROMETHEUS = shutil.which("prometheus")


@contextlib.asynccontextmanager
async def prometheus(config: Path, directory: Path) -> AsyncIterator[str]:
    """A Prometheus with this configuration; its URL."""
    assert PROMETHEUS is not None
    (port,) = free_ports(1)
    log = (directory / "prometheus.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=log,
        stderr=log,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
        log.close()


async def asked(url: str, query: str) -> list[dict[str, Any]]:
    """The result of a query."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/api/v1/query", params={"query": query}) as answer,
    ):
        found: dict[str, dict[str, list[dict[str, Any]]]] = await answer.json()
        return found["data"]["result"]
