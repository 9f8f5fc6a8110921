"""The wire: every message, its encoding and the protocol version. Must not know the bus.

MessagePack written by msgspec; a decoder rejects what does not fit and says which field.
`docs/protocol.md` is generated from these types.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from common.errors import ProtocolError
from common.failures import Failure
from common.model import (
    Checkpoint,
    GpuUuid,
    JobSpec,
    Lease,
    NodeRole,
    NonNegativeFloat,
    NonNegativeInt,
    Ordinal,
    Pool,
    Progress,
    Ratio,
    StopReason,
    Token,
    TurnBack,
    WorkerKey,
)

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1_000_000
"""Larger messages are refused before they are decoded."""


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that crosses the wire; `v` is checked before anything else."""

    v: int = PROTOCOL_VERSION


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A piece of a message."""


# --- node report ----------------------------------------------------------------------------


class GpuHealth(StrEnum):
    """`unresponsive`: NVML does not answer in time. `lost`: fell off the bus."""

    OK = "ok"
    UNRESPONSIVE = "unresponsive"
    LOST = "lost"
    FAULTY = "faulty"


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


class Trespass(Part, frozen=True, kw_only=True):
    """A process on a GPU that belongs to nobody who was given it: no worker, and not the server."""

    pid: NonNegativeInt
    gpu_uuid: GpuUuid


class WorkerPhase(StrEnum):
    """Where a worker is, as its node sees it."""

    RESERVING = "reserving"  # accepted; its GPUs or paths are not yet ready
    READY = "ready"  # waits for the rest of its gang
    RUNNING = "running"
    SUSPENDED = "suspended"  # it keeps its place and does not compute, until it is resumed
    STOPPING = "stopping"
    EXITED = "exited"
    REFUSED = "refused"  # the node cannot run it; `error` says why


class WorkerReport(Part, frozen=True, kw_only=True):
    """One worker that a node holds, or held and was not yet acknowledged as gone."""

    key: WorkerKey
    phase: WorkerPhase
    gpu_uuids: tuple[GpuUuid, ...]
    is_flexible: bool = False
    endpoint: str = ""
    """host:port that this node offers as the rendezvous of the gang."""
    exit_code: int | None = None
    """Exit status of the main process; negative is the signal that ended it."""
    stop_reason: StopReason | None = None
    error: str = ""
    progress: Progress | None = None
    checkpoint: Checkpoint | None = None
    saved_ago_s: NonNegativeFloat = 0.0
    """Seconds from its claim of `checkpoint` to this report, on the node's clock."""
    running_s: NonNegativeFloat = 0.0
    ended_ago_s: NonNegativeFloat = 0.0
    """Seconds from its end to this report, on the node's clock; 0 also when that is not known."""
    failure: Failure | None = None
    """Why it ended by itself without success, as its log says."""


class NodeReport(Message, frozen=True, kw_only=True, tag="node_report"):
    """What an agent says each period; the latest wins."""

    node: Token
    boot_id: str
    sequence: Ordinal
    """Milliseconds of its boot clock, or one more than that of the report before."""
    home_pool: Pool
    role: NodeRole
    epoch: Ordinal
    """Highest epoch that this agent has accepted."""
    generation: Ordinal
    """Generation of the desired state that this agent acts on."""
    service: Token | None = None
    rack: str = ""
    instance: Token | None = None
    """This start of the agent: another one each time. None: an agent of an older version."""
    follows: Token | None = None
    """The start before this one on the same state directory, which is over: this one has its lock.
    None: none that is known, or an agent of an older version."""
    period_s: NonNegativeFloat = 0.0
    """Seconds between two of its reports without news; 0: an agent of an older version."""
    lease: Lease | None = None
    lease_remaining_s: float | None = None
    gpus: tuple[GpuReport, ...] = ()
    host: HostReport | None = None
    inference: InferenceReport | None = None
    workers: tuple[WorkerReport, ...] = ()
    collectors: tuple[CollectorReport, ...] = ()
    cost: CostReport | None = None
    agent: AgentReport | None = None
    trespasses: tuple[Trespass, ...] = ()
    detail: str = ""
    """Why the node is where it is, in words, where there is something to say."""
    is_server_down: bool = False
    """Its inference server misses its health checks: the node serves nobody."""
    ledger_error: str = ""
    """Why its ledger cannot be written, as on a full disk: nothing new begins on it meanwhile."""
    stage_durations_s: dict[str, float] = {}
    """Stages of the last return: checkpoint, exit, device_free, server_ready; and unattended, which
    is what else passed since the lease was over, because nobody worked on it. Kept over a restart.
    Agents of an older version tell checkpoint and exit as one, vacate."""
    home_ago_s: float | None = None
    """How long before this report that return was over. None: none that was timed to its end, or an
    agent of an older version."""
    turned_back: TurnBack | None = None
    """Until the next lease. None: its latest loan ended otherwise, or an older version."""


# --- desired state --------------------------------------------------------------------------


class OrderPhase(StrEnum):
    """`reserve`: hold GPUs, check paths, say ready. `run`: every node of the gang is ready."""

    RESERVE = "reserve"
    RUN = "run"


class WorkerOrder(Part, frozen=True, kw_only=True):
    """One worker that a node should hold; enough to rebuild the job from the node's ledger."""

    key: WorkerKey
    spec: JobSpec
    tenant: Token
    user: Token
    submitted_at_s: float
    gpu_uuids: tuple[GpuUuid, ...]
    gpu_type: str
    is_flexible: bool
    phase: OrderPhase
    worker_count: NonNegativeInt
    """Workers of the gang now; a change of it is a resize."""
    endpoint: str = ""
    """host:port of the gang's rendezvous; empty until the gang is ready."""
    has_store: bool = False
    """The gang meets at a rendezvous store of its own, so that no launcher may host one."""
    preemption_count: NonNegativeInt = 0
    gang_nodes: tuple[Token, ...] = ()
    """Nodes of the whole gang, so that one ledger tells who else belongs to it."""
    is_suspended: bool = False
    """It keeps its place and does not compute; it is not told to stop."""
    is_sharing: bool = False
    """Others have its GPUs too: it waits for those that are to be suspended, not for the rest."""


class StopOrder(Part, frozen=True, kw_only=True):
    """The only thing that ends a worker: absence from desired state never does."""

    key: WorkerKey
    reason: StopReason
    grace_s: NonNegativeFloat


class DesiredState(Message, frozen=True, kw_only=True, tag="desired"):
    """What a node should be; complete each time, so the last one is enough."""

    node: Token
    epoch: Ordinal
    generation: Ordinal
    role: NodeRole
    """TRAINING, SERVING, ON_LOAN or QUARANTINED; the node goes there by its life cycle."""
    instance: Token | UnsetType = UNSET
    """The agent that is meant, as its report says; another one of this name does not answer."""
    lease: Lease | None = None
    validation: Ordinal | UnsetType = UNSET
    """To a node in quarantine: check now whether it may leave; one that it obeyed says no more."""
    reclaim_in_s: NonNegativeFloat | None = None
    """Time left, when this was sent, until the node must be serving again."""
    workers: tuple[WorkerOrder, ...] = ()
    stops: tuple[StopOrder, ...] = ()
    acknowledged: tuple[WorkerKey, ...] = ()
    """Ended workers that the journal holds; the node may forget them."""


class DesiredReply(Message, frozen=True, kw_only=True, tag="desired_reply"):
    """Whether the agent took the desired state; a refusal says why."""

    is_accepted: bool
    epoch: Ordinal
    generation: Ordinal
    error: str = ""


class RenewRequest(Message, frozen=True, kw_only=True, tag="renew"):
    """An on-loan agent asks to keep its lease."""

    node: Token
    lease_id: Token
    nonce: NonNegativeInt


class RenewReply(Message, frozen=True, kw_only=True, tag="renew_reply"):
    """The TTL runs from the moment the request was sent, on the asker's clock."""

    lease_id: Token
    nonce: NonNegativeInt
    is_granted: bool
    epoch: Ordinal
    ttl_s: NonNegativeFloat = 0.0
    reason: str = ""


class LedgerRequest(Message, frozen=True, kw_only=True, tag="ledger"):
    """The coordinator asks what a node holds in full, to rebuild lost state."""

    node: Token
    instance: Token | UnsetType = UNSET
    """As in `desired`."""


class LedgerReply(Message, frozen=True, kw_only=True, tag="ledger_reply"):
    """Every order that the node's ledger has live."""

    node: Token
    orders: tuple[WorkerOrder, ...]


class LogRequest(Message, frozen=True, kw_only=True, tag="logs"):
    """The end of a worker's log."""

    node: Token
    key: WorkerKey
    max_bytes: NonNegativeInt
    instance: Token | UnsetType = UNSET
    """As in `desired`."""


class LogReply(Message, frozen=True, kw_only=True, tag="logs_reply"):
    """Text as it is, undecodable bytes replaced; `error` where there is none."""

    text: str = ""
    error: str = ""


# --- encoding -------------------------------------------------------------------------------

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Message]] = {}


class _VersionOnly(Struct):
    v: int


_version_decoder = msgspec.msgpack.Decoder(_VersionOnly)


def encode(message: Message) -> bytes:
    """One message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[M]) -> M:
    """One message of the given kind.

    Raises:
        ProtocolError: too large, another version, not MessagePack, or a field that does not fit;
            the text names the field.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{kind.__name__}: {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}"
        )
    try:
        version = _version_decoder.decode(data).v
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{kind.__name__}: field v: version {version}, expected {PROTOCOL_VERSION}"
            )
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from error
    assert isinstance(message, kind)
    return message
