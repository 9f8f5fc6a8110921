"""Servers for tests: a real nats-server, and one that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.demo.nats_server import NatsServer, find_binary
from tests.harness.inbox import PATIENCE_S

OnConnected = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


async def client_url(directory: Path) -> str:
    """What the server's ports file says, once it is there and whole."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while True:
            for path in directory.glob("*.ports"):  # noqa: ASYNC240 - a local file
                with contextlib.suppress(json.JSONDecodeError):  # half written
                    url: str = json.loads(path.read_text())["nats"][0]
                    return url
            await clock.sleep(0.01)


@contextlib.asynccontextmanager
async def running_nats(directory: Path, *, has_mqtt: bool = False) -> AsyncIterator[NatsServer]:
    """A nats-server of its own, on a free port; the test is skipped where there is no binary."""
    try:
        binary = find_binary()
    except ConfigError as error:
        pytest.skip(str(error))
    server = NatsServer(directory, clock=SystemClock(), binary=binary, has_mqtt=has_mqtt)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class HeldUp:
    """What a client says first with some mark in it reaches its server when `go` is set.

    said: the client has said it.
    """

    def __init__(self, mark: bytes) -> None:
        self.said, self.go = asyncio.Event(), asyncio.Event()
        self.port = 0
        self._mark = mark

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one direction until it ends."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if self._mark in data:
                    self.said.set()
                    await self.go.wait()
                writer.write(data)
        writer.close()


@contextlib.asynccontextmanager
async def held_up(port: int, mark: bytes) -> AsyncIterator[HeldUp]:
    """A way to a server of this machine on which the first words with a mark wait."""
    held, nothing = HeldUp(mark), HeldUp(b"\xff" * 64)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(held.forward(reader, to_server), nothing.forward(from_server, writer))

    way = await asyncio.start_server(accept, "127.0.0.1", 0)
    held.port = way.sockets[0].getsockname()[1]
    try:
        yield held
    finally:
        held.go.set()
        way.close()
        await way.wait_closed()


@contextlib.asynccontextmanager
async def scripted_nats(
    version: str, on_connected: OnConnected, heard: list[str] | None = None
) -> AsyncIterator[str]:
    """The least that speaks the NATS protocol, as a URL.

    Args:
        on_connected: called with the number of each connection, from 1, and its writer.
        heard: gets every line that a client sends.
    """
    connection_count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connection_count
        connection_count += 1
        number, is_new = connection_count, True
        info = {"server_id": "s", "version": version, "max_payload": 1048576, "headers": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if heard is not None:
                    heard.append(line.decode().strip())
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
                    if is_new:
                        is_new = False
                        await on_connected(number, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
