"""Looks at checkpoints from a separate process, because storage may hang for ever.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal

from agent.shim import files as shim_files
from agent.shim import sockets as shim_sockets


class Probe:
    """One look at a path by a forked child; its answer is read from `fd` when that is readable.

    is_settling: look twice, to see whether the path still changes.
    root: the path counts as complete only below this directory, where one is given.

    Raises:
        OSError: there is no process or descriptor left for it.
    """

    def __init__(self, path: str, *, is_settling: bool, root: str = "") -> None:
        self.path = path
        self.fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.fd)
            os.close(write_fd)
            raise
        if self.pid == 0:
            _look_and_leave(path, write_fd, is_settling=is_settling, root=root)
        os.close(write_fd)

    def answer(self) -> tuple[int, bool]:
        """The newest change in nanoseconds on the storage's clock, and whether it looked complete.

        Raises:
            BlockingIOError: it is still looking.
        """
        try:
            found = shim_sockets.parse(os.read(self.fd, 4096))
        except BlockingIOError:
            raise
        except OSError:
            found = None
        newest_ns = (found or {}).get("newest_ns")
        is_complete = (found or {}).get("is_complete")
        return (newest_ns if isinstance(newest_ns, int) else 0), is_complete is True

    def close(self) -> None:
        """Stop waiting; a child that hangs in the storage dies when the storage responds."""
        os.close(self.fd)
        with contextlib.suppress(ProcessLookupError):  # reaped already
            os.kill(self.pid, signal.SIGKILL)


def _look_and_leave(path: str, write_fd: int, *, is_settling: bool, root: str) -> None:
    """In the child: answer and end, without ever touching the shim's resources."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The shim's lock must end with the shim, even while this child hangs.
        kept_fd = os.dup2(write_fd, 3, inheritable=False) if write_fd != 3 else 3
        os.closerange(4, 4096)
        is_ours = not root or shim_files.is_below(path, root)
        is_complete = is_ours and (not is_settling or shim_files.is_complete(path))
        newest_ns = shim_files.newest_mtime_ns(path)
        answer = json.dumps({"newest_ns": newest_ns, "is_complete": is_complete})
        os.write(kept_fd, answer.encode())
    finally:
        os._exit(0)
