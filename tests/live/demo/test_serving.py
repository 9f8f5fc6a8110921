"""What the demo's HTTP processes share: ports, signals, files."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from coordinator.demo.ports import HeldPorts
from coordinator.demo.serving import serve, write_json
from tests.demo.processes import LIMIT_S, ROOT, get_json, listening


@pytest.mark.slow
@pytest.mark.parametrize("held", [(), ("--port-is-held",)])
@pytest.mark.parametrize(("module", "more"), [("router", ()), ("server", ("--node=n1",))])
async def test_a_port_that_is_taken_ends_the_process_with_a_word(
    module: str, more: tuple[str, ...], held: tuple[str, ...]
) -> None:
    """Exit status 1 and the address in the log, instead of a traceback; on a held port too, which
    the kernel would give twice."""
    more += held
    async with listening(module, *more) as first:
        port = first.url.rpartition(":")[2]
        second = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", f"coordinator.demo.{module}", "--port", port, *more),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(LIMIT_S):
            _, said = await second.communicate()
        assert second.returncode == 1
        assert port in said.decode()
        assert "Traceback" not in said.decode()
        assert await first.terminate() == 0


async def test_a_stop_lets_requests_under_way_end_and_takes_no_new_ones() -> None:
    """The answer that was begun is given; afterwards nobody listens."""
    begun, may_end, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        begun.set()
        await may_end.wait()
        return web.json_response({"said": "all"})

    application = web.Application()
    application.router.add_get("/", slow)
    ports = HeldPorts()
    [port] = ports.hold(1)
    url = f"http://127.0.0.1:{port}/"
    serving = asyncio.create_task(
        serve(
            application,
            host="127.0.0.1",
            port=port,
            stop=stop,
            drain_s=LIMIT_S,
            is_port_held=True,
        )
    )
    async with asyncio.timeout(LIMIT_S), ClientSession() as session:
        asking = asyncio.create_task(until_answered(session, url))
        await begun.wait()
        stop.set()
        await asyncio.sleep(0)
        may_end.set()
        assert await asking == {"said": "all"}
        await serving
        with pytest.raises(OSError, match=str(port)):
            await get_json(session, url)
    ports.close()


async def until_answered(session: ClientSession, url: str) -> dict[str, object]:
    """The page, as soon as somebody listens."""
    while True:
        try:
            return await get_json(session, url)
        except OSError:
            await asyncio.sleep(0)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """A value that cannot be written leaves the old file whole, and no scratch file is read."""
    path = tmp_path / "figures.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]
