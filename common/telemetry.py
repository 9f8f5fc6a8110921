"""The measurements that a node's reports carry: GPUs, host, server, and the agent itself."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from common.encoding import Part
from common.model import GpuUuid, NonNegativeFloat, NonNegativeInt, Ratio


class GpuHealth(StrEnum):
    """`unresponsive`: NVML does not answer in time. `lost`: fell off the bus."""

    OK = "ok"
    UNRESPONSIVE = "unresponsive"
    LOST = "lost"
    FAULTY = "faulty"


class RecoveryAction(StrEnum):
    """The action that the driver requires before a GPU is well again; NVML's recovery action.

    `unknown`: one that this version has no name for.
    """

    NONE = "none"
    GPU_RESET = "gpu_reset"
    NODE_REBOOT = "node_reboot"
    DRAIN_P2P = "drain_p2p"
    DRAIN_AND_RESET = "drain_and_reset"
    RECOVER_IMEX_DOMAIN = "recover_imex_domain"
    BUS_RESET = "bus_reset"
    SYSTEM_REBOOT = "system_reboot"
    UNKNOWN = "unknown"


class XidCount(Part, frozen=True, kw_only=True):
    """How often one XID was seen on one GPU since its agent started."""

    code: NonNegativeInt
    count: NonNegativeInt


class GpuProcess(Part, frozen=True, kw_only=True):
    """A process that holds GPU memory, as NVML sees it."""

    pid: NonNegativeInt
    memory_used_bytes: NonNegativeInt | None = None


class MigInstance(Part, frozen=True, kw_only=True):
    """A fixed part of a GPU in MIG mode: one compute instance, which a process gets by its UUID.

    None where the driver does not report it.
    """

    uuid: GpuUuid
    gpu_type: str
    """NVML's own name of it, such as `NVIDIA A100-SXM4-80GB MIG 1g.10gb`."""
    memory_total_bytes: NonNegativeInt
    gpu_instance_id: NonNegativeInt | None = None
    compute_instance_id: NonNegativeInt | None = None
    memory_used_bytes: NonNegativeInt | None = None
    processes: tuple[GpuProcess, ...] | None = ()


class GpuReport(Part, frozen=True, kw_only=True):
    """One GPU, in SI units; None where the device or driver does not report it."""

    uuid: GpuUuid
    index: NonNegativeInt
    gpu_type: str
    memory_total_bytes: NonNegativeInt
    health: GpuHealth = GpuHealth.OK
    memory_used_bytes: NonNegativeInt | None = None
    gpu_busy_ratio: Ratio | None = None
    power_w: NonNegativeFloat | None = None
    power_limit_w: NonNegativeFloat | None = None
    temperature_c: float | None = None
    ecc_uncorrected_count: NonNegativeInt | None = None
    throttle_reasons: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] | None = ()
    """Includes those on its MIG instances. None: not reported, which differs from none."""
    xids: tuple[NonNegativeInt, ...] = ()
    """XID codes seen since the last report."""
    is_mig: bool | None = False
    """It is in MIG mode: no job can have the whole of it. None: not reported, and it is not
    assigned either."""
    mig: tuple[MigInstance, ...] = ()
    """Its instances in MIG mode, by GPU instance and compute instance; there may be none."""
    xid_counts: tuple[XidCount, ...] = ()
    """By code, since the agent started: a report that is lost loses none. Empty where there was
    none."""
    recovery_action: RecoveryAction | None = None
    """None: the driver does not report it."""


def whole(gpus: Iterable[GpuReport]) -> tuple[GpuReport, ...]:
    """The GPUs that one worker can have as a whole: none in MIG mode."""
    return tuple(gpu for gpu in gpus if gpu.is_mig is False)


def units(gpus: Iterable[GpuReport]) -> tuple[GpuReport, ...]:
    """The units that workers can have: whole GPUs, and the MIG instances of those in MIG mode."""
    return tuple(unit for gpu in gpus for unit in (instances(gpu) if gpu.is_mig else whole([gpu])))


def instances(gpu: GpuReport) -> tuple[GpuReport, ...]:
    """A GPU's MIG instances, each as a GPU of its own.

    Type, memory and processes are the instance's own; health and faults are those of the device. No
    driver reports how busy an instance is.
    """
    return tuple(
        GpuReport(
            uuid=part.uuid,
            index=gpu.index,
            gpu_type=part.gpu_type,
            memory_total_bytes=part.memory_total_bytes,
            health=gpu.health,
            memory_used_bytes=part.memory_used_bytes,
            processes=part.processes,
            ecc_uncorrected_count=gpu.ecc_uncorrected_count,
            xid_counts=gpu.xid_counts,
            recovery_action=gpu.recovery_action,
        )
        for part in gpu.mig
    )


class HostReport(Part, frozen=True, kw_only=True):
    """The machine around the GPUs."""

    cpu_count: NonNegativeInt
    cpu_busy_ratio: Ratio
    memory_total_bytes: NonNegativeInt
    memory_used_bytes: NonNegativeInt


class InferenceReport(Part, frozen=True, kw_only=True):
    """The content of the inference server's own metrics page; counters are since its start."""

    running_count: NonNegativeFloat
    waiting_count: NonNegativeFloat
    success_total: NonNegativeFloat
    kv_cache_used_ratio: NonNegativeFloat | None = None


class CollectorReport(Part, frozen=True, kw_only=True):
    """The result of one collector; a failure is data, never a crash."""

    name: str
    is_success: bool
    duration_s: NonNegativeFloat
    error: str = ""


class CostReport(Part, frozen=True, kw_only=True):
    """The agent's own cost since its start."""

    cpu_s: NonNegativeFloat
    rss_bytes: NonNegativeInt


class AgentReport(Part, frozen=True, kw_only=True):
    """The state of the agent itself, counted since its start; all of it should stay near zero."""

    bad_messages: NonNegativeInt = 0
    """Invalid messages, which were dropped."""
    lease_failures: NonNegativeInt = 0
    """Renewals without a usable answer, and last resorts that could not be armed or disarmed."""
    bus_errors: NonNegativeInt = 0
    bus_handler_errors: NonNegativeInt = 0
    bus_dropped_messages: NonNegativeInt = 0
    bus_reconnects: NonNegativeInt = 0
