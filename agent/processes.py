"""Who is whose child on this machine, from /proc. An edge; must not know GPUs' owners by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def lineage(pid: int, *, proc: Path = PROC) -> set[int]:
    """The process, its ancestors below init, and the leaders of its group and session.

    Empty when it is gone. A child that was orphaned on purpose still shows its session.
    """
    found: set[int] = set()
    while pid > 1 and pid not in found:
        ids = _ids(pid, proc)
        if ids is None:
            break
        parent, group, session = ids
        found |= {pid, group, session}
        pid = parent
    return found - {0, 1}


def leaders(pid: int, *, proc: Path = PROC) -> set[int]:
    """The leaders of a process's group and session; empty when it is gone."""
    ids = _ids(pid, proc)
    return set() if ids is None else set(ids[1:]) - {0, 1}


def _ids(pid: int, proc: Path) -> tuple[int, int, int] | None:
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold blanks and parentheses itself: count from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[2]), int(fields[3])


def thread_states(pid: int, *, proc: Path = PROC) -> set[str]:
    """The states of a process's threads, one letter each (proc(5)); empty when it is gone."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # it ends while it is looked at
        for thread in (proc / str(pid) / "task").iterdir():
            stat = (thread / "stat").read_bytes()
            found.add(stat.rpartition(b")")[2].split()[0].decode("ascii"))
    return found


def strangers(pids: Iterable[int], owners: Iterable[int], *, proc: Path = PROC) -> set[int]:
    """Those of `pids` that are alive and descend from none of `owners`."""
    known = set(owners)
    return {pid for pid in pids if (family := lineage(pid, proc=proc)) and not family & known}
