"""Child processes: how a loop hears of their end, and signals that reach no other process. An edge.

asyncio's own `Process.kill`, `terminate` and `send_signal` are unsafe for it. In some versions they
first ask the kernel whether the child has ended. That takes the exit status away from the loop,
which then reports 255. In other versions they signal a number that another process may have by
then: a child is reaped before the loop notices.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Protocol


class Child(Protocol):
    """The part of a child process that is used here; `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as this process knows."""
        ...


def watch_without_threads() -> None:
    """Have loops wait for children by descriptors, as Python does by itself from 3.12 on.

    Python 3.11 starts a thread for each child. Where a job has filled the task limit, the child
    then starts and the thread does not: a RuntimeError that no caller of a process expects.
    """
    if sys.version_info >= (3, 12):
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a kernel before 5.3, or a filter of system calls
        return
    # From 3.12 on it is deprecated, as it is not needed there.
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())  # pyright: ignore[reportDeprecated]


def send_signal(child: Child, number: signal.Signals) -> None:
    """Send a signal to a child, unless it has ended. Its exit status stays available.

    Raises:
        PermissionError: it has another account's rights.
    """
    if child.returncode is not None:
        return
    try:
        pid_fd = os.pidfd_open(child.pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel before 5.3, a filter of system calls, or no descriptor is left
        _send_by_number(child.pid, number)
        return
    try:
        # The descriptor stays with the present process of that number.
        if _is_unreaped(os.P_PIDFD, pid_fd):
            signal.pidfd_send_signal(pid_fd, number)
    except ProcessLookupError:
        pass  # it has been reaped since
    finally:
        os.close(pid_fd)


def _send_by_number(pid: int, number: signal.Signals) -> None:
    """Send the signal by number, for a kernel without descriptors of processes.

    A number is no other process's while its child is unreaped, which it was a moment ago.
    """
    try:
        if _is_unreaped(os.P_PID, pid):
            os.kill(pid, number)
    except ProcessLookupError:
        pass


def _is_unreaped(id_type: int, number: int) -> bool:
    """True if this is a child of this process, running or ended; the check does not reap it."""
    try:
        os.waitid(id_type, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
