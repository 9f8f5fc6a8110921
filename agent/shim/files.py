"""Files that a shim reads and writes: its directory, /proc, the worker's log and checkpoints.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable

from common.procfs import TERMINAL_STATES as TERMINAL_STATES
from common.procfs import boot_id as boot_id
from common.procfs import start_ticks as start_ticks
from common.procfs import stat_fields, ticks_of

SPEC_FILE = "spec.json"
STATUS_FILE = "status.json"
SPARE_FILE = "status.json.spare"
LOCK_FILE = "lock"
LOG_FILE = "worker.log"
OLD_LOG_FILE = "worker.log.1"
CONTROL_SOCKET = "control.sock"
JOB_SOCKET = "job.sock"

SPARE_BYTES = 16_384
"""More than any status needs: its texts are short, and a path may have 4096 bytes."""
COPY_BYTES = 256 * 1024
"""Bytes of a log copied at a time; a shim stays small."""
BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system (inode(7))."""
MAX_PROBED_FILES = 100_000
UNFINISHED_SUFFIXES = (".tmp", ".temp", ".part", ".partial", ".incomplete")
SETTLE_S = 0.1
"""A checkpoint that still changes between two looks this far apart is not complete."""


def boot_time_s() -> float:
    """Seconds since boot, suspended time included, as `common.clock.SystemClock.now_s`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_disk_error(error: BaseException) -> bool:
    """True if a disk is full, read-only or broken: no fault of a job or of its node's settings."""
    is_disk = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
    return isinstance(error, OSError) and error.errno in is_disk


def descendants(root_pid: int) -> dict[int, int]:
    """Every process below `root_pid` without zombies, whatever its session or group, and its start.

    The start is as in `start_ticks`: a number can be another process's after the look.
    """
    children: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = stat_fields(int(name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
            started[int(name)] = ticks_of(fields)
    found: list[int] = []
    todo = [root_pid]
    while todo:
        below = children.get(todo.pop(), [])
        found.extend(below)
        todo.extend(below)
    return {pid: started[pid] for pid in found if started[pid]}


def _encoded(value: dict[str, object]) -> bytes:
    """JSON that every reader accepts: an unpaired surrogate, `\\ud800`, becomes `?`."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="replace")


def write_json(
    path: str,
    value: dict[str, object],
    *,
    is_durable: bool,
    mode: int = 0o640,
    owned: Callable[[int], None] | None = None,
) -> None:
    """Replace a file in one step; durable means that it survives a power cut as well.

    owned: gets the new file's descriptor before the file has its name, to give it to its owner.

    Raises:
        OSError: the disk refuses it; the old file is whole.
    """
    temporary = f"{path}.new"
    # Never into an existing file: the agent writes too, and a job could place a link to any file.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        if owned is not None:
            owned(fd)
        data = _encoded(value)
        while data:
            data = data[os.write(fd, data) :]
        if is_durable:
            os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):  # a full disk needs that space back
            os.unlink(temporary)
        raise
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
    """Reserve the disk space that one more file will need, while there is some.

    Raises:
        OSError: there is none.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        os.posix_fallocate(fd, 0, SPARE_BYTES)
    finally:
        os.close(fd)


def write_spare(spare: str, path: str, value: dict[str, object]) -> None:
    """Replace a file in one step on a disk that may be full: the spare's space is used, once.

    spare: a file whose content is needed no more. No link is followed, and no file with a second
    name is written: the directory is its job's, and the caller may be root.

    Raises:
        OSError: there is no spare, or the disk refuses even that; the old file is whole.
    """
    fd = os.open(spare, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.EINVAL, "no plain file of one name", spare)
        data = _encoded(value)
        size = len(data)
        while data:
            data = data[os.write(fd, data) :]
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(spare, path)


def write_anyhow(path: str, value: dict[str, object], *spares: str, is_durable: bool) -> None:
    """Replace a file in one step; on a full disk, use the space of the first large enough spare.

    That spare is gone then.

    Raises:
        OSError: why the disk took neither.
    """
    try:
        write_json(path, value, is_durable=is_durable)
    except OSError:
        for spare in spares:
            with contextlib.suppress(OSError):
                write_spare(spare, path, value)
                return
        raise


def overwrite(path: str, value: dict[str, object]) -> None:
    """Write an object over the one in a file, within its space: for a full disk with no spare left.

    Spaces fill the rest, so the file holds one object at any time.

    Raises:
        OSError: the space is too small, or the disk is read-only; the old object is whole.
    """
    data = _encoded(value)
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if len(data) > max(found.st_size, found.st_blocks * BLOCK_BYTES):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.pwrite(fd, data.ljust(found.st_size), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: str) -> dict[str, object] | None:
    """The object in a file; None when the file is missing or holds no object."""
    try:
        with open(path, "rb") as file:
            value: object = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return as_object(value)


def as_object(value: object) -> dict[str, object] | None:
    """A value as a JSON object; None for anything else."""
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


def is_locked(path: str) -> bool:
    """True if a process holds a file's lock, without taking it; a lock ends with its process.

    A file that exists and cannot be inspected counts as locked: that proves no end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# --- log ------------------------------------------------------------------------------------


def open_log(path: str) -> int:
    """The worker's log, opened so that the file can be emptied under its writers."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def cap_log(log_fd: int, path: str, old_path: str, max_bytes: int) -> bool:
    """Move a log that outgrew its size aside; True if it did.

    Workers write straight into the file, so that no death of a shim can give them SIGPIPE; the file
    is copied and emptied in place. Output between the two is lost; a note in the log records that.

    Its size is the space that it takes. A worker that has opened /dev/stdout writes on at its old
    place in the emptied file: that leaves a hole, which would be moved over the real part.

    Raises:
        OSError: the disk has no room for the copy, and the log is unchanged.
    """
    found = os.fstat(log_fd)
    size = found.st_size
    if min(size, found.st_blocks * BLOCK_BYTES) <= max_bytes:
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


def cut_log(path: str, max_bytes: int) -> bool:
    """Keep only the end of a log without writers; True if it was too long.

    It works in place, front to back, because that very log may have filled the disk.

    Raises:
        OSError: the file cannot be read or written.
    """
    note = f"[aryl: log cut at {max_bytes} bytes]\n".encode()
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        ahead = os.fstat(fd).st_size - max_bytes
        if ahead <= 0:
            return False
        at = len(note)
        while data := os.pread(fd, COPY_BYTES, ahead + at):
            at += os.pwrite(fd, data, at)
        os.pwrite(fd, note, 0)
        os.ftruncate(fd, at)
    finally:
        os.close(fd)
    return True


# --- checkpoints ----------------------------------------------------------------------------


def newest_mtime_ns(path: str) -> int:
    """When the newest file at a path last changed; 0 when there is none.

    A directory counts as its newest non-empty file. The time is on the storage's own clock and is
    only ever compared with an earlier reading of the same storage: clocks of two machines are not
    compared.
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
    """True if a save looks finished: by its name, not empty, and no longer changing."""
    if path.rstrip("/").endswith(UNFINISHED_SUFFIXES):
        return False
    before = look(path)
    time.sleep(SETTLE_S)
    return before[0] > 0 and look(path) == before


def is_below(path: str, root: str) -> bool:
    """True if a path is `root` or lies in it, links resolved."""
    path, root = os.path.realpath(path), os.path.realpath(root)
    return path == root or path.startswith(root.rstrip("/") + "/")
