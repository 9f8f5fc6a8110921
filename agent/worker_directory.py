"""The directory of a worker, made for it. Must not know orders, units or what a shim does there.

With an account for jobs the agent is root, and so is each shim until it has read its order and
given the directory away. From then on nothing of root may begin there again: whoever has the
directory could put a link where root, or PID 1 for it, opens or gives away a file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agent import shim_sockets
from agent.withdrawn import is_shim_silent
from agent.worker_record import kill_marked
from agent.worker_spec import Account

PASSABLE = 0o711
"""Of the directory around them: a job's user comes to its own, and sees no other's name."""


def make_directory(directory: Path, account: Account | None) -> bool:
    """Make it, or leave the one that is there: of another start of the worker, or one cut short.
    Whether a shim is to be started there; there is one otherwise, which has not said a word yet.

    account: as whom the worker will run; None is the agent's own user. One that was already given
        to it is made anew, and what a dead shim left running of it is killed.

    Raises:
        OSError: the disk does not take it.
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
        shim_sockets.remove_folder(str(directory))
        shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
    return True


def remove_directory(directory: Path) -> None:
    """Remove it, as far as the disk lets, with what its shim had to put elsewhere and left there
    because it was killed."""
    shim_sockets.remove_folder(str(directory))
    shutil.rmtree(directory, ignore_errors=True)
