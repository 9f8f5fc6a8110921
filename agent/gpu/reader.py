"""The agent's view of its NVML child: GPUs within a deadline, whatever state the driver is in.

This module does not import `agent.gpu.nvml`, which would bring pynvml and its faults into the
agent.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from agent.gpu.known_gpus import KnownGpus
from agent.gpu.wire import Sample, sample_of
from common.clock import Clock
from common.errors import ProtocolError, Unavailable
from common.messages import GpuReport
from common.model import GpuUuid

logger = logging.getLogger(__name__)

MAX_KEPT_XIDS = 64
"""Events of one GPU that wait for a report; in a storm more would add nothing."""


class ReaderProcess(Protocol):
    """A child that reads GPUs; `agent.gpu.child_process` has the real one."""

    @property
    def pid(self) -> int: ...

    async def ask(self) -> bytes:
        """One question and its answer's payload; OSError or EOFError when the child has ended."""
        ...

    def close_input(self) -> None:
        """Close the child's input, so that it ends in good order."""
        ...

    def urge(self, number: signal.Signals) -> None:
        """Send it a signal; no effect if it has ended."""
        ...

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        ...


ProcessStarter = Callable[[], Awaitable[ReaderProcess]]


class GpuReader:
    """Samples GPUs through a child process that may hang or crash.

    The reader waits for a child that does not answer, as a driver often recovers. After
    `restart_after_s` it asks the child to end, then forces it, and starts another one. It does not
    kill at once: killing a process inside NVML has frozen GPUs (dcgm-exporter#84). After a crash
    the next start waits `backoff_s`, doubled up to `max_backoff_s`.

    A child that was ended before its first good answer may only have been slow: a machine may have
    no free core, or a driver may take long to open. So the next child has twice as long, up to
    `max_restart_after_s`; otherwise none would ever get there.
    """

    def __init__(
        self,
        start: ProcessStarter,
        clock: Clock,
        *,
        deadline_s: float = 1.0,
        restart_after_s: float = 30.0,
        max_restart_after_s: float = 120.0,
        end_grace_s: float = 5.0,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
    ) -> None:
        self._start = start
        self._clock = clock
        self._deadline_s = deadline_s
        self._restart_after_s = restart_after_s
        self._max_restart_after_s = max_restart_after_s
        self._end_grace_s = end_grace_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._known = KnownGpus()
        self._xids_by_uuid: dict[GpuUuid, tuple[int, ...]] = {}
        self._gpus: tuple[GpuReport, ...] = ()
        self._uuid_by_pci_address: dict[str, GpuUuid] = {}
        self._error = ""
        self._unread: set[str] = set()
        self._lost_indices: tuple[int, ...] = ()
        self._process: ReaderProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[ReaderProcess] | None = None
        self._is_closed = False
        self._is_down = False
        self._has_good_answer = False
        self._news_count = 0
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()

    @property
    def error(self) -> str:
        """The part of the last sample that could not be read, as text; empty when all was read."""
        return self._error

    @property
    def lost_indices(self) -> tuple[int, ...]:
        """Lost GPUs of the last sample that this reader cannot name; an older reader could."""
        return self._lost_indices

    @property
    def uuid_by_pci_address(self) -> Mapping[str, GpuUuid]:
        """Every GPU that was ever read, even one that is gone.

        The kernel names GPUs by PCI address.
        """
        return self._uuid_by_pci_address

    @property
    def child_pid(self) -> int | None:
        """The child that reads now; None between two children."""
        return None if self._process is None else self._process.pid

    async def sample(self, deadline_s: float | None = None) -> tuple[GpuReport, ...]:
        """Every GPU; the last known ones as UNRESPONSIVE when no answer comes within the deadline.

        Raises:
            Unavailable: no GPU answers and none has ever been seen, or the reader is closed.
        """
        if self._is_closed:
            raise Unavailable("the GPU reader is closed")
        if self._task is None:
            self._task = asyncio.create_task(self._supervise(), name="gpu-reader")
        elif self._task.done():
            self._task.result()  # a defect of the supervisor must show, not look like a hang
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        seen = self._news_count
        self._wanted.set()
        if not self._is_down:
            try:
                async with self._clock.timeout(limit_s):
                    while self._news_count == seen:
                        self._news.clear()
                        await self._news.wait()
            except TimeoutError:
                self._gpus = self._lost_indices = ()
                self._error = f"the GPU reader did not answer within {limit_s:g} s"
        gpus = self._gpus or self._known.unresponsive()
        if not gpus and self._error and not self._lost_indices:
            raise Unavailable(self._error)
        return tuple(self._with_xids(gpu) for gpu in gpus)

    async def close(self) -> None:
        """End the child; it has `end_grace_s` for each step from asking to killing.

        A child that is starting is awaited and then ended in the same way: a cancelled start would
        kill it while it opens the driver, or leave it running.
        """
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        process = self._process or await self._started_late()
        self._process = None
        if process is not None:
            await self._end(process)

    async def _started_late(self) -> ReaderProcess | None:
        """The child of a start that was abandoned; None when there is none to end."""
        starting, self._starting = self._starting, None
        if starting is None:
            return None
        await asyncio.wait([starting])
        return None if starting.cancelled() or starting.exception() else starting.result()

    async def _supervise(self) -> None:
        backoff_s, patience_s = self._backoff_s, self._restart_after_s
        while True:
            self._is_down = self._has_good_answer = False
            # A task of its own: a child whose start is interrupted would have no owner, or be
            # killed.
            starting = self._starting = asyncio.ensure_future(self._start())
            await asyncio.wait([starting])
            self._starting = None
            try:
                self._process = starting.result()
            except OSError as error:
                reason = f"the GPU reader cannot be started: {error}"
            else:
                reason, is_silent = await self._serve(self._process, patience_s)
                await self._end(self._process)
                self._process = None
                if is_silent:
                    patience_s = min(2 * patience_s, self._max_restart_after_s)
            if self._has_good_answer:
                backoff_s, patience_s = self._backoff_s, self._restart_after_s
            logger.warning("gpu reader: restart in %g s: %s", backoff_s, reason)
            self._is_down = True
            self._tell((), reason)
            await self._clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _serve(self, process: ReaderProcess, first_after_s: float) -> tuple[str, bool]:
        """Ask the child for each requested sample until it ends.

        Return why, and whether it timed out. The first good answer may take `first_after_s`.
        """
        last_error = ""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            limit_s = self._restart_after_s if self._has_good_answer else first_after_s
            try:
                async with self._clock.timeout(limit_s):
                    sample = sample_of(await process.ask())
            except TimeoutError:
                return f"the GPU reader did not answer for {limit_s:g} s", True
            except (OSError, EOFError):
                return last_error or "the GPU reader has ended", False
            except ProtocolError as error:
                return f"the GPU reader is out of step: {error}", False
            last_error = sample.error
            self._take(sample)

    def _take(self, sample: Sample) -> None:
        if sample.gpus or sample.lost_indices or not sample.error:
            self._has_good_answer = True
            self._uuid_by_pci_address.update(sample.uuid_by_pci_address)
            for gpu in sample.gpus:
                if gpu.xids:
                    kept = self._xids_by_uuid.get(gpu.uuid, ()) + gpu.xids
                    self._xids_by_uuid[gpu.uuid] = kept[:MAX_KEPT_XIDS]
            self._tell_unread(sample.unread)
            gpus = self._known.update(sample.gpus)
            self._tell(gpus, sample.error, sample.lost_indices)
        else:
            self._tell((), sample.error)

    def _tell(
        self, gpus: tuple[GpuReport, ...], error: str, lost_indices: tuple[int, ...] = ()
    ) -> None:
        self._gpus, self._error, self._lost_indices = gpus, error, lost_indices
        self._news_count += 1
        self._news.set()

    def _tell_unread(self, unread: Mapping[str, str]) -> None:
        """Log a missing value once, until it is read again.

        A report without a value gives no reason.
        """
        for what in sorted(unread.keys() - self._unread):
            logger.warning("gpu reader: %s unknown: %s", what, unread[what])
        self._unread = set(unread)

    def _with_xids(self, gpu: GpuReport) -> GpuReport:
        """The sample with every event since the last report, including those of late answers."""
        xids = self._xids_by_uuid.pop(gpu.uuid, ())
        return gpu if xids == gpu.xids else msgspec.structs.replace(gpu, xids=xids)

    async def _end(self, process: ReaderProcess) -> None:
        """Ask the child to end, then signal it, then kill it.

        A process stuck in the kernel is left to it.
        """
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            with suppress(OSError):
                process.close_input() if number is None else process.urge(number)
            try:
                async with self._clock.timeout(self._end_grace_s):
                    await process.wait()
            except TimeoutError:
                continue
            return
        logger.error("gpu reader: pid %d does not exit; left behind", process.pid)
