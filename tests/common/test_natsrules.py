"""The rules around a connection: URLs, plain text, identities, files, waits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common import natsrules
from common.bus import connect_nats
from common.clock import SystemClock
from common.errors import ConfigError
from common.model import NatsAccess
from common.mqttrules import servers_of
from tests.tables import each_row


@each_row(
    "url",
    [
        "nats://10.0.0.1:4222",
        "nats://nats.example:4222",
        "nats://127.0.0.1:1, nats://h:1",
        "ws://h",
    ],
)
async def test_plain_text_off_loopback_is_refused(url: str) -> None:
    """Without `insecure` nothing is sent in the clear to another machine."""
    with pytest.raises(ConfigError, match="plain text"):
        await connect_nats(url, identity="a", clock=SystemClock())
    assert natsrules.checked(url, may_be_plain=True)


@each_row(
    "url", ["nats://127.0.0.1:4222", "nats://localhost:1", "nats://[::1]:1", "tls://far.example:1"]
)
def test_loopback_and_tls_are_allowed(url: str) -> None:
    """TLS anywhere, plain text to this machine."""
    assert natsrules.checked(url, may_be_plain=False) == [url]


@each_row("url", ["", "localhost:4222", "http://h", "nats://", "nats://h:99999"])
def test_what_is_no_nats_url_is_refused(url: str) -> None:
    """The error names the setting."""
    with pytest.raises(ConfigError, match="nats_url"):
        natsrules.checked(url, may_be_plain=True)


def test_a_password_is_never_in_a_message() -> None:
    """An error about a URL does not repeat its user and password."""
    with pytest.raises(ConfigError) as error:
        natsrules.checked("nats://user:secret@far.example:4222", may_be_plain=False)
    assert "secret" not in str(error.value)
    assert "far.example" in str(error.value)


@each_row("rest", ["12/34@h:1", "pa/ss@h:1", "pa,ss@h:1", "12?34@h", "1#2@h", "pass@h:x"])
def test_a_url_that_a_password_breaks_is_refused_without_any_of_it(rest: str) -> None:
    """A `/` in a password ends the host: what stands before it would be taken for host and port."""
    nats = f"nats://ada:{rest}"
    with pytest.raises(ConfigError, match="nats_url: not a URL: host or port cannot") as refused:
        natsrules.checked(nats, may_be_plain=True)
    assert "pa" not in str(refused.value).partition("password")[0]
    assert "12" not in str(refused.value)
    with pytest.raises(ConfigError, match="mqtt_url: not a URL: host or port cannot"):
        servers_of(f"mqtt://ada:{rest}", access=NatsAccess(), insecure=True)


async def test_a_missing_seed_is_found_at_once(tmp_path: Path) -> None:
    """A file that cannot be read is named, before anything is connected."""
    with pytest.raises(ConfigError, match=r"nkey_seed_path: .*seed cannot be read"):
        await connect_nats(
            "nats://127.0.0.1:1",
            identity="a",
            clock=SystemClock(),
            access=NatsAccess(nkey_seed_path=str(tmp_path / "seed")),
        )


def test_waits_between_attempts_grow_differ_and_are_bounded() -> None:
    """Later attempts wait longer up to a cap, and two clients do not wait alike."""
    waits = [natsrules.wait_s(attempt, random.Random(attempt)) for attempt in range(40)]
    assert waits[0] <= 0.1
    assert all(2.0 <= wait <= natsrules.RECONNECT_CAP_S for wait in waits[10:])
    assert natsrules.wait_s(3, random.Random(1)) != natsrules.wait_s(3, random.Random(2))
