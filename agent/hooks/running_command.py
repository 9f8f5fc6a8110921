"""Records the server command that a node runs now, and ends one that outlived its agent.

The record is a file beside the node's lock. A command has a session of its own, so it survives an
agent that is killed. A leftover unroute command could otherwise take the node out of its routing
long after the next agent has brought the node home.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from agent.proc import sessions
from agent.proc.process_tree import environ_of, leaders, thread_states
from agent.shim.files import boot_id, start_ticks
from agent.storage.node_lock import WAITING_IN_KERNEL
from common.clock import Clock

log = logging.getLogger(__name__)

NODE_VARIABLE = "ARYL_NODE"
"""Each command has it in its environment."""
OUTPUT_PREFIX = "aryl-command-"
"""The start of its output's name, which the kernel still shows when no directory has it
(proc(5))."""


class CommandRecord:
    """The record file; the caller holds the node's lock.

    Boot, pid and start time identify the recorded process. Where the boot has two ids, the marks
    that the process has from an agent identify it.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "command"

    def write(self, pid: int) -> None:
        """Record the leader of a command's session, before it does anything.

        Written in place and not synced: it must outlive a process, not a boot. On a full disk it
        reuses the blocks of the record before. The record of a command that has ended need not be
        removed: no later process matches it.
        """
        line = f"{boot_id()} {pid:010d} {start_ticks(pid):020d}\n".encode("ascii")
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, line, 0)
            finally:
                os.close(fd)
        except OSError as error:  # a node that stays away because of this would be the greater harm
            log.warning("%s: %s; a command may outlive its agent", self._path, error)

    def running(self) -> int | None:
        """Pid of the leader, if that very process is alive; None: it has ended, or none began."""
        try:
            named_boot_id, pid, ticks = self._path.read_text("ascii").split()
            leader, began = int(pid), int(ticks)
        except (OSError, ValueError):
            return None
        if not 0 < began == start_ticks(leader):
            return None
        return leader if named_boot_id == boot_id() or _is_command(leader) else None


def _is_command(pid: int) -> bool:
    """True if a process was begun as a server command.

    It leads a session, and it has the variable or writes where commands do. `env -i` removes the
    first, a redirection the second.

    Another boot id does not prove another process: in a container the boot id may be masked for the
    writer or for the reader. No process outlives a boot, and none of another boot has the number,
    the start and the marks of this one. The environment of a process that waits in the kernel is
    not read: it is in that process's memory, so the reader might wait with it.
    """
    if leaders(pid) != {pid}:
        return False
    if any(_is_output(pid, fd) for fd in (1, 2)):
        return True
    return WAITING_IN_KERNEL not in thread_states(pid) and _has_variable(pid)


def _has_variable(pid: int) -> bool:
    variable = f"{NODE_VARIABLE}=".encode()
    return any(text.startswith(variable) for text in environ_of(pid).split(b"\0"))


def _is_output(pid: int, fd: int) -> bool:
    """True if this is the file, or the memory, that an agent gave a command to write to."""
    try:
        target = Path(f"/proc/{pid}/fd/{fd}").readlink()
    except OSError:  # as above, or it is closed
        return False
    return target.name.removeprefix("memfd:").startswith(OUTPUT_PREFIX)


async def end_left(state_dir: Path, *, clock: Clock) -> None:
    """SIGKILL a command that an earlier agent left running, and wait until it is gone.

    The remains of a command that has ended by itself are left alone: they may be the server.
    """
    leader = CommandRecord(state_dir).running()
    if leader is None:
        return
    log.warning("command %d has outlived its agent; killing it", leader)
    try:
        sessions.end(leader)
    except PermissionError as error:
        log.error("command %d cannot be killed: %s; it may still move the server", leader, error)
        return
    try:
        async with clock.timeout(sessions.END_S):
            await sessions.emptied(leader, clock)
    except TimeoutError:
        who = sessions.left(leader)
        log.error("command %d: %s does not exit; it may still move the server", leader, who)
