"""A worker's directory as the agent reads it: its record, its log, the remains of a dead shim."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import stat
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from agent.shim import files as shim_files
from agent.shim import status as shim_status
from agent.shim import stop as shim_stop
from agent.shim.paths import NODE_ERROR
from agent.workers.process_marks import kill_marked, owner, signal_if
from common.decoding import UNREADABLE
from common.errors import ConfigError
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import STORE_INDEX, TOKEN_PATTERN, Checkpoint, JobId, Progress, WorkerKey

SHIM_LOST = "shim lost"
"""The text for people about a worker whose shim died; `Fault.SHIM_LOST` is for programs."""
MAX_RECORD_BYTES = 4 * shim_files.SPARE_BYTES
"""Far more than a shim writes; a job may write anything there."""
MAX_TEXT_CHARS = shim_status.MAX_TEXT_CHARS
"""Limit of a text for people; the rest is cut. One report carries every worker's text."""

Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ticks = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ExitCode = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Instant = Annotated[float, Meta(ge=0.0, le=1e12)]


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """status.json as a shim writes it; instants are seconds since the boot that it names."""

    phase: WorkerPhase
    pid: Pid
    start_ticks: Ticks
    shim_pid: Pid
    shim_start_ticks: Ticks
    boot_id: str
    started_boot_s: Instant
    updated_boot_s: Instant
    ended_boot_s: Instant | None = None
    exit_code: ExitCode | None = None
    error: str = ""
    detail: str = ""
    progress: Progress | None = None
    checkpoint: Checkpoint | None = None
    checkpoint_boot_s: Instant | None = None
    stop_reason: str | None = None
    stop_stage: str = ""
    stop_boot_s: Instant | None = None
    """When it was ordered to stop; None: never."""
    stop_stages_s: dict[str, Instant] = {}
    garbage_count: Count = 0
    fault: Fault = Fault.NONE
    """Whose fault its end is, by the process that recorded it; a shim marks a node's fault in its
    text (`read_record`)."""

    @property
    def save_over_at_s(self) -> float | None:
        """When a worker that was ordered to stop had saved, or it was plain that it would not.

        It left without, got its signal or was killed: from then on nothing waits for its save. A
        job that reports after its signal that it saves is awaited again.
        """
        stages_s = self.stop_stages_s
        working_s = stages_s.get(shim_stop.WORKING, 0.0)
        gave_up = (shim_stop.RELEASED, shim_stop.SIGNALLED, shim_stop.KILLED)
        after_s = [stages_s[name] for name in gave_up if stages_s.get(name, -1.0) >= working_s]
        over_s = stages_s.get(shim_stop.SAVED, min(after_s, default=None))
        if over_s is None or self.stop_boot_s is None:
            return None
        return self.stop_boot_s + over_s


_decoder = msgspec.json.Decoder(WorkerRecord)


def directory_name(key: WorkerKey) -> str:
    """The name of a worker's directory.

    Raises:
        ConfigError: the job's id is no token, so it could name another place.
    """
    if (
        not re.fullmatch(TOKEN_PATTERN, key.job_id)
        or key.attempt < 0
        or (key.worker_index < 0 and not key.is_store)
    ):
        raise ConfigError(f"key: {key}, expected a token and two counts")
    return str(key)


def key_of(directory: Path) -> WorkerKey | None:
    """The worker whose directory this is; None when the name is no key's."""
    match = re.fullmatch(r"([A-Za-z0-9_-]{1,64})\.(\d{1,9})\.(\d{1,9}|store)", directory.name)
    if match is None:
        return None
    index = STORE_INDEX if match[3] == "store" else int(match[3])
    return WorkerKey(JobId(match[1]), int(match[2]), index)


def read_record(directory: Path) -> WorkerRecord | None:
    """The record of the shim, or of the process that wrote the end in its place.

    None without a file. The fault of an end is in `fault`, whichever version wrote it. The
    directory is its job's, which may have put anything there: no record, or a record that no shim
    writes, is one kind of error, however it is detected.

    Raises:
        msgspec.DecodeError: the file is damaged, cannot be read, or is no longer a file.
        OSError: this process has no descriptor or no memory left to look.
    """
    try:
        fd = _plain(f"{directory}/{shim_files.STATUS_FILE}")
        try:
            data = _bytes_of(fd, MAX_RECORD_BYTES + 1)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if lacks_means(error):
            raise
        raise msgspec.DecodeError(str(error)) from error
    if len(data) > MAX_RECORD_BYTES:
        raise msgspec.DecodeError(f"more than {MAX_RECORD_BYTES} bytes")
    try:
        record = _decoder.decode(data)
    except UNREADABLE as error:
        raise msgspec.DecodeError(str(error)) from error
    _check_words(record)
    if max(len(record.error), len(record.detail)) > MAX_TEXT_CHARS:
        record = msgspec.structs.replace(
            record, error=record.error[:MAX_TEXT_CHARS], detail=record.detail[:MAX_TEXT_CHARS]
        )
    if record.fault != Fault.NONE or not record.error.startswith((SHIM_LOST, NODE_ERROR)):
        return record
    is_lost = record.error.startswith(SHIM_LOST)
    return msgspec.structs.replace(record, fault=Fault.SHIM_LOST if is_lost else Fault.NODE)


def lacks_means(error: BaseException) -> bool:
    """True if this process, or its machine, had no descriptor or no memory left to look.

    No file is at fault for that, and no worker may be ended for it.
    """
    own = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, OSError) and error.errno in own


def is_passing(error: BaseException) -> bool:
    """True if the disk failed, maybe only this time: that shows nothing about the file.

    error: of `read_record` as well, which has the disk's as its cause.
    """
    of_disk, found = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT), error.__cause__ or error
    return isinstance(found, OSError) and found.errno in of_disk


def _check_words(record: WorkerRecord) -> None:
    """Refuse text of the job that a shim would not have accepted: from here it is passed on.

    Raises:
        msgspec.DecodeError: the text names the field.
    """
    if record.progress is not None:
        said = msgspec.structs.asdict(record.progress)
        if shim_status.read_progress(said) != said:
            raise msgspec.DecodeError("progress: expected whole steps, and a number as loss")
    saved = record.checkpoint
    if saved and shim_status.read_checkpoint(msgspec.structs.asdict(saved)) is None:
        raise msgspec.DecodeError("checkpoint: expected a whole step, and a path that fits")


def is_shim_alive(directory: Path, record: WorkerRecord, boot_id: str) -> bool:
    """True if the shim that wrote it is still that process: boot, number, start.

    Another boot id alone is no proof that it ended: in a container the agent's view of /proc and
    the shim's may differ, and its job would be started again while it runs. A process of that
    number and start that holds the directory's lock is the shim, as no lock outlives a boot.
    """
    if not 0 < shim_files.start_ticks(record.shim_pid) == record.shim_start_ticks:
        return False
    is_locked = shim_files.is_locked
    return record.boot_id == boot_id or is_locked(str(directory / shim_files.LOCK_FILE))


def bury(directory: Path, record: WorkerRecord, *, boot_id: str, now_s: float) -> WorkerRecord:
    """Record in place of a dead shim how its worker ended, once nothing of the worker is left.

    The exit code stays unknown: the only process that could learn it is gone. A disk that refuses
    the record is no reason to hold its GPUs: the next look writes it again.
    """
    latest = read_record(directory)
    if latest is None or latest.phase == WorkerPhase.EXITED:
        return latest or record  # its last status came between our first look and its end
    ended_s, error = now_s, SHIM_LOST
    is_this_boot = record.boot_id == boot_id
    # Numbers of another boot may have been reused; a process with the directory's mark is its own,
    # and shows that there was no boot.
    left = kill_leftovers(directory, record) if is_this_boot else len(kill_marked(directory))
    if left:
        error = f"{SHIM_LOST}; {left} of its processes are not dead yet"
        return msgspec.structs.replace(
            record, phase=WorkerPhase.STOPPING, error=error, fault=Fault.SHIM_LOST
        )
    if not is_this_boot:
        ended_s, error = record.updated_boot_s, f"{SHIM_LOST}: the node has booted since"
    record = msgspec.structs.replace(
        record,
        phase=WorkerPhase.EXITED,
        error=error,
        ended_boot_s=ended_s,
        fault=Fault.SHIM_LOST,
    )
    write_record(directory, record)
    return record


def write_record(directory: Path, record: WorkerRecord) -> bool:
    """Record in place of a missing shim how its worker ended; True if a disk took it.

    On a full disk it uses the space of the shim's spare, or of its order, which no shim needs any
    more.
    """
    spares = (directory / shim_files.SPARE_FILE, directory / shim_files.SPEC_FILE)
    path, value = str(directory / shim_files.STATUS_FILE), msgspec.to_builtins(record)
    try:
        shim_files.write_anyhow(path, value, *map(str, spares), is_durable=False)
    except OSError:
        return False
    return True


def kill_leftovers(directory: Path, record: WorkerRecord) -> int:
    """SIGKILL what a dead shim left of its worker; returns how many processes were still there.

    They are the group of the recorded main process, if it is still that process, and each process
    that has a mark of the worker: torchrun gives its ranks groups of their own, and a daemon has
    left every group. Only processes of the directory's owner, so that a forged record cannot aim a
    root agent.
    """
    uid = directory.stat().st_uid
    left = kill_marked(directory)

    def is_main(pid: int) -> bool:
        return 0 < shim_files.start_ticks(pid) == record.start_ticks and owner(pid) == uid

    if is_main(record.pid):
        left.add(record.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(record.pid, signal.SIGKILL)
        signal_if(record.pid, signal.SIGKILL, is_main)
    return len(left)


def tail(directory: Path, max_bytes: int) -> bytes:
    """The end of a worker's log, reaching back into the part that was moved aside."""
    data = file_tail(directory / shim_files.LOG_FILE, max_bytes)
    if len(data) < max_bytes:
        data = file_tail(directory / shim_files.OLD_LOG_FILE, max_bytes - len(data)) + data
    return data


def file_tail(path: Path, max_bytes: int) -> bytes:
    """The end of a file; empty when it is missing, or no plain file."""
    try:
        with os.fdopen(_plain(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes)
    except (FileNotFoundError, NotPlainError):
        return b""


class NotPlainError(OSError):
    """A link, a fifo or a device in place of a file: a job can put one into its directory."""


def _plain(path: Path | str) -> int:
    """Open a plain file of a job's directory for reading; never blocks, and follows no link.

    Otherwise the job could make its agent wait for a fifo for ever, or read any file of the machine
    to it.

    Raises:
        FileNotFoundError: there is nothing.
        NotPlainError: there is something else.
        OSError: it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise NotPlainError(error.errno, "no plain file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotPlainError(errno.EINVAL, "no plain file", str(path))
    return fd


def _bytes_of(fd: int, max_bytes: int) -> bytes:
    data = part = os.read(fd, max_bytes)
    while part and len(data) < max_bytes:
        part = os.read(fd, max_bytes - len(data))
        data += part
    return data
