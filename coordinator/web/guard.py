"""Who may look at the dashboard: host names, the token, sessions, and headers of each answer.

A page of another site can make a browser send requests here. It cannot read the answers, unless its
own name resolves to this machine (DNS rebinding): then the Host header has that name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import ConfigError

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Of every answer."""

SESSION_S = 12 * 3600.0
"""How long a login holds."""
TOKEN_MIN = 16
"""Characters of a token; a shorter one could be guessed."""


def read_token(path: Path) -> str:
    """The token in a file: its text without white space around it.

    Raises:
        ConfigError: the file cannot be read, other users can, or the token is too short.
    """
    try:
        token = path.read_text().strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: {error}") from None
    if mode & 0o007:
        raise ConfigError(f"--token-file {path}: other users can read it; `chmod 600 {path}`")
    if len(token) < TOKEN_MIN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"--token-file {path}: expected at least {TOKEN_MIN} printable ASCII characters, such "
            "as of `openssl rand -hex 32`"
        )
    return token


class Guard:
    """Decides on requests by their headers.

    Args:
        token: None: each request is let in whose Host header fits.
        host_names: further names under which browsers reach this server.
    """

    def __init__(self, *, token: str | None, host_names: frozenset[str] = frozenset()) -> None:
        self._token = None if token is None else token.encode()
        own = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        self._names = own | {name.lower().rstrip(".") for name in host_names}

    @property
    def has_token(self) -> bool:
        """Whether a browser has to log in."""
        return self._token is not None

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine: an address, or one of its names."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        name = name.lower().rstrip(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def is_token(self, given: str) -> bool:
        """Whether a token is the right one, compared in constant time."""
        token = self._token
        return token is not None and hmac.compare_digest(_bytes(given), token)

    def may_look(self, *, authorization: str, session: str, now_s: float) -> bool:
        """Whether a request may read.

        Args:
            authorization: the header; empty without one.
            session: the cookie; empty without one.
            now_s: wall clock.
        """
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        return self._is_session(session, now_s=now_s)

    def session(self, *, now_s: float) -> str:
        """A cookie that holds for `SESSION_S`: its end, signed with the token."""
        until = f"{now_s + SESSION_S:.0f}"
        return f"{until}.{self._signature(until)}"

    def _is_session(self, cookie: str, *, now_s: float) -> bool:
        until, _, signature = cookie.partition(".")
        if not hmac.compare_digest(_bytes(signature), _bytes(self._signature(until))):
            return False
        return until.isdecimal() and now_s < float(until)

    def _signature(self, until: str) -> str:
        assert self._token is not None, "sessions are of a server with a token"
        return hmac.new(self._token, _bytes(f"session {until}"), hashlib.sha256).hexdigest()


def _bytes(header: str) -> bytes:
    """A part of a header as it came; bytes that are no UTF-8 are in it as surrogates."""
    return header.encode(errors="surrogateescape")
