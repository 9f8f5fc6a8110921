"""Every message on the wire between agents and coordinators.

`docs/protocol.md` is generated from these types. `common.encoding` turns them into bytes, and
`common.telemetry` has the measured part of a report.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import UNSET, UnsetType, field

from common.encoding import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from common.encoding import PROTOCOL_VERSION as PROTOCOL_VERSION
from common.encoding import Message as Message
from common.encoding import Part as Part
from common.encoding import decode as decode
from common.encoding import encode as encode
from common.failures import Failure
from common.faults import Fault
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
    PositiveFloat,
    Progress,
    StopReason,
    Token,
    TurnBack,
    WorkerKey,
)
from common.node_labels import Labels
from common.telemetry import AgentReport as AgentReport
from common.telemetry import CollectorReport as CollectorReport
from common.telemetry import CostReport as CostReport
from common.telemetry import GpuHealth as GpuHealth
from common.telemetry import GpuProcess as GpuProcess
from common.telemetry import GpuReport as GpuReport
from common.telemetry import HostReport as HostReport
from common.telemetry import InferenceReport as InferenceReport
from common.telemetry import MigInstance as MigInstance
from common.telemetry import RecoveryAction as RecoveryAction
from common.telemetry import XidCount as XidCount

# --- node report ----------------------------------------------------------------------------


UNTOLD_PID = 0
"""In place of a process whose pid is unknown."""


def process_named(pid: int) -> str:
    """A foreign process, as text for people."""
    return "a process that its driver does not name" if pid == UNTOLD_PID else f"process {pid}"


class Trespass(Part, frozen=True, kw_only=True):
    """A foreign process: it uses a GPU, and belongs to no assigned worker and not to the server.

    pid: 0 where the GPU is in use, no worker has it, and its driver does not report the processes.
    """

    pid: NonNegativeInt
    gpu_uuid: GpuUuid
    owner: str = ""
    """Its user and program, such as `uid 1001: python3`; empty: it has gone."""


class CommandReport(Part, frozen=True, kw_only=True):
    """A command that moves the inference server and has run for a long time."""

    name: str
    """`start`, `stop`, `route` or `unroute`."""
    running_s: NonNegativeFloat


class WorkerPhase(StrEnum):
    """The phase of a worker, as its node sees it."""

    RESERVING = "reserving"  # accepted; its GPUs or paths are not yet ready
    READY = "ready"  # waits for the rest of its gang
    RUNNING = "running"
    SUSPENDED = "suspended"  # it keeps its place and does not compute, until it is resumed
    STOPPING = "stopping"
    EXITED = "exited"
    REFUSED = "refused"  # the node cannot run it; `fault` and `error` give the cause


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
    """Seconds since its start, until its end, also while suspended; 0 also when that is not known.
    """
    ended_ago_s: NonNegativeFloat = 0.0
    """Seconds from its end to this report, on the node's clock; 0 also when that is not known."""
    failure: Failure | None = None
    """Why it ended by itself without success, by its log."""
    fault: Fault = Fault.NONE
    """Whose fault its end is, or that it was refused; `error` has it in words."""
    refused_for: str = ""
    """The part of its job that caused the refusal: `workdir`, `checkpoint.path` or `command`."""


class NodeReport(Message, frozen=True, kw_only=True, tag="node_report"):
    """An agent's periodic report; the latest wins."""

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
    labels: Labels | UnsetType = UNSET
    """Only where it has any: a coordinator of an older version refuses it."""
    instance: Token
    """This start of the agent: another one each time."""
    follows: Token | None = None
    """The start before this one on the same state directory, which is over: this one has its lock.
    None: none that is known."""
    period_s: PositiveFloat
    """Seconds between two of its reports without news."""
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
    """Why the node is in its role, as text, where there is a reason to give."""
    is_server_down: bool = False
    """Its inference server misses its health checks: the node serves no requests."""
    ledger_error: str = ""
    """Why nothing new begins on it: its ledger cannot be written, as on a full disk, or none of its
    GPUs was ever read."""
    stage_durations_s: dict[str, float] = field(default_factory=dict[str, float])
    """Stages of the last return: checkpoint, exit, device_free, server_ready; and unattended, which
    is what else passed since the lease was over, without an agent at work. Kept over
    a restart."""
    home_ago_s: float | None = None
    """How long before this report that return was over. None: none that was timed."""
    turned_back: TurnBack | None = None
    """Until the next lease. None: its latest loan ended otherwise."""
    slow_command: CommandReport | UnsetType = UNSET
    """Only while there is one: a coordinator of an older version refuses it."""


# --- desired state --------------------------------------------------------------------------


class OrderPhase(StrEnum):
    """`reserve`: hold GPUs, check paths, report ready. `run`: every node of the gang is ready."""

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
    """Nodes of the whole gang, so that one ledger shows the other members."""
    is_suspended: bool = False
    """It keeps its place and does not compute; this is no stop."""
    is_sharing: bool = False
    """Other jobs have its GPUs too: it waits for those that are to be suspended, not for the
    rest."""


class StopOrder(Part, frozen=True, kw_only=True):
    """The only thing that ends a worker: absence from desired state never does."""

    key: WorkerKey
    reason: StopReason
    grace_s: NonNegativeFloat


class DesiredState(Message, frozen=True, kw_only=True, tag="desired"):
    """The desired state of a node; complete each time, so the last one is enough."""

    node: Token
    epoch: Ordinal
    generation: Ordinal
    role: NodeRole
    """TRAINING, SERVING, ON_LOAN or QUARANTINED; the node goes there by its life cycle."""
    instance: Token | UnsetType = UNSET
    """The agent that is meant, by its report; another one of this name does not answer."""
    lease: Lease | None = None
    validation: Ordinal | UnsetType = UNSET
    """To a node in quarantine: check now whether it may leave; an order that it has obeyed has no
    effect."""
    reclaim_in_s: NonNegativeFloat | None = None
    """Time left, when this was sent, until the node must be serving again."""
    workers: tuple[WorkerOrder, ...] = ()
    stops: tuple[StopOrder, ...] = ()
    acknowledged: tuple[WorkerKey, ...] = ()
    """Ended workers that the journal holds; the node may forget them."""


class DesiredReply(Message, frozen=True, kw_only=True, tag="desired_reply"):
    """The agent's answer to a desired state; a refusal carries the reason."""

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
    """The coordinator asks for all that a node holds, to rebuild lost state."""

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
    """The text, undecodable bytes replaced; `error` where there is none."""

    text: str = ""
    error: str = ""
