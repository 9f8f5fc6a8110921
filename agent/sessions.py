"""The processes of a session, and the end of all of them. Must not know whose session it is.

A process group is not enough: `timeout` in a script makes one of its own within the session, as
does each shell with job control. Whoever makes a session of its own, as a daemon does, has left.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from agent.shim_files import TERMINAL_STATES

PROC = Path("/proc")
END_S = 5.0
"""A process that was sent SIGKILL is gone by then, or waits in the kernel for a device."""


def living(session: int) -> frozenset[int]:
    """Pids of this session's processes; a zombie does nothing and is none of them."""
    found: set[int] = set()
    for directory in PROC.iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (directory / "stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
            if int(fields[3]) == session and fields[0] not in TERMINAL_STATES:
                found.add(int(directory.name))
    return frozenset(found)


def end(session: int) -> None:
    """SIGKILL each of them, and who was begun meanwhile; the leader must not be reaped yet.

    Raises:
        PermissionError: one is of another account; all others were sent the signal.
    """
    told: set[int] = set()
    refused: PermissionError | None = None
    while new := living(session) - told:
        for pid in new:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError as error:
                refused = error
        told |= new
    if refused is not None:
        raise refused
