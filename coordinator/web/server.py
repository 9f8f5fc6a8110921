"""The dashboard's HTTP server: pages, and a stream of updates to each browser.

All is read by GET; the login form alone is posted.

Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) carry the
updates: a browser connects again by itself, and says by the id of the last one how far it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from importlib.resources import files

from aiohttp import web

from common.clock import Clock
from common.errors import ConfigError
from common.model import TOKEN_PATTERN
from coordinator.client import Client
from coordinator.web import guard
from coordinator.web.address import Address
from coordinator.web.feed import Topic
from coordinator.web.guard import Guard
from coordinator.web.looks import CellLook, ThingLook
from coordinator.web.pages import Pages

log = logging.getLogger(__name__)

COOKIE = "aryl_session"
KINDS = ("job", "node", "service", "loan")
THINGS_MAX = 64
"""Pages of single things that are watched at the same time, each by any number of browsers."""
BROWSERS_MAX = 256
"""Streams at the same time."""
PING_S = 2.0
"""An update is sent at least this often, although a poll takes longer."""
SEND_S = 20.0
"""A browser that takes no bytes for this long is let go; it connects again."""
BODY_MAX_BYTES = 4096
"""Of the login form, which is the only body that is read."""
STATIC = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The routes, and the topics that browsers watch.

    Args:
        client: the API user whose view every visitor sees.
    """

    def __init__(self, client: Client, *, cell: str, guard: Guard, clock: Clock) -> None:
        self._client = client
        self._guard = guard
        self._clock = clock
        self._pages = Pages(cell=cell)
        self._incarnation = secrets.token_hex(4)
        self._cell = self._topic(CellLook(client, self._pages))
        self._things: dict[tuple[str, str], Topic] = {}
        self._streams: set[asyncio.Task[object]] = set()
        self._static = _static_files()

    def application(self) -> web.Application:
        """The routes behind the guard."""
        app = web.Application(middlewares=[self._guarded], client_max_size=BODY_MAX_BYTES)
        name = f"{{kind:{'|'.join(KINDS)}}}/{{name}}"
        app.add_routes(
            [
                web.get("/", self._page),
                web.get(f"/{name}", self._page),
                web.get("/live", self._live),
                web.get(f"/live/{name}", self._live),
                web.get("/static/{file}", self._file),
                web.get("/login", self._login_form),
                web.post("/login", self._login),
                web.get("/logout", self._logout),
            ]
        )
        app.on_shutdown.append(self._end_streams)
        return app

    def _topic(self, look: CellLook | ThingLook) -> Topic:
        return Topic(look, clock=self._clock, show_link=self._pages.link)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = await self._checked(request, handler)
        except web.HTTPException as error:
            error.headers.update(guard.HEADERS)
            raise
        if not answer.prepared:
            answer.headers.update(guard.HEADERS)
        return answer

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._guard.is_ours(request.headers.get("Host", "")):
            text = "This server has another name; `aryl web --host-name NAME` adds one.\n"
            return web.Response(status=421, text=text)
        is_open = request.path == "/login" or request.path.startswith("/static/")
        if is_open or self._guard.may_look(
            authorization=request.headers.get("Authorization", ""),
            session=request.cookies.get(COOKIE, ""),
            now_s=self._clock.wall_s(),
        ):
            return await handler(request)
        if "text/html" in request.headers.get("Accept", ""):
            raise web.HTTPSeeOther("/login")
        return web.Response(
            status=401, text="A token is needed.\n", headers={"WWW-Authenticate": "Bearer"}
        )

    async def _page(self, request: web.Request) -> web.Response:
        kind, name = request.match_info.get("kind", ""), request.match_info.get("name", "")
        if kind and not re.fullmatch(TOKEN_PATTERN, name):
            raise web.HTTPNotFound(text=f"No {kind} has this name.\n")
        html = self._pages.shell(kind=kind, name=name, has_token=self._guard.has_token)
        return web.Response(text=html, content_type="text/html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in self._static:
            raise web.HTTPNotFound
        return web.Response(body=self._static[name], content_type=STATIC[name], charset="utf-8")

    async def _login_form(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._pages.login(is_wrong=False), content_type="text/html")

    async def _login(self, request: web.Request) -> web.Response:
        given = (await request.post()).get("token", "")
        if not isinstance(given, str) or not self._guard.is_token(given.strip()):
            html = self._pages.login(is_wrong=True)
            return web.Response(status=403, text=html, content_type="text/html")
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(
            COOKIE,
            self._guard.session(now_s=self._clock.wall_s()),
            max_age=int(guard.SESSION_S),
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return answer

    async def _logout(self, _request: web.Request) -> web.Response:
        answer = web.Response(status=303, headers={"Location": "/login"})
        answer.del_cookie(COOKIE, httponly=True, samesite="Strict")
        return answer

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Updates until the browser goes: what changed since the last one that it has."""
        kind, name = request.match_info.get("kind", ""), request.match_info.get("name", "")
        if kind and not re.fullmatch(TOKEN_PATTERN, name):
            raise web.HTTPNotFound(text=f"No {kind} has this name.\n")
        if len(self._streams) >= BROWSERS_MAX:
            raise web.HTTPServiceUnavailable(text="Too many browsers watch this server.\n")
        seen = self._seen(request.headers.get("Last-Event-ID") or request.query.get("seen", ""))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", **guard.HEADERS})
        answer.headers["X-Accel-Buffering"] = "no"  # a proxy in between passes each update on
        async with self._watched(kind, name) as topic:
            await answer.prepare(request)
            task = asyncio.current_task()
            assert task is not None, "a handler runs in a task"
            self._streams.add(task)
            try:
                await self._send(answer, topic, 0 if kind else seen)
            except (ConnectionError, TimeoutError):
                log.debug("a browser went")
            finally:
                self._streams.discard(task)
        return answer

    async def _send(self, answer: web.StreamResponse, topic: Topic, seen: int) -> None:
        is_polling = True
        if not topic.is_fresh:  # what an earlier browser saw may be hours old
            is_polling = await self._polled(topic)
        while is_polling:
            seen, update = self.update(topic, seen)
            async with self._clock.timeout(SEND_S):
                await answer.write(update)
            is_polling = await self._polled(topic)

    async def _polled(self, topic: Topic) -> bool:
        """Wait for a poll; a slow one is not waited for, so that the browser hears this server."""
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(PING_S):
                return await topic.polled()
        return True

    def update(self, topic: Topic, seen: int) -> tuple[int, bytes]:
        """The version that a browser has after an update, and the update as an event."""
        if seen > topic.board.version:
            seen = 0
        head = f"id: {self._incarnation}.{topic.board.version}\n"
        now_s, polled_at_s = self._clock.wall_s(), topic.polled_at_s
        data = f'data: {{"now":{now_s:.3f},"polled":{polled_at_s:.3f},"changes":'
        changes = topic.changes(seen)
        return topic.board.version, b"".join([head.encode(), data.encode(), changes, b"}\n\n"])

    def _seen(self, event_id: str) -> int:
        """How far a browser is; 0 also where it was with an earlier server."""
        incarnation, _, version = event_id.partition(".")
        is_ours = incarnation == self._incarnation and version.isdecimal() and len(version) < 16
        return int(version) if is_ours else 0

    @contextlib.asynccontextmanager
    async def _watched(self, kind: str, name: str) -> AsyncGenerator[Topic]:
        if not kind:
            async with self._cell.watched():
                yield self._cell
            return
        topic = self._things.get((kind, name))
        if topic is None:
            if len(self._things) >= THINGS_MAX:
                raise web.HTTPServiceUnavailable(text="Too many pages are watched here.\n")
            look = ThingLook(self._client, self._pages, kind=kind, name=name)
            topic = self._things[kind, name] = self._topic(look)
        try:
            async with topic.watched():
                yield topic
        finally:
            if not topic.watchers:
                self._things.pop((kind, name), None)

    async def _end_streams(self, _app: web.Application) -> None:
        for task in self._streams:
            task.cancel()


def _static_files() -> dict[str, bytes]:
    folder = files("coordinator.web") / "static"
    return {name: (folder / name).read_bytes() for name in STATIC}


@contextlib.asynccontextmanager
async def serving(dashboard: Dashboard, address: Address) -> AsyncGenerator[str]:
    """Serve for as long as a block runs; its value is the URL.

    Raises:
        ConfigError: the address cannot be had, or the certificate cannot be read.
    """
    runner = web.AppRunner(dashboard.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(
            runner, address.host, address.port, ssl_context=_tls(address), reuse_address=True
        )
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"--listen {address.host}:{address.port}: {error.strerror or error}"
            ) from None
        host, port = runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        yield f"{address.scheme}://{shown}:{port}/"
    finally:
        await runner.cleanup()


def _tls(address: Address) -> ssl.SSLContext | None:
    if address.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(address.certificate, address.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {address.certificate}: {error}") from None
    return context
