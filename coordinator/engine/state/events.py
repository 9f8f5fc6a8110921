"""Events: the facts that enter the engine, as the journal holds them."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from common.failures import Failure
from common.faults import Fault
from common.history import OrderRecord
from common.messages import GpuHealth, RecoveryAction, WorkerOrder, WorkerPhase
from common.model import (
    Checkpoint,
    GpuUuid,
    JobChange,
    JobId,
    JobSpec,
    LeaseId,
    NodeName,
    NodeRole,
    Pool,
    Progress,
    ServiceName,
    StopReason,
    TurnBack,
    WorkerKey,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClockMark


class Fact(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all events."""


class LeaderStarted(Fact, frozen=True, kw_only=True, tag="leader_started"):
    """A coordinator began to lead; nothing is ordered of a node before its first report."""

    epoch: int
    holder: str
    settings: EngineSettings | None = None
    """The settings in force from here on; None keeps the old ones."""
    clock: ClockMark | None = None
    """How its time is counted, for the next one; None: virtual time."""


class JobSubmitted(Fact, frozen=True, kw_only=True, tag="job_submitted"):
    """A job was accepted; submitting the same id again changes nothing."""

    job_id: JobId
    spec: JobSpec
    tenant: str
    user: str
    client: str = ""
    """Host and version of the caller, as the caller states them."""


class JobCancelRequested(Fact, frozen=True, kw_only=True, tag="job_cancel_requested"):
    """Its user, or an operator, wants a job ended, or an array.

    indices: only these tasks of the array; empty: all of it.
    """

    job_id: JobId
    by: str
    indices: str = ""
    client: str = ""


class ArrayThrottled(Fact, frozen=True, kw_only=True, tag="array_throttled"):
    """Its user, or an operator, changes the most tasks of an array at once.

    throttle: None: no bound.
    """

    job_id: JobId
    by: str
    throttle: int | None = None
    client: str = ""


class JobsHeld(Fact, frozen=True, kw_only=True, tag="jobs_held"):
    """A person holds jobs; one that starts before this fact stays as it is."""

    job_ids: tuple[JobId, ...]
    by: str
    client: str = ""


class JobsReleased(Fact, frozen=True, kw_only=True, tag="jobs_released"):
    """A person ended the hold of jobs."""

    job_ids: tuple[JobId, ...]
    by: str
    client: str = ""


class JobsRequeued(Fact, frozen=True, kw_only=True, tag="jobs_requeued"):
    """A person wants jobs stopped and back in the queue, or held outside it."""

    job_ids: tuple[JobId, ...]
    by: str
    is_held: bool = False
    client: str = ""


class JobChanged(Fact, frozen=True, kw_only=True, tag="job_changed"):
    """A person changed fields of a job."""

    job_id: JobId
    by: str
    change: JobChange
    client: str = ""


class FaultClass(StrEnum):
    """The consequence of a GPU's fault; see `gpu_faults`."""

    INFO = "info"  # nothing
    JOB = "job"  # the program's own fault
    GPU = "gpu"  # nothing new begins on the GPU
    NODE = "node"  # nor on its node


class GpuFaultFact(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of fault of a GPU, as this cell's catalogue has it.

    what: for example `XID 79`.
    count: occurrences since its agent started; for ECC, since its driver was loaded. The rest as in
        an entry of the catalogue.
    """

    what: str
    count: int
    kind: FaultClass
    meaning: str = ""
    owner: str = ""
    next_step: str = ""
    needs_repair: bool = False


class GpuFact(Struct, frozen=True):
    """The facts of a GPU that matter to a scheduler; `recovery`: None: its driver does not report
    it.
    """

    uuid: GpuUuid
    gpu_type: str
    health: GpuHealth = GpuHealth.OK
    memory_bytes: int = 0
    faults: tuple[GpuFaultFact, ...] = ()
    recovery: RecoveryAction | None = None


class WorkerFact(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of a worker that matter to a scheduler."""

    key: WorkerKey
    phase: WorkerPhase
    endpoint: str = ""
    exit_code: int | None = None
    stop_reason: StopReason | None = None
    error: str = ""
    """Why it ended, or what it waits for while its node makes it ready; empty in other phases."""
    progress: Progress | None = None
    """Its last progress, once it has ended: it is not polled again."""
    checkpoint: Checkpoint | None = None
    failure: Failure | None = None
    fault: Fault = Fault.NONE
    """Whose fault its end is."""
    refused_for: str = ""
    """The field of its job for which its node refused it, through no fault of the node."""
    ended_ago_s: float = 0.0
    """How long before this fact it ended, and claimed its checkpoint; 0 also when not known."""
    saved_ago_s: float = 0.0


class TrespassFact(Struct, frozen=True, order=True):
    """A foreign process on a GPU."""

    pid: int
    gpu_uuid: GpuUuid
    owner: str = ""
    """Its user and program; empty: not known."""


class NodeReported(Fact, frozen=True, kw_only=True, tag="node_reported"):
    """A node's report had news: all the facts that matter, never raw telemetry."""

    node: NodeName
    boot_id: str
    home_pool: Pool
    role: NodeRole
    epoch: int
    generation: int
    gpus: tuple[GpuFact, ...]
    service: ServiceName | None = None
    rack: str = ""
    labels: dict[str, str] = {}
    cpus: int = 0
    memory_bytes: int = 0
    lease_id: LeaseId | None = None
    workers: tuple[WorkerFact, ...] = ()
    trespasses: tuple[TrespassFact, ...] = ()
    detail: str = ""
    is_server_down: bool = False
    ledger_error: str = ""
    rival: str = ""
    """That another agent reports as this node and is not heard, in words."""
    stage_durations_s: dict[str, float] = {}
    home_ago_s: float | None = None
    """How long before this fact its latest return ended; None: not known."""
    turned_back: TurnBack | None = None
    """Its latest loan was given up by the node itself; None: it was not."""
    is_move_heard: bool = False
    """It left another role, in which it had been heard until now: no later than the silence by
    which a node is LOST before this fact, in the same boot."""


class ProgressReported(Fact, frozen=True, kw_only=True, tag="progress_reported"):
    """How far a running attempt is; one fact per job and pass.

    saved_ago_s: how long before this fact the job claimed the checkpoint, in seconds.
    told_ago_s: how long before this fact its node first reported this progress, in seconds.
    """

    job_id: JobId
    attempt: int
    progress: Progress | None = None
    checkpoint: Checkpoint | None = None
    saved_ago_s: float = 0.0
    told_ago_s: float = 0.0


class ProgressStopped(Fact, frozen=True, kw_only=True, tag="progress_stopped"):
    """A running attempt reports no new step and no new save, though all its nodes report.

    quiet_s: for how long the reports of its nodes show that. Time without reports does not count.
    """

    job_id: JobId
    attempt: int
    quiet_s: float


class NodeSilent(Fact, frozen=True, kw_only=True, tag="node_silent"):
    """No report of a node for lost_after_s, and again when that much silence proves something.

    unanswered_s: seconds in which certainly no leader answered a report of it: since the last
        answered one, or since this leader began if that was later, on its boot clock; 0 is not
        known.
    """

    node: NodeName
    silent_s: float
    unanswered_s: float = 0.0


class LoadMeasured(Fact, frozen=True, kw_only=True, tag="load_measured"):
    """Offered load of a service over the last folding window, in requests per second.

    is_known: whether any serving node was measured. If not, `load` is the sum of the last known
        loads, and no sample.
    """

    service: ServiceName
    load: float
    is_known: bool = True


class LoadUnknown(Fact, frozen=True, kw_only=True, tag="load_unknown"):
    """The load of a serving node is unknown from now on; or no longer, where `why` is empty.

    unknown_s: how long before this fact its metrics page was last read.
    last_load: its last known load, in requests per second; None: it never had one.
    is_read: its page is read again; False: it does not serve any more.
    """

    node: NodeName
    why: str = ""
    unknown_s: float = 0.0
    last_load: float | None = None
    is_read: bool = False


class OrdersRecovered(Fact, frozen=True, kw_only=True, tag="orders_recovered"):
    """The full contents of a node's ledger: rebuilds jobs that the journal does not know."""

    node: NodeName
    orders: tuple[WorkerOrder, ...]
    began_ago_s: dict[str, float] = {}
    """How long before this fact each worker began to run, by its key. A worker that is missing did
    not begin, or its node does not report when it did."""


class OperatorAction(StrEnum):
    """The orders of an operator."""

    FREEZE = "freeze"
    THAW = "thaw"
    RECALL = "recall"
    END_RECALL = "end_recall"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    DRAIN = "drain"
    DRAIN_AT = "drain_at"
    CONFIRM_DEAD = "confirm_dead"
    REMOVE = "remove"
    REVOKE_LOAN = "revoke_loan"
    APPROVE_LOAN = "approve_loan"
    SET_MODE = "set_mode"
    LABEL = "label"


class OperatorAsked(Fact, frozen=True, kw_only=True, tag="operator_asked"):
    """A human action; `target` is a node, a service or empty for the whole cell.

    value: of `set_mode` the mode; of `label` the changes, as `common.node_labels` reads them.
    deadline_s: of a drain, how long running work may go on; None: not at all.
    in_s: of `drain_at`, when the drain begins, in seconds from this event.
    """

    action: OperatorAction
    by: str
    target: str = ""
    value: str = ""
    reason: str = ""
    deadline_s: float | None = None
    in_s: float | None = None
    client: str = ""


class OrderRefused(Fact, frozen=True, kw_only=True, tag="order_refused"):
    """An order of a person was refused; it changed nothing, and is kept for `aryl audit`."""

    order: OrderRecord


class RecordsLost(Fact, frozen=True, kw_only=True, tag="records_lost"):
    """Records of the journal are gone, found when a leader began or by the present leader.

    first, last: their numbers; `last` below `first`: the count is not known.
    from_s: engine time of the last record before them.
    until_s: engine time of the first record after them; None: there is none.
    is_state_whole: the leader has their effect in memory, and saved it.
    lines: number of the last event line that is known from elsewhere; 0: none.
    """

    first: int
    last: int
    from_s: float
    until_s: float | None = None
    is_state_whole: bool = False
    lines: int = 0


class PassDue(Fact, frozen=True, kw_only=True, tag="pass_due"):
    """Time for a scheduling pass: order, size, place."""


class LoanPassDue(Fact, frozen=True, kw_only=True, tag="loan_pass_due"):
    """Time for a loan pass: forecast, lend or reclaim."""


Event = (
    LeaderStarted
    | JobSubmitted
    | JobCancelRequested
    | JobsHeld
    | JobsReleased
    | JobsRequeued
    | JobChanged
    | ArrayThrottled
    | NodeReported
    | ProgressReported
    | ProgressStopped
    | NodeSilent
    | LoadMeasured
    | LoadUnknown
    | OrdersRecovered
    | OperatorAsked
    | OrderRefused
    | RecordsLost
    | PassDue
    | LoanPassDue
)
