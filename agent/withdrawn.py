"""A worker that must not begin any more, though its shim may be on its way. Must not know orders,
sockets or who asks.

A shim holds the lock of its directory from before its worker is there, and leaves a directory alone
that has a status. So whoever has the lock and writes one has decided for good that nothing runs.
Where no disk takes a status the agent keeps the lock until one does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from agent import shim_files
from agent.lost_workers import LostWorkers, has_begun
from agent.worker_record import WorkerRecord, write_record
from common.messages import WorkerPhase
from common.model import StopReason, WorkerKey


class HeldBack:
    """Workers that were withdrawn while no disk took a status: their locks, until a disk does.

    A shim that comes meanwhile finds the lock taken and leaves.
    """

    def __init__(self) -> None:
        self._kept: dict[WorkerKey, tuple[Path, WorkerRecord, int | None]] = {}

    def __contains__(self, key: WorkerKey) -> bool:
        return key in self._kept

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, key: WorkerKey, directory: Path, record: WorkerRecord, fd: int | None) -> None:
        """Remember a worker. fd: its lock, None where the disk has no room for a lock either."""
        self.forget(key)
        self._kept[key] = (directory, record, None if fd is None else os.dup(fd))

    def write(self) -> None:
        """Write those statuses that a disk takes now."""
        for key, (directory, record, _) in list(self._kept.items()):
            with contextlib.suppress(OSError):
                has_status = (directory / shim_files.STATUS_FILE).exists()
                if has_status or not directory.is_dir() or write_record(directory, record):
                    self.forget(key)

    def forget(self, key: WorkerKey) -> None:
        """Let a worker's lock go."""
        _, _, fd = self._kept.pop(key, (None, None, None))
        if fd is not None:
            os.close(fd)


def withdraw(
    key: WorkerKey,
    directory: Path,
    reason: StopReason,
    boot_id: str,
    now_s: float,
    *,
    lost: LostWorkers,
    held_back: HeldBack,
    uid: int,
) -> bool:
    """Say that a worker has ended which never began; nothing where one has a status already, or its
    shim lives, which then has to be told. Whether it did begin, and has lost its shim or all that
    its shim could be told by: then it is being killed, by `lost`, and over when it is dead.

    uid: of the worker's account. held_back: takes a worker whose end no disk takes. A disk that
        cannot be read says nothing of a worker, so its processes alone tell whether it has begun.

    Raises:
        OSError: this process cannot look; the disk is not at fault.
    """
    record = WorkerRecord(
        phase=WorkerPhase.EXITED,
        pid=0,
        start_ticks=0,
        shim_pid=0,
        shim_start_ticks=0,
        boot_id=boot_id,
        started_boot_s=now_s,
        updated_boot_s=now_s,
        ended_boot_s=now_s,
        stop_reason=reason.value,
    )
    try:
        return _withdraw(key, directory, record, lost=lost, held_back=held_back, uid=uid)
    except OSError as error:
        if not shim_files.is_disk_error(error):
            raise
        if not has_begun(directory, uid):  # else its shim was told, and is ended once it is overdue
            held_back.keep(key, directory, record, None)
    return False


def _withdraw(
    key: WorkerKey,
    directory: Path,
    record: WorkerRecord,
    *,
    lost: LostWorkers,
    held_back: HeldBack,
    uid: int,
) -> bool:
    status = directory / shim_files.STATUS_FILE
    if status.exists():
        return False
    if not _has_lock_place(directory) and any(lost.end_left(key, directory, uid)):
        return True
    if not directory.is_dir() or directory.is_symlink():
        return False
    with _lock(directory) as (is_free, fd):
        is_reached = not is_free and os.path.lexists(directory / shim_files.CONTROL_SOCKET)
        if is_reached or status.exists():
            return False
        if has_begun(directory, uid):
            return any(lost.end_left(key, directory, uid))
        if not is_free:  # it is on its way
            return False
        if not write_record(directory, record):
            held_back.keep(key, directory, record, fd)
    return False


def _has_lock_place(directory: Path) -> bool:
    """Whether a lock may be taken there: a job can put anything where its directory was."""
    lock = directory / shim_files.LOCK_FILE
    is_lock = lock.is_file() if os.path.lexists(lock) else True
    return directory.is_dir() and not directory.is_symlink() and is_lock and not lock.is_symlink()


def is_shim_silent(directory: Path) -> bool:
    """Whether a shim lives that has not said anything of its worker yet: its storage may hang."""
    lock = directory / shim_files.LOCK_FILE
    if (directory / shim_files.STATUS_FILE).exists() or not lock.is_file() or lock.is_symlink():
        return False
    with _lock(directory) as (is_free, _):
        return not is_free


@contextlib.contextmanager
def _lock(directory: Path) -> Generator[tuple[bool, int]]:
    """The shim's lock, as long as the block runs: whether it could be had, and its descriptor.

    A link is not followed: the directory is its job's, and the agent may be root.
    """
    path, flags = directory / shim_files.LOCK_FILE, os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o640)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        fd = os.open(path, os.O_RDONLY | flags)  # which locks as well
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False, fd
    else:
        yield True, fd
    finally:
        os.close(fd)
