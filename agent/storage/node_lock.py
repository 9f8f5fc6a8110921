"""The node's lock: which process holds the node, whether it lives, and how a hung one is ended.

The holder writes its pid and start time, and beats: a counter that grows while its event loop turns
and no duty is overdue. A process that finds the lock taken watches that counter. It never compares
instants of the wall clock: CLOCK_MONOTONIC, which stands still while the machine is suspended,
gives the age of a beat. A watcher that was paused itself starts to watch again, because the same
pause may have stopped the holder.

A full or read-only disk stops no holder. Where no beat can be written, silence proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from agent.proc.process_tree import PROC, has_lock, thread_states
from agent.proc.sessions import END_S
from agent.shim.files import boot_id, is_locked, start_ticks
from agent.storage import file_ownership
from common.clock import Clock
from common.errors import Unavailable

log = logging.getLogger(__name__)

BEAT_S = 0.5
LOOK_S = 0.1
WATCH_S = 2 * BEAT_S
"""However old the last beat is, a holder is watched this long. A holder that was stopped and goes
on, or whose machine was suspended, beats within one `BEAT_S`."""
HELD_UP_S = WATCH_S / 2
"""With two looks further apart than this, the watcher was paused itself."""
WAITING_IN_KERNEL = "D"
"""State of a thread that waits for a disk or a device (proc(5)); no signal reaches it."""


def monotonic_s() -> float:
    """Seconds since some instant of this boot, suspended time left out."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Holder(Struct, frozen=True, kw_only=True):
    """The holder's own record. `beat_at_s` is on CLOCK_MONOTONIC."""

    boot_id: str
    pid: int
    start_ticks: int
    beat_count: int
    beat_at_s: float

    def is_running(self, state_dir: Path) -> bool:
        """True if this very process exists, stopped or not, and no other with its pid.

        Another boot id is no proof that it is gone: in a container the boot id may be masked for
        the holder or for the reader. No lock outlives a boot, and the kernel knows which process
        has one.
        """
        if not 0 < self.start_ticks == start_ticks(self.pid):
            return False
        return self.boot_id == boot_id() or has_lock(self.pid, lock_path(state_dir))


def path_in(state_dir: Path) -> Path:
    """The file in which a node's holder records itself."""
    return state_dir / "holder"


def lock_path(state_dir: Path) -> Path:
    """The file that a node's holder has locked."""
    return state_dir / "lock"


def read(state_dir: Path) -> Holder | None:
    """The holder's last record; None when there is none, or it cannot be read."""
    try:
        named_boot_id, pid, ticks, count, at_s = path_in(state_dir).read_text("ascii").split()
        return Holder(
            boot_id=named_boot_id,
            pid=int(pid),
            start_ticks=int(ticks),
            beat_count=int(count),
            beat_at_s=float(at_s),
        )
    except (OSError, ValueError):
        return None


class Heartbeat:
    """The holder's side of the file; the node's lock must be held.

    Args:
        is_needed: asked before each beat. A node at home is never watched, so it need not wear its
            disk.
        is_well: asked before each beat. A holder with a duty that makes no progress must be ended
            like one whose loop has stopped: it would keep the node for ever.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        is_needed: Callable[[], bool] = lambda: True,
        is_well: Callable[[], bool] = lambda: True,
    ) -> None:
        self.is_needed = is_needed
        self.is_well = is_well
        self._path = path_in(state_dir)
        self._count = 0
        # One line of constant length, written in place: neither a rename nor a sync per beat, and
        # on a full disk the blocks of an earlier holder.
        self._name = f"{boot_id()} {os.getpid():010d} {start_ticks(os.getpid()):020d}"
        self._fd: int | None = None
        self._error = ""
        self._try_write()

    def _try_write(self) -> None:
        """Write a beat, if the disk takes it; a disk that does not is reported once."""
        try:
            self._write()
        except OSError as error:  # the next one may go; the ledger reports a dead disk
            if not self._error:
                log.warning("heartbeat %s: %s", self._path, error)
            self._error = str(error)
        else:
            self._error = ""

    def _write(self) -> None:
        self._count += 1
        line = f"{self._name} {self._count:012d} {monotonic_s():020.6f}\n".encode("ascii")
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file_ownership.give(self._fd, self._path.parent)
            os.ftruncate(self._fd, min(len(line), os.fstat(self._fd).st_size))
        os.pwrite(self._fd, line, 0)

    async def beat_for_ever(self, clock: Clock) -> None:
        """Beat each `BEAT_S` for as long as the event loop turns and the holder is well.

        The write has a thread of its own: a disk that stalls must not stall the agent.
        """
        with ThreadPoolExecutor(1, "heartbeat") as writer:
            loop = asyncio.get_running_loop()
            while True:
                await clock.sleep(BEAT_S)
                while self.is_needed() and not self.is_well():
                    # A resumed holder is well again as soon as its timers have run, and must beat
                    # before its watcher gives it up.
                    await clock.sleep(LOOK_S)
                if not self.is_needed():
                    continue
                # No thread can start where a job has filled the task limit; the next beat may.
                with contextlib.suppress(RuntimeError):
                    await loop.run_in_executor(writer, self._try_write)

    def close(self) -> None:
        """Record that no holder is left; called before the lock is released."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._fd is not None:
            os.close(self._fd)


@contextlib.asynccontextmanager
async def beating(state_dir: Path, clock: Clock) -> AsyncGenerator[Heartbeat]:
    """Beat for as long as the block runs; a heartbeat that fails ends the block.

    A holder without a heartbeat counts as hung as soon as the node is away.

    Raises:
        Exception: the error of the heartbeat.
    """
    heartbeat = Heartbeat(state_dir)
    holder = asyncio.current_task()
    assert holder is not None
    task = asyncio.create_task(heartbeat.beat_for_ever(clock), name="heartbeat")

    def end_if_broken(done: asyncio.Task[None]) -> None:
        if not done.cancelled():  # it never returns
            holder.cancel()

    task.add_done_callback(end_if_broken)
    try:
        yield heartbeat
    finally:
        task.cancel()
        await asyncio.wait({task})
        heartbeat.close()
        if not task.cancelled():
            holder.uncancel()
            task.result()


async def end_if_hung(
    state_dir: Path,
    *,
    patience_s: float,
    clock: Clock,
    let_go_s: float = END_S,
    proc: Path = PROC,
) -> Holder | None:
    """SIGKILL a holder that has not beaten for `patience_s`; afterwards it is gone or about to go.

    A pid alone is never enough: boot, pid and start time must be those in the file. None: no
    process was killed, because the holder released the lock within `let_go_s`.

    Raises:
        Unavailable: it is alive, or unknown, or it waits for a disk and would not end; the caller
            tries again later.
    """
    holder = read(state_dir)
    if holder is None or not holder.is_running(state_dir):
        await _until_let_go(state_dir, let_go_s, clock)
        return None
    if not os.access(path_in(state_dir), os.W_OK):
        raise Unavailable(
            f"{state_dir}: another agent works on this node; the disk is read-only, so that it "
            "cannot show that it is alive"
        )
    began_at_s = looked_at_s = clock.now_s()
    while True:
        if WAITING_IN_KERNEL in thread_states(holder.pid, proc=proc):
            raise Unavailable(
                f"{state_dir}: another agent works on this node; process {holder.pid} waits for "
                "a disk or a device"
            )
        silent_s = monotonic_s() - holder.beat_at_s
        if silent_s >= patience_s and looked_at_s - began_at_s >= WATCH_S:
            break
        await clock.sleep(LOOK_S)
        said = read(state_dir)
        if said is None or not said.is_running(state_dir):
            await _until_let_go(state_dir, let_go_s, clock)
            return None
        if said != holder:
            raise Unavailable(f"{state_dir}: another agent works on this node and is alive")
        now_s = clock.now_s()
        if now_s - looked_at_s > HELD_UP_S:
            began_at_s = now_s
        looked_at_s = now_s
    log.warning("process %d holds the node and hangs, silent for %.1f s", holder.pid, silent_s)
    _end(holder, state_dir)
    return holder


async def _until_let_go(state_dir: Path, within_s: float, clock: Clock) -> None:
    """Wait for the lock of a holder that is gone, or has announced its end.

    A lock may outlive its process for a moment: in a child that has not yet become a program of its
    own, or until the kernel has closed the dead process's files.

    Raises:
        Unavailable: a process still has it, and which one is unknown.
    """
    began_at_s = clock.now_s()
    while is_locked(str(lock_path(state_dir))):
        if clock.now_s() - began_at_s >= within_s:
            raise Unavailable(
                f"{state_dir}: another agent works on this node and does not say which"
            )
        await clock.sleep(LOOK_S)


def _end(holder: Holder, state_dir: Path) -> None:
    """SIGKILL this process and no other: the descriptor is taken before it is verified.

    Raises:
        Unavailable: the kernel refuses (pidfd_open needs Linux 5.3).
    """
    try:
        pid_fd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return
    except OSError as error:
        raise Unavailable(f"process {holder.pid} hangs and cannot be ended: {error}") from error
    try:
        if holder.is_running(state_dir):
            signal.pidfd_send_signal(pid_fd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except OSError as error:
        raise Unavailable(f"process {holder.pid} hangs and cannot be ended: {error}") from error
    finally:
        os.close(pid_fd)
