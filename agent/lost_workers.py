"""A worker that was seen to run and has no status any more: its shim is asked, else it is ended.
Must not know orders, leases or who looks.

The directory is its job's, which may clean it by mistake. A missing status proves no end, and a
shim that lives knows what it wrote there: it writes it again, and the job goes on. Where no shim
answers, whatever is left of the worker is killed before anybody may think that it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from agent import shim_control, shim_files
from agent.processes import thread_states
from agent.runner import WorkerStatus
from agent.shim import READY_FLAG
from agent.worker_marks import is_marked, marked, owner, signal_if
from agent.worker_record import SHIM_LOST
from common.clock import Clock
from common.errors import Unavailable
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import WorkerKey

log = logging.getLogger(__name__)

ASK_S = 2.0
"""How long a shim may take to write its status again; the node's step waits for it."""
LOOK_S = 10.0
"""How long one look through all processes may take; on a busy machine it takes seconds."""
END_ALL_S = ASK_S + 2 * LOOK_S
"""`LostWorkers.end_all_left` takes no longer: the first look, who it saw, and the look after it."""
UNREAD_S = 10.0
"""How long a disk may fail to read a status before its worker counts as lost."""
POLL_S = 0.02
HALTED = "T"
"""The state of a process that was stopped by a signal (proc(5))."""


def has_file(directory: Path, name: str = shim_files.STATUS_FILE) -> bool:
    """Whether anything stands where a worker's status belongs, or another of its files."""
    return os.path.lexists(directory / name)


class LostWorkers:
    """Which of them were asked in vain, and are not asked again; which shims were halted, and whom
    somebody here killed; what was last read of each."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_vain: set[WorkerKey] = set()
        self._halted: dict[WorkerKey, set[int]] = {}
        self._shot: set[WorkerKey] = set()
        self._read: dict[WorkerKey, WorkerStatus] = {}
        self._unread_from_s: dict[WorkerKey, float] = {}

    async def ask(self, key: WorkerKey, directory: Path, uid: int) -> bool:
        """Have the shim write its status again; whether it did when this returns.

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
        log.warning("worker %s: its status was gone; its shim has written it again", key)
        return True

    def end(self, key: WorkerKey, directory: Path, uid: int) -> WorkerStatus | None:
        """What to say of it while anybody of it lives, who is killed; None once nobody does."""
        workers, shims = self.end_left(key, directory, uid)
        left = len(workers | shims)
        if not left:
            self.forget(key)
            return None
        log.error("worker %s: its status is gone; %d processes of it are killed", key, left)
        return WorkerStatus(
            key=key,
            phase=WorkerPhase.STOPPING,
            pid=0,
            shim_pid=min(shims, default=0),
            error=f"{SHIM_LOST}: its status is gone; {left} of its processes are not dead yet",
            fault=Fault.SHIM_LOST,
        )

    def end_left(self, key: WorkerKey, directory: Path, uid: int) -> tuple[set[int], set[int]]:
        """SIGKILL to what is left of a worker: its processes that were still there, and its shim.

        That is each process that has its mark, what descends from its shim, and last the shim, so
        that nothing leaves its sight meanwhile. The shim is halted before all else, or its last
        word would be that its worker was killed, and not why. This works where the directory is
        gone, and where something stands in place of the status, onto which the shim could try for
        ever to write.

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

        # One that waits for its disk halts later: it is waited for until the next look, no longer.
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
        """Whether somebody is left of a worker that should be gone, who is killed as by `end_left`.

        A shim alone that never began it is nobody: it has its stop, and may wait for its disk.
        """
        if key not in self._halted and not has_begun(directory, uid):
            return False
        is_left = any(self.end_left(key, directory, uid))
        if is_left:
            log.error("worker %s: it should have ended: its shim never spoke, killed", key)
        else:
            self.forget(key)
        return is_left

    async def end_all_left(self, key: WorkerKey, directory: Path, uid: int) -> None:
        """Return when nobody of it lives; see `end_left`.

        Raises:
            Unavailable: somebody waits in the kernel, and cannot die now; or nobody could look.
        """
        until_s = math.inf
        try:
            while any(await self._look_and_end(key, directory, uid)):
                now_s = self._clock.now_s()
                until_s = min(until_s, now_s + ASK_S)  # a look that took long proves nobody alive
                if now_s >= until_s:
                    raise Unavailable(f"{key}: some of its processes are not dead yet")
                await self._clock.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"{key}: its processes could not be looked for in time") from None
        self.forget(key)

    async def _look_and_end(self, *of_it: *tuple[WorkerKey, Path, int]) -> tuple[set[int], ...]:
        async with self._clock.timeout(LOOK_S):
            return await asyncio.to_thread(self.end_left, *of_it)

    def as_before(self, key: WorkerKey) -> WorkerStatus:
        """What to say of it when nobody knows better at this look: nothing has changed."""
        before = self._read.get(key)
        return WorkerStatus(key=key, phase=WorkerPhase.RUNNING, pid=0) if before is None else before

    def unread(self, key: WorkerKey, directory: Path) -> WorkerStatus | None:
        """What to say of it while its disk fails to read its status; None once that takes too long.

        Its shim is asked for another one, which the disk may have room for elsewhere.
        """
        now_s = self._clock.now_s()
        if now_s - self._unread_from_s.setdefault(key, now_s) >= UNREAD_S:
            return None
        with contextlib.suppress(Unavailable, OSError):
            shim_control.tell(directory, key, {"op": "say"})
        return self.as_before(key)

    def found(self, status: WorkerStatus, directory: Path, uid: int) -> WorkerStatus:
        """Its status can be read, again: a shim that was halted and not yet killed goes on, and
        whoever was killed here did not fail by itself, whatever its shim saw. What is said of it.
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
        """A worker of whom an agent before this one may have halted the shim: it goes on.

        Whether it looks halted says nothing: a SIGSTOP may be on its way, and takes effect later.
        """
        if key not in self._halted:
            _signal(_shims(directory, uid), signal.SIGCONT, _shim_check(directory, uid))

    def forget(self, key: WorkerKey) -> None:
        """Nothing of it is left."""
        self._in_vain.discard(key)
        self._shot.discard(key)
        for table in (self._halted, self._read, self._unread_from_s):
            table.pop(key, None)


def has_begun(directory: Path, uid: int) -> bool:
    """Whether a worker computes of this directory, or something that descends from its shim."""
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
    processes of this account count: nobody else's can be named by it.
    """
    is_shim = _shim_check(directory, uid)
    numbers = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return {pid for pid in numbers if is_shim(pid)}


def _shim_check(directory: Path, uid: int) -> Callable[[int], bool]:
    """Whether a process is a shim of this directory; see `_shims`."""
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
