"""The load driver as a process and under stress; what it counts in peace is in test_router."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.clock import SystemClock
from coordinator.demo.load import LoadDriver, LoadSettings, arrivals
from coordinator.workloads.records import LoadSeries
from tests.demo.processes import LIMIT_S, ROOT

STEADY = LoadSeries(name="x", values=(10, 10), step_s=600)


class Service:
    """One URL that users see; it answers when the test lets it."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.asked = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        await self.is_open.wait()
        return web.json_response({})


@asynccontextmanager
async def running_service() -> AsyncIterator[Service]:
    """A service on a free port that does not answer yet."""
    service = Service()
    application = web.Application()
    application.router.add_post("/v1/completions", service.answer)
    async with TestServer(application) as site:
        service.url = str(site.make_url("")).rstrip("/")
        try:
            yield service
        finally:
            service.is_open.set()


async def test_a_burst_never_opens_more_than_its_bound() -> None:
    """A driver that woke up late sends at most so many at once; the rest counts as refused."""
    async with running_service() as service:
        settings = LoadSettings(
            router_url=service.url,
            speed=1e9,  # the whole slice is due at once
            peak_req_per_s=1e8,
            cycles=1,
            most_in_flight=3,
        )
        due = sum(
            1 for _ in arrivals(STEADY, speed=1e9, peak_req_per_s=1e8, seed=settings.seed, cycles=1)
        )
        driver = LoadDriver(settings, STEADY)
        driving = asyncio.create_task(driver.run(asyncio.Event()))
        clock = SystemClock()
        async with clock.timeout(LIMIT_S):
            while service.asked < 3 or driver.sent_total < due:
                await clock.sleep(0.01)
        service.is_open.set()
        async with clock.timeout(LIMIT_S):
            await driving
    assert driver.sent_total == due > 50
    assert service.asked == driver.ok_total == 3
    assert driver.refused_total == driver.sent_total - 3


async def test_a_driver_that_cannot_keep_up_still_stops() -> None:
    """More is due than it can ever send: it obeys nevertheless, and every request is counted."""
    async with running_service() as service:
        service.is_open.set()
        settings = LoadSettings(router_url=service.url, speed=1.0, peak_req_per_s=1e7)
        driver = LoadDriver(settings, STEADY)
        stop = asyncio.Event()
        driving = asyncio.create_task(driver.run(stop))
        clock = SystemClock()
        async with clock.timeout(LIMIT_S):
            while driver.ok_total < 10:
                await clock.sleep(0.01)
            stop.set()
            await driving
    assert driver.sent_total == driver.ok_total + driver.refused_total
    assert driver.in_flight == 0


async def start_load(*arguments: str) -> asyncio.subprocess.Process:
    """The driver as `aryl up` starts it."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "coordinator.demo.load", *arguments),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.slow
async def test_the_process_drives_the_packaged_day_until_sigterm(tmp_path: Path) -> None:
    """Requests arrive, figures are written while it runs, and the last ones say that it ended."""
    stats = tmp_path / "load.json"
    async with running_service() as service:
        service.is_open.set()
        process = await start_load(
            "--router", f"{service.url}/", "--peak-req-per-s=200", f"--stats={stats}"
        )
        clock = SystemClock()
        try:
            async with clock.timeout(LIMIT_S):
                while service.asked < 20 or not await asyncio.to_thread(stats.exists):
                    await clock.sleep(0.02)
            process.terminate()
            async with clock.timeout(LIMIT_S):
                _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0
    written = json.loads(await asyncio.to_thread(stats.read_text))
    assert written["is_finished"] is True
    assert written["sent_total"] == written["ok_total"] == service.asked
    assert f"sent={service.asked} ok={service.asked} refused=0" in said.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slice=nothing.csv",), "nothing.csv"),
        (("--model=m-nobody", "--slice={bad}"), "m-nobody"),
        (("--speed=0",), "--speed"),
        (("--cycles=-1",), "--cycles"),
    ],
)
async def test_bad_options_are_named(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """Exit status 2 and the option or the file in the error; no request is sent."""
    bad = tmp_path / "load.csv"
    bad.write_text("t_s,model,req_per_s\n0,m-small,1\n600,m-small,2\n")
    words = [word.format(bad=bad) for word in arguments]
    process = await start_load("--router=http://127.0.0.1:1", *words)
    async with asyncio.timeout(LIMIT_S):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert said in errors.decode()
