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
from common.procfs import boot_id, start_ticks

PROC = Path("/proc")


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
    if not ticks:
        return None
    try:
        return ProcessId(boot_id=boot_id(), pid_namespace=_namespace(), pid=pid, start_ticks=ticks)
    except OSError:
        return None


def has_ended(process: ProcessId) -> bool:
    """True if a process of this machine and namespace is known to have ended; a zombie has."""
    try:
        if (process.boot_id, process.pid_namespace) != (boot_id(), _namespace()):
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


def _namespace() -> str:
    return str((PROC / "self/ns/pid").readlink())
