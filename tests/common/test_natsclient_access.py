"""Who may speak on NATS, tried on a real server with a user of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import nkeys
import pytest

from common import natsrules
from common.bus import connect_nats
from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from common.model import NatsAccess
from coordinator.demo.nats_server import find_binary
from tests.harness.fakes import FakeClock
from tests.harness.inbox import ECHO, PATIENCE_S, echo
from tests.harness.servers import client_url


def write_seed(path: Path) -> str:
    """A new user's seed in a file; its public key."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    path.write_bytes(seed)
    return bytes(nkeys.from_seed(bytearray(seed)).public_key).decode()


@pytest.fixture
async def guarded_url(tmp_path: Path) -> AsyncIterator[str]:
    """A server that knows one nkey, whose seed is in `seed`."""
    key = write_seed(tmp_path / "seed")
    config = tmp_path / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: {json.dumps(str(tmp_path))}\n'
        f"authorization {{ users: [ {{ nkey: {key} }} ] }}\n"
    )
    server = await asyncio.create_subprocess_exec(
        str(find_binary()), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield await client_url(tmp_path)
    finally:
        server.terminate()
        await server.wait()


@pytest.mark.nats
async def test_an_nkey_opens_a_guarded_server(guarded_url: str, tmp_path: Path) -> None:
    """The seed in the file is this identity; nothing secret stands in the URL."""
    access = NatsAccess(nkey_seed_path=str(tmp_path / "seed"))
    bus = await connect_nats(guarded_url, identity="a", clock=SystemClock(), access=access)
    await bus.subscribe(ECHO, echo)
    assert await bus.request(ECHO, b"1", timeout_s=PATIENCE_S) == b"re:1"
    await bus.close()


@pytest.mark.nats
@pytest.mark.parametrize("has_key", [False, True])
async def test_a_stranger_stays_outside(guarded_url: str, tmp_path: Path, has_key: bool) -> None:
    """Without a key, or with one that the server does not know, there is no connection."""
    write_seed(tmp_path / "other")
    access = NatsAccess(nkey_seed_path=str(tmp_path / "other")) if has_key else NatsAccess()
    with pytest.raises(Unavailable, match=r"(?i)authorization"):
        await connect_nats(
            guarded_url, identity="a", clock=SystemClock(), access=access, timeout_s=1.0
        )


CERTIFICATE = """
-----BEGIN CERTIFICATE-----
MIIBjzCCATagAwIBAgIUEmWaFrVIS+sieCDBOA/WbZI/dpAwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJYXJ5bCB0ZXN0MCAXDTI2MTEyMTIxNDUxNFoYDzIxMjYxMDI4
MjE0NTE0WjAUMRIwEAYDVQQDDAlhcnlsIHRlc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAT/5pnt1Oi5yMSrEkJ/ixFR52XBoGSIVCAZV+3mbs81Lh11I2tESvjn
fzzXaVOV522a3mADHlmDXf8asRpdwedjo2QwYjAdBgNVHQ4EFgQU9eRHJQHlN8Rg
5xoc6WqfVaVNwOwwHwYDVR0jBBgwFoAU9eRHJQHlN8Rg5xoc6WqfVaVNwOwwDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0cAMEQC
ICVrg0DS9UamQEDXCoZcjFg9iR9jLx2aVFCS+cdfhr1XAiBv8p6nEsegJFwFREDl
wBdorjMrumdQk4LvpbJmykxU3Q==
-----END CERTIFICATE-----
"""
"""Of nobody; its key was thrown away."""


@contextlib.asynccontextmanager
async def curt_server(connections: list[int]) -> AsyncIterator[str]:
    """A server that says once why it refuses, and only hangs up on whoever knocks again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections) + 1)
        writer.write(b'INFO {"version": "2.14.5", "auth_required": true}\r\n')
        await reader.readline()
        if len(connections) == 1:
            await reader.readline()
            writer.write(b"-ERR 'Authorization Violation'\r\n")
        else:
            no_linger = struct.pack("ii", 1, 0)  # a close that the peer sees as a reset
            link = writer.get_extra_info("socket")
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("has_ca", [False, True], ids=["tls url", "plain url and a CA"])
async def test_nothing_is_said_in_plain_text_where_tls_was_meant(
    has_ca: bool, tmp_path: Path
) -> None:
    """A server, or who stands in for it, that demands no TLS gets no name and no password."""
    heard: list[bytes] = []
    clock = FakeClock()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.99.0","max_payload":8388608,"proto":1}\r\n')
        heard.append(await reader.read(1000))
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"{'nats' if has_ca else 'tls'}://ada:secret@127.0.0.1:{port}"
    (tmp_path / "ca.pem").write_text(CERTIFICATE)
    access = NatsAccess(tls_ca_path=str(tmp_path / "ca.pem") if has_ca else None)
    async with server:
        connecting = asyncio.create_task(
            connect_nats(url, identity="a", clock=clock, access=access, timeout_s=5.0)
        )
        async with asyncio.timeout(PATIENCE_S):
            while len(heard) < 2 and not connecting.done():  # by then the first was noted
                await SystemClock().sleep(0.01)
        await clock.advance(6.0)
        with pytest.raises(Unavailable, match="demands no TLS"):
            await connecting
    assert heard == [b""] * len(heard)


async def test_a_refusal_is_told_although_later_attempts_were_only_cut() -> None:
    """Whether a client reads a refusal or a reset is chance; the reason is kept until the end."""
    clock, connections = FakeClock(), list[int]()
    async with curt_server(connections) as url:
        url = f"{url},{url}"  # one refusal is not yet that of each server
        connecting = asyncio.create_task(
            connect_nats(url, identity="a", clock=clock, timeout_s=5.0)
        )
        async with asyncio.timeout(PATIENCE_S):
            while len(connections) < 3:  # by then the second one was cut, and noted
                await SystemClock().sleep(0.01)
        await clock.advance(6.0)
        with pytest.raises(Unavailable, match=r"Authorization Violation.*, then "):
            await connecting


@pytest.mark.parametrize("content", [None, "not a certificate"])
def test_a_ca_file_that_is_none_is_named(tmp_path: Path, content: str | None) -> None:
    """The error names the field and the file before anything is connected."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"tls_ca_path: .*ca\.pem"):
        natsrules.options(NatsAccess(tls_ca_path=str(path)))
