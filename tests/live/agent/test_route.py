"""`aryl-route` against real haproxy and real nginx from Debian."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.clock import SystemClock

PATIENCE_S = 20.0


def needs(program: str) -> None:
    """Skip where Debian's package is not installed; the gate installs it."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while not holds():
            await clock.sleep(0.02)


def free_port() -> int:
    """Nobody listens there now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether a connection is taken."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Backend:
    """A server that answers every request with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0

    async def open(self) -> asyncio.Server:
        """On a free port."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = self.name.encode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await writer.drain()
        writer.close()


async def answers(port: int, count: int = 8) -> set[str]:
    """Who answers requests to a router."""
    found: set[str] = set()
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        found.add((await reader.read()).decode().splitlines()[-1])
        writer.close()
    return found


async def run(*arguments: str) -> tuple[int, str]:
    """The command as an agent runs it: exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agent.hooks.route", *arguments,
        env={**os.environ, "ARYL_NODE": "n1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().strip()


HAPROXY = """\
global
  stats socket {socket} mode 600 level admin
  stats socket ipv4@127.0.0.1:{api} level admin
defaults
  mode http
  timeout connect 2s
  timeout client 20s
  timeout server 20s
frontend f
  bind 127.0.0.1:{port}
  default_backend chat
backend chat
  server n1 127.0.0.1:{one}
  server n2 127.0.0.1:{two}
"""


async def test_haproxy(tmp_path: Path) -> None:
    """By both kinds of socket, again and again, and a request then goes where it should."""
    needs("haproxy")
    one, two = Backend("n1"), Backend("n2")
    servers = [await one.open(), await two.open()]
    port, api, path = free_port(), free_port(), tmp_path / "s"
    config = tmp_path / "h.cfg"
    config.write_text(HAPROXY.format(socket=path, api=api, port=port, one=one.port, two=two.port))
    process = await asyncio.create_subprocess_exec("haproxy", "-db", "-f", str(config))
    try:
        await until(lambda: listens(port) and listens(api))
        for where in (str(path), f"127.0.0.1:{api}"):
            words = ("--socket", where, "--backend", "chat")
            for _ in range(2):
                assert await run("haproxy", "remove", *words) == (0, "")
                assert await run("haproxy", "state", *words) == (0, "not routed")
                assert await answers(port) == {"n2"}
            for _ in range(2):
                assert await run("haproxy", "add", *words) == (0, "")
                assert await run("haproxy", "state", *words) == (0, "routed")
                assert "n1" in await answers(port)
        words = ("--socket", str(path), "--backend", "chat")
        refused = await run("haproxy", "remove", *words, "--server", "n3")
        assert refused == (3, f"aryl-route: haproxy at {path}: no server chat/n3")
        status, said = await run("haproxy", "remove", "--socket", str(path), "--backend", "no")
        assert (status, "find backend" in said) == (3, True)
        assert await run("haproxy", "state", *words) == (0, "routed")

        away = ("--socket", str(tmp_path / "away"), *words)
        status, said = await run("haproxy", "remove", *away)
        assert (status, "away" in said) == (4, True)  # it may send requests still
        status, said = await run("haproxy", "add", *away)
        assert (status, "begins with what its configuration says" in said) == (0, True)
        nobody = ("--socket", str(tmp_path / "away"), "--backend", "chat")
        assert (await run("haproxy", "add", *nobody))[0] == 4
    finally:
        process.terminate()
        await process.wait()
        for server in servers:
            server.close()


NGINX = """\
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  include {folder}/chat.upstream;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://chat; }} }}
}}
"""


async def test_nginx_sends_a_node_requests_or_none_from_when_the_command_returns(
    tmp_path: Path,
) -> None:
    """No old worker takes a connection afterwards; a file that nginx refuses is as it was."""
    needs("nginx")
    one, two = Backend("n1"), Backend("n2")
    servers = [await one.open(), await two.open()]
    port = free_port()
    upstream, config = tmp_path / "chat.upstream", tmp_path / "nginx.conf"
    text = (
        "upstream chat {\n  # server 127.0.0.1:1 down;\n"
        f"  server 127.0.0.1:{one.port} max_fails=1;\n  server 127.0.0.1:{two.port};\n}}\n"
    )
    upstream.write_text(text)
    upstream.chmod(0o640)
    config.write_text(NGINX.format(folder=tmp_path, port=port))
    process = await asyncio.create_subprocess_exec(
        "nginx", "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    words = (
        "--upstream", str(upstream), "--server", f"127.0.0.1:{one.port}",
        "--nginx", f"nginx -c {config}", "--pid-file", str(tmp_path / "nginx.pid"),
    )  # fmt: skip
    try:
        await until(lambda: listens(port))
        for _ in range(2):
            assert await run("nginx", "remove", *words) == (0, "")
            assert await run("nginx", "state", *words) == (0, "not routed")
            assert await answers(port) == {"n2"}
        assert f"server 127.0.0.1:{one.port} max_fails=1 down;" in upstream.read_text()
        for _ in range(2):
            assert await run("nginx", "add", *words) == (0, "")
            assert await answers(port) == {"n1", "n2"}
        assert upstream.read_text() == text
        assert upstream.stat().st_mode & 0o777 == 0o640

        spoilt = text.replace("max_fails=1", "max_fales=1")
        upstream.write_text(spoilt)
        status, said = await run("nginx", "remove", *words)
        assert (status, "max_fales" in said) == (3, True)
        assert upstream.read_text() == spoilt
        upstream.write_text(text)
        process.send_signal(signal.SIGTERM)
        await process.wait()
        assert (await run("nginx", "remove", *words))[0] == 4
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        for server in servers:
            server.close()
