"""The rows of an API reply: how it shows a job, a node, a service, a loan.

Rows are for people and scripts; a field is only ever added (`common.api`).
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType, field

from common.failures import Failure
from common.messages import Part
from common.model import Dependency, Gate, JobState, Mode, NodeRole, Pool
from common.telemetry import GpuReport, HostReport, InferenceReport


class WorkerRow(Part, frozen=True, kw_only=True):
    """One worker of a job."""

    worker_index: int
    node: str
    gpus: int
    is_flexible: bool
    phase: str
    stop_reason: str = ""


class ArrayRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """The tasks of a job array, counted by state.

    waiting: those in the line and those behind them.
    running: those with GPUs.
    ranges: their indices by state, `waiting` to `cancelled`; only in a description.
    unstarted: the indices of cancelled tasks that never were jobs of their own. Only for a caller
        that asked for rows in full, and where the cell knows them.
    """

    indices: str
    throttle: int | None
    tasks: int
    waiting: int
    running: int
    succeeded: int
    failed: int
    cancelled: int
    ranges: dict[str, str] = field(default_factory=dict[str, str])
    unstarted: str | UnsetType | None = UNSET


class RequestRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """What a job asked for, and where its latest attempt ran.

    title, comment: the variables `SLURM_JOB_NAME` and `SLURM_JOB_COMMENT` of its request. A title
        has no rules, as the name of a job has.
    ran_on, ran_workers: nodes and workers of its latest attempt that ran; also of an ended job.
    most_workers, worker_s: the most workers of that attempt at one time, and its worker-seconds so
        far; 0: neither is known.
    attempt_started_at_s: when its present attempt ran, and of an ended job its last one; None: it
        does not run.
    waits_for: its dependencies that do not hold, with numbers of jobs in place of ids.
    """

    priority: int
    time_limit_s: float | None
    deadline_s: float | None
    grace_s: float
    gpu_types: tuple[str, ...]
    cpus_per_worker: int
    memory_bytes_per_worker: int
    workdir: str
    title: str
    comment: str
    ran_on: tuple[str, ...] = ()
    ran_workers: int = 0
    array_number: int | None = None
    """For a task of a job array: the number of the array, and below its index."""
    array_index: int | None = None
    attempt_started_at_s: float | None = None
    waits_for: tuple[Dependency, ...] = ()
    most_workers: int = 0
    worker_s: float = 0.0


class JobRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One job."""

    job_id: str
    name: str
    tenant: str
    user: str
    state: JobState
    attempt: int
    worker_count: int
    min_workers: int
    max_workers: int
    gpus_per_worker: int
    gpus: int
    nodes: tuple[str, ...]
    submitted_at_s: float
    started_at_s: float | None
    finished_at_s: float | None
    queueing_s: float
    preemption_count: int
    step: int | None = None
    total_steps: int | None = None
    exit_code: int | None = None
    error: str = ""
    failure: Failure | None = None
    """The reason for its latest own fault, by the worker's log."""
    waited_s: dict[str, float] = field(default_factory=dict[str, float])
    """Its waits by kind, under a policy that reports them."""
    blockers: tuple[str, ...] = ()
    """Why it does not start; for a suspended job, the jobs that compute; for an ending job, its
    next state; for a stalled job, its last progress."""
    stalled_s: float | UnsetType | None = UNSET
    """How long it has reported no progress. Only while it is STALLED: a caller of an older version
    refuses it."""
    resize_cost_s: float | UnsetType | None = UNSET
    """Seconds of running time that one of its resizes costs, the median of the latest. Only once
    one was measured, as above."""
    lost_gpu_s: float | UnsetType | None = UNSET
    """GPU-seconds that its preemptions and resizes cost. Only where there are any, as above."""
    gate: Gate | UnsetType | None = UNSET
    """What keeps it out of the queue; `blockers` has it in words. Only while something does, as
    above."""
    array: ArrayRow | UnsetType | None = UNSET
    """The tasks of a job array, whose row sums them up; a task has its array and its index below.
    Only where there are any, as above."""
    array_id: str | UnsetType | None = UNSET
    array_index: int | UnsetType | None = UNSET
    number: int | UnsetType | None = UNSET
    """Its number in the cell. Only for a caller that asked for rows in full, as above."""
    request: RequestRow | UnsetType | None = UNSET
    """What it asked for. Only for a caller that asked for rows in full, as above."""


class UnknownLoadRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """A load that is unknown now, as no metrics page is read.

    unknown_s: how long ago a page was last read; of a service, the longest of its nodes.
    last_load_per_s: the last known load; None: it was never known.
    nodes: of a service, its nodes whose load is unknown.
    serving: the number of its nodes that serve.
    """

    unknown_s: float
    why: str
    last_load_per_s: float | None
    nodes: tuple[str, ...] = ()
    serving: int = 0


class ClosedRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """A node that takes no new worker or loan, although no operator cordoned it.

    left_s: it is tried again after this time; None: once the problem there is solved.
    """

    why: str
    left_s: float | None


class WindowRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """A maintenance window to come.

    at_s: when the node is drained. left_s: how long that is from now.
    reason: by whose order, and why.
    """

    at_s: float
    left_s: float
    reason: str


class NodeRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One node.

    jobs: jobs that have anything there, if only their rendezvous store.
    drain_left_s: how long work on a draining node may go on; None: not any more, or it is not
        drained.
    """

    node: str
    home_pool: Pool
    role: NodeRole
    desired_role: NodeRole
    service: str
    gpu_type: str
    gpus: int
    gpus_held: int
    gpu_busy_ratio: float | None
    jobs: tuple[str, ...]
    is_cordoned: bool
    is_heard: bool
    heard_ago_s: float | None
    rack: str
    detail: str
    is_draining: bool = False
    drain_left_s: float | None = None
    is_server_down: bool = False
    """It should serve, and its server does not: it counts for nothing."""
    load_unknown: UnknownLoadRow | UnsetType | None = UNSET
    """Only while it serves and its load is unknown: a caller of an older version refuses it."""
    gpus_out: int | UnsetType | None = UNSET
    """GPUs on which nothing new begins after a fault. Only while there are any, as above."""
    closed: ClosedRow | UnsetType | None = UNSET
    """Only while it takes no new work by itself, for the same reason."""
    cpus: int | UnsetType | None = UNSET
    """Logical CPUs, and memory below; 0: not reported. Only for a caller that asked for rows in
    full, as above, as are both below."""
    memory_bytes: int | UnsetType | None = UNSET
    labels: dict[str, str] | UnsetType | None = UNSET
    """Its labels as jobs select by them; an empty value: none."""
    ordered_labels: dict[str, str | None] | UnsetType | None = UNSET
    """Those that an operator set or, with None, took away; all others are its agent's."""
    window: WindowRow | UnsetType | None = UNSET
    """Only while an operator has ordered one that has not begun, as above."""


class NodeTelemetry(Part, frozen=True, kw_only=True, omit_defaults=False):
    """The measurements of a node's latest report; older ones are not kept.

    reported_ago_s: how old all of it is.
    is_silent: a newer report should have come by now.
    lease_remaining_s: until the lease ends unless it is renewed, as its agent counted when it
        reported; None: it has none, or not yet an answer to a renewal.
    """

    reported_ago_s: float
    is_silent: bool
    lease_remaining_s: float | None
    gpus: tuple[GpuReport, ...]
    host: HostReport | None
    inference: InferenceReport | None


class ServiceRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One inference service.

    running_requests, waiting_requests: by the servers of its serving nodes; None: none reports
        them.
    reclaims: reclaims of the loans that are remembered, and how many of them were late.
    lapses, turn_backs: of the same loans, leases that ended by themselves, and loans that their
        nodes gave up.
    last_reclaim_s: how long the last reclaim took, from the order to serving again, and when it
        ended.
    """

    service: str
    mode: Mode
    is_recalled: bool
    nodes: int
    serving: int
    on_loan: int
    coming_home: int
    load_per_s: float | None
    capacity_per_node: float
    min_serving: int
    reclaim_deadline_s: float
    return_s: float
    running_requests: float | None = None
    waiting_requests: float | None = None
    reclaims: int = 0
    reclaims_late: int = 0
    last_reclaim_s: float | None = None
    last_returned_at_s: float | None = None
    lapses: int = 0
    lapses_late: int = 0
    turn_backs: int = 0
    turn_backs_late: int = 0
    load_unknown: UnknownLoadRow | UnsetType | None = UNSET
    """Only while the load of a node that serves is unknown; `load_per_s` has its last known one."""


class LoanRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One loan.

    begun_at_s: when its node first reported to be on loan; None too where a reclaim overtook that.
    reclaim_s: from the order to return to serving again; None without an order, and of a node that
        is not home yet. Also None, without stages, for a node that had not stopped its server,
        unless it was seen draining until after its deadline.
    """

    lease_id: str
    node: str
    service: str
    state: str
    decided_at_s: float
    begun_at_s: float | None
    reclaim_ordered_at_s: float | None
    returned_at_s: float | None
    reclaim_deadline_s: float | None
    reclaim_s: float | None
    lapse_s: float | None
    """From the end of its lease without an order to serving again; None of any other loan."""
    is_late: bool
    reason: str
    reclaim_reason: str
    predicted_preemptions: int
    realised_preemptions: int
    predicted_cost_gpu_s: float
    realised_cost_gpu_s: float
    stage_durations_s: dict[str, float] = field(default_factory=dict[str, float])
    """Stages of its return, in order; without `decide`, which is before the order, they add up to
    `reclaim_s`, `lapse_s` or `turn_back_s`."""
    lapse_deadline_s: float | None = None
    """The longest that `lapse_s` may be; None of any other loan, and without a promise."""
    turned_back: str = ""
    """Why its node gave it up before it began; empty: it did not."""
    turn_back_s: float | None = None
    """From then to serving again; None of any other loan, and of a node that had not left."""
    turn_back_deadline_s: float | None = None
    """The longest that `turn_back_s` may be, as for `lapse_deadline_s`."""


class SaveRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One checkpoint that a job reported. is_verified: its node saw the file change."""

    at_s: float
    step: int
    is_verified: bool


class StoryRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One event."""

    number: int
    at_s: float
    subject: str
    what: str
    reason: str


class TenantRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One tenant with all below it; GPUs whatever their type.

    used_gpus: of a GPU that jobs of several tenants share, each has a part.
    borrowed_gpus: its use beyond its guarantee.
    waiting_gpus: base demand of its jobs that wait.
    fair_share_gpus: its part of the present GPUs by guarantees, and then by weights.
    user_max_gpus, user_max_jobs: its limits for each of its users. Only where there are any: a
        caller of an older version refuses them.
    """

    tenant: str
    parent: str
    weight: float
    guarantee_gpus: int
    used_gpus: float
    borrowed_gpus: float
    borrow_limit_gpus: int | None
    lend_limit_gpus: int | None
    waiting_gpus: int
    fair_share_gpus: float
    user_max_gpus: int | UnsetType | None = UNSET
    user_max_jobs: int | UnsetType | None = UNSET
