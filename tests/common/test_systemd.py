"""What PID 1 hears, on a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import systemd
from tests.harness.sockets import short_path

Receive = Callable[[], str]


@pytest.fixture(params=["file", "abstract"])
def receive(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Receive]:
    """PID 1's end of the socket, in the file system and in the abstract name space."""
    name = f"aryl-test-{os.getpid()}-{tmp_path.name}"
    with (
        short_path(tmp_path) as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pid1,
    ):
        path = str(directory / "notify") if request.param == "file" else f"@{name}"
        pid1.bind(path.replace("@", "\0", 1) if path.startswith("@") else path)
        pid1.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield lambda: pid1.recv(4096).decode()


def test_ready_carries_its_text(receive: Receive) -> None:
    """One datagram holds READY and the status that goes with it."""
    systemd.ready("standing by")
    assert receive() == "READY=1\nSTATUS=standing by"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (systemd.ready, "READY=1"),
        (systemd.watchdog, "WATCHDOG=1"),
        (systemd.stopping, "STOPPING=1"),
        (lambda: systemd.status("leading"), "STATUS=leading"),
    ],
)
def test_each_call_is_its_assignment(
    receive: Receive, call: Callable[[], None], expected: str
) -> None:
    """Each function says exactly what sd_notify(3) calls it."""
    call()
    assert receive() == expected


def test_a_text_cannot_forge_an_assignment(receive: Receive) -> None:
    """A newline in a status stays inside the status."""
    systemd.status("job a\nREADY=1")
    assert receive() == "STATUS=job a READY=1"


def test_without_a_socket_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon in a terminal neither fails nor warns."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.ready("here")
    systemd.watchdog()
    assert caplog.records == []


def test_a_socket_that_is_gone_does_not_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PID 1 that does not listen is a warning."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    systemd.watchdog()
    assert "sd_notify failed" in caplog.text
