"""What the history of a cell records beside the words of an event line: orders and accounting.

The engine attaches these records to its event lines; the history keeps them, and the API shows
them. Instants are engine time, in seconds since 1970. A reader passes over fields that it does not
know, and every new field has a default.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from common.apirows import StoryRow


class StoryKind(StrEnum):
    """The kind of a line of the history."""

    EVENT = "event"  # something that happened
    DECISION = "decision"  # the policy decided it: a start, resize, preemption, loan, reclaim, ...
    ORDER = "order"  # a person ordered it
    REFUSED = "refused"  # a person's order that was refused
    ATTEMPT = "attempt"  # the GPUs that an attempt of a job held
    JOB = "job"  # the account of a job that ended
    LOAN = "loan"  # the account of a loan that ended
    LENT = "lent"  # the time that the GPUs of a node were on loan
    LOSS = "loss"  # work that a preemption or a migration lost


TOLD = frozenset({StoryKind.EVENT, StoryKind.DECISION, StoryKind.ORDER})
"""The kinds that `aryl events` shows; the others are accounts."""
ORDERS = frozenset({StoryKind.ORDER, StoryKind.REFUSED})
"""The kinds that `aryl audit` shows."""


class Interval(Struct, frozen=True):
    """A span of time; engine time, the end excluded."""

    began_at_s: float
    ended_at_s: float


class Use(Struct, frozen=True, kw_only=True):
    """GPUs of one type that a job held on a node for a while.

    gpus: a GPU that n jobs share counts as 1/n of it.
    pool: `training`, or `loan` on a node that its service had lent.
    service: that service; empty in the training pool.
    """

    node: str
    gpu_type: str
    gpus: float
    pool: str
    began_at_s: float
    ended_at_s: float
    service: str = ""

    @property
    def gpu_s(self) -> float:
        """GPU-seconds."""
        return self.gpus * (self.ended_at_s - self.began_at_s)


class OrderRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="order"):
    """An order of a person.

    client: host and version of the caller, as the caller states them; empty: not stated.
    values: what the order sets, by name.
    refused: why it was refused; empty: it was accepted.
    unrecorded: refused orders of this tenant since the last record, beyond the rate of records.
    """

    tenant: str
    user: str
    verb: str
    target: str = ""
    values: dict[str, str] = {}
    reason: str = ""
    client: str = ""
    refused: str = ""
    unrecorded: int = 0


class AttemptRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="attempt"):
    """GPUs that an attempt of a job held; a long attempt has several of these records."""

    job_id: str
    tenant: str
    user: str
    attempt: int
    uses: tuple[Use, ...]


class LossRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="loss"):
    """Work of a job that was lost.

    cause: reclaim, policy, order, node, migration or resize.
    gpu_s: GPU-seconds; below 0 where a save became known late.
    service: whose reclaim it was; empty: none.
    """

    job_id: str
    tenant: str
    user: str
    cause: str
    gpu_s: float
    service: str = ""


class WaitRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="wait"):
    """The time that a job waited before an attempt or a hold. gpus: of its smallest gang."""

    job_id: str
    tenant: str
    user: str
    gpus: int
    began_at_s: float
    ended_at_s: float


class Requested(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a job that ended had asked for, as `RequestRow` has it."""

    priority: int = 0
    time_limit_s: float | None = None
    gpu_types: tuple[str, ...] = ()
    cpus_per_worker: int = 0
    memory_bytes_per_worker: int = 0
    workdir: str = ""
    title: str = ""
    comment: str = ""


class JobRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="job"):
    """The account of a job that ended, or of tasks of an array that were cancelled before their
    turn: these share one, whose `job_id` is such as `ARRAY_[4-9]`.

    state: succeeded, failed or cancelled.
    waited_s: in the queue, before all its attempts; `last_wait`: the part after its last attempt
        that ran, or all of it for a job that never ran.
    held_gpu_s: GPU-seconds by pool and GPU type, such as `loan/H100`.
    lost_gpu_s: GPU-seconds by cause, as in `LossRecord`.
    nodes, workers: of its latest attempt that ran; `attempt_started_at_s`: when that ran.
        The number of workers is the largest at one time.
    worker_s: worker-seconds of that attempt; 0: an earlier version wrote this, or it never ran.
    number: its number in the cell; 0: a version without numbers wrote this.
    array_number, array_indices: of a task, the number of its array and its index; of tasks that
        were cancelled before their turn, their indices, such as `4-9`.
    min_workers, gpus_per_worker: its smallest gang; 0: an earlier version wrote this.
    failure: the reason of its latest own fault (`common.failures`); empty: none is known.
    """

    job_id: str
    name: str
    tenant: str
    user: str
    submitted_at_s: float
    ended_at_s: float
    state: str
    started_at_s: float | None = None
    exit_code: int | None = None
    error: str = ""
    attempts: int = 0
    preemptions: int = 0
    waited_s: float = 0.0
    last_wait: Interval | None = None
    gpus: int = 0
    held_gpu_s: dict[str, float] = {}
    lost_gpu_s: dict[str, float] = {}
    nodes: tuple[str, ...] = ()
    workers: int = 0
    worker_s: float = 0.0
    attempt_started_at_s: float | None = None
    number: int = 0
    array_number: int = 0
    array_indices: str = ""
    min_workers: int = 0
    gpus_per_worker: int = 0
    failure: str = ""
    requested: Requested = Requested()


class LoanRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="loan"):
    """The account of a loan that ended.

    outcome: returned, lapsed, turned_back, cancelled before its node had left, or ended where its
        node did not come back by it.
    stage_durations_s: seconds of each stage of its return.
    """

    lease_id: str
    node: str
    service: str
    decided_at_s: float
    ended_at_s: float
    outcome: str
    begun_at_s: float | None = None
    reclaim_ordered_at_s: float | None = None
    is_late: bool = False
    preemptions: int = 0
    lost_gpu_s: float = 0.0
    stage_durations_s: dict[str, float] = {}


class LentRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="lent"):
    """The time that the GPUs of a node were on loan, held by a job or not."""

    uses: tuple[Use, ...]


Detail = OrderRecord | AttemptRecord | LossRecord | WaitRecord | JobRecord | LoanRecord | LentRecord


class HistoryLine(
    StoryRow, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False
):
    """A line of the history as the stream keeps it: an event line, its kind and its record.

    tenant, user: whose job or order it is; empty where it is the cell's.
    """

    kind: StoryKind = StoryKind.EVENT
    detail: Detail | None = None
    tenant: str = ""
    user: str = ""
