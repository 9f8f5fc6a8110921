"""The engine's mutable tables; only the engine writes them.

They are plain structs, so that one encode call is a snapshot; methods are lookups only.
`ClusterState` is the root: nodes and GPUs, jobs and attempts, step times by worker count, loans
(made, delayed, shadow, recommended), and totals of the cell since its journal began.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from msgspec import Struct, field

from common.failures import Failure
from common.faults import NODE_FAULT
from common.history import Detail, StoryKind, Use
from common.messages import GpuHealth, OrderPhase, WorkerPhase
from common.model import (
    STORE_INDEX,
    GpuUuid,
    JobId,
    JobSpec,
    JobState,
    Lease,
    LeaseId,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    Progress,
    ServiceName,
    StopReason,
    WorkerKey,
)
from coordinator.engine.jobs.resize_costs import ResizeCosts
from coordinator.engine.jobs.step_gaps import StepGaps
from coordinator.engine.state.array_entry import ArrayEntry, ArrayTask
from coordinator.engine.state.job_groups import (
    AttemptEntry,
    EndedWorkers,
    JobCounts,
    SaveState,
    StartGate,
    Suspension,
    WaitEntry,
    WorkClock,
    WorkEstimate,
)
from coordinator.engine.state.node_groups import (
    Contact,
    Cordon,
    DesiredEntry,
    FailedStarts,
    Homecoming,
    LedgerEntry,
    NodeLabels,
)
from coordinator.policies.contract.decisions import Migrate, Reclaim
from coordinator.policies.contract.job_groups import BackOff
from coordinator.policies.contract.seasonal_load import Season
from coordinator.policies.contract.snapshot import LoadSample, UnknownLoad


class Counters(Struct, kw_only=True):
    """Totals since the journal began; see `accounting` for their meaning."""

    jobs_submitted: int = 0
    jobs_finished: int = 0
    jobs_failed: int = 0
    jobs_rejected: int = 0
    jobs_finished_on_loan: int = 0
    preemptions: int = 0
    preemption_cost_gpu_s: float = 0.0
    loans: int = 0
    loans_cancelled: int = 0
    reclaims: int = 0
    reclaims_late: int = 0
    leases_lapsed: int = 0
    lapses_late: int = 0
    turn_backs: int = 0
    turn_backs_late: int = 0
    resizes: int = 0
    resize_cost_gpu_s: float = 0.0
    """GPU-seconds without new work around resizes, of jobs that tell their progress."""
    stalls: int = 0
    """Times that a job was found STALLED."""
    suspensions: int = 0
    migrations: int = 0
    migration_cost_gpu_s: float = 0.0
    """GPU-seconds of work that migrations lost; those of preemptions are not among them."""
    flexible_workers_released: int = 0
    gang_timeouts: int = 0
    decisions_refused: int = 0
    passes: int = 0
    reclaim_s: list[float] = field(default_factory=list[float])
    lapse_s: list[float] = field(default_factory=list[float])
    turn_back_s: list[float] = field(default_factory=list[float])
    training_held_gpu_s: float = 0.0
    training_gpu_s: float = 0.0
    on_loan_held_gpu_s: float = 0.0
    on_loan_gpu_s: float = 0.0
    integrated_at_s: float | None = None


class StepTimes(Struct, kw_only=True):
    """Measured step times of one job.

    step_time_s: seconds per step with `workers` workers on `gpu_type`, between two reports of one
        attempt and one worker count; None before.
    told_at_s: its last progress report.
    anchor_of: attempt and resizes at the report from which it is measured, with its step and
        instant.
    """

    step_time_s: float | None = None
    workers: int = 0
    gpu_type: str = ""
    told_at_s: float = 0.0
    anchor_of: tuple[int, int] = (0, 0)
    anchor_step: int = 0
    anchor_at_s: float = 0.0

    def told(
        self, step: int, now_s: float, *, of: tuple[int, int], workers: int, gpu_type: str = ""
    ) -> bool:
        """A running job says how far it is; `workers` is 0 while their number changes.

        Returns whether its gang is that of its last word.
        """
        self.told_at_s = now_s
        if self.anchor_of != of or workers == 0 or step < self.anchor_step:
            self.anchor_of, self.anchor_step, self.anchor_at_s = of, step, now_s
            return False
        if step > self.anchor_step and now_s > self.anchor_at_s:
            self.step_time_s = (now_s - self.anchor_at_s) / (step - self.anchor_step)
            self.workers, self.gpu_type = workers, gpu_type
        return True


class Ending(Struct, frozen=True, kw_only=True):
    """How a worker ended.

    ended_at_s: by its node's report; None: the time of the report.
    said_reason: the reason for which its node stopped it by itself.
    failure: why it failed by itself, by its log; None: not known.
    refused: the field of the job for which its node refused it, such as `workdir`; empty: it did
        not.
    has_begun: it was not refused, for whatever reason.
    """

    ended_at_s: float | None = None
    exit_code: int | None = None
    error: str = ""
    said_reason: StopReason | None = None
    is_node_fault: bool = False
    failure: Failure | None = None
    refused: str = ""
    has_begun: bool = True

    @property
    def whose(self) -> str:
        """Which budget pays for it, in words."""
        return NODE_FAULT if self.is_node_fault else "own fault"

    @property
    def in_words(self) -> str:
        """Its error for people, with the party at fault where its node knows it. For a field of the
        job that one node alone lacks, the error is enough.
        """
        if not self.is_node_fault or self.refused:
            return self.error
        return f"{NODE_FAULT}: {self.error}" if self.error else NODE_FAULT


class TrespassStory(Struct, kw_only=True):
    """Logged foreign processes on one GPU that belong together; see `nodes.foreign_processes`.

    owner: their user and program, as the first of them had it.
    pids: the latest of them.
    left_at_s: when the last of them left; None: one is there.
    untold_count: processes seen since the last one that was logged.
    """

    gpu_uuid: GpuUuid
    owner: str
    pids: list[int]
    left_at_s: float | None = None
    untold_count: int = 0


class GpuOut(Struct, frozen=True, kw_only=True):
    """Why no work begins on a GPU, and what ends that; see `gpu_faults`.

    what: the fault, for example `XID 79`.
    is_node: nor on its node.
    needs_repair: it stays out when its node reboots.
    is_drivers: while its driver asks for a recovery.
    """

    since_s: float
    what: str
    meaning: str
    owner: str
    next_step: str
    is_node: bool = False
    needs_repair: bool = False
    is_drivers: bool = False


class Suspicion(Struct, frozen=True):
    """A program had a fault of its own on a GPU, for the last time then."""

    program: str
    at_s: float


class GpuCondition(Struct, kw_only=True):
    """The known faults of one GPU.

    counts: how often each was logged, as in `GpuFaultFact`.
    held_back: it would be out, but for the breaker.
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    suspicions: list[Suspicion] = field(default_factory=list[Suspicion])
    out: GpuOut | None = None
    held_back: GpuOut | None = None
    is_asked: bool = False
    """Its driver asked for a recovery when it was heard last."""


class Avoided(Struct, frozen=True):
    """Until when a job leaves a node alone. is_own_fault: it failed there by its own fault, and
    does not grow there however long it runs elsewhere."""

    until_s: float
    is_own_fault: bool = False


class RetryEntry(Struct, kw_only=True, omit_defaults=True):
    """The failures of a job as they affect its next try; see `jobs.retry`.

    failure: why its latest own fault came, by its node's report.
    attempt: in which attempt that was.
    counts: its own faults so far, by reason.
    is_charged: the latest one counts on the job's budget.
    in_a_row: number of own faults since an attempt ran well; the pause grows with it.
    forgiven: number of charged faults that no longer count on the budget, by `retry.reset_after_s`.
    peer_left_at_s: when a flexible worker last left while its gang went on.
    at_s: it is not tried again before; None: at once.
    is_prerun_over: its pre-run went well and is being stopped; see `prerun`.
    prerun_attempts: number of its attempts that were pre-runs, once it is a gang.
    avoided: nodes that it leaves alone, each for a time of its own; see `jobs.retry`.
    no_loan_until_s: nodes could not start it, maybe for its own storage: before this no further
        node is lent for it. None: as for any other.
    failed_on: the nodes that ended its latest attempt; empty: none did, or none was noted.
    node_faults: count of latest faults in a row that were its nodes'; 0: the latest was its own.
    refused_by: since it ran last, the first node that refused it for each thing that it names.
    refused_attempt: the latest attempt whose end that is, while it counts as a node's fault.
    """

    failure: Failure | None = None
    attempt: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    is_charged: bool = False
    in_a_row: int = 0
    forgiven: int = 0
    peer_left_at_s: float | None = None
    at_s: float | None = None
    avoided: dict[NodeName, Avoided] = field(default_factory=dict[NodeName, Avoided])
    no_loan_until_s: float | None = None
    is_prerun_over: bool = False
    prerun_attempts: int = 0
    node_faults: int = 0
    refused_by: dict[str, NodeName] = field(default_factory=dict[str, NodeName])
    refused_attempt: int = 0
    failed_on: list[NodeName] = field(default_factory=list[NodeName])

    @property
    def avoid_nodes(self) -> list[NodeName]:
        """The nodes that it leaves alone now, by name."""
        return sorted(self.avoided)


class ClockMark(Struct, frozen=True):
    """How engine time stands to the clock of the machine that leads.

    boot_id: which boot of which machine. ahead_s: engine time less its boot clock.
    """

    boot_id: str
    ahead_s: float


class LoanEntry(Struct, kw_only=True):
    """One loan, from the decision to the node serving again."""

    lease_id: LeaseId
    node: NodeName
    service: ServiceName
    decided_at_s: float
    reason: str
    begun_at_s: float | None = None
    is_server_stopped: bool = False
    """Its node stopped its server for it, and was called back or turned back before it was heard to
    be on loan; `coordinator.engine.state.loan_outcome.has_left`."""
    is_drain_late: bool = False
    """Its node was recalled while it drained, and was reported draining, out of its service's
    routing, until after its deadline.
    """
    reclaim_ordered_at_s: float | None = None
    reclaim_deadline_s: float | None = None
    reclaim_reason: str = ""
    decide_s: float = 0.0
    """How old the load was that the policy decided the order by; 0 of an operator's order."""
    called_home_at_s: float | None = None
    """When its node got the order; later than the order itself if a delayed reclaim waits for jobs.
    """
    called_home_boot_id: str = ""
    """That of its node then."""
    returned_at_s: float | None = None
    ended_reason: str = ""
    """Why it is over although its node did not come back to the service that had lent it."""
    is_lapsed: bool = False
    """It ended by its own TTL, before any order had reached its node."""
    lapsed_at_s: float | None = None
    """When that was heard."""
    lapse_s: float | None = None
    """From the lease's end to serving again, once it does; None for a node that had not left."""
    lapse_deadline_s: float | None = None
    """The longest that may be: what the lease's TTL leaves of the service's reclaim deadline."""
    turned_back: str = ""
    """Why its node gave it up by itself before it began; empty: it did not."""
    turned_back_at_s: float | None = None
    """When that was heard."""
    turn_back_s: float | None = None
    """From then to serving again, once it does; None for a node that had not left."""
    turn_back_deadline_s: float | None = None
    """The longest that may be: the service's reclaim deadline, as if it had asked at that time."""
    predicted_preemptions: int = 0
    predicted_cost_gpu_s: float = 0.0
    realised_preemptions: int = 0
    realised_cost_gpu_s: float = 0.0
    stage_durations_s: dict[str, float] = field(default_factory=dict[str, float])
    """The stages of its return; see `coordinator.engine.loans.lifecycle`."""


class ShadowLoan(Struct, kw_only=True):
    """A loan that a watched service would have made; see `coordinator.engine.loans.shadow_mode`."""

    service: ServiceName
    reclaimed_at_s: float | None = None
    is_late: bool = False


class Awaited(Struct, frozen=True, kw_only=True):
    """A lent node that goes home when its jobs have ended, at `until_s` in any case."""

    decision: Reclaim
    began_at_s: float
    until_s: float


class Recommendation(Struct, frozen=True, kw_only=True):
    """A loan that waits for an operator."""

    service: ServiceName
    at_s: float
    reason: str


class GpuSlot(Struct):
    """One GPU. holder: who may run on it now. nominee: who gets it when the holder is gone.

    guests: workers that share it with the holder, packed or in turns; see `jobs.gpu_sharing`.
    memory_bytes: 0: not reported.
    is_gone: its node does not report it any more. It is kept while it has a holder, and no other
        worker gets it.
    """

    uuid: GpuUuid
    gpu_type: str
    health: GpuHealth = GpuHealth.OK
    holder: WorkerKey | None = None
    nominee: WorkerKey | None = None
    guests: list[WorkerKey] = field(default_factory=list[WorkerKey])
    memory_bytes: int = 0
    is_gone: bool = False


class NodeEntry(Struct, kw_only=True):
    """A node: its reported state and its desired state; groups are in `state.node_groups`."""

    name: NodeName
    home_pool: Pool
    role: NodeRole
    boot_id: str
    contact: Contact = field(default_factory=Contact)
    desired: DesiredEntry
    service: ServiceName | None = None
    rack: str = ""
    labels: NodeLabels = field(default_factory=NodeLabels)
    cpus: int = 0
    """Logical CPUs, and memory below; 0: not reported."""
    memory_bytes: int = 0
    gpus: list[GpuSlot] = field(default_factory=list[GpuSlot])
    detail: str = ""
    ledger: LedgerEntry = field(default_factory=LedgerEntry)
    failed_starts: FailedStarts = field(default_factory=FailedStarts)
    lease: Lease | None = None
    homecoming: Homecoming = field(default_factory=Homecoming)
    cordon: Cordon = field(default_factory=Cordon)
    serving_since_s: float | None = None
    is_server_down: bool = False
    """Its server is down without an order to stop it; only while the node serves."""
    trespassed: dict[GpuUuid, int] = field(default_factory=dict[GpuUuid, int])
    """GPUs with a foreign process, by its last report, each with one of them; no worker would
    begin there.
    """
    trespass_stories: list[TrespassStory] = field(default_factory=list[TrespassStory])
    """Foreign processes logged in this boot, so that a crowd of them is logged once."""
    gpu_conditions: dict[GpuUuid, GpuCondition] = field(default_factory=dict[GpuUuid, GpuCondition])
    """GPUs that had faults; see `gpu_faults`."""

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types of the node, most common first, then by name; see `state.mixed_nodes`."""
        first = self.gpus[0].gpu_type if self.gpus else ""
        for slot in self.gpus:  # no generator: asked for each node with each fact
            if slot.gpu_type != first:
                break
        else:
            return (first,)  # as of nearly all
        counts = Counter(slot.gpu_type for slot in self.gpus)
        most = min(counts, key=lambda kind: (-counts[kind], kind))
        return (most, *sorted(kind for kind in counts if kind != most))

    @property
    def gpu_type(self) -> str:
        """Type of most of its GPUs; empty before its first report."""
        return self.gpu_types[0]

    def count_of(self, kind: str) -> int:
        """Its GPUs of one type."""
        return sum([slot.gpu_type == kind for slot in self.gpus])

    @property
    def is_out(self) -> bool:
        """Whether a fault of one of its GPUs keeps anything new from the whole node."""
        found = self.gpu_conditions.values() if self.gpu_conditions else ()
        return any(one.out is not None and one.out.is_node for one in found)

    @property
    def out_uuids(self) -> frozenset[GpuUuid]:
        """GPUs on which nothing new begins after a fault."""
        conditions = self.gpu_conditions
        return frozenset([uuid for uuid, one in conditions.items() if one.out is not None])

    @property
    def home_role(self) -> NodeRole:
        """The role that it has when it is not lent, drained or quarantined."""
        return NodeRole.TRAINING if self.home_pool == Pool.TRAINING else NodeRole.SERVING


class DrainEntry(Struct, frozen=True, kw_only=True):
    """A drain whose deadline is not over: until when base workers may go on, and why they then end;
    see `nodes.maintenance`.
    """

    until_s: float
    reason: str


class WindowEntry(Struct, kw_only=True):
    """A maintenance window that has been ordered and has not begun; see `nodes.windows`.

    at_s: when its node is drained. reason: by whose order, and why.
    deadline_s: for how long base workers may go on after that; None: not at all.
    lent_until_s: no loan of the node is made after that, nothing starts on it while it is lent, and
        its service counts it as gone.
    home_from_s: a loan of it that is open is called home then.
    next_s: the first of these instants that is to come.
    """

    at_s: float
    reason: str
    deadline_s: float | None = None
    lent_until_s: float = 0.0
    home_from_s: float = 0.0
    next_s: float = 0.0
    is_called_home: bool = False


class WorkerEntry(Struct, kw_only=True):
    """One worker of a job's current attempt, or its rendezvous store, which has no GPUs."""

    key: WorkerKey
    node: NodeName
    gpu_uuids: tuple[GpuUuid, ...]
    is_flexible: bool
    is_other_type: bool = False
    """Its node has another GPU type than the attempt, which spans several."""
    order: OrderPhase = OrderPhase.RESERVE
    phase: WorkerPhase | None = None
    """Its node's report; None before the first one."""
    waits_for: str = ""
    """The reason why its node has not made it ready, in the node's words; empty: not reported."""
    stop: StopReason | None = None
    stop_ordered_at_s: float = 0.0
    """When it was ordered to stop, while `stop` is set."""
    stop_grace_s: float = 0.0
    endpoint: str = ""
    generation: int = 0
    """Generation of the node's desired state that first carried it."""
    share: float = 1.0
    """Its share of its GPUs' time while it computes: 1 over the number of workers there."""


class AfterVacating(StrEnum):
    """The next state of a job when its last worker has ended."""

    REQUEUE = "requeue"
    CANCEL = "cancel"
    FAIL = "fail"
    SUCCEED = "succeed"


class LossEntry(Struct, kw_only=True):
    """Work of a preempted attempt that is lost unless it is saved; see `jobs.preemption_loss`."""

    gpu_s: float
    """Work computed up to the order and not saved, in GPU-seconds."""
    since_s: float | None
    """The order, while its gang computes on. None: nothing is added any more."""
    ordered_at_s: float = 0.0
    gpus: float = 0.0
    """On how many it computed then."""
    after_gpu_s: float = 0.0
    """Work computed since, in GPU-seconds; below 0 where it ended before the order."""
    lease_id: LeaseId | None = None
    """The loan that bears it."""
    cause: str = ""
    """Why it was preempted, in one word; see `LossRecord`."""
    is_booked: bool = False
    """The last worker is gone."""
    is_migration: bool = False
    is_ordered: bool = False
    """A person ordered the requeue of the job."""


class Migration(Struct, frozen=True, kw_only=True):
    """Where a job goes when its present attempt has left; its GPUs there are held for it."""

    decision: Migrate
    gpus: tuple[tuple[NodeName, WorkerKey], ...]
    """Workers of the next attempt, and on which node each holds its GPUs."""


class JobEntry(Struct, kw_only=True):
    """A job: its spec, its life, and the workers of its current attempt.

    What belongs together stands in a group (`state.job_groups`); a field that stands alone, here.
    """

    job_id: JobId
    spec: JobSpec
    tenant: str
    user: str
    submitted_at_s: float
    number: int = 0
    """Its number in the cell, for people and for Slurm's clients; see `jobs.numbers`."""
    state: JobState = JobState.PENDING
    attempt: AttemptEntry = field(default_factory=AttemptEntry)
    workers: dict[int, WorkerEntry] = field(default_factory=dict[int, WorkerEntry])
    store: WorkerEntry | None = None
    """The rendezvous store of its current attempt; its order stays `reserve`, see `LedgerEntry`."""
    ended: EndedWorkers = field(default_factory=EndedWorkers)
    after_vacating: AfterVacating | None = None
    cancelled_by: str = ""
    """The person who asked for its end; empty: no person did."""
    started_at_s: float | None = None
    """First start of its first attempt that ran."""
    finished_at_s: float | None = None
    resized_at_s: float | None = None
    preempted_at_s: float | None = None
    back_off: BackOff | None = None
    """Its stops for guarantees in a row; see `jobs.borrower_backoff`."""
    counts: JobCounts = field(default_factory=JobCounts)
    retry: RetryEntry = field(default_factory=RetryEntry)
    wait: WaitEntry
    gate: StartGate = field(default_factory=StartGate)
    submitted_spec: JobSpec | None = None
    """Its spec before the first change of it by a person; None: there was none."""
    exit_code: int | None = None
    error: str = ""
    progress: Progress | None = None
    saves: SaveState = field(default_factory=SaveState)
    clock: WorkClock = field(default_factory=WorkClock)
    estimate: WorkEstimate = field(default_factory=WorkEstimate)
    suspension: Suspension = field(default_factory=Suspension)
    is_rejected: bool = False
    """It ended because its deadline could not be promised."""
    is_promised: bool = False
    """Its deadline had been promised to it when it started for the first time."""
    steps: StepTimes = field(default_factory=StepTimes)
    resizes: ResizeCosts = field(default_factory=ResizeCosts)
    gaps: StepGaps = field(default_factory=StepGaps)
    lost_gpu_s: float = 0.0
    """GPU-seconds that preemptions and resizes cost (`jobs.preemption_loss`); see `resizes`."""
    loss: LossEntry | None = None
    """The loss of its latest preemption, until the next attempt is placed."""
    was_on_loan: bool = False
    migration: Migration | None = None
    is_recovered: bool = False
    """Rebuilt from ledgers: its workers that have not been reported yet are adopted, not stale."""
    array_task: ArrayTask | None = None
    """Which task of an array it is; None: a job of its own."""

    def worker(self, index: int) -> WorkerEntry | None:
        """A worker of the current attempt, or its rendezvous store, by index."""
        return self.store if index == STORE_INDEX else self.workers.get(index)

    @property
    def running_workers(self) -> int:
        """Workers that compute now: ordered to run and not ordered to stop."""
        count, run = 0, OrderPhase.RUN
        for worker in self.workers.values():
            if worker.stop is None and worker.order == run:
                count += 1
        return count


class ServiceEntry(Struct, kw_only=True):
    """The changing part of a service; its settings are the engine's."""

    name: ServiceName
    mode: Mode
    configured_mode: Mode
    """The last value of the file; `service mode` overrides it until the file changes."""
    reclaim_deadline_s: float | None = None
    """The last promise of the file: loans made under it return by it, whatever changed at the
    service since.
    """
    is_recalled: bool = False
    load: list[LoadSample] = field(default_factory=list[LoadSample])
    season: Season = Season()
    """The memory of the load beyond the kept samples."""
    unknown_since_s: float | None = None
    """Since when the load of all its serving nodes is unknown; None: at least one is known."""
    shadow_loan_count: int = 0
    shadow_reclaim_count: int = 0
    shadow_late_count: int = 0


class StoryLine(Struct, frozen=True, omit_defaults=True):
    """One thing that happened, for `explain`, `events` and `history`.

    detail: its record for accounting and audit; None: the words are all.
    """

    at_s: float
    subject: str
    what: str
    reason: str
    kind: StoryKind = StoryKind.EVENT
    detail: Detail | None = None


class HeldUse(Struct, frozen=True, kw_only=True):
    """GPUs of one type that one attempt holds on a node now; see `state.usage`.

    job_id: empty: the GPUs of a node on loan, held or not.
    """

    job_id: JobId
    attempt: int
    gpu_type: str
    gpus: float
    pool: str
    service: str
    since_s: float


class JobUse(Struct, kw_only=True):
    """What a job used so far; kept until it has ended and holds nothing.

    closed: uses that are over and not in a record yet, each with its attempt.
    held_gpu_s: GPU-seconds of all closed uses by pool and GPU type; lost_gpu_s: by cause.
    open_count: uses that are open.
    """

    closed: list[tuple[int, Use]] = field(default_factory=list[tuple[int, Use]])
    held_gpu_s: dict[str, float] = field(default_factory=dict[str, float])
    lost_gpu_s: dict[str, float] = field(default_factory=dict[str, float])
    nodes: list[str] = field(default_factory=list[str])
    nodes_of: int = 0
    """The attempt that had these nodes."""
    open_count: int = 0


STATE_VERSION = 2
"""Of the form of a saved state; `state.older_forms` has the history."""


class ClusterState(Struct, kw_only=True):
    """Everything."""

    version: int = STATE_VERSION
    now_s: float = 0.0
    clock: ClockMark | None = None
    """The clock of the present, or last, leader."""
    epoch: int = 0
    is_frozen: bool = False
    is_recalled: bool = False
    """Recall of the whole cell: a service that its settings gain before that ends is recalled as
    well.
    """
    nodes: dict[NodeName, NodeEntry] = field(default_factory=dict[NodeName, NodeEntry])
    jobs: dict[JobId, JobEntry] = field(default_factory=dict[JobId, JobEntry])
    loans: dict[LeaseId, LoanEntry] = field(default_factory=dict[LeaseId, LoanEntry])
    services: dict[ServiceName, ServiceEntry] = field(
        default_factory=dict[ServiceName, ServiceEntry]
    )
    awaited: dict[NodeName, Awaited] = field(default_factory=dict[NodeName, Awaited])
    drains: dict[NodeName, DrainEntry] = field(default_factory=dict[NodeName, DrainEntry])
    windows: dict[NodeName, WindowEntry] = field(default_factory=dict[NodeName, WindowEntry])
    """Nodes that an operator drains at an instant to come."""
    closed_until_s: dict[NodeName, float] = field(default_factory=dict[NodeName, float])
    """Nodes that could start no worker, and until when they are closed; `nodes.start_failures`."""
    idle_loans_since_s: dict[NodeName, float] = field(default_factory=dict[NodeName, float])
    """Lent nodes on which nothing runs, and since when; kept while `idle_return_s` is set."""
    shadow_loans: dict[NodeName, ShadowLoan] = field(default_factory=dict[NodeName, ShadowLoan])
    recommendations: dict[NodeName, Recommendation] = field(
        default_factory=dict[NodeName, Recommendation]
    )
    unknown_loads: dict[NodeName, UnknownLoad] = field(default_factory=dict[NodeName, UnknownLoad])
    breaker_since_s: float | None = None
    """Since when so much of the fleet is out by faults that no more GPUs follow; see `gpu_faults`.
    """
    counters: Counters = field(default_factory=Counters)
    next_lease_number: int = 1
    next_job_number: int = 1
    least_generation: int = 0
    """The highest generation of a removed node: a node that joins gets no older order."""
    pass_id: int = 0
    policy_memory: bytes = b""
    policy_memory_of: str = ""
    """The policy that remembers it, without its knobs."""
    history: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Measured work (worker-seconds) by (tenant, name, command) and by size class; the key that
    was recorded last comes last."""
    stories: list[StoryLine] = field(default_factory=list[StoryLine])
    stories_dropped: int = 0
    """Lines that were forgotten; the first one kept has this number plus one."""
    live_jobs: dict[JobId, None] = field(default_factory=dict[JobId, None])
    """Ids of the jobs that have not ended, in order of submission."""
    gated_jobs: dict[JobId, None] = field(default_factory=dict[JobId, None])
    """Those of them that a hold or a dependency keeps from their next start."""
    dependents: dict[JobId, dict[JobId, None]] = field(
        default_factory=dict[JobId, dict[JobId, None]]
    )
    """Jobs that others wait for, and which others."""
    oversized_jobs: dict[JobId, None] = field(default_factory=dict[JobId, None])
    """Jobs that may have more workers than the maximum to which a person changed them."""
    suspended_jobs: dict[JobId, None] = field(default_factory=dict[JobId, None])
    migrating_jobs: dict[JobId, None] = field(default_factory=dict[JobId, None])
    held_uses: dict[NodeName, list[HeldUse]] = field(default_factory=dict[NodeName, list[HeldUse]])
    """The GPUs that jobs hold now, and since when; see `state.usage`."""
    job_uses: dict[JobId, JobUse] = field(default_factory=dict[JobId, JobUse])
    """What the jobs that have not ended used so far."""
    shared_nodes: dict[NodeName, None] = field(default_factory=dict[NodeName, None])
    """Nodes with a GPU that several workers have."""
    awaiting_jobs: dict[JobId, None] = field(default_factory=dict[JobId, None])
    """Rebuilt gangs that await nodes; one that no longer does stays until the next report."""
    doubted_nodes: dict[NodeName, None] = field(default_factory=dict[NodeName, None])
    """Nodes that have not reported since journal records were lost; see `nodes.lost_records`."""
    doubted_jobs: dict[JobId, None] = field(default_factory=dict[JobId, None])
    """Jobs that this node may run although the state does not know it."""
    arrays: dict[JobId, ArrayEntry] = field(default_factory=dict[JobId, ArrayEntry])
    live_arrays: dict[JobId, None] = field(default_factory=dict[JobId, None])
    """Ids of the arrays that have not ended, in order of submission."""

    def latest_loan(self, node: NodeEntry) -> LoanEntry | None:
        """The loan that a node is under, or on its way home from."""
        lease_id = node.homecoming.lease_id
        return None if lease_id is None else self.loans.get(lease_id)

    def live(self) -> list[JobEntry]:
        """The jobs that have not ended."""
        return [self.jobs[job_id] for job_id in self.live_jobs]
