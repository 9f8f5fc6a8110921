"""Creates the directory of a worker.

With an account for jobs the agent is root, and so is each shim until it has read its order and
given the directory away. After that, no process of root may create a file there: the directory's
owner could place a link where root, or PID 1 for it, opens a file or changes its owner.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from agent.shim import sockets as shim_sockets
from agent.workers.lost import is_shim_silent
from agent.workers.process_marks import kill_marked
from agent.workers.spec import Account

PASSABLE = 0o711
"""Mode of the directory around them: a job's user reaches its own, and sees no other's name."""


def make_directory(directory: Path, account: Account | None) -> bool:
    """Make the directory, or leave the one of an earlier start of the worker.

    Returns True if a shim is to be started there; otherwise one exists, without a first status.

    account: the account that the worker will run as; None is the agent's own user. A directory that
    was already given to it is made again, and the remains of a dead shim that run there are killed.

    Raises:
        OSError: the disk refuses it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    if account is not None:
        directory.parent.chmod(PASSABLE)  # the umask may have closed it
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if account is None or directory.lstat().st_uid == os.geteuid():
            return True
        if is_shim_silent(directory):
            return False
        kill_marked(directory)
        remove_directory(directory)
        directory.mkdir(mode=0o700)
    return True


def remove_directory(directory: Path) -> None:
    """Remove the directory, as far as the disk allows.

    This includes files that its shim had to put elsewhere and left there because it was killed.
    """
    shim_sockets.remove_folder(str(directory))
    if directory.is_symlink():  # a file of its job, in place of it
        with contextlib.suppress(OSError):
            directory.unlink()
    with contextlib.suppress(RecursionError):  # a job may nest directories as deep as it likes
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        if os.path.lexists(directory):
            _remove_deep(directory)


def _remove_deep(directory: Path) -> None:
    """Remove a tree of any depth with two descriptors.

    Each directory in it moves up to the top before it is emptied. No link is followed.

    Raises:
        OSError: the disk refuses; part of the tree is left.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    top = os.open(directory, flags)
    try:
        while below := _emptied(top):
            for name in below:
                fd = os.open(name, flags, dir_fd=top)
                try:
                    for inner in _emptied(fd):
                        # A name that no job can have used before.
                        os.rename(inner, os.urandom(16).hex(), src_dir_fd=fd, dst_dir_fd=top)
                finally:
                    os.close(fd)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    directory.rmdir()


def _emptied(fd: int) -> list[str]:
    """Remove the files of an open directory; the names of the directories in it."""
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=fd)
    return [name for name, is_directory in found if is_directory]
