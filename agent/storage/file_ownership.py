"""Gives files that root creates in a node's state directory to the directory's owner.

The files are closed to all other accounts. An agent that is not root could otherwise not go on with
files left by root's `--go-home`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

ROOT = 0
WORKER_DEPTH = 2
"""Depth of a worker's directory; files of its job below it stay the job's."""


def give(fd: int, state_dir: Path) -> None:
    """Give files that root made in a state directory to the directory's owner.

    A file that has another name besides is left alone: the directory's owner could have linked one
    of root's there. A file that cannot be given is left too; its owner gets the error when opening
    it.
    """
    if os.geteuid() != ROOT:
        return
    with contextlib.suppress(OSError):
        owner, found = state_dir.stat(), os.fstat(fd)
        is_alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        is_fit = is_alone or stat.S_ISDIR(found.st_mode)
        if found.st_uid == ROOT != owner.st_uid and is_fit:
            os.fchown(fd, owner.st_uid, owner.st_gid)


def give_all(state_dir: Path) -> None:
    """Give away everything that root has left there, workers' directories included.

    It follows no link.
    """
    if os.geteuid() != ROOT:
        return
    with contextlib.suppress(OSError):
        if state_dir.stat().st_uid == ROOT:
            return
        for path, directories, files, directory_fd in os.fwalk(state_dir):
            for name in (*directories, *files):
                _give_named(name, directory_fd, state_dir)
            if len(Path(path).relative_to(state_dir).parts) >= WORKER_DEPTH:
                directories.clear()


def _give_named(name: str, directory_fd: int, state_dir: Path) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        fd = os.open(name, flags, dir_fd=directory_fd)
        try:
            give(fd, state_dir)
        finally:
            os.close(fd)
