"""The frozen snapshot that policies decide on: nodes, jobs, services, tenants. Values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum, StrEnum
from math import ceil

from msgspec import Struct

from common.model import (
    GpuRequest,
    GpuUuid,
    JobId,
    JobState,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    Preemptibility,
    ServiceName,
    WorkerRange,
)
from common.profile import NO_PROFILE, JobProfile
from coordinator.policies.contract.job_groups import (
    ANY_NODE,
    NO_ATTEMPT,
    NO_PREEMPTIONS,
    NO_PROGRESS,
    NO_RESIZES,
    NO_STEP_TIMES,
    NOTHING_TO_SAVE,
    AttemptView,
    Behind,
    EstimateView,
    NodeLimits,
    PreemptionsView,
    ProgressView,
    ResizesView,
    SavesView,
    StepTimesView,
)
from coordinator.policies.contract.seasonal_load import Season


class Tag(IntEnum):
    """The workers on a node: base workers (or any, on a training node), only flexible, none."""

    BASE = 0
    FLEXIBLE = 1
    EMPTY = 2


class Group(Struct, frozen=True, cache_hash=True):
    """Nodes that are alike to a placement, free GPUs aside. `service` is None in training."""

    gpu_type: str
    service: ServiceName | None
    tag: Tag


Masks = list[int]
"""By number of free GPUs: a set of places of nodes, as the bits of an integer."""


_WINDOW = 960
_WINDOW_MASK = (1 << _WINDOW) - 1


def bits(mask: int) -> Iterator[int]:
    """The members of a set of places, lowest first.

    An operation on an integer takes as long as the integer is wide, so that it is walked window by
    window: a member of a set of 10,000 places costs as much as one of a set of 1,000.
    """
    base = 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        base += skipped
        window = mask & _WINDOW_MASK
        while window:
            low = window & -window
            yield base + low.bit_length() - 1
            window ^= low
        mask >>= _WINDOW
        base += _WINDOW


def add_bit(masks: Masks, free: int, place: int) -> None:
    """Add a place to the set of a number of free GPUs."""
    if free >= len(masks):
        masks += [0] * (free + 1 - len(masks))
    masks[free] |= 1 << place


def trimmed(masks: Masks) -> Masks:
    """A copy without the empty sets at its end."""
    last = len(masks)
    while last and not masks[last - 1]:
        last -= 1
    return masks[:last]


class JobShape(Struct, frozen=True, cache_hash=True):
    """All that decides whether a base gang fits; jobs of equal shape fit or fail together."""

    gpus_per_worker: int
    min_workers: int
    is_elastic: bool
    gpu_types: tuple[str, ...]
    multipliers: tuple[tuple[str, int], ...]
    preemptibility: Preemptibility
    grace_s: float
    spans_types: bool = False
    was_preempted: bool = False
    avoid_nodes: tuple[NodeName, ...] = ()
    wants_no_loan: bool = False


class LoadSample(Struct, frozen=True):
    """Offered load of a service at one instant, in its own unit (requests per second)."""

    at_s: float
    load: float


class UnknownLoad(Struct, frozen=True, kw_only=True):
    """A node that serves and whose load is unknown.

    since_s: when its load was last known, or when it was first heard to serve.
    load: the last known one; None: it never had one.
    is_over: it is unknown for longer than its service waits (`unknown_load_s`).
    """

    node: NodeName
    since_s: float
    load: float | None
    why: str
    is_over: bool = False


class ServiceView(Struct, frozen=True, kw_only=True):
    """One inference service.

    capacity_per_node: load that one node carries, in the unit of the samples.
    return_s: TTL + grace + device-free p99 + warm-up p99: how long a node needs to come home.
    """

    name: ServiceName
    mode: Mode
    capacity_per_node: float
    min_serving: int
    headroom_ratio: float
    reclaim_deadline_s: float
    return_s: float
    max_grace_s: float
    """Longest grace that a job on a lent node of this service may have."""
    hold_off_s: float
    loan_period_s: float
    load: tuple[LoadSample, ...] = ()
    unknown: tuple[UnknownLoad, ...] = ()
    """Nodes that serve and whose load is unknown, by name."""
    serving: int = 0
    """All that are there to serve; counted only where a load is unknown."""
    unknown_load_s: float = 120.0
    """How long a load may be unknown before lent nodes come home for it."""
    season: Season = Season()
    """The memory of its load beyond the samples."""
    quantile: float | None = None
    """The quantile of the load to carry; None forecasts without one. Set by the policy."""
    is_recalled: bool = False


ROUNDING_S = 1e-6  # worker-seconds below this count as none: used-up work is seldom exactly 0


class WorkerView(Struct, frozen=True, kw_only=True):
    """One worker of a job on a node.

    freed_gpus: the number of its GPUs that others could have if it left. Unhealthy GPUs, and those
        with a foreign process, stay barred.
    is_leaving: it was ordered to stop; its GPUs come free by themselves.
    is_other_type: its node has another GPU type than the attempt, which spans several.
    """

    job_id: JobId
    worker_index: int
    node: NodeName
    gpus: int
    freed_gpus: int
    is_flexible: bool
    is_leaving: bool = False
    is_other_type: bool = False
    gpu_uuids: tuple[GpuUuid, ...] = ()
    """The very GPUs that it has, so that others can be placed on them."""
    barred_uuids: tuple[GpuUuid, ...] = ()
    """The GPUs that `freed_gpus` leaves out."""


class Shadow(StrEnum):
    """Where a node of a service that is only watched would be, had it been lent."""

    NONE = ""
    LENT = "lent"
    COMING = "coming"  # taken back, and still on its way


class NodeView(Struct, frozen=True, kw_only=True):
    """One node.

    free_gpus: healthy GPUs without holder or nominee, including those that leaving workers will
        free and that are not promised to another worker yet.
    is_schedulable: workers may start here (training or on loan, heard, not cordoned, not leaving).
    takes_nothing: neither a worker nor a loan: it cannot write its ledger, or failed to start its
        last workers.
    sick_gpus: the number of its GPUs that are unhealthy or missing. It is not lent then: its server
        runs on them, and might not come back once it was stopped.
    trespassed_gpus: the number with a foreign process; no worker gets them, and the node is not
        lent.
    barred_gpus: the number that are one or the other, or both: no worker gets them.
    is_reclaimed: on loan, but recalled.
    """

    name: NodeName
    home_pool: Pool
    role: NodeRole
    gpu_type: str
    gpus: int
    free_gpus: int
    is_schedulable: bool
    service: ServiceName | None = None
    is_reclaimed: bool = False
    is_drained_by_operator: bool = False
    takes_nothing: bool = False
    is_closing: bool = False
    """Its maintenance window is near: its service counts it as gone, so that others come home in
    time. Only a node of a service."""
    sick_gpus: int = 0
    trespassed_gpus: int = 0
    is_load_unknown: bool = False
    """It serves and nothing is known of its load: it is not lent."""
    barred_gpus: int = 0
    serving_since_s: float | None = None
    """When it last became ready to serve; None when it does not serve."""
    shadow: Shadow = Shadow.NONE
    workers: tuple[WorkerView, ...] = ()
    rack: str = ""
    cpus: int = 0
    """Logical CPUs, and memory below, its own and that of its smallest GPU; 0: not reported."""
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    closes_at_s: float | None = None
    """When an operator drains it: no attempt that would not be over by then starts there. None: not
    ordered, or a node of a service."""


class JobView(Struct, frozen=True, kw_only=True):
    """One job that waits or runs.

    What belongs together stands in a group (`job_groups`); a field that stands alone, here.

    as_of_s: the instant of the sums in its groups; methods give them at any later one.
    app: the group of trials that it belongs to; None: it stands for itself.
    waiting_since_s: since when it has waited; None while it has workers.
    deadline_at_s: when its user wants it done; None: no deadline.
    grace_s: how long it may take to stop.
    workers, profile: limited by the GPUs of the fleet. most_on: the most workers on a GPU type that
        has room for fewer than `workers` with its multiplier.
    cpus_per_worker, memory_bytes_per_worker: 0: not declared.
    behind: during or before a pre-run, the gang behind it, and all other fields are of the pre-run;
        None: no pre-run.
    gpu_type: of the running attempt; None while it waits.
    held: while it moves, workers of its next attempt for which GPUs are held where it goes.
    is_resizable: running, elastic, and no resize of it is under way.
    is_resting: it was preempted so lately that it may not be stopped for another one; see
        `cooldown`.

    A view is valid until an event changes the job, however late: snapshots share views.
    """

    job_id: JobId
    tenant: str = ""
    user: str = ""
    app: str | None = None
    state: JobState
    submitted_at_s: float
    waiting_since_s: float | None = None
    deadline_at_s: float | None = None
    priority: int
    preemptibility: Preemptibility
    grace_s: float

    workers: WorkerRange
    most_on: Mapping[str, int] = {}
    gpus_per_worker: int
    cpus_per_worker: int = 0
    memory_bytes_per_worker: int = 0
    gpu: GpuRequest
    nodes: NodeLimits = ANY_NODE
    profile: JobProfile = NO_PROFILE
    behind: Behind | None = None

    gpu_type: str | None = None
    placed: tuple[WorkerView, ...] = ()
    held: tuple[WorkerView, ...] = ()
    is_resizable: bool = False
    is_resting: bool = False
    attempt: AttemptView = NO_ATTEMPT
    preemptions: PreemptionsView = NO_PREEMPTIONS
    resizes: ResizesView = NO_RESIZES

    as_of_s: float = 0.0
    estimate: EstimateView
    progress: ProgressView = NO_PROGRESS
    saves: SavesView = NOTHING_TO_SAVE
    steps: StepTimesView = NO_STEP_TIMES

    @property
    def is_elastic(self) -> bool:
        """Whether it may run with more workers than its base demand."""
        return self.workers.max > self.workers.min

    @property
    def spans_types(self) -> bool:
        """Whether its attempt has workers on several GPU types."""
        return self.gpu.heterogeneous_speed_ratio > 0 and any(
            worker.is_other_type and not worker.is_leaving for worker in self.placed
        )

    def work_left_s(self, now_s: float) -> float:
        """Worker-seconds left at an instant; an overrun of the estimate counts again as remaining
        work.
        """
        known = self.estimate
        done_s = known.work_rate * max(0.0, now_s - self.as_of_s)
        over_s = 0.0 if known.estimated_left_s is None else done_s - known.estimated_left_s
        return max(known.least_work_s, known.remaining_work_s - done_s, over_s)

    def estimate_left_s(self, now_s: float) -> float:
        """Worker-seconds left at an instant by the estimate alone, while that is above zero.

        A job that has outlived its estimate has `work_left_s` left. So has one that is about to by
        less than rounding; otherwise views of different instants would disagree.
        """
        known = self.estimate
        if known.estimated_left_s is None:
            return self.work_left_s(now_s)
        left_s = known.estimated_left_s - known.work_rate * max(0.0, now_s - self.as_of_s)
        return left_s if left_s > ROUNDING_S else self.work_left_s(now_s)

    def lost_gpu_s(self, now_s: float) -> float:
        """GPU-seconds that a preemption at an instant throws away."""
        saves = self.saves
        return saves.unsaved_gpu_s + saves.unsaved_gpus * max(0.0, now_s - self.as_of_s)

    def rate(self, workers: int) -> float:
        """Worker-seconds of work per second with this number of workers, by its profile; else
        linear.
        """
        return self.profile.rate(workers, base=self.workers.min)

    def runtime_s(self, workers: int, now_s: float) -> float:
        """Remaining seconds with this number of workers of its reference GPU type."""
        return self.work_left_s(now_s) / self.rate(workers)

    def attained_service_gpu_s(self, now_s: float) -> float:
        """GPU-seconds that it has computed until an instant (Tiresias, NSDI'19, section 3.2)."""
        done = self.progress
        return done.attained_gpu_s + done.computing_gpus * max(0.0, now_s - self.as_of_s)

    def accepts(self, gpu_type: str) -> bool:
        """Whether an attempt may run on this GPU type."""
        return self.gpu.accepts(gpu_type)

    @property
    def base_gpus(self) -> int:
        """GPUs of its base gang on a GPU type without a multiplier."""
        return self.workers.min * self.gpus_per_worker

    def base_gpus_on(self, gpu_type: str) -> int:
        """GPUs of its base gang on a GPU type."""
        return self.workers_on(gpu_type).min * self.gpus_per_worker

    def workers_on(self, gpu_type: str) -> WorkerRange:
        """The worker range on a GPU type, its multiplier applied."""
        factor = self.gpu.worker_multiplier.get(gpu_type, 1)
        if factor == 1 and not self.most_on:
            return self.workers
        most = self.workers.max * factor
        return WorkerRange(
            min=self.workers.min * factor, max=min(most, self.most_on.get(gpu_type, most))
        )


class Occupied(Struct, frozen=True):
    """The facts of one node with workers that a placement needs."""

    node: NodeView
    service: ServiceName | None
    """The service that lent it; None in training."""
    free: int
    base_count: int
    flexible: tuple[WorkerView, ...]
    """Flexible workers that are not leaving, by job and index."""


Flexible = dict[NodeName, tuple[WorkerView, ...]]
"""Per node, workers that may be taken back: flexible ones that stay, of jobs that can be resized,
by job and index."""

Spot = tuple[str, ServiceName | None, int, int, int]
"""A group of like nodes: GPU type, service, free GPUs, GPUs that these workers hold, location."""


class ServiceNodes(Struct, frozen=True, kw_only=True):
    """The nodes of one service, in order of name.

    count: all of them; those that are cordoned, or about to close, count in nothing else.
    ready: serving. coming: on their way home. draining: on their way to training.
    longest_serving: those ready that tell since when and can be lent, the longest first.
    gpu_types: of those ready.
    """

    count: int = 0
    ready: tuple[NodeView, ...] = ()
    coming: tuple[NodeView, ...] = ()
    draining: tuple[NodeView, ...] = ()
    longest_serving: tuple[NodeView, ...] = ()
    gpu_types: frozenset[str] = frozenset()


class Index(Struct, frozen=True, kw_only=True):
    """One snapshot, sorted.

    names, places: which node stands where, in order of name.
    nodes: by place; None for a node that takes no workers.
    masks: per group, by number of free GPUs.
    flexible, spots: of nodes with workers that may be taken back now, those and their room.
    lines: waiting jobs of one shape each, in order of priority and submission.
    resizable: jobs whose flexible workers may change now, by id.
    growable: those of them that do not have all the workers that they can use.
    preempted: jobs that ever were, by id.
    held: of each that is resizable its flexible workers that are not leaving, by index.
    services: the nodes of each service.
    """

    names: tuple[NodeName, ...]
    places: dict[NodeName, int]
    nodes: tuple[Occupied | None, ...]
    masks: tuple[tuple[Group, tuple[int, ...]], ...]
    flexible: Flexible
    spots: dict[NodeName, Spot]
    lines: tuple[tuple[JobView, ...], ...]
    resizable: tuple[JobView, ...]
    growable: tuple[JobView, ...]
    preempted: tuple[JobView, ...]
    held: dict[JobId, tuple[WorkerView, ...]]
    services: dict[ServiceName, ServiceNodes]

    def place(self, name: NodeName) -> int | None:
        """Where a node stands; None when it takes no workers."""
        place = self.places.get(name)
        return place if place is not None and self.nodes[place] is not None else None


class TenantView(Struct, frozen=True, kw_only=True):
    """One tenant and its guarantee.

    parent: the tenant that contains it; empty: none.
    weight: its share of the capacity left over after guarantees, relative to siblings.
    guarantee_gpus: its quota, with that of its children.
    borrow_limit_gpus: what it may use beyond its guarantee; None: no limit but others' guarantees.
    lend_limit_gpus: what others may use of its idle guarantee; None: all of it.
    user_max_gpus: what jobs of one user may use at once; None: no limit.
    """

    name: str
    parent: str = ""
    weight: float = 1.0
    guarantee_gpus: int = 0
    borrow_limit_gpus: int | None = None
    lend_limit_gpus: int | None = None
    user_max_gpus: int | None = None


class ClusterSnapshot(Struct, frozen=True, kw_only=True):
    """All that a policy may know. Tuples are sorted by name or id.

    min_runtime_s: a preempted job runs for this long before it is preempted for another one's turn.
    start_s, restart_s, resize_s: maxima set by the operator: a start until the first step, the
        extra time of a restart, the pause of a gang when its worker count changes.
    unseen: live jobs that are not in `jobs`: they wait, and the policy is not to start them.
    tenants: none where the cell has no settings of any; then there are no guarantees.
    index: the same nodes and jobs, sorted for fast answers; None leaves it to the caller.
    """

    now_s: float
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]
    services: tuple[ServiceView, ...] = ()
    is_frozen: bool = False
    resize_cooldown_s: float = 0.0
    min_runtime_s: float = 0.0
    start_s: float = 0.0
    restart_s: float = 0.0
    resize_s: float = 0.0
    index: Index | None = None
    tenants: tuple[TenantView, ...] = ()
    unseen: frozenset[JobId] = frozenset()


def nodes_for(service: ServiceView, load: float, node_count: int) -> int:
    """Nodes that a load needs, headroom included, but no more than the service has."""
    headroom_nodes = ceil(service.headroom_ratio * node_count - 1e-9)
    needed = ceil(load / service.capacity_per_node - 1e-9) + headroom_nodes
    return min(node_count, max(service.min_serving, needed))
