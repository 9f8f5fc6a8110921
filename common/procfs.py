"""What the kernel says of a boot and of a process: proc(5). An edge that reads files alone.

Must not know whose process it is. Standard library only and without `pathlib` or `typing`: a shim,
which has to stay small, and hooks, which have to be quick, are among those who ask.
"""

from __future__ import annotations

TERMINAL_STATES = "ZXx"
"""States of a process, or of a thread, that has ended."""


def boot_id() -> str:
    """The kernel's name for this boot.

    Raises:
        OSError: it cannot be read.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def stat_fields(pid: int, *, proc: str = "/proc") -> list[str]:
    """Fields of /proc/PID/stat from the third on, the state; empty when the process is gone.

    The name before them stands in parentheses and may hold anything, parentheses too.
    """
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return []


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
