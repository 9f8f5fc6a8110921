"""Keeps a nats-server running, as systemd and an operator would.

An edge. A server that ends is restarted. A server whose disk was full is restarted once there is
room: JetStream keeps the write error and takes no record before a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from common.clock import Clock
from common.errors import ArylError
from coordinator.demo.nats_server import NatsServer
from coordinator.demo.supervise import RESTART_S

log = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds between two health checks; each one that finds it ill is logged."""
ANSWER_S = 2.0
ROOM_BYTES = 1024 * 1024
"""This much must fit onto the disk before a start is tried."""
WRITE_ERROR = "write error"
"""The term of nats-server's health page (2.14) for a stream that could not be written."""


class _Health(Struct, frozen=True):
    error: str = ""


class NatsKeeper:
    """Keeps one nats-server running until it is left alone.

    Args:
        has_room: whether its disk takes writes again; by default a write is tried.
    """

    def __init__(
        self,
        server: NatsServer,
        *,
        clock: Clock,
        has_room: Callable[[Path], bool] | None = None,
    ) -> None:
        self._server = server
        self._clock = clock
        self._has_room = has_room or takes_writes
        self._keeping: asyncio.Task[None] | None = None
        self._is_told = False

    async def start(self) -> str:
        """Start the server and keep it; its URL. A restarted server has the same port and store.

        Raises:
            ConfigError: as `NatsServer.start`.
            Unavailable: it does not come up in time.
        """
        url = await self._server.start()
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="unit nats")
        return url

    async def leave_alone(self) -> None:
        """Stop restarting it; a running server keeps running."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def _keep(self) -> None:
        look_at_s = self._clock.now_s() + LOOK_S
        while True:
            await self._clock.sleep(RESTART_S)
            try:
                if self._server.pid is None:
                    log.warning("nats-server exited; restarting it")
                    await self._server.start()
                elif self._clock.now_s() >= look_at_s:
                    look_at_s = self._clock.now_s() + LOOK_S
                    await self._look()
            except (ArylError, OSError) as error:  # the next try may find it better
                log.error("nats-server cannot be started: %s", error)

    async def _look(self) -> None:
        error = await write_error(self._server.monitoring_url)
        if not error:
            self._is_told = False
            return
        if not self._is_told:
            log.error("nats-server accepts no records; restarting it when it can: %s", error)
            self._is_told = True
        if await asyncio.to_thread(self._has_room, self._server.directory):
            log.warning("nats-server restarted: its disk has free space again")
            await self._server.restart()


async def write_error(monitoring_url: str) -> str:
    """The stream that could not be written and the reason, from the server's health page.

    Empty when all is well and when the server does not answer: a hang is not judged here.
    """
    import aiohttp  # it takes long, and every command of `aryl` imports this module

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session,
            session.get(f"{monitoring_url}/healthz") as answer,
        ):
            error = msgspec.json.decode(await answer.read(), type=_Health).error
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return ""
    return error if WRITE_ERROR in error else ""


def takes_writes(directory: Path) -> bool:
    """True if `ROOM_BYTES` can be written there and reach the disk; nothing of it stays."""
    path = directory / "room"
    try:
        with path.open("wb") as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return True
