"""Recognizes the processes of a worker by two marks that they inherit.

The first mark is the worker's directory in the environment; `env -i` removes it. The second is the
soft limit of file locks, a number derived from the directory: a new session, a new program, closed
files and an empty environment keep it, and every account may read it (proc(5)). The kernel has not
enforced this limit since Linux 2.4.25, and nothing that a job runs has a use for it
(docs/decisions/0026-what-a-worker-leaves-behind.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from agent.proc.process_tree import environ_of
from agent.shim import files as shim_files

RLIMIT_LOCKS = 10
"""The number in the kernel's interface (getrlimit(2)); Python has no name for it."""
LIMIT_NAME = b"Max file locks"
"""Its name in /proc/PID/limits."""
MARK_BITS = 62
"""Bits below the largest limit, which means that there is none."""


def mark_of(directory: Path | str) -> int:
    """The number that marks the processes of a worker; it needs no file of the worker."""
    place = os.fsencode(os.path.realpath(directory))
    number = int.from_bytes(blake2b(place, digest_size=8, person=b"aryl worker").digest(), "big")
    return number >> (64 - MARK_BITS) | 1 << (MARK_BITS - 1)  # no limit that a person would set


def marked(directory: Path, uid: int) -> set[int]:
    """The living processes of an account that have a mark of the worker."""
    found: set[int] = set()
    text = b"ARYL_WORKER_DIRECTORY=" + os.fsencode(os.path.realpath(directory))
    number = b"%d" % mark_of(directory)
    for entry in os.scandir("/proc"):
        pid = int(entry.name) if entry.name.isdigit() else 0
        if pid and owner(pid) == uid and _has_mark(pid, text, number):
            found.add(pid)
    return found


def is_marked(pid: int, directory: Path, uid: int) -> bool:
    """True if a process of an account lives and has a mark of the worker."""
    text = b"ARYL_WORKER_DIRECTORY=" + os.fsencode(os.path.realpath(directory))
    return owner(pid) == uid and _has_mark(pid, text, b"%d" % mark_of(directory))


def _has_mark(pid: int, text: bytes, number: bytes) -> bool:
    place = Path(f"/proc/{pid}")
    is_its = False
    with contextlib.suppress(OSError):  # limits first: that reads no process memory
        is_its = number in _limit(place)
    is_its = is_its or text in environ_of(pid).split(b"\0")
    return is_its and shim_files.start_ticks(pid) > 0


def _limit(place: Path) -> list[bytes]:
    for line in (place / "limits").read_bytes().splitlines():
        if line.startswith(LIMIT_NAME):
            return line.split()
    return []


def kill_marked(directory: Path) -> set[int]:
    """SIGKILL the processes that have a mark of the worker; returns those that were still there.

    Only processes of the directory's owner. A worker whose record cannot be read may live, so this
    needs no record.
    """
    uid = directory.stat().st_uid
    left = marked(directory, uid)
    for pid in left:
        signal_if(pid, signal.SIGKILL, lambda pid: is_marked(pid, directory, uid))
    return left


def signal_if(pid: int, number: signal.Signals, is_it: Callable[[int], bool]) -> None:
    """Signal a process if it is still the one that was seen: its number may be another's by now.

    is_it: called when the descriptor holds the process, so that the answer stays true.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        fd = os.pidfd_open(pid)
        try:
            if is_it(pid):
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def owner(pid: int) -> int:
    """The account of a process; -1 when it is gone."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1
