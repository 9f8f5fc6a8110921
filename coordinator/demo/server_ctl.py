"""Hooks that start, stop, revive and probe a node's pretend inference server.

Must not know more of Aryl than `common.procfs`: a hook runs for every loan, so
`python -I -S server_ctl.py` must cost tens of milliseconds. A server is known by pid *and* start
time (and boot): a recycled pid is never signalled.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import signal
import sys
from collections.abc import Generator, Sequence

if not __package__:  # run by its path, as a hook is
    sys.path.append(os.path.abspath(__file__ + "/../../.."))  # noqa: PTH100 - pathlib costs start-up time
from common.procfs import boot_id, start_ticks

EXIT_NOT_RUNNING = 3
"""The exit status of `status` for a stopped service, as in init scripts (LSB)."""

EXIT_STILL_RUNNING = 1


class Files:
    """The state directory of one node's server."""

    def __init__(self, directory: str, node: str) -> None:
        os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - pathlib costs start-up time
        self.pid = os.path.join(directory, f"server-{node}.pid")  # noqa: PTH118 - as above
        self.lock = os.path.join(directory, f"server-{node}.lock")  # noqa: PTH118 - as above
        self.log = os.path.join(directory, f"server-{node}.log")  # noqa: PTH118 - as above


@contextlib.contextmanager
def locked(files: Files, how: int = fcntl.LOCK_EX) -> Generator[None, None, None]:
    """One hook at a time per node: two starts at once must not make two servers."""
    number = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(number, how)
        yield
    finally:
        os.close(number)


def _content(path: str) -> str:
    """A file's text; empty when it is missing or its process is gone."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - as above
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def running_pid(files: Files) -> int | None:
    """The pid of the server that the pid file names, if it is that very process."""
    try:
        noted = json.loads(_content(files.pid))
        pid, ticks, boot = int(noted["pid"]), int(noted["start_ticks"]), str(noted["boot_id"])
    except (ValueError, KeyError, TypeError):
        return None
    return pid if boot == boot_id() and 0 < start_ticks(pid) == ticks else None


def has_died(files: Files) -> bool:
    """True if the server was started, is gone, and was not stopped, nor is about to be."""
    if not _is_dead(files):
        return False
    try:
        with locked(files, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return _is_dead(files)
    except BlockingIOError:
        return False


def _is_dead(files: Files) -> bool:
    return bool(_content(files.pid)) and running_pid(files) is None


def start(files: Files, arguments: Sequence[str], variables: Sequence[str]) -> int:
    """Spawn the server in a session of its own unless it runs; returns before it is warm."""
    with locked(files):
        if running_pid(files) is None:
            _start(files, arguments, variables)
        return 0


def revive(files: Files) -> int:
    """Start a server that has died with its last arguments; a stopped one stays stopped."""
    with locked(files):
        if _is_dead(files):
            noted = json.loads(_content(files.pid))
            _start(files, noted["arguments"], noted["variables"])
        return 0


def _start(files: Files, arguments: Sequence[str], variables: Sequence[str]) -> None:
    here = os.path.abspath(__file__)  # noqa: PTH100 - as above
    root = os.path.dirname(os.path.dirname(os.path.dirname(here)))  # noqa: PTH120 - as above
    environment = dict(os.environ)
    for variable in variables:
        name, _, environment[name] = variable.partition("=")
    paths = (root, environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["PYTHONSAFEPATH"] = "1"
    command = (sys.executable, "-m", "coordinator.demo.server", *arguments)
    pid = _spawn(files, command, environment)
    noted = {
        "pid": pid,
        "start_ticks": start_ticks(pid),
        "boot_id": boot_id(),
        "arguments": list(arguments),
        "variables": list(variables),
    }
    scratch = f"{files.pid}.new"
    with open(scratch, "w", encoding="utf-8") as file:  # noqa: PTH123 - as above
        json.dump(noted, file)
    os.replace(scratch, files.pid)  # noqa: PTH105 - as above


def _spawn(files: Files, command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Start a process by posix_spawn, the cheapest way.

    No fork of this process, no import of subprocess.
    """
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, files.log, appending, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def stop(files: Files, limit_s: float) -> int:
    """End the server: SIGTERM, after `limit_s` SIGKILL; returns when it is gone."""
    with locked(files):
        pid = running_pid(files)
        if pid is not None and not _end_process(files, pid, limit_s):
            return EXIT_STILL_RUNNING
        with contextlib.suppress(FileNotFoundError):
            os.unlink(files.pid)  # noqa: PTH108 - as above
        return 0


def _end_process(files: Files, pid: int, limit_s: float) -> bool:
    """Ask this process to end, then force it; True if it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # The handle pins the process; looking again closes the gap before it was opened.
        if running_pid(files) != pid:
            return True
        return _end(handle, signal.SIGTERM, limit_s) or _end(handle, signal.SIGKILL, 5.0)
    finally:
        os.close(handle)


def _end(handle: int, number: signal.Signals, limit_s: float) -> bool:
    """Signal, then wait: a pidfd turns readable when its process ends."""
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return True
    return bool(select.select([handle], [], [], limit_s)[0])


def status(files: Files) -> int:
    """0 and the pid when it runs, else 3."""
    pid = running_pid(files)
    sys.stdout.write(f"running pid={pid}\n" if pid is not None else "stopped\n")
    return 0 if pid is not None else EXIT_NOT_RUNNING


def main(arguments: Sequence[str] | None = None) -> int:
    """`server_ctl.py start|stop|revive|status`; 0 done, 1 still running, 2 usage, 3 not running."""
    parser = argparse.ArgumentParser(prog="server_ctl.py", description=__doc__)
    parser.add_argument("action", choices=("start", "stop", "revive", "status"))
    parser.add_argument("--node", required=True)
    parser.add_argument("--state-dir", required=True, help="directory of pid file, lock and log")
    parser.add_argument("--port", type=int, help="port of the server; required by start")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--stop-limit-s", type=float, default=10.0, help="time before SIGKILL, in seconds"
    )
    parser.epilog = "What follows -- is passed to the server."
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:cut])
    if any("=" not in variable for variable in given.env):
        parser.error("--env takes NAME=VALUE")
    files = Files(given.state_dir, given.node)
    if given.action == "stop":
        return stop(files, given.stop_limit_s)
    if given.action == "revive":
        return revive(files)
    if given.action == "status":
        return status(files)
    if given.port is None:
        parser.error("start needs --port")
    own = ("--node", given.node, "--port", str(given.port))
    return start(files, (*own, *words[cut + 1 :]), given.env)


if __name__ == "__main__":
    sys.exit(main())
