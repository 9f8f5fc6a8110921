"""The proxy with which the nemesis parts a process from NATS."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from tests.live.proxy import HOST, Link, Proxy


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """A proxy before a server that says everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    found = Proxy(server.sockets[0].getsockname()[1], rng=random.Random(1), slow_s=0.01)
    await found.start()
    yield found
    await found.stop()
    server.close()


async def said(proxy: Proxy, text: bytes) -> bytes:
    """What comes back of a text on a new connection; empty if it is closed."""
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    try:
        writer.write(text)
        return await reader.read(100)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_a_cut_closes_and_refuses_until_it_is_mended(proxy: Proxy) -> None:
    """What was open is closed, what comes is closed, and a mended proxy forwards again."""
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    writer.write(b"one")
    assert await reader.read(100) == b"one"
    proxy.set(Link.CUT)
    with pytest.raises(ConnectionError):
        if not await reader.read(100):
            raise ConnectionError
    writer.transport.abort()
    assert await said(proxy, b"two") == b""
    proxy.set(Link.WHOLE)
    assert await said(proxy, b"three") == b"three"


async def test_a_blackhole_keeps_bytes_until_it_is_mended(proxy: Proxy) -> None:
    """Nothing passes, on old connections or new ones; then all of it does."""
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    writer.write(b"one")
    assert await reader.read(100) == b"one"
    proxy.set(Link.BLACKHOLE)
    writer.write(b"two")
    answers = [asyncio.create_task(reader.read(100)), asyncio.create_task(said(proxy, b"three"))]
    done, _ = await asyncio.wait(answers, timeout=0.05)
    assert not done
    proxy.set(Link.WHOLE)
    assert await asyncio.gather(*answers) == [b"two", b"three"]
    writer.transport.abort()


async def test_a_slow_link_loses_nothing(proxy: Proxy) -> None:
    """Pieces are late, and in order."""
    proxy.set(Link.SLOW)
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    for number in range(10):
        writer.write(str(number).encode())
        await writer.drain()
    assert await reader.readexactly(10) == b"0123456789"
    writer.transport.abort()
