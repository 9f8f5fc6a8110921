"""Finds and ends all processes of a session.

A process group is not enough: `timeout` in a script makes a group of its own within the session, as
does each shell with job control. A process that starts its own session, as a daemon does, has left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from agent.proc.process_tree import name_of, thread_states
from agent.shim.files import TERMINAL_STATES
from common.clock import Clock

PROC = Path("/proc")
END_S = 5.0
"""A process that got SIGKILL is gone by then, or waits in the kernel for a device."""
LOOK_S = 0.02
NAMED_COUNT = 3
"""This many of the processes left are named; a message is for people."""


def living(session: int, *, proc: Path = PROC) -> frozenset[int]:
    """Pids of this session's live processes.

    A zombie does nothing and does not count, unless it is a main thread that ended before the
    others.
    """
    found: set[int] = set()
    for directory in proc.iterdir():
        if not directory.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (directory / "stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
            pid = int(directory.name)
            if int(fields[3]) == session and (
                fields[0] not in TERMINAL_STATES or _is_alive(pid, proc)
            ):
                found.add(pid)
    return frozenset(found)


def _is_alive(pid: int, proc: Path) -> bool:
    """True if one of its threads has not ended."""
    return not thread_states(pid, proc=proc).issubset(TERMINAL_STATES)


async def emptied(session: int, clock: Clock) -> None:
    """Return when none of its processes is left.

    A process that survives SIGKILL delays the return.
    """
    while living(session):
        await clock.sleep(LOOK_S)


def end(session: int, *, proc: Path = PROC) -> None:
    """SIGKILL each process, and those begun meanwhile; the leader must not be reaped yet.

    All of them are stopped before the first is killed. Otherwise a shell whose child is killed goes
    on with its script, and may have moved the server before its own turn comes. The leader is
    killed last: if the caller dies half-way, its successor finds the stopped processes by their
    leader.

    Raises:
        PermissionError: some are of another account, and named; all others got the signal.
    """
    told: set[int] = set()
    refused: set[int] = set()
    while new := living(session, proc=proc) - told:
        refused |= _refused(new, signal.SIGSTOP)
        told |= new
    refused |= _refused(sorted(told - {session}), signal.SIGKILL)
    refused |= _refused(told & {session}, signal.SIGKILL)
    if refused:
        names = [f"{pid} ({name_of(pid, proc=proc)})" for pid in sorted(refused)]
        raise PermissionError(errno.EPERM, f"{os.strerror(errno.EPERM)}: {_few(names)}")


def _refused(pids: Iterable[int], number: signal.Signals) -> set[int]:
    """The processes that may not be signalled; all others were, except those that are gone."""
    refused: set[int] = set()
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            refused.add(pid)
    return refused


def left(leader: int, *, proc: Path = PROC) -> str:
    """The remains of a session, as text: pid, name and the states of the threads (proc(5)).

    `D` waits in the kernel for a disk or a device, and no signal reaches it. The leader is named
    first, even if its main thread alone has ended; a leader that is gone is named only if no other
    process is left.
    """
    others = sorted(living(leader, proc=proc) - {leader})
    pids = [leader, *others] if not others or _is_alive(leader, proc) else others
    return _few([_in_words(pid, proc) for pid in pids])


def _few(named: list[str]) -> str:
    """The first processes, and the number of the others."""
    more = f" and {len(named) - NAMED_COUNT} more" if len(named) > NAMED_COUNT else ""
    return f"process {', '.join(named[:NAMED_COUNT])}{more}"


def _in_words(pid: int, proc: Path) -> str:
    states = "".join(sorted(thread_states(pid, proc=proc)))
    return f"{pid} ({name_of(pid, proc=proc)}, state {states})" if states else f"{pid} (gone)"
