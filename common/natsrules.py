"""The rules around a NATS connection: URLs, plain text, server versions, waits, counters.

`common.bus` applies these rules to the client library.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import random
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from common.access import Cause
from common.errors import ConfigError
from common.model import NatsAccess

MIN_SERVER_VERSION = (2, 14, 5)
"""Older servers lose acknowledged writes after a power cut or do not know `sync_interval`."""
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""The message size that the journal's server must accept; NATS's own default is an eighth of it."""
RECONNECT_CAP_S = 4.0
"""Longest wait between two attempts to connect."""
PING_PERIOD_S = 10
"""A dead peer is noticed after two unanswered pings; the client's own default takes minutes."""
MAX_BUFFERED_BYTES = 2 * 1024 * 1024
"""Bytes that a client may buffer while there is no connection."""

_PLAIN = ("nats", "ws")
_ENCRYPTED = ("tls", "wss")


@dataclass(slots=True)
class BusCounters:
    """The errors since the start, for the metrics page."""

    error_count: int = 0
    handler_error_count: int = 0
    dropped_message_count: int = 0
    reconnect_count: int = 0
    foreign_reply_count: int = 0
    """Messages that asked for an answer on a subject of another identity than their sender."""


@dataclass(slots=True)
class WhyNot:
    """Why a client cannot reach its servers: their own last words, and the last error.

    A server that refuses hangs up at once. A client that is just writing then sees a reset and not
    the refusal, so which of them came last is chance.
    """

    cause: Cause | None = None
    server_said: str = ""
    last_error: str = ""

    def note(self, error: str, cause: Cause | None) -> None:
        """Record one more failed attempt; `Cause.SERVER` where no server gives a reason."""
        self.last_error = error
        if cause is not Cause.SERVER:
            self.server_said = error
        if cause is not None and (cause is not Cause.SERVER or not self.server_said):
            self.cause = cause

    def __str__(self) -> str:
        reasons = dict.fromkeys((self.server_said, self.last_error))
        return ", then ".join(filter(None, reasons)) or "no answer"


def client_options(
    urls: str, *, name: str, inbox_prefix: str, access: NatsAccess, insecure: bool
) -> dict[str, Any]:
    """All options of a client; it tries to connect for ever.

    Args:
        insecure: allow a plain-text URL off loopback.

    Raises:
        ConfigError: a URL or a file is invalid.
    """
    return {
        "servers": server_urls(urls, access=access, insecure=insecure),
        "name": name,
        "inbox_prefix": inbox_prefix,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.2,
        "ping_interval": PING_PERIOD_S,
        "max_outstanding_pings": 2,
        "connect_timeout": 2,
        "pending_size": MAX_BUFFERED_BYTES,
        **options(access),
    }


def options(access: NatsAccess) -> dict[str, object]:
    """A client's options for keys and certificates.

    Raises:
        ConfigError: a file cannot be read or used; names the field.
    """
    return {
        "nkeys_seed": credentials_file(access.nkey_seed_path, "nkey_seed_path"),
        "user_credentials": credentials_file(access.credentials_path, "credentials_path"),
        "tls": trust(access.tls_ca_path),
    }


def server_urls(urls: str, *, access: NatsAccess, insecure: bool) -> list[str]:
    """The URLs that a client with these settings may connect to; errors as `checked`.

    A plain `nats://` with `tls_ca_path` is encrypted all the same, or not connected at all.
    """
    return checked(urls, may_be_plain=insecure or access.tls_ca_path is not None)


def checked(urls: str, *, may_be_plain: bool) -> list[str]:
    """The URLs of a comma-separated list, each one checked.

    Raises:
        ConfigError: not a NATS URL, or plain text off loopback without `may_be_plain`.
    """
    return [_checked_one(url.strip(), may_be_plain) for url in urls.split(",")]


def nats_user(options: dict[str, Any]) -> str:
    """The user that a client with these options shows to a server, without its secret."""
    if options["nkeys_seed"]:
        return f"the nkey of {options['nkeys_seed']}"
    if options["user_credentials"]:
        return f"the credentials of {options['user_credentials']}"
    servers: list[str] = options["servers"]
    users = filter(None, (urlsplit(url).username for url in servers))
    name = next(users, None)
    return f"user {name}" if name else "a client without user and key"


def redacted(url: str) -> str:
    """A URL without its user and password, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def trust(ca_path: str | None) -> ssl.SSLContext | None:
    """TLS with the CA certificates of this file alone; None without one.

    Raises:
        ConfigError: the file holds none.
    """
    if ca_path is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_path)
    except OSError as error:  # ssl.SSLError, for a file that holds no certificate, is one too
        raise ConfigError(f"tls_ca_path: {ca_path}: {error.strerror or error}") from error


def credentials_file(path: str | None, what: str) -> str | None:
    """The file as nats-py takes it; a missing one is an error now, not at each reconnect.

    Raises:
        ConfigError: it cannot be read, or the package that signs with it is not installed.
    """
    if path is None:
        return None
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: {path} cannot be read: {error.strerror}") from error
    if importlib.util.find_spec("nkeys") is None:
        raise ConfigError(f"{what}: needs the package nkeys (pip install 'aryl[nkeys]')")
    return path


def check_version(found: tuple[int, int, int]) -> None:
    """Refuse a server whose acknowledgements cannot be trusted.

    Raises:
        ConfigError: older than `MIN_SERVER_VERSION`.
    """
    if found < MIN_SERVER_VERSION:
        floor = ".".join(map(str, MIN_SERVER_VERSION))
        raise ConfigError(
            f"NATS server is version {'.'.join(map(str, found))}, expected {floor} or later: "
            "older ones lose acknowledged writes"
        )


def check_max_payload(found_bytes: int) -> None:
    """Refuse a server that would refuse a journal record, now rather than after a flood of events.

    Raises:
        ConfigError: its `max_payload` is too small.
    """
    if found_bytes < MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"nats-server: max_payload is {found_bytes}, expected at least {MAX_PAYLOAD_BYTES}"
        )


def check_fits(what: str, size_bytes: int, max_payload_bytes: int) -> None:
    """Refuse to send a message that the server would always refuse.

    Raises:
        ConfigError: it is larger than the server's `max_payload`.
    """
    if size_bytes > max_payload_bytes:
        raise ConfigError(
            f"nats-server: max_payload is {max_payload_bytes}, expected at least {size_bytes} "
            f"for one {what}"
        )


def wait_s(attempt: int, chance: random.Random) -> float:
    """Time before the next attempt: it doubles up to `RECONNECT_CAP_S`, and half of it is random.

    So ten thousand clients do not come back at the same instant.
    """
    return min(RECONNECT_CAP_S, 0.1 * 2.0 ** min(attempt, 10)) * chance.uniform(0.5, 1.0)


def parts_of(url: str, field: str) -> SplitResult:
    """The parts of a URL, of which host and port can be read.

    Raises:
        ConfigError: they cannot; names the field, and nothing of what may be a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port, (parts.hostname or "").encode("idna")
    except ValueError:
        parts = None
    if parts is None or ("@" in url and "@" not in parts.netloc):
        raise ConfigError(
            f"{field}: not a URL: host or port cannot be read; a comma or one of / ? # in a user or"
            " password ends it there"
        )
    return parts


def _checked_one(url: str, may_be_plain: bool) -> str:
    parts = parts_of(url, "nats_url")
    host = parts.hostname
    if parts.scheme not in _PLAIN + _ENCRYPTED or not host:
        raise ConfigError(f"nats_url: {redacted(url)!r} is not nats://host:port or tls://host:port")
    if parts.scheme in _PLAIN and not (may_be_plain or is_loopback(host)):
        raise ConfigError(
            f"nats_url: {redacted(url)} is plain text to another machine; "
            "use tls://, or set insecure = true (--insecure)"
        )
    return url


def is_loopback(host: str) -> bool:
    """True if a host is this machine, whatever its resolver answers."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
