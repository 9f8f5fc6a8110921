"""The API: requests and replies.

Every reply is either the verb's own or an `ApiError`. Rows are for people and scripts; their JSON
carries `SCHEMA_VERSION`, and a field is only ever added.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from common.apirows import ArrayRow as ArrayRow
from common.apirows import ClosedRow as ClosedRow
from common.apirows import JobRow as JobRow
from common.apirows import LoanRow as LoanRow
from common.apirows import NodeRow as NodeRow
from common.apirows import NodeTelemetry as NodeTelemetry
from common.apirows import RequestRow as RequestRow
from common.apirows import SaveRow as SaveRow
from common.apirows import ServiceRow as ServiceRow
from common.apirows import StoryRow as StoryRow
from common.apirows import TenantRow as TenantRow
from common.apirows import UnknownLoadRow as UnknownLoadRow
from common.apirows import WindowRow as WindowRow
from common.apirows import WorkerRow as WorkerRow
from common.history import HistoryLine, JobRecord, StoryKind
from common.messages import AgentReport, CollectorReport, CostReport, Message, Part
from common.model import Dependency, JobPriority, JobSeconds, JobSpec, Token, WorkerRange
from common.plans import Plan as Plan
from common.plans import Planned as Planned

SCHEMA_VERSION = 1


class ApiErrorCode(StrEnum):
    """Classes of refusal; the CLI's exit codes follow them."""

    USAGE = "usage"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    DENIED = "denied"
    UNAVAILABLE = "unavailable"


class ApiError(Message, frozen=True, kw_only=True, tag="error"):
    """The request changed nothing; `field` was invalid, `message` gives the reason and a remedy."""

    code: ApiErrorCode
    message: str
    field: str = ""


class Order(Message, frozen=True, kw_only=True):
    """Base of the requests that change something; `client` is for the audit.

    client: host and version of the caller, as the caller states them.
    """

    client: Annotated[str, Meta(max_length=200)] | UnsetType = UNSET


class Submit(Order, frozen=True, kw_only=True, tag="submit"):
    """Queue a job. A repeated request id means the same job, so a retry is safe."""

    spec: JobSpec
    request_id: Token


class Submitted(Message, frozen=True, kw_only=True, tag="submitted"):
    """The job is in the journal: no crash loses it."""

    job_id: str
    warnings: tuple[str, ...] = ()
    """Why no node of the present fleet can run it, in the words of `explain job`; it waits all the
    same, as nodes may join."""
    gate: str | UnsetType = UNSET
    """Why it is not in the queue, in the same words. Only while it is not: a caller of an older
    version refuses it."""


class Cancel(Order, frozen=True, kw_only=True, tag="cancel"):
    """End a job, an array, or with `ARRAY_7` or `ARRAY_[10-20,30]` some tasks of one."""

    job_id: str


JobNames = Annotated[tuple[str, ...], Meta(min_length=1, max_length=1000)]
"""Ids or names of jobs. An order to several of them is carried out for all, or for none."""


class Hold(Order, frozen=True, kw_only=True, tag="hold"):
    """Keep waiting jobs out of the queue until their release."""

    job_ids: JobNames


class Release(Order, frozen=True, kw_only=True, tag="release"):
    """End the hold of jobs. A hold by an operator, of another tenant's job, ends by operators."""

    job_ids: JobNames


class Requeue(Order, frozen=True, kw_only=True, tag="requeue"):
    """Stop running jobs with their grace, free of charge; they wait again.

    is_held: outside the queue, until their release.
    """

    job_ids: JobNames
    is_held: bool = False


class Change(Order, frozen=True, kw_only=True, tag="change"):
    """Change fields of a job that has not ended, as `JobChange` has them.

    deadline_s: counted from the job's submission.
    workers: while the job has workers, its maximum alone may change; workers beyond it are released
        in the next pass.
    depends_on: all that it depends on from now on, while it waits.
    require, exclude, require_nodes, exclude_nodes: from its next start or growth on.
    """

    job_id: str
    priority: JobPriority | UnsetType = UNSET
    time_limit_s: JobSeconds | UnsetType | None = UNSET
    deadline_s: JobSeconds | UnsetType | None = UNSET
    workers: WorkerRange | UnsetType = UNSET
    depends_on: tuple[Dependency, ...] | UnsetType = UNSET
    require: tuple[str, ...] | UnsetType = UNSET
    exclude: tuple[str, ...] | UnsetType = UNSET
    require_nodes: tuple[Token, ...] | UnsetType = UNSET
    exclude_nodes: tuple[Token, ...] | UnsetType = UNSET


class Throttle(Order, frozen=True, kw_only=True, tag="throttle"):
    """Change the most tasks of an array at once; None: no bound."""

    job_id: str
    throttle: Annotated[int, Meta(ge=1, le=10_000)] | None


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """The change is in the journal."""

    detail: str = ""


class ListJobs(Message, frozen=True, kw_only=True, tag="list_jobs"):
    """All jobs behind `after`, newest last; `is_live_only` leaves out the ended ones.

    in_full: rows have `number` and `request` too, which a caller of an older version refuses.
    """

    is_live_only: bool = False
    after: str = ""
    in_full: bool = False


class ListNodes(Message, frozen=True, kw_only=True, tag="list_nodes"):
    """All nodes behind `after`.

    in_full: rows have `cpus`, `memory_bytes` and `labels` too, which a caller of an older version
        refuses.
    """

    after: str = ""
    in_full: bool = False


class ListServices(Message, frozen=True, kw_only=True, tag="list_services"):
    """All services."""


class ListTenants(Message, frozen=True, kw_only=True, tag="list_tenants"):
    """All tenants that have settings in the cell, or jobs."""


class ListLoans(Message, frozen=True, kw_only=True, tag="list_loans"):
    """All loans behind `after`; `is_live_only` leaves out the returned ones."""

    is_live_only: bool = True
    after: str = ""


class Describe(Message, frozen=True, kw_only=True, tag="describe"):
    """Everything about one job, node, service or loan, and the reasons for its state.

    in_full: as of `ListJobs` and `ListNodes`, for the row of a job or of a node.
    """

    kind: Annotated[str, Meta(pattern=r"^(job|node|service|loan)\Z")]
    name: str
    in_full: bool = False


MAX_WINDOW_S = 366 * 86_400.0
WindowSeconds = Annotated[float, Meta(gt=0, le=MAX_WINDOW_S)]
"""How far ahead a maintenance window may begin."""


class Operate(Order, frozen=True, kw_only=True, tag="operate"):
    """A human action: see `coordinator.engine.state.events.OperatorAction` for the verbs.

    target: a node's name, or a service's, which may be empty for all; of `revoke_loan` the id of
        the loan or the name of the lent node.
    deadline_s: of a drain: work on the node may go on for this long, and is preempted then; None:
        at once.
    in_s: of `drain_at`, when the drain begins; only there.
    """

    action: str
    target: str = ""
    value: str = ""
    reason: str = ""
    deadline_s: JobSeconds | None = None
    in_s: WindowSeconds | UnsetType = UNSET


class GetStatus(Message, frozen=True, kw_only=True, tag="get_status"):
    """The cell at a glance, with the figures so far."""


class GetEvents(Message, frozen=True, kw_only=True, tag="get_events"):
    """Events after a number; follow by asking again with the last one.

    subject: empty for everything, an id or a name, or `KIND/NAME` with a kind of `Describe`. For a
    service it includes the events of its nodes; for a loan, those of its node while it is lent.
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


class GetHistory(Message, frozen=True, kw_only=True, tag="get_history"):
    """Lines of the history. A user sees the lines of the own tenant, and tenant `ops` all.

    names: jobs, nodes, services or loans that a line is about, all of them; a number stands for its
        job. A name that stands for nothing is refused.
    kinds: of `StoryKind`; empty: any.
    since_at_s, until_at_s: seconds since 1970; the end is excluded.
    after, before: numbers, both excluded. is_newest: of more lines than `limit` the newest ones.
    """

    names: Annotated[tuple[str, ...], Meta(max_length=8)] = ()
    tenant: str = ""
    user: str = ""
    kinds: tuple[StoryKind, ...] = ()
    since_at_s: float | None = None
    until_at_s: float | None = None
    after: int = 0
    before: int = 0
    limit: Annotated[int, Meta(ge=1, le=5000)] = 100
    is_newest: bool = True


class GetUsage(Message, frozen=True, kw_only=True, tag="get_usage"):
    """GPU time in a span of time by columns of `tenant`, `user`, `job`, `service`, `node` and
    `gpu_type`. A user sees the usage of the own tenant, and tenant `ops` all.

    until_at_s: None: now. after: the key of the last row of the page before.
    """

    by: tuple[str, ...]
    since_at_s: float
    until_at_s: float | None = None
    tenant: str = ""
    user: str = ""
    after: tuple[str, ...] = ()


class ListEndedJobs(Message, frozen=True, kw_only=True, tag="list_ended_jobs"):
    """Accounts of jobs that ended in a span of time, oldest first; scoped as `GetUsage`.

    after: the `number` of the last row of the page before.
    job_numbers: only jobs and tasks of arrays with one of these numbers; empty: of any.
    submitted_until_at_s: only jobs that were submitted before; None: whenever. A coordinator of an
        older version refuses these two, so they are left out where they say nothing.
    """

    since_at_s: float
    until_at_s: float | None = None
    tenant: str = ""
    user: str = ""
    job_ids: Annotated[tuple[str, ...], Meta(max_length=100)] = ()
    after: int = 0
    job_numbers: Annotated[tuple[int, ...], Meta(max_length=1000)] | UnsetType = UNSET
    submitted_until_at_s: float | UnsetType | None = UNSET


class Jobs(Message, frozen=True, kw_only=True, tag="jobs"):
    """Answer to `ListJobs`: a page, where one message does not carry all."""

    rows: tuple[JobRow, ...]
    has_more: bool = False


class Nodes(Message, frozen=True, kw_only=True, tag="nodes"):
    """Answer to `ListNodes`: a page, where one message does not carry all."""

    rows: tuple[NodeRow, ...]
    has_more: bool = False


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
    """Answer to `GetEvents`.

    `subject` is the requested subject as `KIND/ID`, for the next request.
    """

    rows: tuple[StoryRow, ...]
    last: int
    subject: str = ""
    has_more: bool = False


class History(Message, frozen=True, kw_only=True, tag="history"):
    """Answer to `GetHistory`, by number.

    has_more: more lines fit the question than this page has.
    missing_lines: lines that the history of this coordinator does not have yet.
    kept_since_at_s: the oldest line that is kept; None: there is none.
    """

    rows: tuple[HistoryLine, ...]
    has_more: bool = False
    missing_lines: int = 0
    kept_since_at_s: float | None = None


class UsageRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """GPU time of one combination of the columns, in GPU-seconds; `waited_s` in job-seconds.

    key: the values of the columns; an empty one: none, as a job in the training pool has no
        service.
    training_gpu_s, on_loan_gpu_s: GPUs held by jobs, in the training pool and on loan.
    lent_gpu_s: GPUs on loan, held or not; only in reports that name no tenant, user and job.
    lost_gpu_s: work that preemptions, migrations and resizes lost, also by cause.
    waited_gpu_s: time in the queue times the GPUs of the smallest gang.
    """

    key: tuple[str, ...]
    training_gpu_s: float = 0.0
    on_loan_gpu_s: float = 0.0
    lent_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    waited_s: float = 0.0
    waited_gpu_s: float = 0.0
    lost_by_cause_gpu_s: dict[str, float] = field(default_factory=dict[str, float])


class Usage(Message, frozen=True, kw_only=True, tag="usage"):
    """Answer to `GetUsage`: what ended and what still runs, each as far as it lies in the span."""

    by: tuple[str, ...]
    rows: tuple[UsageRow, ...]
    since_at_s: float
    until_at_s: float
    has_more: bool = False
    missing_lines: int = 0
    kept_since_at_s: float | None = None


class EndedJobRow(Part, frozen=True, kw_only=True, omit_defaults=False):
    """A job that ended, and its number in the history."""

    number: int
    job: JobRecord


class EndedJobs(Message, frozen=True, kw_only=True, tag="ended_jobs"):
    """Answer to `ListEndedJobs`.

    missing_lines: as of `History`. Only where there are any: a caller of an older version refuses
        it.
    """

    rows: tuple[EndedJobRow, ...]
    has_more: bool = False
    missing_lines: int | UnsetType = UNSET


class Logs(Message, frozen=True, kw_only=True, tag="logs"):
    """Answer to `GetLogs`."""

    text: str
    node: str
    worker_index: int
    attempt: int


class Description(Message, frozen=True, kw_only=True, tag="description"):
    """One thing in full. `why` holds sentences: every blocker, the estimate and its source."""

    kind: str
    name: str
    job: JobRow | None = None
    node: NodeRow | None = None
    service: ServiceRow | None = None
    loan: LoanRow | None = None
    agent: AgentReport | None = None
    """For a node: the latest state of its agent, its cost, and what it cannot see."""
    cost: CostReport | None = None
    collectors: tuple[CollectorReport, ...] = ()
    telemetry: NodeTelemetry | None = None
    """For a node that this coordinator has heard: its latest measurements."""
    workers: tuple[WorkerRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    """For a service: all its nodes."""
    loans: tuple[LoanRow, ...] = ()
    """For a service: all loans that are out, and the last few that were returned."""
    why: tuple[str, ...] = ()
    estimate: str = ""
    story: tuple[StoryRow, ...] = ()
    spec: JobSpec | None = None
    saves: tuple[SaveRow, ...] = ()
    """For a job: its latest checkpoints, oldest first."""


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
    clock_warning: str = ""
    """A warning about the time that decisions count in; empty without one."""
    starting_jobs: int = 0
    """Neither pending nor running: their nodes are being made ready."""
    suspended_jobs: int = 0
    """Not running either: they keep their GPUs, and other jobs compute there for now."""
    jobs_without_room: int = 0
    """Those pending jobs that the present fleet could never run."""
    without_room_why: tuple[str, ...] = ()
    """Why the first of them cannot run, in the words of `explain job`."""
    is_recalled: bool | UnsetType = UNSET
    """A recall of all services holds, for those too that the settings gain before its end. Only
    while it does: a caller of an older version refuses it."""
    reports_shed: int | UnsetType = UNSET
    """Reports lost to overload so far: a later one of the same agent replaced each of them before
    it was read. Only while reports are shed, and for a minute after."""
    loads_unknown: tuple[str, ...] | UnsetType = UNSET
    """Services with serving nodes whose load is unknown, with the numbers of both. Only while there
    are any, as above."""
    gpus_out: int | UnsetType = UNSET
    """GPUs on which nothing new begins after a fault, and below why no more of them are taken out
    automatically. Only while there are any, as above."""
    gpu_breaker: str | UnsetType = UNSET
    nodes_closed: int | UnsetType = UNSET
    """Nodes that take no new work by themselves, see `NodeRow.closed`. Only while there are any, as
    above."""
    stalled_jobs: int | UnsetType = UNSET
    """The running ones that are STALLED. Only while there are any, as above."""
    held_jobs: int | UnsetType = UNSET
    """The pending ones that a person holds. Only while there are any, as above."""
    dependent_jobs: int | UnsetType = UNSET
    """The pending ones that wait for other jobs and are not held. Only while there are any, as
    above."""
    never_jobs: int | UnsetType = UNSET
    """Those of them of which a dependency can never hold. Only while there are any, as above."""


REQUESTS: tuple[type[Message], ...] = (
    Submit,
    Cancel,
    Hold,
    Release,
    Requeue,
    Change,
    Throttle,
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
    GetHistory,
    GetUsage,
    ListEndedJobs,
    Plan,
)
"""Every request; its tag is the verb in the subject."""

OPERATORS = "ops"
"""The tenant whose users may order the cell."""
JOB_ORDERS = (Cancel, Hold, Release, Requeue, Change, Throttle)
"""The orders about jobs: of a user of the job's tenant, or of an operator."""
CHANGES = frozenset(str(kind.__struct_config__.tag) for kind in (Submit, *JOB_ORDERS, Operate))
"""The verbs that may change something; all others only read."""
