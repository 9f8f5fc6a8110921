"""The pretend inference server: vLLM's page, admission, draining, and the hooks around it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from common.clock import SystemClock
from common.procfs import boot_id, start_ticks
from coordinator.demo.server import InferenceServer, ServerSettings, UsageFile
from tests.demo.processes import LIMIT_S, listening, run_script

pytestmark = pytest.mark.slow


async def page(session: ClientSession, url: str) -> dict[str, float]:
    """The server's samples by name, as the agent's parser sees them."""
    async with session.get(f"{url}/metrics") as reply:
        families = text_string_to_metric_families(await reply.text())
        return {sample.name: sample.value for family in families for sample in family.samples}


async def until_page(session: ClientSession, url: str, name: str, value: float) -> None:
    """Return once the page shows the value."""
    async with asyncio.timeout(LIMIT_S):
        while (await page(session, url))[name] != value:
            pass


async def post(session: ClientSession, url: str) -> int:
    """One request's status."""
    async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as reply:
        await reply.read()
        return reply.status


async def test_health_and_requests_wait_for_the_warm_up() -> None:
    """A server that is still loading answers 503 to health checks and to requests."""
    settings = ServerSettings(node="n1", service_time_s=0.0, warm_up_s=3600.0)
    server = InferenceServer(settings, UsageFile(None))
    async with TestServer(server.application()) as site, ClientSession() as session:
        url = str(site.make_url("")).rstrip("/")
        warming = asyncio.create_task(server.warm_up())
        async with session.get(f"{url}/health") as reply:
            assert reply.status == 503
        assert await post(session, url) == 503
        warming.cancel()


async def test_the_queue_is_bounded_and_shown_on_the_page() -> None:
    """Two run, one waits, the fourth is refused; the page says so under vLLM's names."""
    settings = ServerSettings(
        node="n1", max_running=2, max_waiting=1, service_time_s=0.3, is_fixed=True, warm_up_s=0.0
    )
    server = InferenceServer(settings, UsageFile(None))
    async with TestServer(server.application()) as site, ClientSession() as session:
        url = str(site.make_url("")).rstrip("/")
        await server.warm_up()
        sent = [asyncio.create_task(post(session, url)) for _ in range(3)]
        await until_page(session, url, "vllm:num_requests_waiting", 1)
        seen = await page(session, url)
        assert seen["vllm:num_requests_running"] == 2
        assert seen["vllm:kv_cache_usage_perc"] == 1.0
        assert await post(session, url) == 503
        assert await asyncio.gather(*sent) == [200, 200, 200]
        seen = await page(session, url)
        assert seen["vllm:request_success_total"] == 3
        assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0


def test_service_times_repeat_by_node_and_are_bounded() -> None:
    """The same node draws the same times again; none exceeds four means."""
    settings = ServerSettings(node="n1", service_time_s=0.4)
    first, again = (InferenceServer(settings, UsageFile(None)) for _ in range(2))
    times_s = [first.service_time_s() for _ in range(500)]
    assert times_s == [again.service_time_s() for _ in range(500)]
    assert max(times_s) <= 1.6
    assert len(set(times_s)) > 100


async def test_sigterm_lets_running_requests_end(tmp_path: Path) -> None:
    """A request under way is answered after SIGTERM; the exit status is 0, the usage file gone."""
    usage = tmp_path / "usage.json"
    async with (
        listening(
            "server",
            "--node=n1",
            "--warm-up-s=0",
            "--service-time-s=0.3",
            "--fixed-service-time",
            until=b"ready node=n1",
            environment={"ARYL_FAKE_GPU_USAGE_FILE": str(usage)},
        ) as running,
        ClientSession() as session,
    ):
        answer = asyncio.create_task(post(session, running.url))
        await until_page(session, running.url, "vllm:num_requests_running", 1)
        seen = json.loads(usage.read_text())
        assert set(seen) == {"busy_ratio", "memory_bytes"}
        assert seen["memory_bytes"] > 0
        status = asyncio.create_task(running.terminate())
        assert await answer == 200
        assert await status == 0
        assert not usage.exists()


async def test_a_server_is_started_once_and_stopped_by_its_hooks(tmp_path: Path) -> None:
    """Start twice makes one server; stop returns when it is gone; both may be repeated."""
    where = ("--node=n1", f"--state-dir={tmp_path}")
    assert (await run_script("server_ctl.py", "status", *where))[0] == 3
    start = ("start", *where, "--port=0", "--env=A_NAME=a value", "--", "--warm-up-s=0")
    assert (await run_script("server_ctl.py", *start))[0] == 0
    pid = json.loads((tmp_path / "server-n1.pid").read_text())["pid"]
    try:
        assert (await run_script("server_ctl.py", *start))[0] == 0
        assert json.loads((tmp_path / "server-n1.pid").read_text())["pid"] == pid
        code, said = await run_script("server_ctl.py", "status", *where)
        assert (code, said) == (0, f"running pid={pid}\n")
        assert os.getsid(pid) == pid, "the server must outlive the hook's session"
    finally:
        assert (await run_script("server_ctl.py", "stop", *where))[0] == 0
    assert not start_ticks(pid)
    assert (await run_script("server_ctl.py", "stop", *where))[0] == 0
    assert (await run_script("server_ctl.py", "status", *where))[0] == 3


async def test_a_recycled_pid_is_never_signalled(tmp_path: Path) -> None:
    """A pid file whose start time is another process's leads to no signal."""
    bystander = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        ticks = start_ticks(bystander.pid)
        assert ticks
        noted = {"pid": bystander.pid, "start_ticks": ticks + 1, "boot_id": boot_id()}
        (tmp_path / "server-n1.pid").write_text(json.dumps(noted))
        where = ("--node=n1", f"--state-dir={tmp_path}")
        assert (await run_script("server_ctl.py", "status", *where))[0] == 3
        assert (await run_script("server_ctl.py", "stop", *where))[0] == 0
        assert bystander.returncode is None
        assert start_ticks(bystander.pid) == ticks
    finally:
        bystander.kill()
        await bystander.wait()


async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """After its limit stop uses SIGKILL, and still returns only when the process is gone."""
    program = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    stubborn = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert stubborn.stdout is not None
    await stubborn.stdout.readline()
    noted = {"pid": stubborn.pid, "start_ticks": start_ticks(stubborn.pid), "boot_id": boot_id()}
    (tmp_path / "server-n1.pid").write_text(json.dumps(noted))
    where = ("--node=n1", f"--state-dir={tmp_path}", "--stop-limit-s=0.05")
    assert (await run_script("server_ctl.py", "stop", *where))[0] == 0
    assert await stubborn.wait() == -signal.SIGKILL


async def test_a_usage_file_that_no_disk_takes_ends_no_server(tmp_path: Path) -> None:
    """It is written as soon as there is room: the server's requests are worth more."""
    folder = tmp_path / "not-there-yet"
    usage = UsageFile(folder / "usage.json")
    usage.set(0.5, 1000)
    writing = asyncio.create_task(usage.run())
    async with asyncio.timeout(LIMIT_S):
        while not usage.failure_count:
            await SystemClock().sleep(0.01)
        folder.mkdir()
        while not (folder / "usage.json").exists():
            assert not writing.done()
            await SystemClock().sleep(0.01)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
