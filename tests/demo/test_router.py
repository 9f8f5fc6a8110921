"""The router and the load driver: who is asked, who is refused, and what the counts say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer, unused_port

from common.clock import SystemClock
from coordinator.demo.load import LoadDriver, LoadSettings
from coordinator.demo.router import Router, RouterSettings, Routes
from coordinator.demo.server import InferenceServer, ServerSettings, UsageFile
from coordinator.workloads.records import LoadSeries
from tests.demo.processes import LIMIT_S, get_json, listening, run_script


class Harness:
    """A router, its servers and a client in one loop, over real sockets."""

    def __init__(self, stack: AsyncExitStack, session: ClientSession, router: Router) -> None:
        self._stack = stack
        self.session = session
        self.router = router
        self.url = ""

    async def serve(self, application: web.Application) -> TestServer:
        """An application on a free port until the harness is closed."""
        site = TestServer(application)
        await site.start_server()
        self._stack.push_async_callback(site.close)
        return site

    async def node(self, name: str, *, service_time_s: float = 0.0) -> TestServer:
        """A warm server, routed under its name."""
        settings = ServerSettings(
            node=name, service_time_s=service_time_s, is_fixed=True, warm_up_s=0.0
        )
        server = InferenceServer(settings, UsageFile(None))
        await server.warm_up()
        site = await self.serve(server.application())
        await self.route(name, str(site.make_url("")))
        return site

    async def route(self, name: str, url: str) -> None:
        """Add a node over the admin path."""
        async with self.session.put(f"{self.url}/nodes/{name}", params={"url": url}) as reply:
            assert reply.status == 200

    async def unroute(self, name: str) -> None:
        """Remove a node over the admin path."""
        async with self.session.delete(f"{self.url}/nodes/{name}") as reply:
            assert reply.status == 200

    async def ask(self) -> tuple[int, str]:
        """One request: status, and the node that served it."""
        async with self.session.post(f"{self.url}/v1/completions", json={}) as reply:
            answer = await reply.json()
            return reply.status, answer.get("node", "")

    async def stats(self) -> dict[str, object]:
        """The router's counts."""
        return await get_json(self.session, f"{self.url}/stats")


@asynccontextmanager
async def harness(*, wait_s: float = LIMIT_S) -> AsyncIterator[Harness]:
    """A router without nodes."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(ClientSession())
        made = Harness(stack, session, Router(RouterSettings(wait_s=wait_s)))
        site = await made.serve(made.router.application())
        made.url = str(site.make_url("")).rstrip("/")
        yield made


async def post(session: ClientSession, url: str) -> int:
    """One request's status."""
    async with session.post(f"{url}/v1/completions", json={}) as reply:
        await reply.read()
        return reply.status


async def refusing(request: web.Request) -> web.Response:
    """A node whose queue is full."""
    return web.json_response({"error": "full"}, status=503)


def full_node() -> web.Application:
    """An application that answers 503 to every request."""
    application = web.Application()
    application.router.add_post("/v1/completions", refusing)
    return application


def test_the_node_with_the_fewest_requests_in_flight_is_next() -> None:
    """Fewest first, equals in rotation, tried and removed ones never."""
    routes = Routes()
    for name in ("a", "b", "c"):
        routes.add(name, f"http://{name}")
    assert [routes.pick(set()) for _ in range(4)] == ["a", "b", "c", "a"]
    routes.nodes["b"].in_flight = 1
    routes.nodes["a"].in_flight = 2
    assert routes.pick(set()) == "c"
    assert routes.pick({"c"}) == "b"
    routes.remove("b")
    assert routes.pick({"c"}) == "a"
    assert routes.pick({"a", "c"}) is None


async def test_requests_are_spread_over_all_routed_nodes() -> None:
    """Requests that overlap go to different nodes."""
    async with harness() as home:
        for name in ("a", "b", "c"):
            await home.node(name, service_time_s=0.05)
        answers = await asyncio.gather(*(home.ask() for _ in range(6)))
        assert sorted(answers) == [(200, name) for name in "aabbcc"]


async def test_a_dead_node_costs_a_retry_and_no_refusal() -> None:
    """Connection refused and 503 are both retried on another node, and counted."""
    async with harness() as home:
        await home.route("dead", f"http://127.0.0.1:{unused_port()}")
        full = await home.serve(full_node())
        await home.route("full", str(full.make_url("")))
        await home.node("good")
        assert await home.ask() == (200, "good")
        stats = await home.stats()
        assert (stats["requests_total"], stats["refused_total"]) == (1, 0)
        assert stats["retried_total"] == 2


async def test_a_request_that_nobody_serves_in_time_is_refused() -> None:
    """With only failing nodes, or none, the client gets 503 and the refusal is counted."""
    async with harness(wait_s=0.02) as home:
        assert (await home.ask())[0] == 503
        full = await home.serve(full_node())
        await home.route("full", str(full.make_url("")))
        assert (await home.ask())[0] == 503
        stats = await home.stats()
        assert (stats["requests_total"], stats["refused_total"], stats["in_flight"]) == (2, 2, 0)


async def test_a_request_waits_for_the_first_routed_node() -> None:
    """A request that came before any node is served as soon as one is routed."""
    async with harness() as home:
        asked = asyncio.create_task(home.ask())
        async with asyncio.timeout(LIMIT_S):
            while (await home.stats())["in_flight"] != 1:
                pass
        await home.node("late")
        assert await asked == (200, "late")


async def test_a_removed_node_ends_its_running_requests_and_gets_no_new_ones() -> None:
    """The hook `drained` says 1 while a removed node still serves, and 0 after."""
    async with harness() as home:
        may_answer = asyncio.Event()

        async def complete(request: web.Request) -> web.Response:
            await may_answer.wait()
            return web.json_response({"node": "a"})

        busy = web.Application()
        busy.router.add_post("/v1/completions", complete)
        await home.route("a", str((await home.serve(busy)).make_url("")))
        running = asyncio.create_task(home.ask())
        async with asyncio.timeout(LIMIT_S):
            while home.router.routes.nodes["a"].in_flight != 1:
                await home.stats()
        assert (await run_script("route.py", "remove", home.url, "a"))[0] == 0
        await home.node("b")
        assert await home.ask() == (200, "b")
        assert (await run_script("route.py", "drained", home.url, "a"))[0] == 1
        may_answer.set()
        assert await running == (200, "a")
        assert (await run_script("route.py", "drained", home.url, "a"))[0] == 0
        assert (await run_script("route.py", "drained", home.url, "unheard-of"))[0] == 0


async def test_a_route_hook_adds_a_node_and_says_what_went_wrong() -> None:
    """0 when the node is routed; 4 when the router is away or refuses the URL; 2 on bad usage."""
    async with harness() as home:
        site = await home.node("a")
        await home.unroute("a")
        url = str(site.make_url(""))
        assert (await run_script("route.py", "add", home.url, "a", url))[0] == 0
        assert await home.ask() == (200, "a")
        assert (await run_script("route.py", "add", home.url, "a", "ftp://x"))[0] == 4
        assert (await run_script("route.py", "add", home.url, "a"))[0] == 2
        away = f"http://127.0.0.1:{unused_port()}"
        assert (await run_script("route.py", "remove", away, "a"))[0] == 4


async def test_the_load_driver_counts_every_request_once(tmp_path: Path) -> None:
    """Sent = answered + refused at the end, and the file holds the last figures."""
    load = LoadSeries(name="x", values=(10, 5), step_s=600)
    async with harness() as home:
        await home.node("a")
        settings = LoadSettings(
            router_url=home.url, speed=12000, peak_req_per_s=400, seed=5, cycles=1
        )
        driver = LoadDriver(settings, load, stats_path=tmp_path / "load.json")
        await driver.run(asyncio.Event())
        stats = await home.stats()
    written = json.loads((tmp_path / "load.json").read_text())
    assert driver.sent_total == driver.ok_total == stats["requests_total"]
    assert driver.sent_total > 0
    assert written["is_finished"] is True
    assert (written["sent_total"], written["refused_total"]) == (driver.sent_total, 0)
    assert 0 < written["latency_p50_s"] <= written["latency_p99_s"] <= written["latency_max_s"]


async def test_what_is_not_answered_with_200_was_refused() -> None:
    """A service that is away or full refuses every request, and none is lost in the counts."""
    load = LoadSeries(name="x", values=(10, 10), step_s=600)
    async with harness() as home:
        full = await home.serve(full_node())
        urls = (f"http://127.0.0.1:{unused_port()}", str(full.make_url("")).rstrip("/"))
        for url in urls:
            settings = LoadSettings(router_url=url, speed=12000, peak_req_per_s=200, cycles=1)
            driver = LoadDriver(settings, load)
            await driver.run(asyncio.Event())
            assert driver.refused_total == driver.sent_total > 0
            assert driver.ok_total == driver.in_flight == 0


@pytest.mark.slow
async def test_a_router_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9: the next router has the same routes without any hook, and the counts go on.

    Hooks run when a node comes or goes; a router that forgot its nodes would refuse every request
    until then.
    """
    state = f"--state={tmp_path / 'router.json'}"
    fast = ("--warm-up-s=0", "--service-time-s=0.01")
    async with (
        listening("server", "--node=a", *fast, until=b"ready") as server,
        ClientSession() as session,
    ):
        async with listening("router", state) as first:
            for name in ("a", "b"):
                hook = ("route.py", "add", first.url, name, server.url)
                assert (await run_script(*hook))[0] == 0
            assert (await run_script("route.py", "remove", first.url, "b"))[0] == 0
            first.process.kill()
            await first.process.wait()
        async with listening("router", state, until=b"resumed nodes=2") as second:
            for name, routing in (("a", True), ("b", False)):
                seen = await get_json(session, f"{second.url}/nodes/{name}")
                assert (seen["url"], seen["is_routed"]) == (server.url, routing)
            assert await post(session, second.url) == 200
            assert await second.terminate() == 0
        async with listening("router", state, until=b"resumed nodes=2 requests=1") as third:
            assert await post(session, third.url) == 200
            stats = await get_json(session, f"{third.url}/stats")
            assert (stats["requests_total"], stats["refused_total"]) == (2, 0)


async def test_a_router_goes_on_where_no_disk_takes_its_state(tmp_path: Path) -> None:
    """And writes it as soon as there is room, so that the next router goes on with its routes."""
    folder = tmp_path / "not-there-yet"
    router = Router(RouterSettings(), state_path=folder / "router.json")
    async with (
        TestServer(router.application()) as site,
        ClientSession() as session,
        asyncio.timeout(LIMIT_S),
    ):
        async with session.put(site.make_url("/nodes/b"), params={"url": "http://b"}) as reply:
            assert reply.status == 200
        assert router.save_failures
        folder.mkdir()
        while not (folder / "router.json").exists():
            await SystemClock().sleep(0.01)


def test_what_was_under_way_at_a_crash_was_refused(tmp_path: Path) -> None:
    """Nobody answered those requests: the figures must not call them served."""
    path = tmp_path / "router.json"
    first = Router(RouterSettings(), state_path=path)
    first.routes.add("a", "http://a")
    first.routes.nodes["a"].in_flight = first.in_flight = 3
    first.requests_total, first.refused_total = 10, 1
    first.save()
    second = Router(RouterSettings(), state_path=path)
    assert (second.requests_total, second.refused_total, second.in_flight) == (10, 4, 0)
    assert second.routes.nodes["a"].in_flight == 0


@pytest.mark.parametrize("text", ["", "{", '{"nodes": 7}', "\xff"])
def test_a_state_that_cannot_be_read_is_said_and_not_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A router without its memory still routes what it is told."""
    path = tmp_path / "router.json"
    path.write_text(text, encoding="latin-1")
    router = Router(RouterSettings(), state_path=path)
    assert router.routes.nodes == {}
    assert str(path) in caplog.text


@pytest.mark.slow
async def test_the_processes_serve_a_load_while_a_node_dies_without_a_refusal(
    tmp_path: Path,
) -> None:
    """Real router, servers and driver: one of two servers is stopped under load, nobody notices."""
    fast = ("--warm-up-s=0", "--service-time-s=0.01")
    async with (
        listening("router", "--wait-s=10") as router,
        listening("server", "--node=a", *fast, until=b"ready") as first,
        listening("server", "--node=b", *fast, until=b"ready") as second,
        ClientSession() as session,
    ):
        for name, running in (("a", first), ("b", second)):
            assert (await run_script("route.py", "add", router.url, name, running.url))[0] == 0
        load = LoadSeries(name="x", values=(10, 10), step_s=600)
        settings = LoadSettings(router_url=router.url, speed=600, peak_req_per_s=10)
        driver = LoadDriver(settings, load)
        stop = asyncio.Event()
        driving = asyncio.create_task(driver.run(stop))
        async with asyncio.timeout(LIMIT_S):
            while driver.ok_total < 10:
                await get_json(session, f"{router.url}/stats")
            assert await first.terminate() == 0
            reached = driver.ok_total + 10
            while driver.ok_total < reached:
                await get_json(session, f"{router.url}/stats")
        stop.set()
        await driving
        stats = await get_json(session, f"{router.url}/stats")
        assert driver.refused_total == stats["refused_total"] == 0
        assert driver.sent_total == driver.ok_total == stats["requests_total"]
        assert await router.terminate() == 0
