"""Which server command a node runs now, in a file beside the node's lock, and the end of one that
outlived its agent. Must not know what commands do, nor when a node moves.

An agent that is killed takes no command along: it is a session of its own. One that takes a
node out of its routing would do so long after the next agent has brought the node home.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from agent import sessions
from agent.shim_files import boot_id, start_ticks
from common.clock import Clock

log = logging.getLogger(__name__)

LOOK_S = 0.02


class CommandRecord:
    """The file; the node's lock must be held. What it names is proven by boot, pid and start."""

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
            log.warning("%s: %s; a command would outlive its agent", self._path, error)

    def running(self) -> int | None:
        """Pid of the leader, if that very process is alive; None: it has ended, or none began."""
        try:
            named_boot_id, pid, ticks = self._path.read_text("ascii").split()
            leader, began = int(pid), int(ticks)
        except (OSError, ValueError):
            return None
        is_it = named_boot_id == boot_id() and began > 0 and start_ticks(leader) == began
        return leader if is_it else None


async def end_left(state_dir: Path, *, clock: Clock) -> None:
    """SIGKILL the command that an agent before this one left running, and wait until it is gone.

    Whatever a command leaves behind that has ended by itself is its own affair, as ever: it may be
    the server.
    """
    leader = CommandRecord(state_dir).running()
    if leader is None:
        return
    log.warning("command %d has outlived its agent and is ended", leader)
    try:
        sessions.end(leader)
    except PermissionError as error:
        log.error("command %d cannot be ended: %s; it may yet move the server", leader, error)
        return
    try:
        async with clock.timeout(sessions.END_S):
            while sessions.living(leader):
                await clock.sleep(LOOK_S)
    except TimeoutError:
        log.error("command %d does not end; it may yet move the server", leader)
