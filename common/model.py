"""Frozen nouns of the cluster: jobs, nodes, services, leases."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NewType

from msgspec import UNSET, Meta, Struct, UnsetType, field

from common.profile import NO_PROFILE, JobProfile

NodeName = NewType("NodeName", str)
JobId = NewType("JobId", str)
ServiceName = NewType("ServiceName", str)
LeaseId = NewType("LeaseId", str)
GpuUuid = NewType("GpuUuid", str)

TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,64}\Z"
Token = Annotated[str, Meta(pattern=TOKEN_PATTERN)]
"""A name that is one NATS subject token: no dots, blanks or wildcards."""

MAX_INT = 2**53
"""Above it a float, and so a reader of JSON, cannot count exactly; nothing here comes near it."""
Ordinal = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""A number that only grows, and fences older ones: the largest value would fence for ever."""
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
"""A relative weight: within this range sums and quotients of thousands stay exact."""

MAX_JOB_S = 1e9
"""No job plans for longer, some thirty years; it also keeps out infinity."""
JobSeconds = Annotated[float, Meta(gt=0, le=MAX_JOB_S)]
JobPriority = Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
MAX_WORKERS = 100_000
"""Workers of one gang; above the GPUs of any fleet, and far below a number that a pass could not
count."""


class Pool(StrEnum):
    """Where a node belongs."""

    TRAINING = "training"
    INFERENCE = "inference"


class NodeRole(StrEnum):
    """The present role of a node; `common.node_role_table` has the legal changes."""

    TRAINING = "training"
    SERVING = "serving"
    DRAINING = "draining"
    ON_LOAN = "on_loan"
    VACATING = "vacating"
    WARMING = "warming"
    QUARANTINED = "quarantined"
    LOST = "lost"


class JobState(StrEnum):
    """The state of a job; `common.job_state_table` has the legal changes."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    PREEMPTING = "preempting"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class Mode(StrEnum):
    """How far a service trusts Aryl with its nodes."""

    OBSERVE = "observe"
    RECOMMEND = "recommend"
    ACT = "act"


class Launcher(StrEnum):
    """The program that starts the ranks of a worker."""

    NONE = "none"
    TORCHRUN = "torchrun"


class Preemptibility(StrEnum):
    """`non`: never placed on a lent node. `semi`: only flexible workers are. `full`: all are."""

    NON = "non"
    SEMI = "semi"
    FULL = "full"


class StopReason(StrEnum):
    """Why a worker is stopped; decides which budget pays and which reason the job gets."""

    RELEASE = "release"  # a flexible worker is given back; the job goes on
    PREEMPT = "preempt"  # the job is stopped against its will and queues again
    CANCEL = "cancel"  # its user asked
    GANG_TIMEOUT = "gang_timeout"  # the gang was not ready in time; free of charge
    FINISHED = "finished"  # the rest of its gang ended
    STALE = "stale"  # a newer attempt or no job: reconciliation
    TIME_LIMIT = "time_limit"  # it ran into its own time limit


class DependencyKind(StrEnum):
    """What must have become of a job before one that depends on it starts (Slurm's `after`,
    `afterok`, `afternotok` and `afterany`). A job that ended without a start counts as started."""

    STARTED = "started"
    OK = "ok"  # it succeeded
    NOT_OK = "not_ok"  # it failed, or was cancelled
    ENDED = "ended"


class Gate(StrEnum):
    """What keeps a waiting job out of the queue."""

    HELD = "held"
    DEPENDENCY = "dependency"  # another job has not come so far
    NEVER = "never"  # a dependency that can never hold


class WorkerRange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers a job can use; min == max makes it inelastic."""

    min: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    max: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


class Dependency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job, by its id or number, and what must have become of it before another job starts."""

    job: Token
    when: DependencyKind


WHOLE_GPU = "a whole GPU"
"""The type that stands for any whole GPU, where there are MIG instances alone."""


def is_mig(gpu_type: str) -> bool:
    """True if a GPU type is one of MIG instances, as NVML names them: `NVIDIA A100 MIG 1g.10gb`.

    Each MIG instance is a unit of its own, and only a job that names its type gets one.
    """
    return " MIG " in gpu_type


class GpuRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which GPUs a job can use.

    types: accepted GPU types in order of preference; empty accepts any whole GPU (a fungible job).
    worker_multiplier: per type, how many workers stand for one (16 GB cards for 32 GB ones: 2), so
        that the global batch stays the same.
    heterogeneous_speed_ratio: part of its full speed that the job reaches on several of its types
        at once; 0: it runs on one type at a time. A worker on another type than the attempt's has
        more GPUs by the ratio of the multipliers, and stands for one worker.
    """

    types: tuple[str, ...] = ()
    worker_multiplier: dict[str, Annotated[int, Meta(ge=1, le=64)]] = field(
        default_factory=dict[str, int]
    )
    heterogeneous_speed_ratio: Ratio = 0.0

    def accepts(self, gpu_type: str) -> bool:
        """True if an attempt may run on this GPU type."""
        return gpu_type in self.types if self.types else not is_mig(gpu_type)

    def gpus_for_one(self, node_type: str, gpu_type: str) -> int | None:
        """GPUs of a node's type that stand for one of the attempt's type.

        None where the attempt cannot use the node: it does not span these types, or the one type
        does not stand for a whole number of the other.
        """
        if node_type == gpu_type:
            return 1
        if not self.heterogeneous_speed_ratio or node_type not in self.types:
            return None
        factor, rest = divmod(
            self.worker_multiplier.get(node_type, 1), self.worker_multiplier.get(gpu_type, 1)
        )
        return None if rest else factor


class CheckpointSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to ask a job to save, and where it saves.

    path: file or directory on storage that every node sees; None means the job never saves.
    grace_s: time between the request and SIGKILL.
    signal: signal for the worker's main process when it does not answer on the socket.
    """

    path: str | None = None
    grace_s: Annotated[float, Meta(ge=0, le=MAX_JOB_S)] = 30.0
    signal: str = "SIGTERM"


class RetrySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job's own budget for its own faults; preemptions and node faults are free of it."""

    max_restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    on_exit_codes: tuple[Annotated[int, Meta(ge=-64, le=255)], ...] = ()
    reset_after_s: JobSeconds | UnsetType = UNSET
    """An agent of an older version refuses an order that has it."""


class PrerunGang(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of a job after its pre-run."""

    workers: WorkerRange
    gpus_per_worker: Annotated[int, Meta(ge=1, le=1024)]


class PrerunSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A try on a few GPUs before the gang starts, which shows most failures as well.

    time_s: over when its one worker has computed for this long, or has saved a verified checkpoint;
        None: no pre-run.
    gpus: of its one worker.
    gang: the job's shape afterwards; set by the coordinator while the pre-run is on or waits.
    """

    time_s: JobSeconds | None = None
    gpus: Annotated[int, Meta(ge=1, le=1024)] = 1
    gang: PrerunGang | None = None


class RendezvousSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gang meets, when that is a program of its own: the rendezvous store.

    command: program and arguments, run without a shell on the node of worker 0; it listens at
        `ARYL_RENDEZVOUS_ENDPOINT`. Without it an elastic job under torchrun gets a PyTorch
        `TCPStore`, and any other job none.
    """

    command: tuple[str, ...] = ()


class ArraySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Many tasks of one job, each with an index of its own; `common.arrays` reads the indices.

    indices: in Slurm's manner: `0-99`, `1,3,7` or `0-100:4`; up to 10,000 tasks. It makes the job
        an array: each index is a task with these workers of its own.
    throttle: the most tasks at once, those in the line included; None: no bound.
    """

    indices: str
    throttle: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's request for a job; docs/job-contract.md describes each field.

    `common.jobspec.misfit` checks the rules that types cannot express.
    """

    name: Token
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    workers: WorkerRange
    gpus_per_worker: Annotated[int, Meta(ge=1, le=1024)] = 1
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict[str, str])
    cpus_per_worker: Annotated[int, Meta(ge=0, le=100_000)] = 0
    memory_bytes_per_worker: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    gpu: GpuRequest = GpuRequest()
    priority: JobPriority = 0
    preemptibility: Preemptibility = Preemptibility.FULL
    expected_runtime_s: JobSeconds | None = None
    """Declared running time with `workers.min` workers; None leaves it to history."""
    deadline_s: JobSeconds | None = None
    time_limit_s: JobSeconds | None = None
    stop_after_s: JobSeconds | None = None
    """A worker without contact to the coordinator for this long is stopped; None: never."""
    stall_timeout_s: JobSeconds | UnsetType = UNSET
    """A job that reported progress and reports none for this long is restarted. An agent of an
    older version refuses an order that has it."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    retry: RetrySpec = RetrySpec()
    launcher: Launcher = Launcher.NONE
    rendezvous: RendezvousSpec = RendezvousSpec()
    app: Token | None = None
    """The group of trials that it belongs to, such as one hyper-parameter search."""
    profile: JobProfile = NO_PROFILE
    prerun: PrerunSpec = PrerunSpec()
    depends_on: tuple[Dependency, ...] | UnsetType = UNSET
    """All of them must hold before it starts for the first time. No order has them, and none of
    `is_held`: an agent of an older version refuses both."""
    is_held: bool | UnsetType = UNSET
    """It waits outside the queue until a person releases it."""
    array: ArraySpec | UnsetType = UNSET
    """Many tasks of this job. No order to a node has it: a task is a job of its own."""
    require: tuple[str, ...] | UnsetType = UNSET
    """Terms of labels (`common.node_labels`): a node fits all of them. An agent of an older version
    refuses an order that has it, or one of the three below."""
    exclude: tuple[str, ...] | UnsetType = UNSET
    """Terms of labels: a node fits none of them."""
    require_nodes: tuple[Token, ...] | UnsetType = UNSET
    """It runs on no other nodes."""
    exclude_nodes: tuple[Token, ...] | UnsetType = UNSET

    @property
    def is_elastic(self) -> bool:
        """True if the job may run with more workers than its base demand."""
        return self.workers.max > self.workers.min

    @property
    def has_store(self) -> bool:
        """True if each attempt runs a rendezvous store of its own beside its workers."""
        is_default = self.launcher == Launcher.TORCHRUN and self.is_elastic
        return is_default or bool(self.rendezvous.command)

    @property
    def base_demand_gpus(self) -> int:
        """GPUs of the minimum gang, before any worker multiplier."""
        return self.workers.min * self.gpus_per_worker

    def workers_on(self, gpu_type: str) -> WorkerRange:
        """The worker range on a GPU type, its multiplier applied."""
        factor = self.gpu.worker_multiplier.get(gpu_type, 1)
        return WorkerRange(min=self.workers.min * factor, max=self.workers.max * factor)

    def accepts(self, gpu_type: str) -> bool:
        """True if an attempt may run on this GPU type."""
        return self.gpu.accepts(gpu_type)


class JobChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New values for fields of a job that has not ended; UNSET leaves a field as it is.

    None, and an empty list, take the old value away.
    """

    priority: JobPriority | UnsetType = UNSET
    time_limit_s: JobSeconds | UnsetType | None = UNSET
    deadline_s: JobSeconds | UnsetType | None = UNSET
    workers: WorkerRange | UnsetType = UNSET
    depends_on: tuple[Dependency, ...] | UnsetType = UNSET
    require: tuple[str, ...] | UnsetType = UNSET
    exclude: tuple[str, ...] | UnsetType = UNSET
    require_nodes: tuple[Token, ...] | UnsetType = UNSET
    exclude_nodes: tuple[Token, ...] | UnsetType = UNSET


NODE_FIELDS = ("require", "exclude", "require_nodes", "exclude_nodes")
"""The fields of a job, and of its change, that select nodes."""

STORE_INDEX = -1
"""Worker index of an attempt's rendezvous store: it is held, stopped and reported like a worker,
and does not count as one."""


class WorkerKey(Struct, frozen=True, order=True, cache_hash=True):
    """One worker of one attempt of one job, or its rendezvous store; unique for ever."""

    job_id: JobId
    attempt: int
    worker_index: int

    def __str__(self) -> str:
        return f"{self.job_id}.{self.attempt}.{'store' if self.is_store else self.worker_index}"

    @property
    def is_store(self) -> bool:
        """True if this is the attempt's rendezvous store."""
        return self.worker_index == STORE_INDEX


class Lease(Struct, frozen=True, kw_only=True):
    """The contract of a loan, as the agent holds it: fenced by lease_id, ended by its own clock."""

    lease_id: LeaseId
    service: ServiceName
    ttl_s: float


class TurnBack(Struct, frozen=True, kw_only=True):
    """A loan that its node gave up before it began, without an order and before its TTL ended."""

    lease_id: LeaseId
    reason: str


class Progress(Struct, frozen=True, kw_only=True):
    """A job's own report: steps done, total steps where known, loss where known."""

    step: int
    total_steps: int | None = None
    loss: float | None = None


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A save that the job reports; verified when the shim saw the path newer than the request."""

    step: int
    path: str
    is_verified: bool = False


class NatsAccess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a client of NATS authenticates, and which servers it trusts.

    The URL can hold a password.
    """

    nkey_seed_path: Annotated[
        str | None, Meta(description="file with the nkey seed of this identity")
    ] = None
    credentials_path: Annotated[
        str | None, Meta(description="file with a user JWT and its seed")
    ] = None
    tls_ca_path: Annotated[
        str | None, Meta(description="CA certificates to trust instead of the system's")
    ] = None
