"""Names this process uniquely, and detects whether another process of this machine has ended.

A pid alone is not enough: it is used again, and every container counts its own. So a process is
named by the boot, the namespace of its pid, the pid and its start. A process that cannot be
inspected counts as alive.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from common.model import Ordinal

PROC = Path("/proc")
TERMINAL_STATES = (b"Z", b"X", b"x")


class ProcessId(Struct, frozen=True, kw_only=True):
    """One process among all that ever ran on any machine.

    start_ticks: clock ticks from boot to its start.
    """

    boot_id: str
    pid_namespace: str
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    start_ticks: Ordinal


def this_process() -> ProcessId | None:
    """This process; None where the kernel does not give all parts."""
    pid = os.getpid()
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    try:
        return ProcessId(boot_id=_boot_id(), pid_namespace=_namespace(), pid=pid, start_ticks=ticks)
    except OSError:
        return None


def has_ended(process: ProcessId) -> bool:
    """True if a process of this machine and namespace is known to have ended; a zombie has."""
    try:
        if (process.boot_id, process.pid_namespace) != (_boot_id(), _namespace()):
            return False
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # of another user: if it is visible, it may be another process by now
    except OSError:
        return False
    is_hidden = not (PROC / str(process.pid)).exists()
    return not is_hidden and start_ticks(process.pid) != process.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None for a process that does not exist.

    Field 22 of /proc/<pid>/stat, proc(5). A zombie has ended and does not count.
    """
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command name stands in parentheses and may hold anything, parentheses too.
    state, *fields = text.rpartition(b")")[2].split()
    return None if state in TERMINAL_STATES else int(fields[18])


def _boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return str((PROC / "self/ns/pid").readlink())
