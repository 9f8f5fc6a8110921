"""sd_notify: reports a unit's state to PID 1, over the datagram socket in NOTIFY_SOCKET.

An edge: one socket. Without NOTIFY_SOCKET every call is a no-op, so a daemon needs no flag to run
in a terminal (sd_notify(3) has the protocol).
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def ready(text: str = "") -> None:
    """READY=1: units that wait for this one may start."""
    _notify("READY=1", *_status(text))


def status(text: str) -> None:
    """One line for `systemctl status`."""
    _notify(*_status(text))


def stopping(text: str = "") -> None:
    """STOPPING=1: the shutdown is deliberate."""
    _notify("STOPPING=1", *_status(text))


def watchdog() -> None:
    """WATCHDOG=1: work was really done since the last call."""
    _notify("WATCHDOG=1")


def _status(text: str) -> tuple[str, ...]:
    # A newline would begin a new assignment, so a job's name could contain READY=1.
    return (f"STATUS={' '.join(text.split())}",) if text else ()


def _notify(*assignments: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or not assignments:
        return
    if address.startswith("@"):  # the abstract name space, which has no file
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        with socket.socket(socket.AF_UNIX, kind) as notify:
            notify.sendto("\n".join(assignments).encode(), address)
    except OSError as error:
        # A PID 1 that does not listen must not end a daemon that works.
        log.warning("sd_notify failed: %s", error)
