"""Fetches a server's metrics page over HTTP, with the key that the server asks for.

No secret reaches an error: an error shows a URL without its query, and a key only by its file.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

from agent.settings import PageAccess
from common.clock import Clock
from common.errors import ConfigError, ProtocolError, Unavailable
from common.key_file import KeyUnreadableError, read_key

MAX_PAGE_BYTES = 4_000_000
MAX_REDIRECTS = 3
"""vLLM redirects from /metrics to /metrics/, a proxy before it perhaps from http to https."""
NO_ACCESS = PageAccess()

_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}


class RefusedError(Unavailable):
    """No process listens at the server's address."""


class FetchPage(Protocol):
    """The text at a URL within a time; `fetch_page` with a clock is one."""

    async def __call__(self, url: str, timeout_s: float, access: PageAccess = NO_ACCESS) -> str:
        """As `fetch_page`."""
        ...


def page_fetcher(clock: Clock) -> FetchPage:
    """The function that fetches from real servers."""
    contexts = _Contexts()

    async def fetch(url: str, timeout_s: float, access: PageAccess = NO_ACCESS) -> str:
        return await fetch_page(url, timeout_s, clock=clock, access=access, contexts=contexts)

    return fetch


async def fetch_page(
    url: str,
    timeout_s: float,
    *,
    clock: Clock,
    access: PageAccess = NO_ACCESS,
    contexts: _Contexts | None = None,
) -> str:
    """The text at an http or https URL; follows a redirect on the same host, uses no proxy.

    Takes at most `timeout_s`, and leaves nothing behind when it is cancelled before.

    Raises:
        ConfigError: no http or https URL.
        RefusedError: no process listens at it.
        KeyUnreadableError: the file with its key cannot be used.
        Unavailable: no whole answer in time, or not a status of success.
        ProtocolError: more than `MAX_PAGE_BYTES`, or not UTF-8.
    """
    fetch = _Fetch(url, timeout_s, access, contexts or _Contexts())
    where = shown(url)
    try:
        async with clock.timeout(timeout_s):
            data = await asyncio.to_thread(fetch.read)
    except TimeoutError:
        raise Unavailable(f"{where}: no whole answer within {timeout_s:g} s") from None
    except RuntimeError as error:  # no thread can start: a job has filled the task limit
        raise Unavailable(f"{where}: {error}") from error
    finally:
        fetch.abort()
    if len(data) > MAX_PAGE_BYTES:
        raise ProtocolError(f"{where}: more than {MAX_PAGE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{where}: not UTF-8: {error}") from error


class _Contexts:
    """TLS settings by their CA file, made once.

    Reading a machine's certificates takes longer than a page. A file that has changed is read
    again.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[int, ssl.SSLContext]] = {}

    def of(self, ca_path: str) -> ssl.SSLContext:
        """A context that trusts this file's CA certificates; empty: the machine's.

        Raises:
            Unavailable: the file cannot be read or holds no certificate.
        """
        try:
            changed_ns = Path(ca_path).stat().st_mtime_ns if ca_path else 0
            made_ns, context = self._made.get(ca_path, (None, None))
            if context is None or made_ns != changed_ns:
                context = ssl.create_default_context(cafile=ca_path or None)
                self._made[ca_path] = changed_ns, context
        except OSError as error:  # an SSLError is one
            raise Unavailable(f"{ca_path}: {error.strerror or error}") from None
        else:
            return context


class _Fetch:
    """One request in a thread, with its redirects, which `abort` ends from outside.

    A socket's timeout is of each read: a server that sends a byte a second would hold the thread
    for ever. A few of these servers would hold all threads that the agent writes its ledger with.
    """

    def __init__(self, url: str, timeout_s: float, access: PageAccess, contexts: _Contexts) -> None:
        self._parts = self._asked = checked_url(url)
        self._timeout_s = timeout_s
        self._access = access
        self._contexts = contexts
        self._socket: socket.socket | None = None
        self._is_aborted = False

    def read(self) -> bytes:
        """The body, cut off behind `MAX_PAGE_BYTES`; blocks."""
        headers = key_headers(self._access)
        for _ in range(MAX_REDIRECTS + 1):
            # A key is for one page: not for another port on its host.
            is_same = _origin(self._parts) == _origin(self._asked)
            data = self._read_one(headers if is_same else {})
            if data is not None:
                return data
        raise Unavailable(f"{shown_parts(self._asked)}: more than {MAX_REDIRECTS} redirects")

    def _read_one(self, headers: Mapping[str, str]) -> bytes | None:
        """A body; None after a redirect, which the next request follows."""
        where = shown_parts(self._parts)
        connection = self._connection()
        try:
            connection.connect()
            # The connection forgets its socket as soon as the server announces a close.
            self._socket = connection.sock
            if self._is_aborted:
                raise ConnectionAbortedError("given up")
            target = (self._parts.path or "/") + (
                f"?{self._parts.query}" if self._parts.query else ""
            )
            connection.request("GET", target, headers=dict(headers))
            # A reply that is not read to its end keeps its socket open behind the connection.
            with connection.getresponse() as reply:
                if reply.status in _REDIRECTS:
                    self._parts = self._led_to(reply, where)
                    return None
                if not 200 <= reply.status < 300:
                    raise Unavailable(f"{where}: status {reply.status} {reply.reason}")
                data = reply.read(MAX_PAGE_BYTES + 1)
                # http.client raises no error when a size was given; half a page is a false load.
                if reply.length and len(data) <= MAX_PAGE_BYTES:
                    raise Unavailable(f"{where}: broke off {reply.length} bytes before its end")
        except ConnectionRefusedError as error:
            raise RefusedError(f"{where}: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{where}: {error}") from error
        else:
            return data
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            context = self._contexts.of(self._access.tls_ca_path)
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)

    def _led_to(self, reply: http.client.HTTPResponse, where: str) -> SplitResult:
        """The target of a redirect.

        Raises:
            Unavailable: to no page, to another host, or out of TLS.
        """
        status = f"{where}: status {reply.status} {reply.reason}"
        location = reply.headers.get("Location", "")
        try:
            parts = checked_url(urljoin(urlunsplit(self._parts), location), "Location")
        except (ConfigError, ValueError):
            raise Unavailable(f"{status}, which leads to no page") from None
        place = shown_parts(parts)
        if parts.hostname != self._asked.hostname:
            raise Unavailable(f"{status}, which leads to another host: {place}")
        if self._parts.scheme == "https" and parts.scheme != "https":
            raise Unavailable(f"{status}, which leads out of TLS: {place}")
        return parts

    def abort(self) -> None:
        """Make `read` end soon; harmless after its end."""
        self._is_aborted = True
        if self._socket is not None:
            with suppress(OSError):
                # Not SSLSocket's own: that would change the object under the thread's hands.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


# --- URLs: parts and how they are shown -------------------------------------------------------


def checked_url(url: str, field: str = "metrics_url") -> SplitResult:
    """The parts of a URL that can be fetched.

    Raises:
        ConfigError: no http or https URL, or one that holds a user or password; names the field.
    """
    try:
        parts = urlsplit(url)
        is_fit = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        if is_fit and "@" not in parts.netloc:
            return parts
    except ValueError as error:
        if "@" not in url:
            raise ConfigError(f"{field}: {url!r}: {error}") from None
    if "@" in url:  # never shown, whatever else is wrong with it
        raise ConfigError(
            f"{field}: holds a user or password, which every error would show; expected a file"
            " with them, named by `access.basic_path` or `access.bearer_path`"
        )
    raise ConfigError(f"{field}: {url!r} is no http or https URL")


def less_user(url: str) -> str:
    """A URL without the user and password in it, which are not sent anyway."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def shown(url: str) -> str:
    """A URL as people may see it: without user, password and query."""
    try:
        return shown_parts(urlsplit(url))
    except ValueError:
        return "a URL that cannot be read"


def shown_parts(parts: SplitResult) -> str:
    """As `shown`."""
    query = "?..." if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


# --- keys -------------------------------------------------------------------------------------


def key_headers(access: PageAccess) -> dict[str, str]:
    """The headers that authenticate to a page. The files are read each time, as keys change.

    Raises:
        KeyUnreadableError: a file cannot be read, is open to others, or holds no key.
    """
    if access.bearer_path:
        return {"Authorization": f"Bearer {read_key(access.bearer_path)}"}
    if access.basic_path:
        pair = read_key(access.basic_path)
        if ":" not in pair:
            raise KeyUnreadableError(f"{access.basic_path}: expected user:password on one line")
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def checked_access(access: PageAccess, field: str, *, url: str, may_be_plain: bool) -> None:
    """Refuse access settings that would never be sent, or be sent in plain text.

    A credential may exist for the agent's unit alone: a file that is missing is no error.

    Raises:
        ConfigError: names the field.
    """
    if access.bearer_path and access.basic_path:
        raise ConfigError(f"{field}: bearer_path and basic_path; a page takes one of them")
    keys = {"bearer_path": access.bearer_path, "basic_path": access.basic_path}
    parts = urlsplit(url)
    is_plain = parts.scheme == "http" and not _is_loopback(parts.hostname or "")
    for name, path in keys.items():
        if not path:
            continue
        if is_plain and not may_be_plain:
            raise ConfigError(
                f"{field}.{name}: {shown(url)} is plain text off loopback, where others can read"
                " the key; expected https, or `insecure = true`"
            )
        if os.access(path, os.R_OK):
            try:
                key_headers(access)
            except KeyUnreadableError as error:
                raise ConfigError(f"{field}.{name}: {error}") from None
    if access.tls_ca_path:
        try:
            _Contexts().of(access.tls_ca_path)
        except Unavailable as error:
            raise ConfigError(f"{field}.tls_ca_path: {error}") from None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
