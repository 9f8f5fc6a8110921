"""A small reverse proxy in front of one service's nodes: least requests in flight first.

Hooks add and remove nodes over its admin paths, as with a load balancer in production. It refuses a
client only when no node could serve the request in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from aiohttp import ClientConnectionError, ClientSession, ClientTimeout, TCPConnector, web
from msgspec import Struct

from coordinator.demo.serving import PORT_IS_HELD, serve, set_up_log, stop_event, write_json

log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""How long SIGTERM waits for running requests."""

SAVE_PERIOD_S = 1.0
"""How old the counts on disk may be; routes are there before their hook is answered."""

AGAIN_S = 0.1
"""After every routed node failed a request, they are all tried again this much later."""


class RouterSettings(Struct, frozen=True, kw_only=True):
    """One router.

    wait_s: how long a request may wait for a node that takes it, before it is refused.
    max_waiting: the number of requests that wait at once; beyond it, refused at once.
    request_timeout_s: one try at one node.
    """

    wait_s: float = 2.0
    max_waiting: int = 512
    request_timeout_s: float = 30.0


class RoutedNode(Struct, kw_only=True):
    """One node that is or was routed; it stays known so that its counts stay true."""

    url: str
    is_routed: bool = True
    in_flight: int = 0
    served_total: int = 0
    failed_total: int = 0
    turn: int = 0
    """When it was last picked: equals are picked in rotation."""


class RouterState(Struct, kw_only=True):
    """The state that outlives the process.

    Hooks run when a node comes or goes, not when a router does.
    """

    nodes: dict[str, RoutedNode] = {}
    requests_total: int = 0
    refused_total: int = 0
    retried_total: int = 0
    in_flight: int = 0


class Answer(Struct, frozen=True):
    """A node's answer."""

    status: int
    content_type: str
    body: bytes


class Routes:
    """The nodes that take requests, and the next one.

    Pure except for the event that wakes waiters.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, RoutedNode] = {}
        self._turn = 0
        self._changed = asyncio.Event()

    def add(self, node: str, url: str) -> None:
        """Route to a node from now on; again with another URL moves it."""
        known = self.nodes.get(node)
        if known is None:
            self.nodes[node] = RoutedNode(url=url)
        else:
            known.url, known.is_routed = url, True
        # Each waiter holds the old event: setting it wakes them all, once.
        self._changed.set()
        self._changed = asyncio.Event()

    def remove(self, node: str) -> None:
        """Route nothing new to a node; its running requests end. Unknown nodes are no error."""
        if node in self.nodes:
            self.nodes[node].is_routed = False

    def pick(self, tried: set[str]) -> str | None:
        """The routed node with the fewest requests in flight that was not tried yet."""
        names = [name for name, node in self.nodes.items() if node.is_routed and name not in tried]
        if not names:
            return None
        name = min(names, key=lambda name: (self.nodes[name].in_flight, self.nodes[name].turn))
        self._turn += 1
        self.nodes[name].turn = self._turn
        return name

    async def changed(self, limit_s: float) -> None:
        """Return when a node is added, at the latest after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()


class Router:
    """Forwards, retries, counts; one per process.

    Args:
        state_path: where routes and counts are kept, so that the next router continues with them.
    """

    def __init__(self, settings: RouterSettings, *, state_path: Path | None = None) -> None:
        self._settings = settings
        self._session: ClientSession | None = None
        self._waiting = 0
        self._state_path = state_path
        self.save_failures = 0
        self._saved: dict[str, object] = {}
        self.routes = Routes()
        self.requests_total = 0
        self.refused_total = 0
        self.retried_total = 0
        self.in_flight = 0
        if state_path is not None:
            self._load(state_path)

    def _load(self, path: Path) -> None:
        """Continue the state of an earlier router; requests that it had under way get no answer."""
        try:
            state = msgspec.json.decode(path.read_bytes(), type=RouterState)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("state %s is not used: %s", path, error)
            return
        self.requests_total = state.requests_total
        self.refused_total = state.refused_total + state.in_flight
        self.retried_total = state.retried_total
        for name, node in state.nodes.items():
            node.in_flight = 0
            self.routes.nodes[name] = node
        log.info("resumed nodes=%d requests=%d", len(state.nodes), state.requests_total)

    def save(self) -> None:
        """Write routes and counts to disk, if they have changed.

        A disk that refuses them is tried again later: routes count more than their copy.
        """
        if self._state_path is None:
            return
        state = RouterState(
            nodes=self.routes.nodes,
            requests_total=self.requests_total,
            refused_total=self.refused_total,
            retried_total=self.retried_total,
            in_flight=self.in_flight,
        )
        values: dict[str, object] = msgspec.to_builtins(state)
        if values != self._saved:
            try:
                write_json(self._state_path, values)
            except OSError as error:
                if not self.save_failures:
                    log.warning("state %s: %s", self._state_path, error)
                self.save_failures += 1
            else:
                self._saved = values

    async def _save_for_ever(self, application: web.Application) -> AsyncIterator[None]:
        async def save() -> None:
            while True:
                await asyncio.sleep(SAVE_PERIOD_S)
                self.save()

        saving = asyncio.create_task(save(), name="save")
        yield
        saving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await saving
        self.save()

    def application(self) -> web.Application:
        """Requests under /v1/, admin under /nodes and /stats."""
        application = web.Application()
        application.cleanup_ctx.append(self._session_for)
        application.cleanup_ctx.append(self._save_for_ever)
        application.router.add_post("/v1/{tail:.*}", self._forward)
        application.router.add_get("/nodes", self._list)
        application.router.add_get("/nodes/{node}", self._one)
        application.router.add_put("/nodes/{node}", self._add)
        application.router.add_delete("/nodes/{node}", self._remove)
        application.router.add_get("/stats", self._stats)
        return application

    async def _session_for(self, application: web.Application) -> AsyncIterator[None]:
        timeout = ClientTimeout(total=self._settings.request_timeout_s, connect=2.0)
        async with ClientSession(connector=TCPConnector(limit=0), timeout=timeout) as session:
            self._session = session
            yield

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests_total += 1
        self.in_flight += 1
        answer: Answer | None = None
        try:
            answer = await self._answer(request.path_qs, request.content_type, body)
        finally:
            self.in_flight -= 1
            if answer is None or answer.status != 200:
                self.refused_total += 1
        if answer is None:
            return web.json_response({"error": "no node could serve this in time"}, status=503)
        return web.Response(
            status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type}
        )

    async def _answer(self, path: str, content_type: str, body: bytes) -> Answer | None:
        """A node's answer, after as many tries as `wait_s` has room for; None: no node served."""
        loop = asyncio.get_running_loop()
        deadline_at_s = loop.time() + self._settings.wait_s
        tried: set[str] = set()
        has_failed = False
        while True:
            name = self.routes.pick(tried)
            if name is not None:
                if has_failed:
                    self.retried_total += 1
                answer = await self._try(name, path, content_type, body)
                if answer is not None:
                    return answer
                has_failed = True
                tried.add(name)
                continue
            left_s = deadline_at_s - loop.time()
            if left_s <= 0 or self._waiting >= self._settings.max_waiting:
                return None
            self._waiting += 1
            try:
                await self.routes.changed(min(left_s, AGAIN_S) if tried else left_s)
            finally:
                self._waiting -= 1
            tried.clear()

    async def _try(self, name: str, path: str, content_type: str, body: bytes) -> Answer | None:
        """One node's answer, or None when it failed before answering and another may be asked."""
        assert self._session is not None
        node = self.routes.nodes[name]
        node.in_flight += 1
        try:
            headers = {"Content-Type": content_type}
            async with self._session.post(node.url + path, data=body, headers=headers) as reply:
                content = await reply.read()
        except (ClientConnectionError, TimeoutError) as error:
            log.debug("retry node=%s error=%s", name, type(error).__name__)
            node.failed_total += 1
            return None
        finally:
            node.in_flight -= 1
        if reply.status == 503:
            node.failed_total += 1
            return None
        node.served_total += 1
        return Answer(reply.status, reply.headers.get("Content-Type", "text/plain"), content)

    async def _list(self, request: web.Request) -> web.Response:
        nodes = {name: self._shown(name) for name in sorted(self.routes.nodes)}
        return web.json_response(nodes)

    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["node"]
        if name not in self.routes.nodes:
            return web.json_response({"error": f"no node {name}"}, status=404)
        return web.json_response(self._shown(name))

    async def _add(self, request: web.Request) -> web.Response:
        name, url = request.match_info["node"], request.query.get("url", "")
        if not url.startswith("http://"):
            return web.json_response(
                {"error": f"url: {url!r}, expected http://host:port"}, status=400
            )
        self.routes.add(name, url.rstrip("/"))
        self.save()
        log.info("routed node=%s url=%s", name, url)
        return web.json_response(self._shown(name))

    async def _remove(self, request: web.Request) -> web.Response:
        name = request.match_info["node"]
        self.routes.remove(name)
        self.save()
        log.info("unrouted node=%s", name)
        return web.json_response({"node": name, "is_routed": False})

    async def _stats(self, request: web.Request) -> web.Response:
        values: dict[str, object] = {
            "requests_total": self.requests_total,
            "refused_total": self.refused_total,
            "retried_total": self.retried_total,
            "in_flight": self.in_flight,
            "by_node": {name: self._shown(name) for name in sorted(self.routes.nodes)},
        }
        return web.json_response(values)

    def _shown(self, name: str) -> dict[str, object]:
        node = self.routes.nodes[name]
        return {
            "url": node.url,
            "is_routed": node.is_routed,
            "in_flight": node.in_flight,
            "served_total": node.served_total,
            "failed_total": node.failed_total,
        }


async def run(
    settings: RouterSettings,
    *,
    host: str,
    port: int,
    is_port_held: bool = False,
    state_path: Path | None = None,
) -> None:
    """Route until SIGTERM, let running requests end, leave.

    Raises:
        OSError: the address is taken.
    """
    stop = stop_event()
    router = Router(settings, state_path=state_path)
    await serve(
        router.application(),
        host=host,
        port=port,
        stop=stop,
        drain_s=DRAIN_S,
        is_port_held=is_port_held,
    )
    log.info(
        "stopped requests=%d refused=%d retried=%d",
        router.requests_total,
        router.refused_total,
        router.retried_total,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m coordinator.demo.router`; 1 when the port is taken."""
    parser = argparse.ArgumentParser(prog="coordinator.demo.router", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="port; 0: a free one")
    parser.add_argument("--port-is-held", action="store_true", help=PORT_IS_HELD)
    parser.add_argument(
        "--wait-s",
        type=float,
        default=2.0,
        help="time before a request without a server is refused",
    )
    parser.add_argument("--request-timeout-s", type=float, default=30.0)
    parser.add_argument(
        "--state", type=Path, help="file that keeps routes and counts over a restart"
    )
    given = parser.parse_args(arguments)
    settings = RouterSettings(wait_s=given.wait_s, request_timeout_s=given.request_timeout_s)
    set_up_log()
    running = run(
        settings,
        host=given.host,
        port=given.port,
        is_port_held=given.port_is_held,
        state_path=given.state,
    )
    try:
        asyncio.run(running)
    except OSError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
