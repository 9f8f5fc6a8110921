"""Remembers the GPUs that have answered before, so that one that stops answering is reported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from common.messages import GpuHealth, GpuReport, MigInstance
from common.model import GpuUuid

GPU_COLLECTOR = "gpu"
"""The name in reports of the collector that reads GPUs."""


def identity_only(report: GpuReport, health: GpuHealth, xids: tuple[int, ...] = ()) -> GpuReport:
    """The same GPU reduced to its identity and its MIG instances, which hold while it is silent."""
    return GpuReport(
        uuid=report.uuid,
        index=report.index,
        gpu_type=report.gpu_type,
        memory_total_bytes=report.memory_total_bytes,
        health=health,
        processes=None,
        xids=xids,
        is_mig=report.is_mig,
        mig=_parts(report),
    )


def _parts(report: GpuReport) -> tuple[MigInstance, ...]:
    return tuple(replace(part, memory_used_bytes=None, processes=None) for part in report.mig)


class GpuIdentity(Struct, frozen=True, kw_only=True):
    """One GPU as the ledger keeps it: enough to report it when NVML cannot be read."""

    uuid: GpuUuid
    index: int
    gpu_type: str
    memory_total_bytes: int
    is_mig: bool | None = False
    mig: tuple[MigInstance, ...] = ()


def identities(gpus: Iterable[GpuReport]) -> list[GpuIdentity]:
    """These GPUs in the form of the ledger."""
    return [
        GpuIdentity(
            uuid=gpu.uuid,
            index=gpu.index,
            gpu_type=gpu.gpu_type,
            memory_total_bytes=gpu.memory_total_bytes,
            is_mig=gpu.is_mig,
            mig=_parts(gpu),
        )
        for gpu in gpus
    ]


def completed(
    read: Sequence[GpuReport],
    known: Iterable[GpuIdentity],
    *,
    is_whole: bool,
    lost_indices: Collection[int] = (),
) -> tuple[GpuReport, ...]:
    """A reading, with each missing GPU of the ledger added as UNRESPONSIVE or as LOST.

    lost_indices: where NVML reports a lost GPU, which the reading cannot name.
    is_whole: the reading had no error, so a GPU that it lacks is no longer in the machine. A GPU
        whose index another GPU has now was replaced.
    """
    if is_whole:
        return tuple(read)
    uuids, indices = {gpu.uuid for gpu in read}, {gpu.index for gpu in read}
    silent = [
        GpuReport(
            uuid=gpu.uuid,
            index=gpu.index,
            gpu_type=gpu.gpu_type,
            memory_total_bytes=gpu.memory_total_bytes,
            health=GpuHealth.LOST if gpu.index in lost_indices else GpuHealth.UNRESPONSIVE,
            processes=None,
            is_mig=gpu.is_mig,
            mig=gpu.mig,
        )
        for gpu in known
        if gpu.uuid not in uuids and gpu.index not in indices
    ]
    return tuple(sorted((*read, *silent), key=lambda gpu: (gpu.index, gpu.uuid)))


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
        """All GPUs by identity, without any state."""
        return tuple(
            identity_only(gpu, GpuHealth.UNRESPONSIVE)
            for gpu in sorted(self._gpus.values(), key=lambda gpu: (gpu.index, gpu.uuid))
        )
