"""What the kernel says of a boot and of a process: proc(5). An edge that reads files alone.

Must not know whose process it is. Standard library only and without `pathlib` or `typing`: a shim,
which has to stay small, and hooks, which have to be quick, are among those who ask.
"""

from __future__ import annotations

import os

STAT_BYTES = 4096
"""More than the one line of /proc/PID/stat ever has."""
TERMINAL_STATES = "ZXx"
"""States of a process, or of a thread, that has ended."""


def boot_id() -> str:
    """The kernel's name for this boot.

    Raises:
        OSError: it cannot be read.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def first_bytes(path: str, max_bytes: int) -> bytes:
    """The beginning of a file, by one read.

    An agent reads some fifty small files a second: a file object costs four more system calls.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, max_bytes)
    finally:
        os.close(fd)


def stat_fields(pid: int, *, proc: str = "/proc") -> list[str]:
    """Fields of /proc/PID/stat from the third on, the state; empty when the process is gone.

    The name before them stands in parentheses and may hold anything, parentheses too.
    """
    try:
        line = first_bytes(f"{proc}/{pid}/stat", STAT_BYTES)
    except OSError:
        return []
    return line.rpartition(b")")[2].decode("ascii").split()


def ticks_of(fields: list[str]) -> int:
    """`start_ticks` from the fields of `stat_fields`.

    The state is that of the main thread, which may end before the others: they go on.
    """
    is_alive = bool(fields) and (fields[0] not in TERMINAL_STATES or int(fields[17]) > 1)
    return int(fields[19]) if is_alive else 0


def start_ticks(pid: int, *, proc: str = "/proc") -> int:
    """When a process started, in clock ticks since boot; 0 when it is gone or only a zombie.

    A process of which any thread has not ended is no zombie.
    """
    return ticks_of(stat_fields(pid, proc=proc))
