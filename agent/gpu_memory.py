"""What is remembered of GPUs that once answered. Must not know NVML, processes or time."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages import GpuHealth, GpuReport
from common.model import GpuUuid


def identity_only(report: GpuReport, health: GpuHealth, xids: tuple[int, ...] = ()) -> GpuReport:
    """The same GPU with nothing but who it is: what may still be said of one that is silent."""
    return GpuReport(
        uuid=report.uuid,
        index=report.index,
        gpu_type=report.gpu_type,
        memory_total_bytes=report.memory_total_bytes,
        health=health,
        xids=xids,
    )


class KnownGpus:
    """Every GPU seen so far by its UUID, so that a lost one stays in the report as LOST.

    Exporters whose series vanish or freeze with the GPU hide exactly the fault that matters
    (dcgm-exporter#164).
    """

    def __init__(self) -> None:
        self._gpus: dict[GpuUuid, GpuReport] = {}

    def __len__(self) -> int:
        return len(self._gpus)

    def update(self, reports: Iterable[GpuReport]) -> tuple[GpuReport, ...]:
        """Remember these and return them by index, with a LOST one for each that is missing."""
        present = {report.uuid: report for report in reports}
        missing = [
            identity_only(gpu, GpuHealth.LOST)
            for uuid, gpu in self._gpus.items()
            if uuid not in present
        ]
        self._gpus.update(present)
        return tuple(sorted((*present.values(), *missing), key=lambda gpu: (gpu.index, gpu.uuid)))

    def unresponsive(self) -> tuple[GpuReport, ...]:
        """All of them as they are named, and nothing said about what they do."""
        return tuple(
            identity_only(gpu, GpuHealth.UNRESPONSIVE)
            for gpu in sorted(self._gpus.values(), key=lambda gpu: (gpu.index, gpu.uuid))
        )
