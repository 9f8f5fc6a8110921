"""A TCP proxy between one client and its server, which can be cut, blackholed or slowed down.

Must not know what passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from enum import StrEnum

HOST = "127.0.0.1"
CHUNK_BYTES = 65_536


class Link(StrEnum):
    """What a proxy does with its connections."""

    WHOLE = "whole"
    CUT = "cut"
    BLACKHOLE = "blackhole"
    SLOW = "slow"


class Proxy:
    """Forwards every connection to one port of this machine.

    `CUT` closes what is open and refuses what comes; `BLACKHOLE` keeps connections and bytes, and
    lets them pass when it is over; `SLOW` holds each piece up for a drawn time of up to `slow_s`.
    """

    def __init__(self, target_port: int, *, rng: random.Random, slow_s: float = 1.0) -> None:
        self._target_port = target_port
        self._rng = rng
        self._slow_s = slow_s
        self._link = Link.WHOLE
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0

    @property
    def port(self) -> int:
        """Where clients connect."""
        return self._port

    async def start(self) -> None:
        """Listen, on a free port at first and on the same one later."""
        self._server = await asyncio.start_server(self._accept, HOST, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        self._close_all()
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set(self, link: Link) -> None:
        """Treat connections so from now on."""
        self._link = link
        if link == Link.BLACKHOLE:
            self._may_pass.clear()
        else:
            self._may_pass.set()
        if link == Link.CUT:
            self._close_all()

    def _close_all(self) -> None:
        for writer in tuple(self._open):
            transport = writer.transport
            transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            if self._link == Link.CUT:
                return
            await self._may_pass.wait()
            from_server, other = await asyncio.open_connection(HOST, self._target_port)
            self._open.add(other)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, other))
                group.create_task(self._pump(from_server, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, other):
                if end is not None:
                    self._open.discard(end)
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._may_pass.wait()
                if self._link == Link.SLOW:
                    await asyncio.sleep(self._rng.uniform(0, self._slow_s))
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
