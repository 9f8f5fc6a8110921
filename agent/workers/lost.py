"""Workers and shims in a broken state: no status, a hanging shim, an ownerless log, a late start.

**A running worker that loses its status file.** The directory belongs to the job, which may clean
it by mistake, so a missing status proves no end. A live shim writes the status again and the job
goes on. Where no shim answers, the agent kills all that is left of the worker before it counts as
ended.

**A shim that does not end its worker in time.** It hangs: it receives no order and kills nothing.
While it lives, the agent leaves its worker to it. The agent kills the shim by its recorded
identity; then it is a lost shim like any other.

**The log of a worker whose shim is gone.** The agent keeps the log within its limit in the shim's
place.

**A worker that must no longer start, though its shim may be starting.** A shim locks its directory
before its worker exists. It leaves a directory alone that has a status. A process that holds the
lock and writes a status therefore decides for good that nothing runs. Where no disk takes a status,
the agent keeps the lock until one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import math
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from agent.proc.process_tree import thread_states
from agent.shim import control as shim_control
from agent.shim import files as shim_files
from agent.shim.main import READY_FLAG
from agent.workers.process_marks import is_marked, marked, owner, signal_if
from agent.workers.record import SHIM_LOST, WorkerRecord, is_shim_alive, write_record
from agent.workers.runner import WorkerStatus
from common.clock import Clock
from common.errors import Unavailable
from common.faults import Fault
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
        """Write the statuses that a disk takes now."""
        for key, (directory, record, _) in list(self._kept.items()):
            with contextlib.suppress(OSError):
                has_status = (directory / shim_files.STATUS_FILE).exists()
                if has_status or not directory.is_dir() or write_record(directory, record):
                    self.forget(key)

    def forget(self, key: WorkerKey) -> None:
        """Release a worker's lock."""
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
    """Record the end of a worker that never began.

    Nothing happens if it has a status already, or if its shim lives, which then needs a stop.
    Returns True if the worker did begin, and has lost its shim or every means to reach it. `lost`
    then kills it, and it is over when it is dead.

    uid: of the worker's account.
    held_back: takes a worker whose end no disk takes. If the disk cannot be read, only the worker's
        processes show whether it has begun.

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
        if not has_begun(directory, uid):  # otherwise its shim ends it, or is ended
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
        if not is_free:  # it is starting
            return False
        if not write_record(directory, record):
            held_back.keep(key, directory, record, fd)
    return False


def _has_lock_place(directory: Path) -> bool:
    """True if a lock may be taken there: a job can put anything where its directory was."""
    lock = directory / shim_files.LOCK_FILE
    is_lock = lock.is_file() if os.path.lexists(lock) else True
    return directory.is_dir() and not directory.is_symlink() and is_lock and not lock.is_symlink()


def is_shim_silent(directory: Path) -> bool:
    """True if a shim lives that has not written a status yet: its storage may hang."""
    lock = directory / shim_files.LOCK_FILE
    if (directory / shim_files.STATUS_FILE).exists() or not lock.is_file() or lock.is_symlink():
        return False
    with _lock(directory) as (is_free, _):
        return not is_free


@contextlib.contextmanager
def _lock(directory: Path) -> Generator[tuple[bool, int]]:
    """Try to hold the shim's lock for the block: whether it was free, and its descriptor.

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


async def cut_lost(status: WorkerStatus, directory: Path, *, max_bytes: int) -> None:
    """Cut a log at `max_bytes` as its shim would have, once no process of the worker can write it.

    It runs at each look: a log that is short enough costs little. It runs outside the event loop,
    because it copies as much as a whole log. A disk that refuses it now may take it at the next
    look.
    """
    if status.phase == WorkerPhase.EXITED and status.fault == Fault.SHIM_LOST:
        path = str(directory / shim_files.LOG_FILE)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(shim_files.cut_log, path, max_bytes)


HUNG_AFTER_S = 5.0
"""From the end of a worker's grace; a shim needs two for the check of its last checkpoint."""


class HungShims:
    """When each worker that was ordered to stop must be gone."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self._end_by_s: dict[WorkerKey, float] = {}

    def told_to_stop(self, key: WorkerKey, grace_s: float, *, now_s: float) -> None:
        """Record a stop, delivered or not; of several the earliest end holds, as in the shim."""
        end_by_s = now_s + grace_s + HUNG_AFTER_S
        self._end_by_s[key] = min(end_by_s, self._end_by_s.get(key, end_by_s))

    def is_overdue(self, key: WorkerKey, *, now_s: float) -> bool:
        """Whether the worker was ordered to stop and should be gone."""
        return now_s >= self._end_by_s.get(key, float("inf"))

    def forget(self, key: WorkerKey) -> None:
        """The worker has ended."""
        self._end_by_s.pop(key, None)

    def end_if_hung(
        self, key: WorkerKey, directory: Path, record: WorkerRecord, *, now_s: float
    ) -> None:
        """SIGKILL the shim of a worker that should be gone, if it is still the one on record.

        The signal goes only to a process of the directory's owner, so that a forged record cannot
        aim a root agent.
        """
        if not self.is_overdue(key, now_s=now_s) or not is_shim_alive(
            directory, record, self._boot_id
        ):
            return
        log.error("worker %s should have ended: its shim %d hangs; killed it", key, record.shim_pid)

        def is_it(pid: int) -> bool:
            is_own = owner(pid) == directory.stat().st_uid
            return is_own and is_shim_alive(directory, record, self._boot_id)

        with contextlib.suppress(FileNotFoundError):
            signal_if(record.shim_pid, signal.SIGKILL, is_it)


log = logging.getLogger(__name__)

ASK_S = 2.0
"""How long a shim may take to write its status again; the node's step waits for it."""
LOOK_S = 10.0
"""How long one look through all processes may take; on a busy machine it takes seconds."""
END_ALL_S = ASK_S + 2 * LOOK_S
"""Limit of `LostWorkers.end_all_left`: the first look, the processes it saw, and the look after
it."""
UNREAD_S = 10.0
"""How long a disk may fail to read a status before its worker counts as lost."""
POLL_S = 0.02
HALTED = "T"
"""The state of a process that was stopped by a signal (proc(5))."""


def has_file(directory: Path, name: str = shim_files.STATUS_FILE) -> bool:
    """True if anything stands where a worker's status belongs, or another of its files."""
    return os.path.lexists(f"{directory}/{name}")


class LostWorkers:
    """The lost workers of this agent, and their last readings.

    It records which shims did not answer and are not asked again, which shims were halted, and
    which workers this agent killed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_vain: set[WorkerKey] = set()
        self._halted: dict[WorkerKey, set[int]] = {}
        self._shot: set[WorkerKey] = set()
        self._read: dict[WorkerKey, WorkerStatus] = {}
        self._unread_from_s: dict[WorkerKey, float] = {}

    async def ask(self, key: WorkerKey, directory: Path, uid: int) -> bool:
        """Ask the shim to write its status again; True if it did when this returns.

        uid: of the worker's account, as in `end`.
        """
        if key in self._in_vain or not _can_be_asked(directory, uid):
            return False
        with contextlib.suppress(Unavailable):
            shim_control.tell(directory, key, {"op": "say"})
        try:
            async with self._clock.timeout(ASK_S):
                while not has_file(directory):
                    await self._clock.sleep(POLL_S)
        except TimeoutError:
            self._in_vain.add(key)
            return False
        log.warning("worker %s: its status was missing; its shim has rewritten it", key)
        return True

    def end(self, key: WorkerKey, directory: Path, uid: int) -> WorkerStatus | None:
        """The status of a worker while any of its processes lives and is being killed.

        None afterwards.
        """
        workers, shims = self.end_left(key, directory, uid)
        left = len(workers | shims)
        if not left:
            self.forget(key)
            return None
        log.error("worker %s: its status is missing; killing %d processes of it", key, left)
        return WorkerStatus(
            key=key,
            phase=WorkerPhase.STOPPING,
            pid=0,
            shim_pid=min(shims, default=0),
            error=f"{SHIM_LOST}: its status is gone; {left} of its processes are not dead yet",
            fault=Fault.SHIM_LOST,
        )

    def end_left(self, key: WorkerKey, directory: Path, uid: int) -> tuple[set[int], set[int]]:
        """SIGKILL the remains of a worker: its processes that were still there, and its shim.

        These are each process that has its mark, the descendants of its shim, and last the shim, so
        that no process escapes meanwhile. The shim is halted first. Otherwise its last status would
        be that its worker was killed, without the reason. This works where the directory is gone,
        and where another file stands in place of the status, where the shim could try to write for
        ever.

        uid: only processes of this account.
        """
        shims, before = _shims(directory, uid), self._halted.get(key, set())
        is_shim = _shim_check(directory, uid)
        _signal(shims, signal.SIGSTOP, is_shim)
        below: dict[int, int] = {}
        for shim in shims:
            below |= shim_files.descendants(shim)
        workers = {pid for pid in below if owner(pid) == uid}
        workers = (workers | marked(directory, uid)) - shims

        def is_of_it(pid: int) -> bool:
            is_below = owner(pid) == uid and 0 < shim_files.start_ticks(pid) == below.get(pid)
            return is_below or is_marked(pid, directory, uid)

        # One that waits for its disk halts later: the next look sees it, and no wait is longer.
        if all(pid in before or _is_halted(pid) for pid in shims):
            if workers:
                _signal(workers, signal.SIGKILL, is_of_it)
            else:
                _signal(shims, signal.SIGKILL, is_shim)
            if workers or shims:
                self._shot.add(key)
        self._halted[key] = shims
        return workers, shims

    def end_begun(self, key: WorkerKey, directory: Path, uid: int) -> bool:
        """True if a worker that should be gone has processes left.

        They are killed as by `end_left`.

        A shim alone that never began the worker does not count: it has its stop, and may wait for
        its disk.
        """
        if key not in self._halted and not has_begun(directory, uid):
            return False
        is_left = any(self.end_left(key, directory, uid))
        if is_left:
            log.error("worker %s should have ended: its shim never reported; killed it", key)
        else:
            self.forget(key)
        return is_left

    async def end_all_left(self, key: WorkerKey, directory: Path, uid: int) -> None:
        """Return when none of its processes lives; see `end_left`.

        Raises:
            Unavailable: a process waits in the kernel and cannot die now, or none could be looked
                up.
        """
        until_s = math.inf
        try:
            while any(await self._look_and_end(key, directory, uid)):
                now_s = self._clock.now_s()
                until_s = min(until_s, now_s + ASK_S)  # a long look proves no process alive
                if now_s >= until_s:
                    raise Unavailable(f"{key}: some of its processes are not dead yet")
                await self._clock.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"{key}: the search for its processes took too long") from None
        self.forget(key)

    async def _look_and_end(self, *of_it: *tuple[WorkerKey, Path, int]) -> tuple[set[int], ...]:
        async with self._clock.timeout(LOOK_S):
            return await asyncio.to_thread(self.end_left, *of_it)

    def as_before(self, key: WorkerKey) -> WorkerStatus:
        """The last status of the worker, unchanged, when this look found nothing newer."""
        before = self._read.get(key)
        return WorkerStatus(key=key, phase=WorkerPhase.RUNNING, pid=0) if before is None else before

    def unread(self, key: WorkerKey, directory: Path) -> WorkerStatus | None:
        """The worker's status while its disk fails to read it; None once that takes too long.

        Its shim is asked for another one, which the disk may have room for elsewhere.
        """
        now_s = self._clock.now_s()
        if now_s - self._unread_from_s.setdefault(key, now_s) >= UNREAD_S:
            return None
        with contextlib.suppress(Unavailable, OSError):
            shim_control.tell(directory, key, {"op": "say"})
        return self.as_before(key)

    def found(self, status: WorkerStatus, directory: Path, uid: int) -> WorkerStatus:
        """The status of a worker whose file can be read, again.

        A shim that was halted and not yet killed goes on. A worker that was killed here did not
        fail by itself, whatever its shim saw.
        """
        key, halted = status.key, self._halted.pop(status.key, set())
        if halted:
            check = _shim_check(directory, uid)
            _signal(_shims(directory, uid) & halted, signal.SIGCONT, check)
        self._in_vain.discard(key)
        self._unread_from_s.pop(key, None)
        is_failure = status.phase == WorkerPhase.EXITED and status.exit_code != 0
        if key in self._shot and is_failure and status.fault == Fault.NONE:
            status = msgspec.structs.replace(status, fault=Fault.SHIM_LOST)
        self._read[key] = status
        return status

    def adopt(self, key: WorkerKey, directory: Path, uid: int) -> None:
        """Adopt a worker whose shim an earlier agent may have halted: it goes on.

        The look of a halted shim proves nothing: a SIGSTOP may be on its way, and takes effect
        later.
        """
        if key not in self._halted:
            _signal(_shims(directory, uid), signal.SIGCONT, _shim_check(directory, uid))

    def forget(self, key: WorkerKey) -> None:
        """Forget a worker of which nothing is left."""
        self._in_vain.discard(key)
        self._shot.discard(key)
        for table in (self._halted, self._read, self._unread_from_s):
            table.pop(key, None)


def has_begun(directory: Path, uid: int) -> bool:
    """True if a worker of this directory computes, or a descendant of its shim does."""
    shims = _shims(directory, uid)
    return any(shim_files.descendants(shim) for shim in shims) or bool(marked(directory, uid))


def _is_halted(pid: int) -> bool:
    return HALTED in thread_states(pid)


def _signal(pids: set[int], number: signal.Signals, is_it: Callable[[int], bool]) -> None:
    for pid in pids:
        signal_if(pid, number, is_it)


def _can_be_asked(directory: Path, uid: int) -> bool:
    has_socket = os.path.lexists(directory / shim_files.CONTROL_SOCKET)
    return has_socket and bool(_shims(directory, uid))


def _shims(directory: Path, uid: int) -> set[int]:
    """Shims of this directory that have begun their work, by their command line.

    Its lock would prove more, but a lock can be found by its file alone, which may be gone. Only
    processes of this account count, because no other account can make one with its name.
    """
    is_shim = _shim_check(directory, uid)
    numbers = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return {pid for pid in numbers if is_shim(pid)}


def _shim_check(directory: Path, uid: int) -> Callable[[int], bool]:
    """A function that tests whether a process is a shim of this directory; see `_shims`."""
    place = os.fsencode(os.path.realpath(directory))

    def is_shim(pid: int) -> bool:
        if owner(pid) != uid:
            return False
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            return False
        is_named = len(words) > 2 and words[-2] == READY_FLAG.encode()
        is_named = is_named and os.path.realpath(words[-1]) == place
        return is_named and shim_files.start_ticks(pid) > 0

    return is_shim
