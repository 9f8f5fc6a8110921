"""Which server command a node runs now, in a file beside the node's lock, and the end of one that
outlived its agent. Must not know what commands do, nor when a node moves.

An agent that is killed takes no command along: it is a session of its own. One that takes a
node out of its routing would do so long after the next agent has brought the node home.
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
"""What the name of its output begins with, which the kernel still tells when no directory has it
(proc(5))."""


class CommandRecord:
    """The file; the node's lock must be held. What it names is proven by boot, pid and start, or
    where the boot has two names by what the process itself has of an agent."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "command"

    def write(self, pid: int) -> None:
        """Name the leader of a command's session, before it does anything.

        Written in place and not synced: it must outlive a process, no boot. On a full disk it has
        the blocks of the one before. One that has ended needs no removal: no process is it again.
        """
        line = f"{boot_id()} {pid:010d} {start_ticks(pid):020d}\n".encode("ascii")
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, line, 0)
            finally:
                os.close(fd)
        except OSError as error:  # a node that did not come home for it would be the greater harm
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
    """Whether a process was begun as a server command: it leads a session, and has the variable or
    writes where commands do. `env -i` takes the one from it, a redirection the other.

    Another boot id is no proof that it is another's: in a container the file may be masked for who
    wrote it or for whoever looks. No process outlives a boot, and none of another boot has the
    number, the start and the marks of this one. Of one that waits in the kernel its environment,
    which is in its own memory, is not asked for: whoever did might wait with it.
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
    """Whether this is the file, or the memory, that an agent gave a command to write to."""
    try:
        target = Path(f"/proc/{pid}/fd/{fd}").readlink()
    except OSError:  # as above, or it is closed
        return False
    return target.name.removeprefix("memfd:").startswith(OUTPUT_PREFIX)


async def end_left(state_dir: Path, *, clock: Clock) -> None:
    """SIGKILL the command that an agent before this one left running, and wait until it is gone.

    Whatever a command leaves behind that has ended by itself is its own affair, as ever: it may be
    the server.
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
