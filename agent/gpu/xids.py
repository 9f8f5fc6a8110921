"""Merges the XIDs of both sources, NVML's events and the kernel log, and counts each one once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec
from msgspec import Struct

from agent.gpu.kernel_log import XidLine
from common.messages import GpuReport, XidCount
from common.model import GpuUuid

log = logging.getLogger(__name__)

SAME_XID_WINDOW_S = 60.0
"""Both reports of one XID come within this time. NVML's answer may wait for a driver that hangs,
and after 30 s its reader is restarted and does not see it again."""
MAX_KEPT_XIDS = 64
"""For one GPU and source; in a storm more would add nothing."""
MAX_COUNTED_CODES = 64
"""For one GPU; there are not many more codes, and a report has its bounds."""


class _Teller(Enum):
    NVML = "nvml"
    KERNEL_LOG = "kernel log"

    @property
    def other(self) -> _Teller:
        return _Teller.KERNEL_LOG if self is _Teller.NVML else _Teller.NVML


class _Told(Struct, frozen=True):
    """An XID that one source has reported and the other has not."""

    code: int
    at_s: float


class UntoldXids:
    """XIDs that no report has carried yet: samples and reports have periods of their own.

    Every report carries the count of each XID, because a receiver may miss some reports.
    """

    def __init__(self) -> None:
        self._codes_by_uuid: dict[GpuUuid, tuple[int, ...]] = {}
        self._counts_by_uuid: dict[GpuUuid, Counter[int]] = {}

    def saw(self, gpus: Iterable[GpuReport]) -> tuple[GpuReport, ...]:
        """Add a sample's GPUs to the unreported XIDs of earlier samples."""
        seen = tuple(gpus)
        for gpu in seen:
            if gpu.xids:
                self._count(gpu)
                codes = (*self._codes_by_uuid.get(gpu.uuid, ()), *gpu.xids)
                self._codes_by_uuid[gpu.uuid] = codes[:MAX_KEPT_XIDS]
        return self.untold(seen)

    def told(self, gpus: Iterable[GpuReport]) -> None:
        """Record that a report with these GPUs was sent."""
        for gpu in gpus:
            left = self._codes_by_uuid.pop(gpu.uuid, ())[len(gpu.xids) :]
            if left:
                self._codes_by_uuid[gpu.uuid] = left

    def untold(self, gpus: Iterable[GpuReport]) -> tuple[GpuReport, ...]:
        """These GPUs with the XIDs that the next report must carry."""
        return tuple(
            self._with_counts(_with_xids(gpu, self._codes_by_uuid.get(gpu.uuid, ())))
            for gpu in gpus
        )

    def _count(self, gpu: GpuReport) -> None:
        counts = self._counts_by_uuid.setdefault(gpu.uuid, Counter())
        for code in gpu.xids:
            if code in counts or len(counts) < MAX_COUNTED_CODES:
                counts[code] += 1

    def _with_counts(self, gpu: GpuReport) -> GpuReport:
        counts = self._counts_by_uuid.get(gpu.uuid)
        if not counts:
            return gpu
        told = tuple(XidCount(code=code, count=counts[code]) for code in sorted(counts))
        return gpu if told == gpu.xid_counts else msgspec.structs.replace(gpu, xid_counts=told)


class GpuXids:
    """Adds the kernel log's XIDs to those of NVML.

    Each XID of one source cancels one equal XID of the other within the window, and no more: two
    processes that fail alike are two XIDs in both.
    """

    def __init__(self) -> None:
        self._unmatched: dict[tuple[GpuUuid, _Teller], list[_Told]] = {}
        self._waiting: tuple[XidLine, ...] = ()
        self._unknown: set[str] = set()

    def add(
        self,
        gpus: Sequence[GpuReport],
        lines: Sequence[XidLine],
        uuid_by_pci_address: Mapping[str, GpuUuid],
        now_s: float,
    ) -> tuple[GpuReport, ...]:
        """The same GPUs, with every new XID.

        A line about a GPU that has not been seen yet waits; once some GPUs are known, an unknown
        one is not ours.
        """
        codes_by_uuid = self._codes(lines, uuid_by_pci_address)
        if not codes_by_uuid and not any(gpu.xids for gpu in gpus):
            return tuple(gpus)
        return tuple(self._with(gpu, codes_by_uuid.get(gpu.uuid, ()), now_s) for gpu in gpus)

    def _codes(
        self, lines: Sequence[XidLine], uuid_by_pci_address: Mapping[str, GpuUuid]
    ) -> dict[GpuUuid, list[int]]:
        lines = (*self._waiting, *lines)
        if not uuid_by_pci_address:
            self._waiting = tuple(lines[:MAX_KEPT_XIDS])
            return {}
        self._waiting = ()
        codes: dict[GpuUuid, list[int]] = {}
        for line in lines:
            uuid = uuid_by_pci_address.get(line.pci_address)
            if uuid is not None:
                codes.setdefault(uuid, []).append(line.code)
            elif line.pci_address not in self._unknown:
                self._unknown.add(line.pci_address)
                log.warning(
                    "kernel log: XID %d of %s, which is not a GPU of this node",
                    line.code,
                    line.pci_address,
                )
        return codes

    def _with(self, gpu: GpuReport, logged: Iterable[int], now_s: float) -> GpuReport:
        new = (
            *self._new(gpu.uuid, _Teller.NVML, gpu.xids, now_s),
            *self._new(gpu.uuid, _Teller.KERNEL_LOG, logged, now_s),
        )
        return _with_xids(gpu, new)

    def _new(self, uuid: GpuUuid, teller: _Teller, codes: Iterable[int], now_s: float) -> list[int]:
        """The XIDs that the other source has not reported already."""
        mine = self._recent(uuid, teller, now_s)
        others = self._recent(uuid, teller.other, now_s)
        new: list[int] = []
        for code in codes:
            twin = next((told for told in others if told.code == code), None)
            if twin is not None:
                others.remove(twin)
                continue
            new.append(code)
            if len(mine) < MAX_KEPT_XIDS:
                mine.append(_Told(code, now_s))
        return new

    def _recent(self, uuid: GpuUuid, teller: _Teller, now_s: float) -> list[_Told]:
        told = self._unmatched.get((uuid, teller), [])
        recent = [one for one in told if now_s - one.at_s <= SAME_XID_WINDOW_S]
        self._unmatched[uuid, teller] = recent
        return recent


def _with_xids(gpu: GpuReport, xids: tuple[int, ...]) -> GpuReport:
    return gpu if xids == gpu.xids else msgspec.structs.replace(gpu, xids=xids)
