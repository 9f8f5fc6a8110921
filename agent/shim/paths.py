"""Checks that a worker's paths and command exist for its user; if not, decides whose fault it is.

It imports no other module of Aryl, because `agent.workers.reserve_check` runs it by its path.
Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

NODE_ERROR = "this node cannot start it"
"""The start of a worker's error if its node, not its command, is at fault."""
JOB_ERRNOS = frozenset(
    [
        errno.E2BIG,
        errno.EACCES,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELIBBAD,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOEXEC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.ETXTBSY,
    ]
)
"""Errors of a wrong path or command in a job (path_resolution(7), execve(2)). For any other, such
as a stale mount or memory, the node has to be repaired."""


def find_command(command: str, search_path: str, workdir: str) -> str:
    """The program that a command names, as execvpe would find it; empty when there is none.

    Raises:
        OSError: there may be one, on storage that fails.
    """
    candidates = (
        [os.path.join(workdir, command)]
        if "/" in command
        else [os.path.join(folder or ".", command) for folder in search_path.split(":")]
    )
    unread: OSError | None = None
    for candidate in candidates:
        try:
            if stat.S_ISREG(_mode(candidate)) and os.access(candidate, os.X_OK):
                return candidate
        except OSError as error:  # the next one may do
            unread = error
    if unread is not None:
        raise unread
    return ""


def _mode(path: str) -> int:
    """Kind and rights of a path; 0 when there is nothing that the job could use.

    Raises:
        OSError: the storage fails, so the answer is unknown.
    """
    try:
        return os.stat(path).st_mode
    except ValueError:  # a zero byte, or text that this machine cannot encode
        return 0
    except OSError as error:
        if error.errno in JOB_ERRNOS:
            return 0
        raise


def _is_dir(path: str) -> bool:
    return stat.S_ISDIR(_mode(path))


def refusal(workdir: str, checkpoint_path: str, command: str, search_path: str) -> str:
    """The path or command of a job that does not work here, and the reason in a second line.

    Empty when all work. The check runs with the caller's rights.

    Raises:
        OSError: its storage fails.
    """
    if not _is_dir(workdir):
        return f"workdir\nworkdir {workdir!r} is not a directory on this node"
    if not os.access(workdir, os.R_OK | os.X_OK):
        return f"workdir\nworkdir {workdir!r} cannot be entered by the job's user"
    if checkpoint_path:
        named = f"checkpoint.path\ncheckpoint.path {checkpoint_path!r}"
        place = os.path.join(workdir, checkpoint_path)
        if not _is_dir(place):
            place = os.path.dirname(place.rstrip("/"))
        if not _is_dir(place):
            return f"{named}: {place!r} is not a directory on this node"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{named}: the job's user cannot write {place!r}"
    if not find_command(command, search_path, workdir):
        return f"command\ncommand {command!r} was not found on PATH {search_path!r}"
    return ""


def error_text(number: int) -> str:
    """The usual text of an error number."""
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"


if __name__ == "__main__":  # agent.workers.reserve_check asks this way, as the job's user
    question = json.loads(sys.argv[1])
    try:
        said = refusal(**{str(name): str(value) for name, value in question.items()})
    except OSError as error:
        sys.stdout.write(f"{error.filename}: {error_text(error.errno or 0)}")
        sys.exit(1)
    sys.stdout.write(said)
