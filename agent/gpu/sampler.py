"""Samples all GPUs of a machine: one after the other while they answer quickly, else all at once.

It runs inside the NVML child, which a faulty driver may hang.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from agent.gpu.known_gpus import KnownGpus, identity_only
from agent.gpu.nvml import GpuProbe, LibraryFailed, LostUnseen, NvmlApi, gpu_count
from agent.gpu.wire import Sample
from common.errors import Unavailable
from common.messages import GpuHealth, GpuReport

QUICK_RATIO = 0.2
"""The share of the deadline in which one thread must have read all GPUs. After that the others are
read beside it, and have the rest of the deadline."""
SAMPLES_AT_ONCE = 10
"""After a GPU that was not quick, this many samples read all GPUs at once."""


class _Reader:
    """Reads one GPU on request, by the thread that comes first: its own, or the one for all.

    A call that hangs costs the thread that makes it and no other. pynvml releases the GIL while it
    is in the driver (measured), so threads are enough: a process per GPU would cost 8 times the
    memory.
    """

    def __init__(self, probe: GpuProbe) -> None:
        self.probe = probe
        self._woken = threading.Event()
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._is_asked = False
        """No thread has begun to read since `ask`."""
        self._is_busy = False
        self._is_overdue = False
        self._report: GpuReport | None = None
        self._error = ""
        self._library_failure: LibraryFailed | None = None
        self._late_xids: tuple[int, ...] = ()
        self.is_lost_unseen = False
        """The last read that ended found a lost GPU that it cannot name."""
        threading.Thread(target=self._run, name=f"gpu-{probe.index}", daemon=True).start()

    def ask(self) -> bool:
        """Ask for a read, unless the last one still hangs; `answer` or `wake` starts it."""
        with self._lock:
            if self._is_busy:
                return False
            if self._report is not None:
                # A late answer: its events must not be lost with it.
                self._late_xids += self._report.xids
            self._is_asked = self._is_busy = True
            self._report, self._error, self.is_lost_unseen = None, "", False
            self._answered.clear()
        return True

    def wake(self) -> None:
        """Have its own thread read, if no thread has begun to."""
        self._woken.set()

    def take(self, timeout_s: float) -> tuple[GpuReport | None, str]:
        """The report, or why there is none; waits at most `timeout_s`.

        A read that timed out once does not delay the others again. A read that is merely
        unfinished, as when another GPU's failure ended the sample early, may still do so.

        Raises:
            LibraryFailed: the read found that NVML as a whole does not work.
        """
        has_answer = self._answered.wait(0.0 if self._is_overdue else max(0.0, timeout_s))
        with self._lock:
            if not has_answer:
                self._is_overdue = self._is_busy
                identity = self.probe.identity
                error = f"GPU {self.probe.index} does not answer"
                if identity is None:
                    return None, error
                return identity_only(identity, GpuHealth.UNRESPONSIVE), error
            if self._library_failure is not None:
                raise self._library_failure
            report, error, late = self._report, self._error, self._late_xids
            self._report, self._late_xids = None, ()
        if report is None:
            return None, error
        return _with_xids(report, late + report.xids), error

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            self.answer()

    def answer(self) -> None:
        """Read, if that was asked for and no other thread has begun."""
        with self._lock:
            if not self._is_asked:
                return
            self._is_asked = False
        report, error, library_failure, is_lost_unseen = None, "", None, False
        try:
            report = self.probe.read()
            error = self.probe.error
        except LibraryFailed as failure:
            library_failure = failure
        except Unavailable as failure:
            error, is_lost_unseen = str(failure), isinstance(failure, LostUnseen)
        except Exception as failure:  # a thread that ends here would seem to hang for ever
            error = f"GPU {self.probe.index}: {failure!r}"
            if self.probe.identity is not None:
                report = identity_only(self.probe.identity, GpuHealth.FAULTY)
        with self._lock:
            self._library_failure = library_failure
            self._report, self._error = report, error
            self.is_lost_unseen = is_lost_unseen
            self._is_busy = self._is_overdue = False
            self._answered.set()


class _OneThread:
    """A thread that reads one GPU after the other: to wake a thread per GPU costs more CPU time."""

    def __init__(self) -> None:
        self._rounds: queue.SimpleQueue[tuple[Sequence[_Reader], queue.SimpleQueue[bool]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def read(self, readers: Sequence[_Reader], timeout_s: float) -> bool:
        """Have them read; True if all answered in time."""
        over: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._rounds.put((readers, over))
        try:
            return over.get(timeout=timeout_s)
        except queue.Empty:
            return False

    def _run(self) -> None:
        while True:
            readers, over = self._rounds.get()
            for reader in readers:
                reader.answer()
            over.put(True)


def _with_xids(report: GpuReport, xids: tuple[int, ...]) -> GpuReport:
    if xids == report.xids:
        return report
    return msgspec.structs.replace(report, xids=xids)


class GpuSampler:
    """Reads every GPU; one that hangs is UNRESPONSIVE and does not hide the others.

    One thread reads them all while each answered the last time. Where that takes too long, each GPU
    that has not had its turn is read by its own thread, and all are from then on, for a while.

    `gpu_deadline_s` is for all of them together; `monotonic_s` is any clock that only grows.
    """

    def __init__(
        self,
        api: NvmlApi,
        *,
        gpu_deadline_s: float,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._gpu_deadline_s = gpu_deadline_s
        self._monotonic_s = monotonic_s
        self._readers: list[_Reader] = []
        self._one_thread = _OneThread()
        self._samples_at_once = 1
        """The first sample opens devices, which takes its time."""
        self._known = KnownGpus()

    def sample(self) -> Sample:
        """All GPUs now, and as LOST those that have disappeared.

        Raises:
            Unavailable: NVML as a whole does not work, or does not report the number of GPUs.
        """
        count = gpu_count(self._api)
        for index in range(len(self._readers), count):
            self._readers.append(_Reader(GpuProbe(self._api, index)))
        readers = self._readers[:count]
        end_s = self._monotonic_s() + self._gpu_deadline_s
        self._begin(readers)
        answers = [reader.take(end_s - self._monotonic_s()) for reader in readers]
        errors = [error for _, error in answers if error]
        if len(self._known) > count:
            errors.append(f"NVML says {count} GPUs, there were {len(self._known)}")
        reports = [report for report, _ in answers if report is not None]
        return Sample(
            gpus=self._known.update(reports),
            error="; ".join(errors),
            unread={
                what: why
                for reader, (report, _) in zip(readers, answers, strict=True)
                if report is not None
                for what, why in reader.probe.unread.items()
            },
            uuid_by_pci_address=dict(
                reader.probe.pci for reader in readers if reader.probe.pci is not None
            ),
            lost_indices=tuple(
                reader.probe.index
                for reader, (report, _) in zip(readers, answers, strict=True)
                if report is None and reader.is_lost_unseen
            ),
        )

    def _begin(self, readers: Sequence[_Reader]) -> None:
        """Begin to read every GPU, except those whose last read still hangs."""
        asked = [reader for reader in readers if reader.ask()]
        if len(asked) < len(readers):
            self._samples_at_once = SAMPLES_AT_ONCE
        if self._samples_at_once == 0:
            if self._one_thread.read(asked, QUICK_RATIO * self._gpu_deadline_s):
                return
            self._samples_at_once = SAMPLES_AT_ONCE
        self._samples_at_once -= 1
        for reader in asked:
            reader.wake()
