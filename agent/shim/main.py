"""The shim: supervisor of one worker, which lives on without its agent.

    python -I -S agent/shim/main.py [--detach] DIRECTORY

It runs the command of DIRECTORY/spec.json, keeps DIRECTORY/status.json true, takes orders on
DIRECTORY/control.sock and ends by itself after its worker. Contract: docs/job-contract.md. Standard
library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import os
import sys

PR_SET_CHILD_SUBREAPER = 36
READY_FLAG = "--ready"
DETACH_FLAG = "--detach"
CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The directory with the package `agent`: a script has only its file's folder on its path."""


def become_reaper() -> None:
    """Become the parent of every orphan below.

    torchrun gives each rank a session of its own, which no kill of a process group reaches.
    """
    import ctypes  # only here: the restarted shim does without its memory

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def become_user(directory: str, account: dict[str, object]) -> None:
    """Give up root for the job's user, who then owns the directory; its group still reads it.

    Raises:
        OSError: not root, or the directory is missing.
        ValueError: the account is root's, or the path is not a directory.
    """
    uid, gid, name = account.get("uid"), account.get("gid"), account.get("name")
    if not isinstance(uid, int) or not isinstance(gid, int) or uid <= 0:
        raise ValueError(f"account: {account!r}, expected uid and gid of a user who is not root")
    # Checked after the account was read: it never becomes root's again, so only that account wrote
    # it.
    if os.lstat(directory).st_uid != os.geteuid():
        raise ValueError(f"{directory}: a job has had access already and could lead root anywhere")
    os.chown(os.path.join(directory, "spec.json"), uid, -1)
    os.chown(directory, uid, -1)
    os.chmod(directory, 0o770)
    if isinstance(name, str) and name:
        os.initgroups(name, gid)
    else:
        os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)


def detach() -> None:
    """Leave the parent, so that the starter's death has no effect here."""
    if os.fork():
        os._exit(0)
    os.setsid()


def prepare(arguments: list[str]) -> None:
    """Do what only a first process can do, then start again with a small memory."""
    directory = os.path.abspath(arguments[-1])
    if DETACH_FLAG in arguments:
        detach()
    become_reaper()
    sys.path.append(CHECKOUT)
    from agent.shim import files as shim_files

    spec = shim_files.read_json(os.path.join(directory, shim_files.SPEC_FILE)) or {}
    account = shim_files.as_object(spec.get("account"))
    if account is not None:
        become_user(directory, account)
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, READY_FLAG, directory])


def main(arguments: list[str]) -> int:
    """Exit status 0 when the worker's end is on disk, whatever it was; 2 for a wrong call."""
    if not arguments or arguments[-1].startswith("-"):
        os.write(2, b"usage: main.py [--detach] DIRECTORY\n")
        return 2
    if READY_FLAG not in arguments:
        prepare(arguments)
    sys.path.append(CHECKOUT)
    from agent.shim import supervisor as shim_supervisor

    return shim_supervisor.supervise(arguments[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
