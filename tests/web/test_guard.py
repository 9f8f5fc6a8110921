"""Who may look at the dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator.web.address import Address
from coordinator.web.guard import SESSION_S, Guard, read_token

TOKEN = "0123456789abcdef0123"


def test_a_name_that_is_not_of_this_machine_is_refused() -> None:
    """DNS rebinding sends the attacker's name; addresses and names of this machine are fine."""
    guard = Guard(token=None, host_names=frozenset({"Dash.Example"}))
    ours = ["127.0.0.1:8420", "localhost", "[::1]:80", "10.0.0.7:8420", "dash.example:443"]
    others = ["evil.example", "127.0.0.1.evil.example:8420", "", "[::1", "localhost.evil:80"]
    assert [host for host in ours if not guard.is_ours(host)] == []
    assert [host for host in others if guard.is_ours(host)] == []


def test_a_session_ends_and_cannot_be_made_up() -> None:
    """It holds for its time, for the token that signed it, and not with another end."""
    guard = Guard(token=TOKEN)
    session = guard.session(now_s=1000.0)

    def may(cookie: str, *, now_s: float = 1000.0, by: Guard = guard) -> bool:
        return by.may_look(authorization="", session=cookie, now_s=now_s)

    until, _, signature = session.partition(".")
    assert may(session)
    assert not may(session, now_s=1001.0 + SESSION_S)
    assert not may(f"{int(until) + 1}.{signature}")
    assert not may(session, by=Guard(token=TOKEN[::-1]))
    assert not any(
        may(cookie) for cookie in ("", ".", f"x.{signature}", "é", "\udcff", f"{until}.")
    )


def test_a_bearer_token_is_the_whole_token() -> None:
    """No part of it, no other scheme, and any text is only refused."""
    guard = Guard(token=TOKEN)
    given = {
        f"Bearer {TOKEN}": True,
        f"bearer {TOKEN}": True,
        f"Bearer {TOKEN[:-1]}": False,
        f"Basic {TOKEN}": False,
        "Bearer é": False,
        "Bearer \udcff": False,  # a byte that is no UTF-8
        "": False,
    }
    assert {
        value: guard.may_look(authorization=value, session="", now_s=0.0) for value in given
    } == given


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [("short", 0o600, "at least 16"), (TOKEN, 0o644, "other users"), (None, 0o600, "No such file")],
)
def test_a_bad_token_file_is_named(
    tmp_path: Path, text: str | None, mode: int, complaint: str
) -> None:
    """The error names the file and never shows what is in it."""
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=complaint) as raised:
        read_token(path)
    assert str(path) in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_a_token_has_no_white_space_around_it(tmp_path: Path) -> None:
    """An editor's newline is not part of it."""
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert read_token(path) == TOKEN


def test_addresses() -> None:
    """HOST:PORT, a port alone, and IPv6 in brackets; loopback is known as such."""
    found = {text: Address.parsed(text) for text in ("0.0.0.0:80", "8420", "[::1]:1", "lab:2")}
    shown = {text: (each.host, each.port, each.is_loopback) for text, each in found.items()}
    assert shown == {
        "0.0.0.0:80": ("0.0.0.0", 80, False),
        "8420": ("127.0.0.1", 8420, True),
        "[::1]:1": ("::1", 1, True),
        "lab:2": ("lab", 2, False),
    }
    for text in ("", ":80", "lab", "lab:x", "lab:70000"):
        with pytest.raises(ConfigError, match="--listen"):
            Address.parsed(text)
