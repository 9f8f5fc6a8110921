"""Samples all GPUs of a machine at once, each read by a thread of its own.

It runs inside the NVML child, which a faulty driver may hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from agent.gpu.known_gpus import KnownGpus, identity_only
from agent.gpu.nvml import GpuProbe, LibraryFailed, LostUnseen, NvmlApi, gpu_count
from agent.gpu.wire import Sample
from common.errors import Unavailable
from common.messages import GpuHealth, GpuReport


class _Reader:
    """A thread that reads one GPU on request; a call that hangs costs this thread and no other.

    pynvml releases the GIL while it is in the driver (measured), so threads are enough: a process
    per GPU would cost 8 times the memory.
    """

    def __init__(self, probe: GpuProbe) -> None:
        self.probe = probe
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_overdue = False
        self._report: GpuReport | None = None
        self._error = ""
        self._library_failure: LibraryFailed | None = None
        self._late_xids: tuple[int, ...] = ()
        self.is_lost_unseen = False
        """The last read that ended found a lost GPU that it cannot name."""
        threading.Thread(target=self._run, name=f"gpu-{probe.index}", daemon=True).start()

    def ask(self) -> None:
        """Start a read, unless the last one still hangs."""
        with self._lock:
            if self._is_busy:
                return
            if self._report is not None:
                # A late answer: its events must not be lost with it.
                self._late_xids += self._report.xids
            self._is_busy = True
            self._report, self._error, self.is_lost_unseen = None, "", False
            self._answered.clear()
        self._asked.set()

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
            self._asked.wait()
            self._asked.clear()
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


def _with_xids(report: GpuReport, xids: tuple[int, ...]) -> GpuReport:
    if xids == report.xids:
        return report
    return msgspec.structs.replace(report, xids=xids)


class GpuSampler:
    """Reads every GPU at once; one that hangs is UNRESPONSIVE and does not hide the others.

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
        for reader in readers:
            reader.ask()
        end_s = self._monotonic_s() + self._gpu_deadline_s
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
