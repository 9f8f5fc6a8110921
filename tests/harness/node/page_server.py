"""A real HTTP server with a metrics page for every way to get one wrong. Knows no collector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from agent.telemetry.page_fetch import MAX_PAGE_BYTES

LIMIT_S = 20.0
"""A test that waits this long has failed; nothing here is timed."""

VLLM = (
    b"# TYPE vllm:num_requests_running gauge\n"
    b'vllm:num_requests_running{model_name="m"} 3.0\n'
    b'vllm:num_requests_waiting{model_name="m"} 2.0\n'
    b'vllm:request_success_total{finished_reason="stop",model_name="m"} 40.0\n'
    b'vllm:request_success_total{finished_reason="length",model_name="m"} 2.0\n'
)
"""A page of vLLM as it should be: 3 run, 2 wait, 42 succeeded."""


class PageServer:
    """A real HTTP server that misbehaves as its path says, and knows who is still connected."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.connected = 0
        self.changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.until_alone()
        await self._server.wait_closed()

    async def until_alone(self) -> None:
        """Return when no client is connected any more."""
        async with asyncio.timeout(LIMIT_S):
            while self.connected:
                self.changed.clear()
                await self.changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            await getattr(self, f"_{path.strip('/')}")(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.connected -= 1
            self.changed.set()

    async def _vllm(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, VLLM)

    async def _html(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, b"<html><body>Grafana</body></html>")

    async def _binary(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, b"\x1f\x8b\x08\x00\xff")

    async def _missing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, VLLM.replace(b"num_requests_waiting", b"num_requests_awaited"))

    async def _renamed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As a program that serves the engine's metrics under a prefix of its own."""
        await self._say(writer, VLLM.replace(b"vllm:", b"served_vllm_"))

    async def _denied(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, b"no valid key", status="401 Unauthorized")

    async def _nonsense(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, VLLM.replace(b"2.0\n", b"two\n"))

    async def _absurd(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Each is a number, and no load: a server that forgot to clear a field."""
        await self._say(writer, VLLM.replace(b"40.0\n", b"1e308\n").replace(b"2.0\n", b"1e308\n"))

    async def _huge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, VLLM + b"#" * MAX_PAGE_BYTES)

    async def _broken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ends in the middle of a line: what is there reads as another number."""
        cut = VLLM.index(b"40.0") + 1
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(VLLM)}\r\n\r\n"
        writer.write(head.encode() + VLLM[:cut])
        await writer.drain()

    async def _error(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._say(writer, VLLM, status="500 Internal Server Error")

    async def _garbage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x01 this is no HTTP\r\n\r\n")
        await writer.drain()

    async def _silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def _drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A byte whenever a socket timeout might end the wait, for ever."""
        gone = asyncio.ensure_future(reader.read())
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not gone.done():
                writer.write(b"#")
                await asyncio.wait({gone}, timeout=0.01)
        finally:
            gone.cancel()

    async def _say(
        self, writer: asyncio.StreamWriter, body: bytes, *, status: str = "200 OK"
    ) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()


async def make_pages() -> AsyncIterator[PageServer]:
    """A page server on a free port; a fixture's body."""
    server = PageServer()
    await server.open()
    yield server
    await server.close()
