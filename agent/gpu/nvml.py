"""NVML at its edge: the only importer of pynvml; all values leave here in SI units.

A call may hang for ever, and every caller must expect that.

A value that the driver does not report is unknown, never zero and never an empty list. A value that
no device can have, or for which NVML returns an error, is unknown too. Only an error of the whole
GPU makes the GPU faulty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar, cast

import pynvml  # pyright: ignore[reportMissingTypeStubs] - the distribution has none
from msgspec.structs import replace

from agent.gpu.known_gpus import identity_only
from agent.gpu.wire import pci_address
from common.errors import Unavailable
from common.messages import (
    GpuHealth,
    GpuProcess,
    GpuReport,
    MigInstance,
    RecoveryAction,
)
from common.model import GpuUuid

# ruff: noqa: N802, N803 - the names are NVML's own; a protocol of them must repeat them

T = TypeVar("T")

TEMPERATURE_GPU: int = pynvml.NVML_TEMPERATURE_GPU
ECC_UNCORRECTED: int = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
ECC_VOLATILE: int = pynvml.NVML_VOLATILE_ECC
"""Errors since the driver was loaded; the aggregate never goes back and would count for ever."""
MEMORY_V2: int = pynvml.nvmlMemory_v2
EVENT_XID: int = pynvml.nvmlEventTypeXidCriticalError
MAX_EVENTS_PER_READ = 64
"""An event storm must not keep a reader from its sample."""
MAX_XID = 0xFFFF
"""Their codes have three digits today."""
MAX_MEMORY_BYTES = 1 << 50
MAX_POWER_W = 10_000.0
"""Ten times the draw of a GPU today; drivers have answered 2**32 - 1 for unknown values."""
TEMPERATURES_C = (-50, 200)
MAX_ECC_COUNT = (1 << 32) - 2
MAX_PID = 1 << 22
"""Linux's own limit (PID_MAX_LIMIT, 64 bits)."""
MAX_MIG_INSTANCES = 64
"""A device reports its maximum; 7 today."""

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


# Handles and event sets are opaque: only the API looks inside.
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
    """nvmlProcessInfo_t; memory in bytes, None where the driver cannot give it."""

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
    """nvmlValue_t, a union; NVML writes the member that belongs to the field."""

    @property
    def uiVal(self) -> int: ...


class FieldValue(Protocol):
    """nvmlFieldValue_t; `nvmlReturn` shows whether there is a value."""

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
    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, handle: Handle, /
    ) -> list[ComputeProcess]: ...
    def nvmlDeviceGetComputeRunningProcesses_v2(
        self, handle: Handle, /
    ) -> list[ComputeProcess]: ...
    def nvmlDeviceGetMPSComputeRunningProcesses_v3(
        self, handle: Handle, /
    ) -> list[ComputeProcess]: ...
    def nvmlDeviceGetMPSComputeRunningProcesses_v2(
        self, handle: Handle, /
    ) -> list[ComputeProcess]: ...
    def nvmlDeviceGetMigMode(self, handle: Handle, /) -> list[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int, /) -> Handle: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetComputeInstanceId(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetTotalEccErrors(
        self, handle: Handle, errorType: int, counterType: int, /
    ) -> int: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle, /) -> int: ...
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
    """A failure of the whole library or driver, not of one GPU.

    The library must be opened again.
    """


class LostUnseen(Unavailable):
    """NVML reports a lost GPU that no reading has named."""


class NvmlError(Exception):
    """Never raised: the static face of pynvml.NVMLError, which has no types."""

    value: int


NvmlFault = cast("type[NvmlError]", pynvml.NVMLError)
"""pynvml's own exception class; `value` is NVML's return code."""

NOT_SUPPORTED: int = pynvml.NVML_ERROR_NOT_SUPPORTED
GPU_IS_LOST: int = pynvml.NVML_ERROR_GPU_IS_LOST
TIMEOUT: int = pynvml.NVML_ERROR_TIMEOUT
INVALID_ARGUMENT: int = pynvml.NVML_ERROR_INVALID_ARGUMENT
NO_PERMISSION: int = pynvml.NVML_ERROR_NO_PERMISSION
NOT_FOUND: int = pynvml.NVML_ERROR_NOT_FOUND
FUNCTION_NOT_FOUND: int = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
UNKNOWN: int = pynvml.NVML_ERROR_UNKNOWN
MIG_ENABLED: int = pynvml.NVML_DEVICE_MIG_ENABLE
UNINITIALIZED: int = pynvml.NVML_ERROR_UNINITIALIZED

# The device or its driver does not report it, and never will: that is not worth a log line.
_SILENT = frozenset(
    {
        NOT_SUPPORTED,
        NO_PERMISSION,
        NOT_FOUND,
        FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_NOT_READY,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
_LOST = frozenset({GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND})
# A failure of the library or the driver, not of one GPU.
_LIBRARY = frozenset(
    {
        UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
# An error of the whole GPU, whatever the call. Any other error is of that value alone.
_WHOLE = _LOST | _LIBRARY | {TIMEOUT, pynvml.NVML_ERROR_RESET_REQUIRED}


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
    """One GPU by its index; remembers its identity, so that a lost GPU can be named.

    Each probe has an NVML event set of its own: an event then belongs to a GPU without a query to a
    device that may be gone.
    """

    def __init__(self, api: NvmlApi, index: int) -> None:
        self._api = api
        self.index = index
        self.identity: GpuReport | None = None
        self.pci: tuple[str, GpuUuid] | None = None
        """Its PCI address and UUID in one value, because another thread reads it."""
        self.error = ""
        """Why the last read found it to be faulty; else empty."""
        self.unread: dict[str, str] = {}
        """Values that the last read could not get or trust and reports as unknown, and why."""
        self._is_mig: bool | None = None
        self._event_set: EventSet | None = None
        self._has_tried_events = False

    def read(self) -> GpuReport:
        """The GPU as it is now. May hang as long as the driver does.

        Raises:
            LibraryFailed: the whole library failed.
            LostUnseen: this GPU is lost, and no earlier reading can name it.
            Unavailable: this GPU was never seen and cannot be named.
        """
        self.error, self.unread = "", {}
        try:
            return self._read()
        except NvmlFault as error:
            if error.value in _LIBRARY:
                raise LibraryFailed(f"NVML: {error}") from error
            if self.identity is None:
                kind = LostUnseen if error.value in _LOST else Unavailable
                raise kind(f"NVML: GPU {self.index} was never seen: {error}") from error
            health = _health_of(error)
            if health == GpuHealth.FAULTY:
                self.error = f"GPU {self.index} is faulty: {error}"
            # A lost GPU often gives the cause by its last XID (79: fell off the bus).
            return identity_only(self.identity, health, self._xids())

    def _read(self) -> GpuReport:
        handle = self._api.nvmlDeviceGetHandleByIndex(self.index)
        identity = self._identify(handle)
        reading = _Reading(self._api, f"GPU {self.index}", identity.memory_total_bytes)
        self._locate(handle, identity.uuid)
        self._register_events(handle)
        report = self._measure(handle, identity, reading)
        self.unread = reading.unread
        if reading.has_failed:
            why = "; ".join(f"{what}: {why}" for what, why in reading.unread.items())
            self.error = f"GPU {self.index} is faulty: {why}"
            return identity_only(identity, GpuHealth.FAULTY, self._xids())
        self.identity = report
        return report

    def _identify(self, handle: Handle) -> GpuReport:
        """Read the identity before any call that may fail or hang, so that the GPU can be named."""
        api, known = self._api, self.identity
        uuid = GpuUuid(_text(api.nvmlDeviceGetUUID(handle)))
        if known is not None and known.uuid != uuid:
            known, self._is_mig = None, None
        try:
            gpu_type = _text(api.nvmlDeviceGetName(handle))
        except NvmlFault as error:
            if known is None or error.value in _WHOLE:
                raise
            gpu_type = known.gpu_type
        if known is None:
            found = GpuReport(uuid=uuid, index=self.index, gpu_type=gpu_type, memory_total_bytes=0)
        else:
            found = replace(known, gpu_type=gpu_type)
        self.identity = found
        return found

    def _locate(self, handle: Handle, uuid: GpuUuid) -> None:
        if self.pci is None or self.pci[1] != uuid:
            info = _supported(lambda: self._api.nvmlDeviceGetPciInfo(handle))
            if info is not None:
                self.pci = pci_address(info.domain, info.bus, info.device), uuid

    def _measure(self, handle: Handle, identity: GpuReport, reading: _Reading) -> GpuReport:
        total, used = reading.memory_bytes(handle)
        is_mig = self._mig_mode(handle, reading)
        parts = reading.mig_instances(handle) if is_mig else ()
        processes = reading.processes(handle)
        if processes is None and is_mig:
            # An account that may not query the whole device may query its instances.
            processes = _together(part.processes for part in parts)
        return GpuReport(
            uuid=identity.uuid,
            index=identity.index,
            gpu_type=identity.gpu_type,
            memory_total_bytes=total,
            memory_used_bytes=used,
            gpu_busy_ratio=reading.busy_ratio(handle),
            power_w=reading.power_w("power", self._api.nvmlDeviceGetPowerUsage, handle),
            power_limit_w=reading.power_w(
                "power limit", self._api.nvmlDeviceGetEnforcedPowerLimit, handle
            ),
            temperature_c=reading.temperature_c(handle),
            ecc_uncorrected_count=reading.ecc_count(handle),
            throttle_reasons=reading.throttle_reasons(handle),
            processes=processes,
            xids=self._xids(),
            is_mig=is_mig,
            mig=parts,
            recovery_action=reading.recovery_action(handle),  # after them: they may have changed it
        )

    def _mig_mode(self, handle: Handle, reading: _Reading) -> bool | None:
        """The MIG mode, the last known one after an error.

        Otherwise an instance would pass for a GPU.
        """
        is_mig = reading.is_mig(handle)
        if is_mig is not None:
            self._is_mig = is_mig
        return self._is_mig

    def _register_events(self, handle: Handle) -> None:
        if self._has_tried_events:
            return
        self._has_tried_events = True
        # Events are an extra: a GPU without them is read all the same.
        with suppress(NvmlFault):
            event_set = self._api.nvmlEventSetCreate()
            try:
                self._api.nvmlDeviceRegisterEvents(handle, EVENT_XID, event_set)
            except NvmlFault:
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
                if event.eventType & EVENT_XID and 0 <= event.eventData <= MAX_XID:
                    codes.append(int(event.eventData))
        except NvmlFault:
            # TIMEOUT means "no more events"; any other error has shown in the reads.
            pass
        return tuple(codes)


def gpu_count(api: NvmlApi) -> int:
    """The number of GPUs in this machine, by NVML.

    Raises:
        Unavailable: NVML does not report it.
    """
    try:
        return api.nvmlDeviceGetCount()
    except NvmlFault as error:
        raise Unavailable(f"NVML: {error}; the number of GPUs is not known") from error


def _text(value: str | bytes) -> str:
    """Older releases of pynvml return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _supported(call: Callable[[], T]) -> T | None:
    """The answer, or None if the call is not supported; an error of the whole GPU is raised."""
    try:
        return call()
    except NvmlFault as error:
        if error.value in _WHOLE:
            raise
        return None


def _health_of(error: NvmlError) -> GpuHealth:
    if error.value in _LOST:
        return GpuHealth.LOST
    if error.value == TIMEOUT:
        return GpuHealth.UNRESPONSIVE
    return GpuHealth.FAULTY


class _Reading:
    """The values of one device, or of a MIG instance, each read by itself.

    Args:
        name: of the device, for people.
        total_bytes: its memory by an earlier reading; 0: not known.
    """

    def __init__(self, api: NvmlApi, name: str, total_bytes: int) -> None:
        self.unread: dict[str, str] = {}
        self._api = api
        self._name = name
        self._total_bytes = total_bytes
        self._answer_count = 0
        self._failure_count = 0
        self._silence = ""

    @property
    def has_failed(self) -> bool:
        """True if several calls returned only errors: that is more than one missing value."""
        return self._failure_count > 1 and self._answer_count == 0

    def _ask(self, what: str, *calls: Callable[[], T]) -> T | None:
        """The first answer of equivalent calls, newest first: an older driver does not have all.

        Raises:
            NvmlFault: an error of the whole GPU, or of the library.
        """
        for call in calls:
            try:
                answer = call()
            except NvmlFault as error:
                if error.value in _WHOLE:
                    raise
                if error.value in _SILENT:
                    self._silence = str(error)
                    continue
                self._failure_count += 1
                self._leave(what, str(error))
                return None
            except ValueError as error:  # a text that is not one
                self._leave(what, str(error))
                return None
            self._answer_count += 1
            return answer
        return None

    def _leave(self, what: str, why: str) -> None:
        self.unread[f"{self._name}: {what}"] = why

    def _within(self, what: str, value: int | None, least: float, most: float) -> int | None:
        """The value, or None if no device can have it.

        Drivers fill in values that they do not know.
        """
        if value is None or least <= value <= most:
            return value
        self._leave(what, f"{value} is out of range")
        return None

    def memory_bytes(self, handle: Handle) -> tuple[int, int | None]:
        """Total memory, by an earlier reading if need be, and used memory."""
        api = self._api
        # Version 2 does not count the driver's own memory as used; with version 1 an idle GPU never
        # looks free.
        memory = self._ask(
            "memory",
            lambda: api.nvmlDeviceGetMemoryInfo(handle, MEMORY_V2),
            lambda: api.nvmlDeviceGetMemoryInfo(handle),
        )
        if memory is None:
            return self._total_bytes, None
        total = self._within("memory", memory.total, 1, MAX_MEMORY_BYTES)
        self._total_bytes = self._total_bytes if total is None else total
        used = self._within("memory used", memory.used, 0, total or MAX_MEMORY_BYTES)
        return self._total_bytes, used

    def busy_ratio(self, handle: Handle) -> float | None:
        rates = self._ask("utilization", lambda: self._api.nvmlDeviceGetUtilizationRates(handle))
        percent = None if rates is None else self._within("utilization", rates.gpu, 0, 100)
        return None if percent is None else percent / 100

    def power_w(self, what: str, call: Callable[[Handle], int], handle: Handle) -> float | None:
        power_mw = self._ask(what, lambda: call(handle))
        power_mw = self._within(what, power_mw, 0, 1000 * MAX_POWER_W)
        return None if power_mw is None else power_mw / 1000

    def temperature_c(self, handle: Handle) -> float | None:
        # TemperatureV replaces Temperature; drivers before 565 have only the latter.
        value = self._ask(
            "temperature",
            lambda: self._api.nvmlDeviceGetTemperatureV(handle, TEMPERATURE_GPU),
            lambda: self._api.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU),
        )
        value = self._within("temperature", value, *TEMPERATURES_C)
        return None if value is None else float(value)

    def ecc_count(self, handle: Handle) -> int | None:
        count = self._ask(
            "ECC errors",
            lambda: self._api.nvmlDeviceGetTotalEccErrors(handle, ECC_UNCORRECTED, ECC_VOLATILE),
        )
        return self._within("ECC errors", count, 0, MAX_ECC_COUNT)

    def throttle_reasons(self, handle: Handle) -> tuple[str, ...]:
        # Drivers before 535 have them by another name.
        bits = self._ask(
            "clocks event reasons",
            lambda: self._api.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: self._api.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
        bits = self._within("clocks event reasons", bits, 0, 1 << 32)
        return tuple(name for name, bit in THROTTLE_REASONS.items() if bits and bits & bit)

    def recovery_action(self, handle: Handle) -> RecoveryAction | None:
        """The recovery action that the driver requests; drivers without the field report none.

        It is no reading of the device, so it does not show that the device answers.
        """
        try:
            values = self._api.nvmlDeviceGetFieldValues(handle, [RECOVERY_FIELD])
        except NvmlFault as error:
            if error.value in _WHOLE:
                raise
            return None
        if values[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        return RECOVERY_ACTIONS.get(values[0].value.uiVal, RecoveryAction.UNKNOWN)

    def processes(self, handle: Handle) -> tuple[GpuProcess, ...] | None:
        """Each process once, by pid; None if the driver does not list them, which is reported.

        Clients of CUDA's Multi-Process Service are in a list of their own; the other list then has
        their server.
        """
        api = self._api
        compute = self._list(
            "processes",
            lambda: api.nvmlDeviceGetComputeRunningProcesses_v3(handle),
            lambda: api.nvmlDeviceGetComputeRunningProcesses_v2(handle),
        )
        if compute is None:
            return None
        clients = self._list(
            "MPS processes",
            lambda: api.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle),
            lambda: api.nvmlDeviceGetMPSComputeRunningProcesses_v2(handle),
        )
        # Where there is no such list there is no such client, or it is in the first one.
        return _together([compute, clients or ()])

    def _list(
        self,
        what: str,
        newest: Callable[[], list[ComputeProcess]],
        older: Callable[[], list[ComputeProcess]],
    ) -> tuple[GpuProcess, ...] | None:
        """A list of processes, by the older call if the newest returns garbage.

        Drivers 535 before 535.98 fill the list with wider records than its type has (nvitop#88).
        """
        found = self._ask(what, newest, older)
        if found is not None and not all(self._is_sound(process) for process in found):
            found = self._ask(what, older)
        if found is None:
            self.unread.setdefault(f"{self._name}: {what}", self._silence)
            return None
        if any(process.pid > MAX_PID for process in found):
            self._leave(what, "not process ids")
            return None
        return tuple(
            GpuProcess(pid=process.pid, memory_used_bytes=self._memory_of(process))
            for process in found
        )

    def _is_sound(self, process: ComputeProcess) -> bool:
        is_pid = 0 < process.pid <= MAX_PID
        return is_pid and process.usedGpuMemory == self._memory_of(process)

    def _memory_of(self, process: ComputeProcess) -> int | None:
        used = process.usedGpuMemory
        most = self._total_bytes or MAX_MEMORY_BYTES
        return used if used is not None and 0 <= used <= most else None

    def is_mig(self, handle: Handle) -> bool | None:
        """True if the GPU is in MIG mode; None: the call returned an error."""
        failure_count = self._failure_count
        modes = self._ask("MIG mode", lambda: self._api.nvmlDeviceGetMigMode(handle))
        mode = None if modes is None else self._within("MIG mode", modes[0], 0, MIG_ENABLED)
        if modes is not None:
            return None if mode is None else mode == MIG_ENABLED
        # A device or a driver without this mode reports that: it is a valid answer.
        return None if self._failure_count > failure_count else False

    def mig_instances(self, handle: Handle) -> tuple[MigInstance, ...]:
        """The MIG instances in order; one that cannot be named is left out, and reported."""
        api = self._api
        count = self._ask("MIG instances", lambda: api.nvmlDeviceGetMaxMigDeviceCount(handle))
        found: list[MigInstance] = []
        for index in range(min(count or 0, MAX_MIG_INSTANCES)):
            what = f"MIG instance {index}"
            part = self._ask(what, partial(api.nvmlDeviceGetMigDeviceHandleByIndex, handle, index))
            instance = None if part is None else self._mig_instance(part, what)
            if instance is not None:
                found.append(instance)
        return tuple(sorted(found, key=_mig_order))

    def _mig_instance(self, handle: Handle, what: str) -> MigInstance | None:
        api, name = self._api, f"{self._name}: {what}"
        reading = _Reading(api, name, 0)
        uuid = reading._ask("UUID", lambda: api.nvmlDeviceGetUUID(handle))
        gpu_type = reading._ask("name", lambda: api.nvmlDeviceGetName(handle))
        total, used = reading.memory_bytes(handle)
        gpu_instance = reading._ask("ids", lambda: api.nvmlDeviceGetGpuInstanceId(handle))
        compute_instance = reading._ask("ids", lambda: api.nvmlDeviceGetComputeInstanceId(handle))
        processes = reading.processes(handle)
        self.unread |= reading.unread
        if uuid is None or gpu_type is None:
            return None
        return MigInstance(
            uuid=GpuUuid(_text(uuid)),
            gpu_type=_text(gpu_type),
            memory_total_bytes=total,
            gpu_instance_id=gpu_instance,
            compute_instance_id=compute_instance,
            memory_used_bytes=used,
            processes=processes,
        )


def _mig_order(part: MigInstance) -> tuple[int, int, str]:
    return part.gpu_instance_id or 0, part.compute_instance_id or 0, part.uuid


def _together(
    lists: Iterable[tuple[GpuProcess, ...] | None],
) -> tuple[GpuProcess, ...] | None:
    """The processes of all lists once, by pid; None if one of the lists is missing."""
    found: dict[int, GpuProcess] = {}
    for processes in lists:
        if processes is None:
            return None
        found.update({process.pid: process for process in processes})
    return tuple(found[pid] for pid in sorted(found))
