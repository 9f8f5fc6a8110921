"""The parents and children of processes on this machine, from /proc. An edge."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from common.procfs import STAT_BYTES, first_bytes, stat_fields

PROC = Path("/proc")
ENVIRON_BYTES = 65_536
"""Read at a time; most environments are shorter."""


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
    fields = stat_fields(pid, proc=str(proc))
    return (int(fields[1]), int(fields[2]), int(fields[3])) if fields else None


def thread_states(pid: int, *, proc: Path = PROC) -> set[str]:
    """The states of a process's threads, one letter each (proc(5)); empty when it is gone."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # it ended during the read
        for thread in (proc / str(pid) / "task").iterdir():
            stat = (thread / "stat").read_bytes()
            found.add(stat.rpartition(b")")[2].split()[0].decode("ascii"))
    return found


def environ_of(pid: int, *, proc: Path = PROC, max_bytes: int = -1) -> bytes:
    """A process's environment, or its first bytes; empty when it is gone or may not be read.

    If the main thread has ended before the others, theirs is read.
    """
    data = b""
    with contextlib.suppress(OSError):
        try:
            return _environ_in(f"{proc}/{pid}/environ", max_bytes)
        except ProcessLookupError:
            pass
        with os.scandir(f"{proc}/{pid}/task") as threads:
            places = [thread.path for thread in threads if thread.name != str(pid)]
        for place in places:
            with contextlib.suppress(OSError):
                data = data or _environ_in(f"{place}/environ", max_bytes)
    return data


def _environ_in(path: str, max_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, ENVIRON_BYTES)
        part = data
        while part and (max_bytes < 0 or len(data) < max_bytes):
            part = os.read(fd, ENVIRON_BYTES)
            data += part
    finally:
        os.close(fd)
    return data if max_bytes < 0 else data[:max_bytes]


def name_of(pid: int, *, proc: Path = PROC) -> str:
    """A process's name, 15 characters at most; empty when it is gone.

    Its command line is not read: the kernel reads that from the process's own memory, so a reader
    may wait with a process that waits in the kernel.
    """
    try:
        stat = first_bytes(f"{proc}/{pid}/stat", STAT_BYTES)
    except OSError:
        return ""
    return stat[stat.find(b"(") + 1 : stat.rfind(b")")].decode(errors="replace")


def has_lock(pid: int, path: Path, *, proc: Path = PROC) -> bool:
    """True if a process has a file locked by flock(2), by the kernel's /proc/locks (proc(5)).

    Only the inode number counts, because a file system may give another device number in that table
    than stat(2) does.
    """
    try:
        inode = path.stat().st_ino
        lines = (proc / "locks").read_text("ascii").splitlines()
    except OSError:
        return False
    # The target of a lock's waiter has an arrow in the second place.
    found = [words for line in lines if len(words := line.split()) > 5 and words[1] == "FLOCK"]
    return any(words[4] == str(pid) and words[5].split(":")[-1] == str(inode) for words in found)


def strangers(pids: Iterable[int], owners: Iterable[int], *, proc: Path = PROC) -> set[int]:
    """The processes among `pids` that are alive and descend from none of `owners`."""
    known = set(owners) - {0, 1}
    return {pid for pid in pids if _is_stranger(pid, known, proc)}


def _is_stranger(pid: int, known: set[int], proc: Path) -> bool:
    """True if a process is alive and none of its `lineage` is known.

    The walk ends at the first known process. Nothing needs to be read for a pid that is known
    itself: alive, it is no stranger, and gone, it is none either.
    """
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid in known:
            return False
        ids = _ids(pid, proc)
        if ids is None:
            break
        parent, group, session = ids
        if group in known or session in known:
            return False
        seen.add(pid)
        pid = parent
    return bool(seen)
