"""A worker that must not begin any more, though its shim may be on its way. Must not know orders,
sockets or who asks.

A shim holds the lock of its directory from before its worker is there, and leaves a directory alone
that has a status. So whoever has the lock and writes one has decided for good that nothing runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from agent import shim_files
from agent.lost_workers import LostWorkers, has_begun
from agent.worker_record import WorkerRecord
from common.messages import WorkerPhase
from common.model import StopReason, WorkerKey


def withdraw(
    key: WorkerKey,
    directory: Path,
    reason: StopReason,
    boot_id: str,
    now_s: float,
    *,
    lost: LostWorkers,
    uid: int,
) -> bool:
    """Say that a worker has ended which never began; nothing where one has a status already, or its
    shim lives, which then has to be told. Whether it did begin, and has lost its shim or all that
    its shim could be told by: then it is being killed, by `lost`, and over when it is dead.

    uid: of the worker's account.

    Raises:
        OSError: the disk does not take it.
    """
    status = directory / shim_files.STATUS_FILE
    if status.exists():
        return False
    if not _has_lock_place(directory) and any(lost.end_left(key, directory, uid)):
        return True
    if not directory.is_dir() or directory.is_symlink():
        return False
    with _lock(directory) as is_free:
        is_reached = not is_free and os.path.lexists(directory / shim_files.CONTROL_SOCKET)
        if is_reached or status.exists():
            return False
        if has_begun(directory, uid):
            return any(lost.end_left(key, directory, uid))
        if not is_free:  # it is on its way
            return False
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
        shim_files.write_json(str(status), msgspec.to_builtins(record), is_durable=False)
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
    with _lock(directory) as is_free:
        return not is_free


@contextlib.contextmanager
def _lock(directory: Path) -> Generator[bool]:
    """The shim's lock, as long as the block runs; whether it could be had.

    A link is not followed: the directory is its job's, and the agent may be root.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(directory / shim_files.LOCK_FILE, flags, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
