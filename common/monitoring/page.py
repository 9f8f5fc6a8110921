"""Serves one page, `/metrics`, over HTTP on the daemon's own event loop.

The page never stops its daemon: an address that cannot be had is logged and tried again, and a
client that sends too much, or reads too slowly, is cut off. One request a connection is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from common.clock import Clock
from common.key_file import KeyUnreadableError, read_key
from common.monitoring.settings import ADDRESS, Address, MetricsSettings, parsed

log = logging.getLogger(__name__)

PATH = "/metrics"
MAX_HEAD_BYTES = 16_384
"""The limit of a request line and its headers in bytes; Prometheus sends some 300."""
HEAD_S = 5.0
"""For the whole head of a request to come."""
WRITE_S = 10.0
"""For a client to take the whole answer; Prometheus waits this long by default."""
MAX_CONNECTIONS = 16
RETRY_S = 5.0
"""Between two tries to listen."""

Render = Callable[[str], tuple[bytes, str]]
"""The page and its content type, by the `Accept` header of a request."""

_REQUEST_LINE = re.compile(r"(?P<method>[!#$%&'*+.^_`|~0-9A-Za-z-]+) (?P<target>\S+) HTTP/1\.\d")
_FIELD = re.compile(r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>[^\x00\r\n]*?)[ \t]*")


def renderer(registry: CollectorRegistry) -> Render:
    """Renders a registry in the format that a scraper asks for: OpenMetrics, or plain text."""

    def render(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return render


@contextlib.asynccontextmanager
async def serving(
    settings: MetricsSettings, render: Render, *, clock: Clock
) -> AsyncGenerator[None]:
    """Serve the page while the block runs; an empty address serves none."""
    address = parsed(settings.address)
    if address is None:
        yield
        return
    task = asyncio.create_task(
        _serve(address, settings.bearer_path, render, clock), name="metrics page"
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _serve(address: Address, bearer_path: str, render: Render, clock: Clock) -> None:
    """Listen until cancelled, trying again for as long as the address cannot be had."""
    said = ""
    while True:
        try:
            page = _Page(render, read_key(bearer_path) if bearer_path else "", clock)
            server = await asyncio.start_server(
                page.connected, address.host, address.port, limit=MAX_HEAD_BYTES
            )
        except KeyUnreadableError as error:
            why = f"metrics.bearer_path: {error}"
        except (OSError, UnicodeError) as error:  # of a name that no DNS could have
            problem = getattr(error, "strerror", None) or error
            why = f"{ADDRESS}: cannot listen at {address}: {problem}"
        else:
            break
        if why != said:
            said = why
            log.error("%s; no metrics are served, and it is tried again each %g s", why, RETRY_S)
        await clock.sleep(RETRY_S)
    log.info("metrics at http://%s%s", address, PATH)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
        await page.close()


class Refusal(Exception):  # noqa: N818 - an answer, and no fault of this program
    """A request that gets no page.

    fields: further headers of the answer.
    """

    def __init__(
        self, status: HTTPStatus, said: str, fields: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(said)
        self.status = status
        self.fields = fields or {}


class Request(NamedTuple):
    """One request; names of its headers are in lower case."""

    method: str
    path: str
    fields: Mapping[str, str]


def parse(head: bytes) -> Request:
    """A request by its head, up to the empty line.

    Raises:
        Refusal: it is no HTTP/1 request (RFC 9112, sections 3 and 5).
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = _REQUEST_LINE.fullmatch(lines[0])
    if found is None:
        raise Refusal(HTTPStatus.BAD_REQUEST, "expected a request line of HTTP/1.1")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise Refusal(HTTPStatus.BAD_REQUEST, "a header line has no name")
        name = field["name"].lower()
        fields[name] = f"{fields[name]}, {field['value']}" if name in fields else field["value"]
    try:
        path = urlsplit(found["target"]).path
    except ValueError:
        raise Refusal(HTTPStatus.BAD_REQUEST, "the target is no URL") from None
    return Request(found["method"], path, fields)


class _Page:
    """Answers the connections of one listener.

    key: what a scraper has to send; empty: nothing.
    """

    def __init__(self, render: Render, key: str, clock: Clock) -> None:
        self._render = render
        self._key = key
        self._clock = clock
        self._open: set[asyncio.Task[None]] = set()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection; one too many is closed at once."""
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._answer(reader, writer), name="metrics request")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """Cut off every connection."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await self._head(reader)
            if head:
                async with self._clock.timeout(WRITE_S):
                    writer.write(self._respond(head))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError):
            log.debug("a scraper was cut off")
        finally:
            writer.transport.abort()

    async def _head(self, reader: asyncio.StreamReader) -> bytes | Refusal | None:
        """The head of a request; None where the client has left."""
        try:
            async with self._clock.timeout(HEAD_S):
                return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            said = f"a request has up to {MAX_HEAD_BYTES} bytes here"
            return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, said)
        except TimeoutError:
            return Refusal(HTTPStatus.REQUEST_TIMEOUT, f"no whole request within {HEAD_S:g} s")

    def _respond(self, head: bytes | Refusal) -> bytes:
        """The whole answer to a request."""
        if isinstance(head, Refusal):
            return _refused(head)
        method = ""
        try:
            request = parse(head)
            method = request.method
            self._check(request)
            body, kind = self._render(request.fields.get("accept", ""))
        except Refusal as refusal:
            return _refused(refusal, method)
        except Exception:
            log.exception("the metrics page broke")
            said = "the page broke; see the log of this daemon"
            return _refused(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, said), method)
        return _packed(HTTPStatus.OK, body, method, {"Content-Type": kind})

    def _check(self, request: Request) -> None:
        """Check that a request may have the page.

        Raises:
            Refusal: the key is wrong, or it asks for something else.
        """
        if self._key and not self._is_known(request.fields.get("authorization", "")):
            challenge = {"WWW-Authenticate": 'Bearer realm="aryl metrics"'}
            raise Refusal(HTTPStatus.UNAUTHORIZED, "expected the bearer token", challenge)
        if request.path != PATH:
            raise Refusal(HTTPStatus.NOT_FOUND, f"the page is {PATH}")
        if request.method not in ("GET", "HEAD"):
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET", {"Allow": "GET, HEAD"})

    def _is_known(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        is_key = hmac.compare_digest(key.strip().encode("latin-1"), self._key.encode())
        return scheme.lower() == "bearer" and is_key


def _refused(refusal: Refusal, method: str = "") -> bytes:
    return _packed(refusal.status, f"{refusal}\n".encode(), method, refusal.fields)


def _packed(status: HTTPStatus, body: bytes, method: str, fields: Mapping[str, str]) -> bytes:
    """An answer as bytes; HEAD gets it without its body."""
    every = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "Connection": "close",
    } | dict(fields)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in every.items()]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head if method == "HEAD" else head + body
