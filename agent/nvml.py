"""NVML at its edge: the only importer of pynvml; what leaves here is in SI units.

Must not know processes, deadlines or the bus: a call may hang, and whoever calls must expect it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import pynvml  # pyright: ignore[reportMissingTypeStubs] - the distribution has none

from agent.gpu_memory import identity_only
from agent.pci import pci_address
from common.errors import Unavailable
from common.messages import GpuHealth, GpuProcess, GpuReport, RecoveryAction
from common.model import GpuUuid

# ruff: noqa: N802, N803 - the names are NVML's own; a protocol of them must repeat them

T = TypeVar("T")

TEMPERATURE_GPU: int = pynvml.NVML_TEMPERATURE_GPU
ECC_UNCORRECTED: int = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
ECC_VOLATILE: int = pynvml.NVML_VOLATILE_ECC
"""Errors since the driver was loaded; the aggregate never goes back and would blame for ever."""
MEMORY_V2: int = pynvml.nvmlMemory_v2
EVENT_XID: int = pynvml.nvmlEventTypeXidCriticalError
MAX_EVENTS_PER_READ = 64
"""An event storm must not keep a reader from its sample."""

RECOVERY_FIELD: int = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
RECOVERY_ACTIONS: dict[int, RecoveryAction] = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: RecoveryAction.NONE,
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: RecoveryAction.GPU_RESET,
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: RecoveryAction.NODE_REBOOT,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: RecoveryAction.DRAIN_P2P,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: RecoveryAction.DRAIN_AND_RESET,
    pynvml.NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: RecoveryAction.RECOVER_IMEX_DOMAIN,
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: RecoveryAction.BUS_RESET,
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: RecoveryAction.SYSTEM_REBOOT,
}

THROTTLE_REASONS: dict[str, int] = {
    "applications_clocks_setting": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
    "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
    "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake_slowdown": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    "display_clock_setting": pynvml.nvmlClocksEventReasonDisplayClockSetting,
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU; `idle` is not one of them."""


# Handles and event sets are opaque: nobody but the API looks inside.
Handle = object
EventSet = object


class Utilization(Protocol):
    """nvmlUtilization_t: whole percent of the last sample period."""

    @property
    def gpu(self) -> int: ...


class Memory(Protocol):
    """nvmlMemory_t, bytes."""

    @property
    def total(self) -> int: ...
    @property
    def used(self) -> int: ...


class ComputeProcess(Protocol):
    """nvmlProcessInfo_t; memory in bytes, None where the driver may not say."""

    @property
    def pid(self) -> int: ...
    @property
    def usedGpuMemory(self) -> int | None: ...


class PciInfo(Protocol):
    """nvmlPciInfo_t; the function of a GPU is always 0."""

    @property
    def domain(self) -> int: ...
    @property
    def bus(self) -> int: ...
    @property
    def device(self) -> int: ...


class Values(Protocol):
    """nvmlValue_t, a union; what NVML wrote is of the member that the field has."""

    @property
    def uiVal(self) -> int: ...


class FieldValue(Protocol):
    """nvmlFieldValue_t; `nvmlReturn` says whether there is a value."""

    @property
    def nvmlReturn(self) -> int: ...
    @property
    def value(self) -> Values: ...


class EventData(Protocol):
    """nvmlEventData_t; `eventData` is the XID code of an XID event."""

    @property
    def eventType(self) -> int: ...
    @property
    def eventData(self) -> int: ...


class NvmlApi(Protocol):
    """The functions of pynvml that Aryl uses, with pynvml's names, units and exceptions."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Handle: ...
    def nvmlDeviceGetName(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetUUID(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetPciInfo(self, handle: Handle, /) -> PciInfo: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle, /) -> Utilization: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None, /) -> Memory: ...
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int, /) -> int: ...
    def nvmlDeviceGetTemperatureV(self, handle: Handle, sensor: int, /) -> int: ...
    def nvmlDeviceGetPowerUsage(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle, /) -> list[ComputeProcess]: ...
    def nvmlDeviceGetMPSComputeRunningProcesses(
        self, handle: Handle, /
    ) -> list[ComputeProcess]: ...
    def nvmlDeviceGetTotalEccErrors(
        self, handle: Handle, errorType: int, counterType: int, /
    ) -> int: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetFieldValues(
        self, handle: Handle, fieldIds: list[int], /
    ) -> Sequence[FieldValue]: ...
    def nvmlEventSetCreate(self) -> EventSet: ...
    def nvmlEventSetFree(self, eventSet: EventSet, /) -> None: ...
    def nvmlDeviceRegisterEvents(
        self, handle: Handle, eventTypes: int, eventSet: EventSet, /
    ) -> None: ...
    def nvmlEventSetWait_v2(self, eventSet: EventSet, timeoutms: int, /) -> EventData: ...


class LibraryFailed(Unavailable):
    """Not one GPU but the library or the driver as a whole; it has to be opened anew."""


class LostUnseen(Unavailable):
    """One GPU that NVML says is lost, and that was never seen to name it."""


class NvmlError(Exception):
    """Never raised: the static face of pynvml.NVMLError, which has no types."""

    value: int


NvmlFault = cast("type[NvmlError]", pynvml.NVMLError)
"""pynvml's own exception class; `value` is NVML's return code."""

NOT_SUPPORTED: int = pynvml.NVML_ERROR_NOT_SUPPORTED
GPU_IS_LOST: int = pynvml.NVML_ERROR_GPU_IS_LOST
TIMEOUT: int = pynvml.NVML_ERROR_TIMEOUT
INVALID_ARGUMENT: int = pynvml.NVML_ERROR_INVALID_ARGUMENT
UNINITIALIZED: int = pynvml.NVML_ERROR_UNINITIALIZED

# The device or its driver does not say; that is no fault of the GPU.
_SILENT = frozenset(
    {
        NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_NOT_READY,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
_LOST = frozenset({GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND})
# Not one GPU but the library or the driver as a whole.
_LIBRARY = frozenset(
    {
        UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)


def nvml_error(code: int) -> NvmlError:
    """The exception that pynvml raises for this return code; needs no driver."""
    return NvmlFault(code)


def real_api() -> NvmlApi:
    """NVML of this machine, initialized.

    Raises:
        Unavailable: no NVML library, no driver, or one that does not fit the other.
    """
    api = cast("NvmlApi", pynvml)
    try:
        api.nvmlInit()
    except NvmlFault as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise Unavailable(
                "NVML: libnvidia-ml.so.1 was not found; is the NVIDIA driver installed?"
            ) from error
        raise Unavailable(f"NVML: {error}; nvmlInit failed, is the driver loaded?") from error
    return api


class GpuProbe:
    """One GPU by its index; remembers who it was, so that it can be named when it is lost.

    Each probe has an NVML event set of its own: an event then belongs to a GPU without asking a
    device that may be gone.
    """

    def __init__(self, api: NvmlApi, index: int) -> None:
        self._api = api
        self.index = index
        self.identity: GpuReport | None = None
        self.pci: tuple[str, GpuUuid] | None = None
        """Its PCI address and UUID, at once: it is read by another thread."""
        self._event_set: EventSet | None = None
        self._has_tried_events = False

    def read(self) -> GpuReport:
        """The GPU as it is now. May hang as long as the driver does.

        Raises:
            LibraryFailed: the whole library failed.
            LostUnseen: this GPU is lost, and was never seen to name it.
            Unavailable: this GPU was never seen and cannot be named.
        """
        try:
            return self._read()
        except NvmlFault as error:
            if error.value in _LIBRARY:
                raise LibraryFailed(f"NVML: {error}") from error
            if self.identity is None:
                kind = LostUnseen if error.value in _LOST else Unavailable
                raise kind(f"NVML: GPU {self.index} was never seen: {error}") from error
            # A lost GPU often says why by its last XID (79: fell off the bus).
            return identity_only(self.identity, _health_of(error), self._xids())

    def _read(self) -> GpuReport:
        api, handle = self._api, self._api.nvmlDeviceGetHandleByIndex(self.index)
        memory = _memory(api, handle)
        identity = GpuReport(
            uuid=GpuUuid(_text(api.nvmlDeviceGetUUID(handle))),
            index=self.index,
            gpu_type=_text(api.nvmlDeviceGetName(handle)),
            memory_total_bytes=0 if memory is None else memory.total,
        )
        self.identity = identity
        if self.pci is None or self.pci[1] != identity.uuid:
            info = _supported(lambda: api.nvmlDeviceGetPciInfo(handle))
            if info is not None:
                address = pci_address(info.domain, info.bus, info.device)
                self.pci = address, identity.uuid
        self._register_events(handle)
        power_mw = _supported(lambda: api.nvmlDeviceGetPowerUsage(handle))
        limit_mw = _supported(lambda: api.nvmlDeviceGetEnforcedPowerLimit(handle))
        rates = _supported(lambda: api.nvmlDeviceGetUtilizationRates(handle))
        return GpuReport(
            uuid=identity.uuid,
            index=identity.index,
            gpu_type=identity.gpu_type,
            memory_total_bytes=identity.memory_total_bytes,
            memory_used_bytes=None if memory is None else memory.used,
            gpu_busy_ratio=None if rates is None else min(rates.gpu, 100) / 100,
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            temperature_c=_temperature_c(api, handle),
            ecc_uncorrected_count=_supported(
                lambda: api.nvmlDeviceGetTotalEccErrors(handle, ECC_UNCORRECTED, ECC_VOLATILE)
            ),
            throttle_reasons=_throttle_reasons(
                _supported(lambda: api.nvmlDeviceGetCurrentClocksEventReasons(handle))
            ),
            processes=_processes(
                _supported(lambda: api.nvmlDeviceGetComputeRunningProcesses(handle)),
                _supported(lambda: api.nvmlDeviceGetMPSComputeRunningProcesses(handle)),
            ),
            xids=self._xids(),
            recovery_action=_recovery_action(api, handle),  # after them: they may have changed it
        )

    def _register_events(self, handle: Handle) -> None:
        if self._has_tried_events:
            return
        self._has_tried_events = True
        event_set = _supported(self._api.nvmlEventSetCreate)
        if event_set is None:
            return
        try:
            self._api.nvmlDeviceRegisterEvents(handle, EVENT_XID, event_set)
        except NvmlFault:
            # Events are an extra: a GPU without them is read all the same.
            self._api.nvmlEventSetFree(event_set)
        else:
            self._event_set = event_set

    def _xids(self) -> tuple[int, ...]:
        """XID codes since the last read: each event once, never the last one for ever (#500)."""
        if self._event_set is None:
            return ()
        codes: list[int] = []
        try:
            for _ in range(MAX_EVENTS_PER_READ):
                event = self._api.nvmlEventSetWait_v2(self._event_set, 0)
                if event.eventType & EVENT_XID:
                    codes.append(int(event.eventData))
        except NvmlFault:
            # TIMEOUT is how "no more events" is said; any other error has shown in the reads.
            pass
        return tuple(codes)


def gpu_count(api: NvmlApi) -> int:
    """GPUs that NVML says this machine has.

    Raises:
        Unavailable: NVML does not say.
    """
    try:
        return api.nvmlDeviceGetCount()
    except NvmlFault as error:
        raise Unavailable(f"NVML: {error}; the number of GPUs is not known") from error


def _text(value: str | bytes) -> str:
    """Older releases of pynvml return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _supported(call: Callable[[], T]) -> T | None:
    """The answer, or None where the device or driver does not have one."""
    try:
        return call()
    except NvmlFault as error:
        if error.value in _SILENT:
            return None
        raise


def _health_of(error: NvmlError) -> GpuHealth:
    if error.value in _LOST:
        return GpuHealth.LOST
    if error.value == TIMEOUT:
        return GpuHealth.UNRESPONSIVE
    return GpuHealth.FAULTY


def _memory(api: NvmlApi, handle: Handle) -> Memory | None:
    # Version 2 does not count what the driver keeps for itself as used; with version 1 an idle
    # GPU never looks free.
    memory = _supported(lambda: api.nvmlDeviceGetMemoryInfo(handle, MEMORY_V2))
    return memory or _supported(lambda: api.nvmlDeviceGetMemoryInfo(handle))


def _temperature_c(api: NvmlApi, handle: Handle) -> float | None:
    # TemperatureV replaces Temperature; drivers before 565 have only the latter.
    value = _supported(lambda: api.nvmlDeviceGetTemperatureV(handle, TEMPERATURE_GPU))
    if value is None:
        value = _supported(lambda: api.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU))
    return None if value is None else float(value)


def _recovery_action(api: NvmlApi, handle: Handle) -> RecoveryAction | None:
    """What the driver asks for; drivers that know no such field tell nothing."""
    values = _supported(lambda: api.nvmlDeviceGetFieldValues(handle, [RECOVERY_FIELD]))
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return RECOVERY_ACTIONS.get(values[0].value.uiVal, RecoveryAction.UNKNOWN)


def _throttle_reasons(bits: int | None) -> tuple[str, ...]:
    return tuple(name for name, bit in THROTTLE_REASONS.items() if bits is not None and bits & bit)


def _processes(*lists: list[ComputeProcess] | None) -> tuple[GpuProcess, ...]:
    """Each once, by pid. Clients of CUDA's Multi-Process Service are in a list of their own; the
    other one then has their server."""
    found = {process.pid: process for processes in lists for process in processes or ()}
    return tuple(
        GpuProcess(pid=pid, memory_used_bytes=found[pid].usedGpuMemory) for pid in sorted(found)
    )
