"""A `libnvidia-ml.so.1` for real programs, and its table written from the fleet of a fake NVML.

Whatever loads NVML then finds the GPUs that `--fake-nvml` would show for the same fleet.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.gpu.fake.fleet import FakeFleet, FaultKind, XidTold
from agent.gpu.fake.nvml import MOST_MIG_PARTS, FakeNvml
from agent.gpu.nvml import (
    ECC_UNCORRECTED,
    ECC_VOLATILE,
    NOT_FOUND,
    TEMPERATURE_GPU,
    ComputeProcess,
    Handle,
    NvmlFault,
)

SOURCE = Path(__file__).with_name("nvml_library.c")
STATE_ENV = "NVML_STATE"
LIBRARY = "libnvidia-ml.so.1"
NEWEST = 999


def build(directory: Path, *, driver: str = "") -> Path:
    """The library of a driver of this version in a directory of its own, to be searched first."""
    major, minor = (int(part) for part in (driver or f"{NEWEST}.0").split(".")[:2])
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *("cc", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *(f"-DDRIVER={1000 * major + minor}", f"-Wl,-soname,{LIBRARY}"),
            *("-o", str(directory / LIBRARY), str(SOURCE), "-lpthread"),
        ],
        check=True,
    )
    return directory


def write(path: Path, lines: Iterator[str]) -> None:
    """All at once: a reader has the old table or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)


def table(fleet: FakeFleet, api: FakeNvml, *, elapsed_s: float) -> Iterator[str]:
    """What a fake NVML of a fleet answers now, this long after its script began."""
    hung = [
        fault
        for fault in fleet.fault
        if fault.kind == FaultKind.HANG and fault.is_active(elapsed_s)
    ]
    yield f"driver ={fleet.driver or f'{NEWEST}.0'}"
    if fleet.known_driver.has_wide_processes:
        yield "wide =1"
    if any(fault.gpu is None for fault in hung):
        yield "hang =1"
        return
    count = api.nvmlDeviceGetCount()
    yield f"count ={count}"
    for index in range(count):
        device = f"g{index}"
        if any(fault.concerns(index) for fault in hung):
            yield f"{device} hang =1"
            continue
        yield from _events(fleet, index, elapsed_s)
        try:
            handle = api.nvmlDeviceGetHandleByIndex(index)
        except NvmlFault as error:
            yield f"{device} handle !{error.value}"
            continue
        yield from _device(api, device, handle)
        yield from _mig(api, device, handle)


def _events(fleet: FakeFleet, index: int, elapsed_s: float) -> Iterator[str]:
    for number, fault in enumerate(fleet.fault, start=1):
        is_event = fault.kind == FaultKind.XID and fault.told_by != XidTold.KERNEL_LOG
        if is_event and fault.concerns(index) and fault.at_s <= elapsed_s:
            yield f"g{index} xid ={number} {fault.value}"


def _device(api: FakeNvml, device: str, handle: Handle) -> Iterator[str]:
    def pci() -> str:
        info = api.nvmlDeviceGetPciInfo(handle)
        return f"{info.domain} {info.bus} {info.device}"

    def ecc() -> int:
        return api.nvmlDeviceGetTotalEccErrors(handle, ECC_UNCORRECTED, ECC_VOLATILE)

    def processes(call: Callable[[Handle], list[ComputeProcess]], is_mps: int) -> list[str]:
        found = call(handle)
        return [f"{one.pid} {one.usedGpuMemory or 0} {is_mps}" for one in found]

    for key, ask in (
        ("name", lambda: api.nvmlDeviceGetName(handle)),
        ("uuid", lambda: api.nvmlDeviceGetUUID(handle)),
        ("pci", pci),
        ("utilization", lambda: api.nvmlDeviceGetUtilizationRates(handle).gpu),
        ("memory", lambda: api.nvmlDeviceGetMemoryInfo(handle).total),
        ("memory_used", lambda: api.nvmlDeviceGetMemoryInfo(handle).used),
        ("temperature", lambda: api.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU)),
        ("power", lambda: api.nvmlDeviceGetPowerUsage(handle)),
        ("power_limit", lambda: api.nvmlDeviceGetEnforcedPowerLimit(handle)),
        ("ecc", ecc),
        ("throttle", lambda: api.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        ("mig", lambda: api.nvmlDeviceGetMigMode(handle)[0]),
        ("gpu_instance", lambda: api.nvmlDeviceGetGpuInstanceId(handle)),
        ("compute_instance", lambda: api.nvmlDeviceGetComputeInstanceId(handle)),
        ("processes", lambda: len(api.nvmlDeviceGetComputeRunningProcesses_v2(handle))),
    ):
        try:
            yield f"{device} {key} ={ask()}"
        except NvmlFault as error:
            yield f"{device} {key} !{error.value}"
            if key == "processes":
                return
    for call, is_mps in (
        (api.nvmlDeviceGetComputeRunningProcesses_v2, 0),
        (api.nvmlDeviceGetMPSComputeRunningProcesses_v2, 1),
    ):
        for process in processes(call, is_mps):
            yield f"{device} process ={process}"


def _mig(api: FakeNvml, device: str, handle: Handle) -> Iterator[str]:
    yield f"{device} mig_most ={api.nvmlDeviceGetMaxMigDeviceCount(handle)}"
    for at in range(MOST_MIG_PARTS):
        try:
            part = api.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
        except NvmlFault as error:
            if error.value == NOT_FOUND:
                continue
            return
        yield from _device(api, f"{device}m{at}", part)
