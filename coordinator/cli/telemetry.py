"""A node's telemetry as lines and a table. Pure."""

from __future__ import annotations

from common.api import NodeTelemetry
from common.telemetry import GpuReport, HostReport, InferenceReport
from coordinator.cli.render import Column
from coordinator.plain_text import MISSING, duration, number, percent

GIB = 1 << 30
THROTTLED_BY = {
    "applications_clocks_setting": "clocks that were set",
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware",
    "sync_boost": "slowest GPU of its group",
    "sw_thermal_slowdown": "heat",
    "hw_thermal_slowdown": "heat (hardware)",
    "hw_power_brake_slowdown": "power brake",
    "display_clock_setting": "display clocks",
}
"""The limits on a GPU's clocks, by NVML's names; another name is shown as it is."""


def facts(found: NodeTelemetry) -> list[tuple[str, str]]:
    """The facts of the whole node, by name; unmeasured ones are left out."""
    pairs = [("reported", _age(found))]
    if found.lease_remaining_s is not None:
        left = duration(found.lease_remaining_s)
        pairs.append(("lease left", f"{left}, as its agent counted in that report"))
    if found.host is not None:
        pairs.append(("host", _host(found.host)))
    if found.inference is not None:
        pairs.append(("server", _server(found.inference)))
    return pairs


def _age(found: NodeTelemetry) -> str:
    age = "now" if found.reported_ago_s < 1 else f"{duration(found.reported_ago_s)} ago"
    silent = ": the node is silent since, all figures below are of then"
    return f"{age}{silent}" if found.is_silent else age


def _host(host: HostReport) -> str:
    memory = _gib(host.memory_used_bytes, host.memory_total_bytes)
    return f"{percent(host.cpu_busy_ratio)} of {host.cpu_count} CPUs busy, {memory} of memory used"


def _server(server: InferenceReport) -> str:
    running, waiting = number(server.running_count), number(server.waiting_count)
    cache = percent(server.kv_cache_used_ratio)
    return f"{running} requests run, {waiting} wait; KV cache {cache} used"


def gpus() -> list[Column[GpuReport]]:
    """One row for each GPU."""
    return [
        Column("GPU", lambda r: str(r.index), is_number=True),
        Column("UUID", lambda r: r.uuid, is_elastic=True, rank=3),
        Column("TYPE", lambda r: r.gpu_type, is_wide=True),
        Column("HEALTH", lambda r: r.health),
        Column("BUSY", lambda r: percent(r.gpu_busy_ratio), is_number=True),
        Column("MEMORY", _memory, is_number=True),
        Column("POWER", _power, is_number=True, rank=1),
        Column("TEMP", _temperature, is_number=True, rank=2),
        Column("ECC", lambda r: number(r.ecc_uncorrected_count), is_number=True),
        Column("THROTTLED BY", throttled_by, is_elastic=True),
        Column("MIG", _partition, is_wide=True),
        Column("PROCESSES", _processes, is_wide=True),
    ]


def _memory(gpu: GpuReport) -> str:
    return _gib(gpu.memory_used_bytes, gpu.memory_total_bytes)


def _gib(used_bytes: int | None, total_bytes: int) -> str:
    used = MISSING if used_bytes is None else f"{used_bytes / GIB:.1f}"
    return f"{used} of {total_bytes / GIB:.1f} GiB"


def _power(gpu: GpuReport) -> str:
    if gpu.power_w is None:
        return ""
    limit = MISSING if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f}"
    return f"{gpu.power_w:.0f} of {limit} W"


def _temperature(gpu: GpuReport) -> str:
    return "" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C"


def throttled_by(gpu: GpuReport) -> str:
    """Why a GPU does not run at full speed, in words; empty where nothing slows it."""
    return ", ".join(THROTTLED_BY.get(name, name) for name in gpu.throttle_reasons)


def _processes(gpu: GpuReport) -> str:
    if gpu.processes is None:
        return "not reported"
    return ",".join(str(process.pid) for process in gpu.processes)


def _partition(gpu: GpuReport) -> str:
    """Its MIG instances; empty outside of MIG mode."""
    if gpu.is_mig is None:
        return "not reported"
    profiles = [part.gpu_type.rpartition(" ")[2] for part in gpu.mig]
    counts = [f"{profiles.count(name)} x {name}" for name in sorted(set(profiles))]
    return (", ".join(counts) or "no instance") if gpu.is_mig else ""
