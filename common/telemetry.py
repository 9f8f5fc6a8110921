"""What a node measures of itself, as its reports carry it: GPUs, host, server, and the agent. Must
not know who measures or who reads it.
"""

from __future__ import annotations

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
    """What the driver says must be done before a GPU is well again; NVML's recovery action.

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


class GpuReport(Part, frozen=True, kw_only=True):
    """One GPU, in SI units; None where the device or driver does not say."""

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
    processes: tuple[GpuProcess, ...] = ()
    xids: tuple[NonNegativeInt, ...] = ()
    """XID codes seen since the last report."""
    xid_counts: tuple[XidCount, ...] = ()
    """By code, since the agent started: a report that is lost loses none. Empty where there was
    none, and of an agent of an older version."""
    recovery_action: RecoveryAction | None = None
    """None: the driver does not tell."""


class HostReport(Part, frozen=True, kw_only=True):
    """The machine around the GPUs."""

    cpu_count: NonNegativeInt
    cpu_busy_ratio: Ratio
    memory_total_bytes: NonNegativeInt
    memory_used_bytes: NonNegativeInt


class InferenceReport(Part, frozen=True, kw_only=True):
    """What the inference server's own metrics page says; counters are since its start."""

    running_count: NonNegativeFloat
    waiting_count: NonNegativeFloat
    success_total: NonNegativeFloat
    kv_cache_used_ratio: NonNegativeFloat | None = None


class CollectorReport(Part, frozen=True, kw_only=True):
    """How one collector fared; a failure is data, never a crash."""

    name: str
    is_success: bool
    duration_s: NonNegativeFloat
    error: str = ""


class CostReport(Part, frozen=True, kw_only=True):
    """What the agent itself costs since its start."""

    cpu_s: NonNegativeFloat
    rss_bytes: NonNegativeInt


class AgentReport(Part, frozen=True, kw_only=True):
    """How the agent itself fares, counted since its start; all of it should stay near zero."""

    bad_messages: NonNegativeInt = 0
    """Messages that did not fit, and were dropped."""
    lease_failures: NonNegativeInt = 0
    """Renewals without a usable answer, and last resorts that could not be armed or disarmed."""
    bus_errors: NonNegativeInt = 0
    bus_handler_errors: NonNegativeInt = 0
    bus_dropped_messages: NonNegativeInt = 0
    bus_reconnects: NonNegativeInt = 0
