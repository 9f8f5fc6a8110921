"""The HTTP of a metrics page, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SystemClock
from common.errors import ConfigError
from common.monitoring.checks import check
from common.monitoring.page import MAX_CONNECTIONS, MAX_HEAD_BYTES, serving
from common.monitoring.settings import MetricsSettings, parsed, warning
from coordinator.demo.ports import free_ports

KEY = "c2VjcmV0LWtleQ"
BODY = b"aryl_leader 1.0\n"
PATIENCE_S = 20.0
LOOK_S = 0.01


class QuickClock(SystemClock):
    """The real clock, for which limits come a hundred times sooner."""

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        return super().timeout(None if delay_s is None else delay_s / 100)

    async def sleep(self, delay_s: float) -> None:
        await super().sleep(delay_s / 100)


def render(accept: str) -> tuple[bytes, str]:
    """A page that says what was accepted."""
    return BODY, f"text/plain; accepted={accept or 'nothing'}"


@contextlib.asynccontextmanager
async def served(
    *, key: Path | None = None, clock: SystemClock | None = None
) -> AsyncIterator[MetricsSettings]:
    """A page that listens."""
    (port,) = free_ports(1)
    settings = MetricsSettings(
        address=f"127.0.0.1:{port}", bearer_path="" if key is None else str(key)
    )
    async with serving(settings, render, clock=clock or SystemClock()):
        await listening(settings)
        yield settings


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    """Look until it is so."""
    for _ in range(int(PATIENCE_S / LOOK_S)):
        if await look():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError("never so")


async def listening(settings: MetricsSettings) -> None:
    """Wait until the address is listened at."""

    async def look() -> bool:
        with contextlib.suppress(OSError):
            (await connect(settings))[1].close()
            return True
        return False

    await until(look)


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until a text is in the log."""

    async def look() -> bool:
        return text in caplog.text

    await until(look)


async def connect(settings: MetricsSettings) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the page."""
    address = parsed(settings.address)
    assert address is not None
    return await asyncio.open_connection(address.host, address.port)


async def send(settings: MetricsSettings, data: bytes) -> bytes:
    """All that a connection answers to some bytes."""
    reader, writer = await connect(settings)
    async with asyncio.timeout(PATIENCE_S):
        try:
            writer.write(data)
            await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def get(settings: MetricsSettings, line: str = "GET /metrics", *fields: str) -> bytes:
    """The answer to a request."""
    head = "\r\n".join([f"{line} HTTP/1.1", "Host: x", *fields, "", ""])
    return await send(settings, head.encode())


def status(answer: bytes) -> int:
    """The status of an answer."""
    return int(answer.split(b" ", 2)[1])


async def test_a_get_has_the_page_and_a_head_its_header_alone() -> None:
    """Both name the length of the page, and the format that the scraper accepts decides it."""
    async with served() as settings:
        answer = await get(settings, "GET /metrics?x=1", "ACCEPT: application/openmetrics-text")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body == BODY
        assert f"Content-Length: {len(BODY)}".encode() in head
        assert b"accepted=application/openmetrics-text" in head
        assert (await get(settings, "GET http://x/metrics")).endswith(BODY)
        head, _, body = (await get(settings, "HEAD /metrics")).partition(b"\r\n\r\n")
        assert (body, f"Content-Length: {len(BODY)}".encode() in head) == (b"", True)


async def test_what_is_no_page_is_refused_by_its_status() -> None:
    """Another path, another method, no HTTP."""
    async with served() as settings:
        assert status(await get(settings, "GET /")) == 404
        answer = await get(settings, "POST /metrics")
        assert (status(answer), b"Allow: GET, HEAD" in answer) == (405, True)
        assert status(await send(settings, b"\x16\x03\x01\x02\r\n\r\n")) == 400
        assert status(await get(settings, "GET /metrics", "no colon")) == 400
        assert status(await get(settings, "GET /metrics", "x: " + "y" * MAX_HEAD_BYTES)) == 431


async def test_a_page_with_a_key_is_for_those_who_send_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, or with another, there is a challenge; the key is in no answer and no log."""
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    caplog.set_level(logging.DEBUG)
    async with served(key=key) as settings:
        for fields in ([], [f"Authorization: Bearer {KEY}x"], [f"Authorization: Basic {KEY}"]):
            answer = await get(settings, "GET /metrics", *fields)
            assert status(answer) == 401
            assert b"WWW-Authenticate: Bearer" in answer
            assert KEY.encode() not in answer
        answer = await get(settings, "GET /metrics", f"authorization: bearer {KEY}")
        assert answer.endswith(BODY)
    assert KEY not in caplog.text


async def test_slow_and_many_clients_are_cut_off() -> None:
    """A client that does not ask in time hears so, one too many is closed, and the next one is
    served."""
    async with served(clock=QuickClock()) as settings:
        assert status(await send(settings, b"GET /metrics HTTP/1.1\r\n")) == 408
    async with served() as settings:
        waiting = [await connect(settings) for _ in range(MAX_CONNECTIONS)]
        for _, writer in waiting:
            writer.write(b"GET ")
            await writer.drain()

        async def is_refused() -> bool:
            return await get(settings) == b""

        async def is_served() -> bool:
            return (await get(settings)).endswith(BODY)

        await until(is_refused)
        for _, writer in waiting:
            writer.close()
        await until(is_served)


async def test_a_page_that_breaks_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Its daemon goes on as well."""

    def broken(_accept: str) -> tuple[bytes, str]:
        raise ValueError("one")

    (port,) = free_ports(1)
    settings = MetricsSettings(address=f"127.0.0.1:{port}")
    async with serving(settings, broken, clock=SystemClock()):
        await listening(settings)
        assert status(await get(settings)) == 500
        assert status(await get(settings)) == 500
    assert "the metrics page broke" in caplog.text


async def test_a_port_that_is_taken_is_named_and_had_once_it_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error says which setting; the daemon goes on without a page, and tries again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = MetricsSettings(address=f"127.0.0.1:{taken.getsockname()[1]}")
        async with serving(settings, render, clock=QuickClock()):
            await logged(caplog, f"metrics.address: cannot listen at {settings.address}")
            taken.close()
            await listening(settings)
    assert caplog.text.count("metrics.address") == 1


async def test_a_key_that_cannot_be_read_serves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather no page than an open one; the key is had once it is there."""
    (port,) = free_ports(1)
    key = tmp_path / "key"
    settings = MetricsSettings(address=f"127.0.0.1:{port}", bearer_path=str(key))
    async with serving(settings, render, clock=QuickClock()):
        await logged(caplog, f"metrics.bearer_path: {key}")
        with pytest.raises(ConnectionRefusedError):
            await connect(settings)
        key.touch(0o600)
        key.write_text(KEY)
        await listening(settings)
        assert status(await get(settings)) == 401


@given(st.text(max_size=30))
def test_an_address_is_read_or_refused_by_its_name(text: str) -> None:
    """What is taken stands for itself; what is not names the setting."""
    try:
        address = parsed(text)
    except ConfigError as error:
        assert re.match(r"metrics\.address: .*expected host:port", str(error), re.DOTALL)
    else:
        assert address is None or parsed(str(address)) == address


def test_settings_that_can_serve_no_page_are_refused(tmp_path: Path) -> None:
    """A port out of range, a host without a port, a key that others may read."""
    for address in ("127.0.0.1", ":9750", "127.0.0.1:0", "127.0.0.1:65536", "::1:9750", "a/b:1"):
        with pytest.raises(ConfigError, match=r"metrics\.address"):
            check(MetricsSettings(address=address))
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"metrics\.bearer_path: .*0644") as caught:
        check(MetricsSettings(bearer_path=str(key)))
    assert KEY not in str(caught.value)


def test_an_open_page_is_warned_of() -> None:
    """Off loopback and without a key, everyone in the network may read it."""
    assert "metrics.address" in warning(MetricsSettings(address="0.0.0.0:9750"))
    for settings in (
        MetricsSettings(),
        MetricsSettings(address="[::1]:9750"),
        MetricsSettings(address=""),
        MetricsSettings(address="0.0.0.0:9750", bearer_path="/etc/aryl/metrics.key"),
    ):
        assert warning(settings) == ""
