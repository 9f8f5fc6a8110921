"""Start and stop commands of a node's vLLM, as a unit of systemd would be: a session of its own.

    python vllm_ctl.py start DIRECTORY -- COMMAND...
    python vllm_ctl.py stop DIRECTORY

Standard library alone. Both are idempotent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

STOP_S = 20.0


def _living(path: Path) -> int | None:
    """The process that a file names, by pid and start time."""
    with contextlib.suppress(OSError, ValueError):
        pid, ticks = path.read_text().split()
        if _ticks(int(pid)) == ticks:
            return int(pid)
    return None


def _ticks(pid: int) -> str:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]


def _members(session: int) -> list[int]:
    """Every process of a session: an engine core outlives its API server by a moment."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def start(directory: Path, argv: list[str]) -> None:
    """Have it run; at once where it does."""
    path = directory / "vllm.pid"
    if _living(path) is not None:
        return
    with (directory / "vllm.log").open("ab") as log:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    path.write_text(f"{child.pid} {_ticks(child.pid)}")


def stop(directory: Path) -> None:
    """Have none; SIGTERM to the server, which ends its engine, and SIGKILL to what is left."""
    pid = _living(directory / "vllm.pid")
    if pid is None:
        return
    handle = os.pidfd_open(pid)
    session = _members(pid)
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    select.select([handle], [], [], STOP_S)
    for member in {*session, *_members(pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    os.close(handle)


def main() -> None:
    """One command; the other one waits for it."""
    action, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if action == "start":
            start(directory, sys.argv[4:])
        else:
            stop(directory)


if __name__ == "__main__":
    main()
