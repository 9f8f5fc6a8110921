"""The API: what a caller asks by request/reply, and what it is told. Must not know the bus.

Every reply is either the verb's own or an `ApiError`. Rows are for people and scripts; their JSON
carries `SCHEMA_VERSION`, and a field is only ever added.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from common.failures import Failure
from common.messages import AgentReport, CollectorReport, CostReport, Message, Part
from common.model import JobSpec, JobState, Mode, NodeRole, Pool, Token

SCHEMA_VERSION = 1


class ApiErrorCode(StrEnum):
    """Classes of refusal; the CLI's exit codes follow them."""

    USAGE = "usage"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    DENIED = "denied"
    UNAVAILABLE = "unavailable"


class ApiError(Message, frozen=True, kw_only=True, tag="error"):
    """The request changed nothing; `field` did not fit, `message` says why and what would."""

    code: ApiErrorCode
    message: str
    field: str = ""


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """Queue a job. The same request id again is the same job, so a retry is safe."""

    spec: JobSpec
    request_id: Token


class Submitted(Message, frozen=True, kw_only=True, tag="submitted"):
    """The job is in the journal: no crash loses it."""

    job_id: str


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """End a job."""

    job_id: str


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """It is in the journal."""

    detail: str = ""


class ListJobs(Message, frozen=True, kw_only=True, tag="list_jobs"):
    """All jobs behind `after`, newest last; `is_live_only` leaves out the ended ones."""

    is_live_only: bool = False
    after: str = ""


class ListNodes(Message, frozen=True, kw_only=True, tag="list_nodes"):
    """All nodes behind `after`."""

    after: str = ""


class ListServices(Message, frozen=True, kw_only=True, tag="list_services"):
    """All services."""


class ListTenants(Message, frozen=True, kw_only=True, tag="list_tenants"):
    """All tenants that the cell has settings of, or jobs."""


class ListLoans(Message, frozen=True, kw_only=True, tag="list_loans"):
    """All loans behind `after`; `is_live_only` leaves out the ones that came home."""

    is_live_only: bool = True
    after: str = ""


class Describe(Message, frozen=True, kw_only=True, tag="describe"):
    """Everything about one job, node, service or loan, with why it is where it is."""

    kind: Annotated[str, Meta(pattern="^(job|node|service|loan)$")]
    name: str


class Operate(Message, frozen=True, kw_only=True, tag="operate"):
    """A human action: see `coordinator.engine.events.OperatorAction` for the verbs."""

    action: str
    target: str = ""
    value: str = ""
    reason: str = ""


class GetStatus(Message, frozen=True, kw_only=True, tag="get_status"):
    """The cell at a glance, with the figures so far."""


class GetEvents(Message, frozen=True, kw_only=True, tag="get_events"):
    """What happened after a number; follow by asking again with the last one.

    subject: empty for everything, an id or a name, or `KIND/NAME` with a kind of `Describe`. Of a
        service it means what happens to its nodes, too; of a loan, to its node while it is lent.
    """

    after: int = 0
    subject: str = ""


class GetLogs(Message, frozen=True, kw_only=True, tag="get_logs"):
    """The end of a worker's log; `worker_index` None is the lowest that runs, else that ran.

    attempt: None is the one that runs now, else the latest that ran.
    """

    job_id: str
    worker_index: int | None = None
    attempt: Annotated[int, Meta(ge=1)] | None = None
    max_bytes: Annotated[int, Meta(ge=1, le=500_000)] = 65_536


class WorkerRow(Part, frozen=True, kw_only=True):
    """One worker of a job."""

    worker_index: int
    node: str
    gpus: int
    is_flexible: bool
    phase: str
    stop_reason: str = ""


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
    """Why its latest own fault came, as the worker's log says."""
    waited_s: dict[str, float] = field(default_factory=dict[str, float])
    """What it has waited for, by kind, under a policy that says so."""
    blockers: tuple[str, ...] = ()


class NodeRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One node."""

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


class ServiceRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One inference service.

    running_requests, waiting_requests: what the servers of its serving nodes say; None: none does.
    reclaims: those of the loans that are remembered, and how many of them were late.
    last_reclaim_s: what the last of them took, from the order to serving again, and when it ended.
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


class LoanRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One loan.

    begun_at_s: when its node was heard to be on loan; None too where a call home overtook that.
    reclaim_s: from the order to come home to serving again; None without an order, of a node that
        is not home yet, and of one that had not stopped its server.
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


class StoryRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One thing that happened."""

    number: int
    at_s: float
    subject: str
    what: str
    reason: str


class Jobs(Message, frozen=True, kw_only=True, tag="jobs"):
    """Answer to `ListJobs`: a page, where one message does not carry all."""

    rows: tuple[JobRow, ...]
    has_more: bool = False


class Nodes(Message, frozen=True, kw_only=True, tag="nodes"):
    """Answer to `ListNodes`: a page, where one message does not carry all."""

    rows: tuple[NodeRow, ...]
    has_more: bool = False


class TenantRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """One tenant with all below it; GPUs whatever their type.

    borrowed_gpus: what it uses beyond its guarantee. waiting_gpus: base demand of its jobs that
        wait. fair_share_gpus: what guarantees, and then weights, give it of what is there.
    """

    tenant: str
    parent: str
    weight: float
    guarantee_gpus: int
    used_gpus: int
    borrowed_gpus: int
    borrow_limit_gpus: int | None
    lend_limit_gpus: int | None
    waiting_gpus: int
    fair_share_gpus: float


class Tenants(Message, frozen=True, kw_only=True, tag="tenants"):
    """Answer to `ListTenants`."""

    rows: tuple[TenantRow, ...]


class Services(Message, frozen=True, kw_only=True, tag="services"):
    """Answer to `ListServices`."""

    rows: tuple[ServiceRow, ...]


class Loans(Message, frozen=True, kw_only=True, tag="loans"):
    """Answer to `ListLoans`: a page, where one message does not carry all."""

    rows: tuple[LoanRow, ...]
    has_more: bool = False


class Events(Message, frozen=True, kw_only=True, tag="events"):
    """Answer to `GetEvents`. `subject` is what was asked for as `KIND/ID`, for the next request."""

    rows: tuple[StoryRow, ...]
    last: int
    subject: str = ""
    has_more: bool = False


class Logs(Message, frozen=True, kw_only=True, tag="logs"):
    """Answer to `GetLogs`."""

    text: str
    node: str
    worker_index: int
    attempt: int


class Description(Message, frozen=True, kw_only=True, tag="description"):
    """One thing in full. `why` are sentences: every blocker, the estimate and its source."""

    kind: str
    name: str
    job: JobRow | None = None
    node: NodeRow | None = None
    service: ServiceRow | None = None
    loan: LoanRow | None = None
    agent: AgentReport | None = None
    """Of a node: how its agent fares, as it said last; what it costs, and what it cannot see."""
    cost: CostReport | None = None
    collectors: tuple[CollectorReport, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    """Of a service: all that are its own."""
    loans: tuple[LoanRow, ...] = ()
    """Of a service: all that are out, and the last few that came home."""
    why: tuple[str, ...] = ()
    estimate: str = ""
    story: tuple[StoryRow, ...] = ()
    spec: JobSpec | None = None


class Status(Message, frozen=True, kw_only=True, tag="status"):
    """The cell at a glance. `figures` are `accounting.Figures` as plain values."""

    cell: str
    epoch: int
    policy: str
    is_frozen: bool
    nodes: int
    nodes_heard: int
    training_gpus: int
    training_gpus_held: int
    on_loan_nodes: int
    on_loan_gpus: int
    on_loan_gpus_held: int
    coming_home_nodes: int
    inference_nodes: int
    serving_nodes: int
    pending_jobs: int
    running_jobs: int
    gpu_busy_ratio_training: float | None
    gpu_busy_ratio_inference: float | None
    figures: dict[str, object]
    bad_messages: int
    up_s: float
    recalled_services: tuple[str, ...] = ()
    """Services that lend nothing until an operator ends their recall."""


REQUESTS: tuple[type[Message], ...] = (
    Submit,
    Cancel,
    ListJobs,
    ListNodes,
    ListServices,
    ListTenants,
    ListLoans,
    Describe,
    Operate,
    GetStatus,
    GetEvents,
    GetLogs,
)
"""Every request; its tag is the verb in the subject."""
