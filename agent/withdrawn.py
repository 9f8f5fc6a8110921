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
from agent.worker_record import WorkerRecord, kill_marked
from common.messages import WorkerPhase
from common.model import StopReason


def withdraw(directory: Path, reason: StopReason, boot_id: str, now_s: float) -> None:
    """Say that a worker has ended which never began; nothing where there is no sign of a start, one
    has a status already, or its shim lives, which then has to be told. One that did begin, and lost
    shim and status, is killed and over when it is dead.

    Raises:
        OSError: the disk does not take it.
    """
    status = directory / shim_files.STATUS_FILE
    if status.exists() or not directory.is_dir():
        return
    with _lock(directory) as is_free:
        if not is_free or status.exists() or kill_marked(directory):
            return
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
