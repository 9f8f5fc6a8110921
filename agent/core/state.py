"""What a node remembers, what it sees, and what it may do: data only. Pure, and without rules.

`agent.core.node_lifecycle` holds the rules over these types; `agent.driver` carries the actions
out. What must outlive a restart is in `Memory`; the driver writes it down before anything else
happens.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from agent.gpu.known_gpus import GpuIdentity
from agent.settings import SHORTEST_HUNG_S, AgentSettings
from common.failures import Failure
from common.faults import Fault
from common.messages import (
    GpuReport,
    InferenceReport,
    StopOrder,
    WorkerOrder,
    WorkerPhase,
)
from common.model import (
    Checkpoint,
    GpuUuid,
    Lease,
    LeaseId,
    NodeRole,
    Pool,
    Progress,
    StopReason,
    TurnBack,
    WorkerKey,
)


class Refusal(Struct, frozen=True):
    """Why a node does not run a worker, for people; whose fault that is, and what its job names
    that is not there: `workdir`, `checkpoint.path`, `command`, or empty where the job is not to
    blame."""

    error: str
    fault: Fault = Fault.NODE
    refused_for: str = ""


MEMORY_VERSION = 1
"""Raised by a change that an older agent would read wrong, and not merely without what is new."""
FORGOTTEN_KEPT = 4096
ENDED_LEASES_KEPT = 256


class HookKind(StrEnum):
    """The commands that move an inference server."""

    START = "start"
    STOP = "stop"
    ROUTE = "route"
    UNROUTE = "unroute"


# --- what is remembered -----------------------------------------------------------------------


class WorkerState(Struct, kw_only=True):
    """One worker that the node was ordered to hold.

    is_begun: its start was ordered, by this agent or one before it, so that its shim may come to
        life at any time. is_started: it was seen to.
    ended_at_s, saved_at_s: of its end and its claim of the checkpoint, once it is over, on the boot
        clock; None: not known.
    fault, refused_for: see `WorkerReport`; a ledger of an older version has them in `error` alone,
        and for such a version they are there as well: `agent.storage.ledger`.
    """

    order: WorkerOrder
    phase: WorkerPhase = WorkerPhase.RESERVING
    endpoint: str = ""
    is_begun: bool = False
    is_started: bool = False
    stop: StopOrder | None = None
    exit_code: int | None = None
    stop_reason: StopReason | None = None
    error: str = ""
    checkpoint: Checkpoint | None = None
    running_s: float = 0.0
    ended_at_s: float | None = None
    saved_at_s: float | None = None
    failure: Failure | None = None
    fault: Fault = Fault.NONE
    refused_for: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it ended, or never could begin."""
        return self.phase in (WorkerPhase.EXITED, WorkerPhase.REFUSED)

    @property
    def is_withdrawn(self) -> bool:
        """Whether it is to stop though it was not seen to run, and its shim may be on its way."""
        return self.stop is not None and self.is_begun and not self.is_started

    def refuse(self, error: str, fault: Fault, refused_for: str = "") -> None:
        """The node cannot run it, for this reason."""
        self.phase, self.error = WorkerPhase.REFUSED, error
        self.fault, self.refused_for = fault, refused_for

    def take_end(self, fact: WorkerFact) -> None:
        """It is over, as its shim says."""
        self.exit_code, self.error = fact.exit_code, fact.error
        self.stop_reason, self.failure, self.fault = fact.stop_reason, fact.failure, fact.fault
        self.checkpoint, self.running_s = fact.checkpoint, fact.running_s
        self.saved_at_s, self.ended_at_s = fact.saved_at_s, fact.ended_at_s


class Memory(Struct, kw_only=True):
    """What outlives the agent's process; one record of the ledger."""

    version: int = MEMORY_VERSION
    """That of whoever wrote it; a newer one is not read, see `agent.storage.ledger`."""
    node: str
    boot_id: str
    instance: str | None = None
    """The agent that wrote this, by the token of its start; None: one of an older version."""
    role: NodeRole
    epoch: int = 0
    generation: int = 0
    desired_role: NodeRole
    home_pool: Pool | None = None
    """That of its settings; None: written by an older version. See `agent.core.node_lifecycle`."""
    validation: int = 0
    """The latest order to leave quarantine that it obeyed."""
    is_quarantine_over: bool = False
    """It need not stay there for `quarantine_s`."""
    lease: Lease | None = None
    lease_until_s: float | None = None
    """End of the TTL on the boot clock; None before the first renewal was answered."""
    lease_unconfirmed_until_s: float | None = None
    """When a lease that no renewal was answered of is over: its TTL after it was taken."""
    ended_leases: list[LeaseId] = field(default_factory=list[LeaseId])
    turned_back: TurnBack | None = None
    """That the node itself gave up its latest loan before it began, and why; until the next one."""
    left_behind: list[int] = field(default_factory=list[int])
    """GPU processes that outlived the server or the workers for longer than those may take; until
    they are gone."""
    strangers: list[int] = field(default_factory=list[int])
    """GPU processes of nobody's that were seen last: whoever starts next could tell a server's from
    others only by its second sample, and its coordinator would lend the node before that."""
    is_server_stopped: bool = False
    """The server of an inference node was ordered to stop and not yet to start again."""
    serve_by_s: float | None = None
    """By when it was told to serve again, on the boot clock; None: nobody said."""
    home_due_at_s: float | None = None
    """While it is on its way home: when its lease was over, on the boot clock."""
    home_at_s: float | None = None
    """When its latest way home was over, on the boot clock."""
    stage_durations_s: dict[str, float] = field(default_factory=dict[str, float])
    """Of its latest way home; see `agent.core.return_timing`."""
    gpus: list[GpuIdentity] = field(default_factory=list[GpuIdentity])
    """Its GPUs by the last reading of NVML, for an agent that starts while NVML cannot be read.
    Empty before the first reading, and in a ledger of an older version."""
    workers: dict[str, WorkerState] = field(default_factory=dict[str, WorkerState])
    forgotten: list[WorkerKey] = field(default_factory=list[WorkerKey])

    @property
    def lease_ends_at_s(self) -> float | None:
        """When the lease is over unless the coordinator answers; None without a lease."""
        if self.lease is None:
            return None
        until_s = self.lease_until_s
        return self.lease_unconfirmed_until_s if until_s is None else until_s


def first_memory(settings: AgentSettings, boot_id: str) -> Memory:
    """A node that was never seen before."""
    inference = settings.home_pool == Pool.INFERENCE
    return Memory(
        node=settings.node,
        boot_id=boot_id,
        role=NodeRole.WARMING if inference else NodeRole.TRAINING,
        desired_role=NodeRole.SERVING if inference else NodeRole.TRAINING,
        home_pool=settings.home_pool,
    )


# --- facts and actions ------------------------------------------------------------------------


class WorkerFact(Struct, frozen=True, kw_only=True):
    """What a worker's shim says; instants are on the boot clock, None: not known."""

    key: WorkerKey
    phase: WorkerPhase
    exit_code: int | None = None
    error: str = ""
    stop_reason: StopReason | None = None
    progress: Progress | None = None
    checkpoint: Checkpoint | None = None
    running_s: float = 0.0
    ended_at_s: float | None = None
    saved_at_s: float | None = None
    save_over_at_s: float | None = None
    failure: Failure | None = None
    fault: Fault = Fault.NONE


class Facts(Struct, frozen=True, kw_only=True):
    """The world at one instant, as far as it is known.

    sampled_at_s: when the sample was begun that gpus, inference and is_healthy are of.
    gpus: None before the first sample.
    inference, is_healthy: of the inference server. is_page_whole: each value of its page that
        matters is a count; else the last good ones stand for some in `inference`. page_error: why
        its metrics page cannot be read, or not all of it; empty where it can, or was not asked.
    trespassers: GPU processes of nobody who was given the GPUs, as (pid, GPU):
        `agent.telemetry.gpu_attribution`.
    owners: of those, their user and program, by pid.
    suspects: those beside a server that will be among them if they stay.
    others: GPU processes that are alive and of no granted worker, whosever they are, while the GPUs
        change hands; empty at other times.
    unknown_server: why nobody can tell the server's GPU processes by its settings; mostly empty.
    leaving: workers that were told to stop before any status spoke of them, and may be there still.
    listening_ports: TCP ports that another process listens on; empty while nobody waits for one.
    contact_at_s: when the last report was sent that the coordinator answered; None before one.
    """

    now_s: float
    sampled_at_s: float = 0.0
    gpus: tuple[GpuReport, ...] | None = None
    inference: InferenceReport | None = None
    is_page_whole: bool = True
    page_error: str = ""
    is_healthy: bool = False
    statuses: tuple[WorkerFact, ...] = ()
    leaving: frozenset[WorkerKey] = frozenset()
    trespassers: tuple[tuple[int, GpuUuid], ...] = ()
    owners: dict[int, str] = field(default_factory=dict[int, str])
    suspects: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    unknown_server: str = ""
    listening_ports: frozenset[int] = frozenset()
    contact_at_s: float | None = None


class CheckReserve(Struct, frozen=True):
    """See whether the node can run this worker at all; answer by `Holding.checked`."""

    order: WorkerOrder


class StartWorker(Struct, frozen=True):
    """Start it; idempotent by key; answer by `Holding.started`."""

    order: WorkerOrder


class StopWorker(Struct, frozen=True):
    """Stop it by the grace protocol; idempotent by key."""

    key: WorkerKey
    reason: StopReason
    grace_s: float


class ResizeWorker(Struct, frozen=True):
    """Tell it how many workers its gang has now."""

    key: WorkerKey
    worker_count: int


class PauseWorker(Struct, frozen=True):
    """Suspend it, or let it compute again; idempotent by key."""

    key: WorkerKey
    is_suspended: bool


class ForgetWorker(Struct, frozen=True):
    """Remove its files: the coordinator's journal has its end."""

    key: WorkerKey


class RunHook(Struct, frozen=True):
    """Run one server command in the background; answer by `Life.hook_done`."""

    kind: HookKind


class EndHook(Struct, frozen=True):
    """End the server command that runs; it is answered by `Life.hook_done` like any other."""

    kind: HookKind


WorkerAction = CheckReserve | StartWorker | StopWorker | ResizeWorker | PauseWorker | ForgetWorker
Action = WorkerAction | RunHook | EndHook


AWAY_ROLES = (NodeRole.DRAINING, NodeRole.ON_LOAN, NodeRole.VACATING, NodeRole.WARMING)


HUNG_TTL_RATIO = 0.5
"""An agent that hung when coordinator and NATS died has been silent for at least the two thirds of
its TTL that were left then: with half of it the way home begins no later than with a dead agent."""


def is_away(memory: Memory) -> bool:
    """Whether a node is on loan, or on its way there or home."""
    return memory.role in AWAY_ROLES


def hung_after_s(settings: AgentSettings, memory: Memory) -> float:
    """Seconds of silence after which whoever holds this node is in its way home."""
    after_s = settings.hung_after_s
    if memory.lease is not None:
        after_s = min(after_s, HUNG_TTL_RATIO * memory.lease.ttl_s)
    return max(SHORTEST_HUNG_S, after_s)


def lease_left_s(memory: Memory, now_s: float) -> float:
    """Seconds until the lease is over, as this memory knows it; 0 without one."""
    ends_at_s = memory.lease_ends_at_s
    return 0.0 if ends_at_s is None else max(0.0, ends_at_s - now_s)
