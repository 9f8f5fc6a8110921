"""What a shim reads and writes: its directory, /proc, the worker's log and checkpoints. Must not
know sockets or the agent's types.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time

SPEC_FILE = "spec.json"
STATUS_FILE = "status.json"
SPARE_FILE = "status.json.spare"
LOCK_FILE = "lock"
LOG_FILE = "worker.log"
OLD_LOG_FILE = "worker.log.1"
CONTROL_SOCKET = "control.sock"
JOB_SOCKET = "job.sock"

SPARE_BYTES = 16_384
"""More than any status has: its texts are short, and a path may have 4096 bytes."""
MAX_PROBED_FILES = 100_000
UNFINISHED_SUFFIXES = (".tmp", ".temp", ".part", ".partial", ".incomplete")
SETTLE_S = 0.1
"""A checkpoint that still changes between two looks this far apart is not complete."""

TERMINAL_STATES = "ZXx"


def boot_time_s() -> float:
    """Seconds since boot, suspended time included, as `common.clock.SystemClock.now_s`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when it is gone or only a zombie."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in TERMINAL_STATES else 0


def descendants(root_pid: int) -> list[int]:
    """Every process below `root_pid`, zombies left out, whatever its session or group."""
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat_fields(int(name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
            if fields[0] not in TERMINAL_STATES:
                alive.add(int(name))
    found: list[int] = []
    todo = [root_pid]
    while todo:
        below = children.get(todo.pop(), [])
        found.extend(below)
        todo.extend(below)
    return [pid for pid in found if pid in alive]


def _encoded(value: dict[str, object]) -> bytes:
    """As JSON that every reader takes: `\\ud800` is none, so half a surrogate pair becomes `?`."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="replace")


def write_json(path: str, value: dict[str, object], *, is_durable: bool) -> None:
    """Replace a file in one step; durable means that it survives a power cut as well.

    Raises:
        OSError: the disk does not take it; the old file is whole.
    """
    temporary = f"{path}.new"
    # Never into what is there: the agent writes too, and a job could lead it to any file by a link.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        data = _encoded(value)
        while data:
            data = data[os.write(fd, data) :]
        if is_durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    if is_durable:
        directory_fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)


def make_spare(path: str) -> None:
    """Take the room on the disk that one more file will need, while there is some.

    Raises:
        OSError: there is none.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        os.posix_fallocate(fd, 0, SPARE_BYTES)
    finally:
        os.close(fd)


def write_spare(spare: str, path: str, value: dict[str, object]) -> None:
    """Replace a file in one step on a disk that may be full: the spare's room is used, once.

    Raises:
        OSError: there is no spare, or the disk does not take even that; the old file is whole.
    """
    fd = os.open(spare, os.O_WRONLY | os.O_CLOEXEC)
    try:
        data = _encoded(value)
        size = len(data)
        while data:
            data = data[os.write(fd, data) :]
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(spare, path)


def read_object(text: str | bytes) -> dict[str, object]:
    """The JSON object that a text is; empty for anything else."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return as_object(value) or {}


def read_json(path: str) -> dict[str, object] | None:
    """The object in a file; None when there is no such file or it holds no object."""
    try:
        with open(path, "rb") as file:
            value: object = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return as_object(value)


def as_object(value: object) -> dict[str, object] | None:
    """A JSON object as what it is; None for anything else."""
    if not isinstance(value, dict):
        return None
    return {str(key): item for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def take_lock(path: str) -> int | None:
    """A descriptor that holds the file's lock for as long as it is open; None when it is taken."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


# --- log ------------------------------------------------------------------------------------


def open_log(path: str) -> int:
    """The worker's log, opened so that the file can be emptied under its writers."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def cap_log(log_fd: int, path: str, old_path: str, max_bytes: int) -> bool:
    """Move a log that outgrew its size aside; whether it did.

    Workers write straight into the file, so that no death of a shim can give them SIGPIPE; the
    file is copied and emptied in place. What is written between the two is lost; the note says so.

    Raises:
        OSError: the disk has no room for the copy, and the log is as it was.
    """
    size = os.fstat(log_fd).st_size
    if size <= max_bytes:
        return False
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    target = os.open(old_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        offset = size - max_bytes
        while offset < size:
            sent = os.sendfile(target, source, offset, size - offset)
            if sent == 0:
                break
            offset += sent
    except OSError:
        os.ftruncate(target, 0)
        raise
    finally:
        os.close(source)
        os.close(target)
    os.ftruncate(log_fd, 0)
    os.write(log_fd, f"[aryl: log cut at {max_bytes} bytes; before this: {old_path}]\n".encode())
    return True


# --- checkpoints ----------------------------------------------------------------------------


def newest_mtime_ns(path: str) -> int:
    """When the newest file at a path last changed; 0 when there is none.

    A directory counts as its newest non-empty file. Read on the storage's own clock and only ever
    compared with an earlier reading of the same storage: clocks of two machines never are.
    """
    return look(path)[0]


def look(path: str) -> tuple[int, int, int]:
    """Newest change, total size in bytes and number of files at a path."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    if not stat.S_ISDIR(found.st_mode):
        return (found.st_mtime_ns, found.st_size, 1) if found.st_size else (0, 0, 0)
    newest_ns = size_bytes = count = 0
    todo = [path]
    while todo and count < MAX_PROBED_FILES:
        for entry in _entries(todo.pop()):
            try:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                    continue
                found = entry.stat()
            except OSError:
                continue
            count += 1
            size_bytes += found.st_size
            if found.st_size:
                newest_ns = max(newest_ns, found.st_mtime_ns)
    return newest_ns, size_bytes, count


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def is_complete(path: str) -> bool:
    """Whether a save looks finished: named as such, not empty, and no longer changing."""
    if path.rstrip("/").endswith(UNFINISHED_SUFFIXES):
        return False
    before = look(path)
    time.sleep(SETTLE_S)
    return before[0] > 0 and look(path) == before


def is_below(path: str, root: str) -> bool:
    """Whether a path is `root` or lies in it, links resolved."""
    path, root = os.path.realpath(path), os.path.realpath(root)
    return path == root or path.startswith(root.rstrip("/") + "/")


# --- what a worker needs before it can start ------------------------------------------------


def find_command(command: str, search_path: str, workdir: str) -> str:
    """The program that a command names, as execvpe would find it; empty when there is none."""
    candidates = (
        [os.path.join(workdir, command)]
        if "/" in command
        else [os.path.join(folder or ".", command) for folder in search_path.split(":")]
    )
    for candidate in candidates:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return ""


def refusal(workdir: str, checkpoint_path: str, command: str, search_path: str) -> str:
    """Why this node cannot run a worker, or the empty string; asks as whoever calls it."""
    if not os.path.isdir(workdir):
        return f"workdir {workdir!r} is not a directory on this node"
    if not os.access(workdir, os.R_OK | os.X_OK):
        return f"workdir {workdir!r} cannot be entered by the job's user"
    if checkpoint_path:
        place = os.path.join(workdir, checkpoint_path)
        if not os.path.isdir(place):
            place = os.path.dirname(place.rstrip("/"))
        if not os.path.isdir(place):
            return f"checkpoint.path {checkpoint_path!r}: {place!r} is not a directory on this node"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"checkpoint.path {checkpoint_path!r}: the job's user cannot write {place!r}"
    if not find_command(command, search_path, workdir):
        return f"command {command!r} was not found on PATH {search_path!r}"
    return ""


def error_text(number: int) -> str:
    """An error number as people know it."""
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"


if __name__ == "__main__":  # agent.reserve asks this way, as the job's user
    question = read_object(sys.argv[1])
    sys.stdout.write(refusal(**{name: str(value) for name, value in question.items()}))
