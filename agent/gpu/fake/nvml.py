"""NVML without a GPU: the same functions, exceptions and units, from a fleet file and its faults.

It replaces the layer below `agent.gpu.nvml`, so the code above it is the code that runs in
production.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from msgspec import Struct, structs

from agent.gpu.fake.fleet import (
    FakeFleet,
    Fault,
    FaultKind,
    GpuGroup,
    MigPart,
    NvmlCall,
    XidTold,
    pci_address_of,
)
from agent.gpu.fake.processes import Holder
from agent.gpu.nvml import (
    ECC_UNCORRECTED,
    EVENT_XID,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    MIG_ENABLED,
    NOT_FOUND,
    NOT_SUPPORTED,
    RECOVERY_FIELD,
    THROTTLE_REASONS,
    TIMEOUT,
    UNINITIALIZED,
    ComputeProcess,
    EventData,
    EventSet,
    FieldValue,
    Handle,
    Memory,
    PciInfo,
    Utilization,
    nvml_error,
)

# ruff: noqa: N802, N803, N815 - the names are NVML's own

IDLE_POWER_RATIO = 0.1
"""Approximate share of its power limit that an idle data-center GPU draws."""
IDLE_TEMPERATURE_C = 30
BUSY_TEMPERATURE_C = 70
SCAN_PERIOD_S = 0.25
"""One look at /proc serves all GPUs of a sample."""


MOST_MIG_PARTS = 7
"""The most instances that a device can have."""
_RECORD = struct.Struct("=IxxxxQII")
_WIDE_RECORD = struct.Struct("=IxxxxQIIQ")
_NO_INSTANCE = (0xFFFFFFFF, 0xFFFFFFFF)


class Processes(Protocol):
    """The processes on each GPU now; `agent.gpu.fake.processes.ProcessTable` is the real one."""

    def scan(self) -> list[Holder]: ...


class _Rates(Struct, frozen=True):
    gpu: int
    memory: int = 0


class _Memory(Struct, frozen=True):
    total: int
    used: int
    free: int


class _Process(Struct, frozen=True):
    pid: int
    usedGpuMemory: int | None


class _PciInfo(Struct, frozen=True):
    domain: int
    bus: int
    device: int


class _Event(Struct, frozen=True):
    eventType: int
    eventData: int


class _Value(Struct, frozen=True):
    uiVal: int = 0


class _Field(Struct, frozen=True):
    nvmlReturn: int
    value: _Value = _Value()


class _Gpu(Struct, frozen=True):
    """A device handle: a GPU, or a MIG instance of one."""

    index: int
    uuid: str
    group: GpuGroup
    parts: tuple[MigPart, ...] = ()
    part: MigPart | None = None


class _Events(Struct):
    """An event set: its GPUs, and the events of the script that it has delivered."""

    indices: set[int] = set()
    delivered: set[tuple[int, int]] = set()


def _raise(code: int) -> NoReturn:
    raise nvml_error(code)


class FakeNvml:
    """NVML of a machine with this fleet; the script starts with the object.

    `now_s` is any clock that only grows. `pause` waits some seconds (a hanging call does so until
    its fault ends). `age_s` is how much of the script is over already: a restarted reader goes on,
    and gets no event twice.
    """

    def __init__(
        self,
        fleet: FakeFleet,
        *,
        node: str,
        processes: Processes,
        now_s: Callable[[], float],
        pause: Callable[[float], None],
        age_s: float = 0.0,
    ) -> None:
        self._fleet = fleet
        self._gpus = tuple(
            _Gpu(index, fleet.uuid_of(node, index), group, fleet.parts_of(node, index))
            for index, group in enumerate(fleet.groups_by_index())
        )
        self._driver = fleet.known_driver
        self._processes = processes
        self._now_s = now_s
        self._pause = pause
        self._age_s = age_s
        self._start_s = now_s() - age_s
        self._is_open = False
        self._lock = threading.Lock()
        self._holders: list[Holder] = []
        self._holders_by_gpu: dict[str, list[Holder]] = {}
        """By the UUID of a GPU or of an instance; of the last scan."""
        self._scanned_at_s = float("-inf")

    def nvmlInit(self) -> None:
        self._is_open = True

    def nvmlShutdown(self) -> None:
        self._is_open = False

    def nvmlDeviceGetCount(self) -> int:
        if not self._is_open:
            _raise(UNINITIALIZED)
        # A hang of all GPUs is one of the driver: it does not even report their number.
        self._hang(None)
        counts = [fault.value for fault in self._active(FaultKind.WRONG_COUNT)]
        return min((count for count in counts if count is not None), default=len(self._gpus))

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Handle:
        if not 0 <= index < self.nvmlDeviceGetCount():
            _raise(INVALID_ARGUMENT)
        return self._answering(self._gpus[index], NvmlCall.HANDLE)

    def nvmlDeviceGetName(self, handle: Handle, /) -> str:
        gpu = self._answering(handle, NvmlCall.NAME)
        return gpu.group.model if gpu.part is None else f"{gpu.group.model} MIG {gpu.part.profile}"

    def nvmlDeviceGetUUID(self, handle: Handle, /) -> str:
        gpu = self._answering(handle, NvmlCall.UUID)
        return gpu.uuid if gpu.part is None else gpu.part.uuid

    def nvmlDeviceGetPciInfo(self, handle: Handle, /) -> PciInfo:
        return _PciInfo(*pci_address_of(self._answering(handle, NvmlCall.PCI).index))

    def nvmlDeviceGetUtilizationRates(self, handle: Handle, /) -> Utilization:
        gpu = self._answering(handle, NvmlCall.UTILIZATION)
        if gpu.group.mig is not None:
            _raise(NOT_SUPPORTED)  # as the real one does, for the device and for its instances
        busy = round(self._busy_ratio(gpu) * 100)
        return _Rates(gpu=self._reading(gpu, NvmlCall.UTILIZATION, busy))

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None, /) -> Memory:
        if version is not None and not self._driver.has_memory_v2:
            _raise(FUNCTION_NOT_FOUND)
        gpu = self._answering(handle, NvmlCall.MEMORY)
        total = gpu.group.memory_bytes if gpu.part is None else gpu.part.memory_bytes
        used = min(total, sum(_memory_bytes(holder, gpu) for holder in self._holders_of(gpu)))
        return _Memory(
            total=self._reading(gpu, NvmlCall.MEMORY, total),
            used=self._reading(gpu, NvmlCall.MEMORY_USED, used),
            free=total - used,
        )

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int, /) -> int:
        gpu = self._answering(handle, NvmlCall.TEMPERATURE, of_a_part=False)
        busy = self._busy_ratio(gpu)
        heat = round(IDLE_TEMPERATURE_C + busy * (BUSY_TEMPERATURE_C - IDLE_TEMPERATURE_C))
        return self._reading(gpu, NvmlCall.TEMPERATURE, heat)

    def nvmlDeviceGetTemperatureV(self, handle: Handle, sensor: int, /) -> int:
        if not self._driver.has_temperature_v:
            _raise(FUNCTION_NOT_FOUND)
        return self.nvmlDeviceGetTemperature(handle, sensor)

    def nvmlDeviceGetPowerUsage(self, handle: Handle, /) -> int:
        gpu = self._answering(handle, NvmlCall.POWER, of_a_part=False)
        share = IDLE_POWER_RATIO + (1 - IDLE_POWER_RATIO) * self._busy_ratio(gpu)
        power_mw = round(gpu.group.power_limit_w * share * 1000)
        return self._reading(gpu, NvmlCall.POWER, power_mw)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle, /) -> int:
        gpu = self._answering(handle, NvmlCall.POWER_LIMIT, of_a_part=False)
        limit_mw = round(gpu.group.power_limit_w * 1000)
        return self._reading(gpu, NvmlCall.POWER_LIMIT, limit_mw)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle, /) -> list[ComputeProcess]:
        return self._newest_list(handle, are_mps_clients=False)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Handle, /) -> list[ComputeProcess]:
        return self._processes_of(handle, are_mps_clients=False)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Handle, /) -> list[ComputeProcess]:
        return self._newest_list(handle, are_mps_clients=True)

    def nvmlDeviceGetMPSComputeRunningProcesses_v2(self, handle: Handle, /) -> list[ComputeProcess]:
        return self._processes_of(handle, are_mps_clients=True)

    def nvmlDeviceGetMigMode(self, handle: Handle, /) -> list[int]:
        if not self._driver.has_mig:
            _raise(FUNCTION_NOT_FOUND)
        gpu = self._answering(handle, NvmlCall.MIG, of_a_part=False)
        mode = MIG_ENABLED if gpu.group.mig is not None else 0
        return [self._reading(gpu, NvmlCall.MIG, mode), mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle, /) -> int:
        gpu = self._answering(handle, of_a_part=False)
        return 0 if gpu.group.mig is None else max(MOST_MIG_PARTS, len(gpu.parts))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int, /) -> Handle:
        gpu = self._answering(handle, of_a_part=False)
        if gpu.group.mig is None or not 0 <= index < max(MOST_MIG_PARTS, len(gpu.parts)):
            _raise(INVALID_ARGUMENT)
        if index >= len(gpu.parts):
            _raise(NOT_FOUND)
        return structs.replace(gpu, part=gpu.parts[index])

    def nvmlDeviceGetGpuInstanceId(self, handle: Handle, /) -> int:
        return self._part(handle).index

    def nvmlDeviceGetComputeInstanceId(self, handle: Handle, /) -> int:
        self._part(handle)
        return 0

    def nvmlDeviceGetTotalEccErrors(
        self, handle: Handle, errorType: int, counterType: int, /
    ) -> int:
        gpu = self._answering(handle, NvmlCall.ECC, of_a_part=False)
        if errorType != ECC_UNCORRECTED:
            _raise(NOT_SUPPORTED)
        # An error that has happened stays counted, also when the fault is over.
        count = sum(
            fault.value or 0
            for fault in self._fleet.fault
            if fault.kind == FaultKind.ECC
            and fault.concerns(gpu.index)
            and fault.at_s <= self._elapsed_s()
        )
        return self._reading(gpu, NvmlCall.ECC, count)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle, /) -> int:
        if not self._driver.has_event_reasons:
            _raise(FUNCTION_NOT_FOUND)
        return self.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle, /) -> int:
        gpu = self._answering(handle, NvmlCall.THROTTLE, of_a_part=False)
        bits = 0
        for fault in self._active(FaultKind.THROTTLE, gpu.index):
            bits |= THROTTLE_REASONS["hw_thermal_slowdown"] if fault.value is None else fault.value
        return self._reading(gpu, NvmlCall.THROTTLE, bits)

    def nvmlDeviceGetFieldValues(
        self, handle: Handle, fieldIds: list[int], /
    ) -> Sequence[FieldValue]:
        gpu = self._answering(handle)
        return [self._field(gpu, field_id) for field_id in fieldIds]

    def _field(self, gpu: _Gpu, field_id: int) -> _Field:
        faults = [
            fault
            for fault in self._fleet.fault
            if fault.kind == FaultKind.RECOVERY and fault.concerns(gpu.index)
        ]
        if field_id != RECOVERY_FIELD or not faults:
            return _Field(NOT_SUPPORTED)
        active = self._active(FaultKind.RECOVERY, gpu.index)
        return _Field(0, _Value(active[-1].value or 0 if active else 0))

    def nvmlEventSetCreate(self) -> EventSet:
        return _Events()

    def nvmlEventSetFree(self, eventSet: EventSet, /) -> None:
        _events(eventSet).indices.clear()

    def nvmlDeviceRegisterEvents(
        self, handle: Handle, eventTypes: int, eventSet: EventSet, /
    ) -> None:
        gpu = self._answering(handle, NvmlCall.EVENTS, of_a_part=False)
        if eventTypes & EVENT_XID:
            _events(eventSet).indices.add(gpu.index)

    def nvmlEventSetWait_v2(self, eventSet: EventSet, timeoutms: int, /) -> EventData:
        events = _events(eventSet)
        for number, fault in enumerate(self._fleet.fault):
            if fault.kind != FaultKind.XID or fault.told_by == XidTold.KERNEL_LOG:
                continue
            if not self._has_happened(fault):
                continue
            for index in sorted(events.indices):
                if fault.concerns(index) and (number, index) not in events.delivered:
                    events.delivered.add((number, index))
                    return _Event(EVENT_XID, fault.value or 0)
        self._pause(timeoutms / 1000)
        _raise(TIMEOUT)

    def _elapsed_s(self) -> float:
        return self._now_s() - self._start_s

    def _has_happened(self, fault: Fault) -> bool:
        """True if it happened in the life of this object.

        NVML delivers no event from before it was opened.
        """
        return self._age_s <= fault.at_s <= self._elapsed_s()

    def _active(self, kind: FaultKind, index: int | None = None) -> list[Fault]:
        if not self._fleet.fault:  # asked some 400 times a sample
            return []
        elapsed_s = self._elapsed_s()
        return [
            fault
            for fault in self._fleet.fault
            if fault.kind == kind
            and fault.is_active(elapsed_s)
            and (fault.gpu is None if index is None else fault.concerns(index))
        ]

    def _hang(self, index: int | None) -> None:
        """Block until every hang of this GPU, or of the driver, is over."""
        while faults := self._active(FaultKind.HANG, index):
            left_s = max(fault.end_s for fault in faults) - self._elapsed_s()
            # In slices: `pause` cannot take an endless time, nor can a clock jump be foreseen.
            self._pause(min(max(left_s, 0.001), 3600.0))

    def _answering(
        self, handle: Handle, call: NvmlCall | None = None, *, of_a_part: bool = True
    ) -> _Gpu:
        """The GPU behind a handle, once it answers at all, and supports this call.

        of_a_part: a MIG instance supports the call as well.
        """
        if not isinstance(handle, _Gpu):
            _raise(INVALID_ARGUMENT)
        if not self._is_open:
            _raise(UNINITIALIZED)
        self._hang(handle.index)
        if self._active(FaultKind.LOST, handle.index):
            _raise(GPU_IS_LOST)
        for fault in self._active(FaultKind.ERROR, handle.index):
            # An instance answers for itself: an account without rights to all may query it.
            if fault.call == call and handle.part is None:
                _raise(fault.value or 0)
        if handle.part is not None and not of_a_part:
            _raise(NOT_SUPPORTED)
        return handle

    def _reading(self, gpu: _Gpu, call: NvmlCall, value: int) -> int:
        """The value, or the value that a fault returns in its place."""
        faults = [] if gpu.part is not None else self._active(FaultKind.READING, gpu.index)
        said = [fault.value for fault in faults if fault.call == call and fault.value is not None]
        return said[-1] if said else value

    def _part(self, handle: Handle) -> MigPart:
        gpu = self._answering(handle)
        if gpu.part is None:
            _raise(INVALID_ARGUMENT)
        return gpu.part

    def _newest_list(self, handle: Handle, *, are_mps_clients: bool) -> list[ComputeProcess]:
        if not self._driver.has_processes_v3:
            _raise(FUNCTION_NOT_FOUND)
        found = self._processes_of(handle, are_mps_clients=are_mps_clients)
        return _misread(found) if self._driver.has_wide_processes else found

    def _processes_of(self, handle: Handle, *, are_mps_clients: bool) -> list[ComputeProcess]:
        gpu = self._answering(handle, NvmlCall.PROCESSES)
        return [
            _Process(holder.pid, _memory_bytes(holder, gpu))
            for holder in self._holders_of(gpu)
            if holder.is_mps_client == are_mps_clients
        ]

    def _holders_of(self, gpu: _Gpu) -> list[Holder]:
        with self._lock:
            now_s = self._now_s()
            if now_s - self._scanned_at_s >= SCAN_PERIOD_S:
                self._holders, self._scanned_at_s = self._processes.scan(), now_s
                self._holders_by_gpu = {}
            uuid = gpu.uuid if gpu.part is None else gpu.part.uuid
            found = self._holders_by_gpu.get(uuid)
            if found is None:  # asked six times a sample
                found = self._holders_by_gpu[uuid] = _holders_on(gpu, self._holders)
        return found

    def _busy_ratio(self, gpu: _Gpu) -> float:
        ratios = (
            gpu.group.default_busy_ratio
            if holder.usage.busy_ratio is None
            else holder.usage.busy_ratio
            for holder in self._holders_of(gpu)
        )
        return min(1.0, sum(ratios))


def _holders_on(gpu: _Gpu, holders: list[Holder]) -> list[Holder]:
    uuids = {gpu.uuid, *(part.uuid for part in gpu.parts)} if gpu.part is None else {gpu.part.uuid}
    return [
        holder for holder in holders if not uuids.isdisjoint(holder.uuids) and _has_context(holder)
    ]


def _misread(processes: list[ComputeProcess]) -> list[ComputeProcess]:
    """The garbage that results when records of 32 bytes are read as records of 24."""
    wide = b"".join(
        _WIDE_RECORD.pack(one.pid, one.usedGpuMemory or 0, *_NO_INSTANCE, 0) for one in processes
    )
    records = (_RECORD.unpack_from(wide, at * _RECORD.size) for at in range(len(processes)))
    return [_Process(pid, used) for pid, used, *_ in records]


def _events(event_set: EventSet) -> _Events:
    if not isinstance(event_set, _Events):
        _raise(INVALID_ARGUMENT)
    return event_set


def _memory_bytes(holder: Holder, gpu: _Gpu) -> int:
    said = holder.usage.memory_bytes
    return gpu.group.default_memory_used_bytes if said is None else said


def _has_context(holder: Holder) -> bool:
    """False for a process that reports no usage.

    A launcher or supervisor has not opened the GPU.
    """
    return holder.usage.busy_ratio != 0 or holder.usage.memory_bytes != 0
