"""Fields of a job that belong together, as `JobEntry` has them."""

from __future__ import annotations

from msgspec import Struct, field

from common.model import Checkpoint, Dependency, NodeName, WorkerKey


class AttemptEntry(Struct, kw_only=True):
    """The present attempt of a job; while it waits, the rest of its latest one.

    Its workers and its store stand beside it in `JobEntry`, as they may outlive it for a while.
    """

    number: int = 0
    """It grows at each start; 0: the job never started."""
    gpu_type: str | None = None
    """The GPU type of its gang; None while the job waits."""
    endpoint: str = ""
    next_worker_index: int = 0
    gang_deadline_s: float | None = None
    """Until when its gang, or the workers that it grows by, must be ready; None: they are."""
    ran_at_s: float | None = None
    """When its gang was ordered to run; None before, and once it is over."""
    start_step: int = 0
    """The step of the save that it began with."""
    succeeded_workers: list[int] = field(default_factory=list[int])
    is_packed: bool = False
    """It may compute on GPUs on which one other worker computes."""
    packed_speed_ratio: float = 1.0
    """The estimated fraction of its speed alone that it reaches next to the other jobs on its GPUs.
    """
    awaited_nodes: list[NodeName] = field(default_factory=list[NodeName])
    """Nodes of a rebuilt gang from which nothing was heard, while its base is not complete."""


class WorkClock(Struct, kw_only=True):
    """The work that a job has computed, counted up to an instant; see `jobs.estimates`."""

    at_s: float = 0.0
    """Up to when it is counted."""
    worker_s: float = 0.0
    """Worker-seconds of this attempt."""
    attained_gpu_s: float = 0.0
    """GPU-seconds of computing in all attempts."""
    progress_gpu_s: float = 0.0
    """GPU-seconds attained at its last progress report."""
    held_worker_s: float = 0.0
    """Seconds of this attempt's workers from their order to run to their end, at any speed."""
    most_workers: int = 0
    """The most workers of this attempt that were there at one time."""


class SaveEntry(Struct, frozen=True):
    """A checkpoint that a job reported."""

    at_s: float
    step: int
    is_verified: bool


class SaveState(Struct, kw_only=True):
    """The checkpoints of a job, of which the latest one counts."""

    checkpoint: Checkpoint | None = None
    at_s: float | None = None
    """When it was made."""
    attained_gpu_s: float = 0.0
    """GPU-seconds attained when the last verified one was made, or else when the attempt began;
    with the losses booked since.
    """
    kept: list[SaveEntry] = field(default_factory=list[SaveEntry])
    """The latest ones, oldest first; see `jobs.progress`."""

    @property
    def step(self) -> int:
        """The step that an attempt which starts now begins with: that of a verified checkpoint."""
        found = self.checkpoint
        return found.step if found is not None and found.is_verified else 0


class WorkEstimate(Struct, kw_only=True):
    """How much work a job is, in worker-seconds; see `jobs.estimates`."""

    expected_work_s: float = 0.0
    """The whole job, by its estimate at submission."""
    source: str = ""
    """Of that estimate."""
    measured_left_s: float | None = None
    """The work left by the last progress of this attempt, when `measured_worker_s` of the attempt's
    were spent; None without progress.
    """
    measured_worker_s: float = 0.0
    measured_work_s: float | None = None
    """The whole job, by the latest progress of any attempt; None without any."""
    longest_work_s: float = 0.0
    """The longest attempt that was over before the job."""
    first_step: int = 0
    """The first report since its gang changed: the step, the work spent, the work of the job."""
    first_worker_s: float = 0.0
    first_work_s: float | None = None


class Suspension(Struct, kw_only=True):
    """The time that a job was suspended."""

    since_s: float | None = None
    """Since when it is; None while it is not."""
    total_s: float = 0.0
    """In all, up to its last resumption."""
    before_attempt_s: float = 0.0
    """The part of it before its present or latest attempt ran."""


class JobCounts(Struct, kw_only=True):
    """How often each thing happened to a job."""

    preemptions: int = 0
    node_faults: int = 0
    own_faults: int = 0
    resizes: int = 0
    suspensions: int = 0
    migrations: int = 0


class EndedWorker(Struct, frozen=True):
    """A worker that is gone, and the node that keeps its log."""

    key: WorkerKey
    node: NodeName


class EndedWorkers(Struct, kw_only=True):
    """Workers of a job that are gone; see `jobs.ended_workers`."""

    workers: dict[int, EndedWorker] = field(default_factory=dict[int, EndedWorker])
    """Of the latest attempt that ran, and its store; the newest only."""
    earlier: list[EndedWorker] = field(default_factory=list[EndedWorker])
    """Of the attempts before it, oldest first."""
    at_s: float = 0.0
    """When the latest to end had ended."""


class WaitEntry(Struct, kw_only=True):
    """The waiting time of a job.

    pending_since_s: since when it waits to run: its submission, or the end of its latest attempt
        that ran.
    queueing_s: how long it waited before its attempts that ran, in all.
    kind: the pending reason that its policy reports now, counted from `since_s` on; empty while
        none is reported.
    spent_s: seconds by pending reason.
    """

    pending_since_s: float
    queueing_s: float = 0.0
    kind: str = ""
    since_s: float = 0.0
    spent_s: dict[str, float] = field(default_factory=dict[str, float])


class StartGate(Struct, kw_only=True, omit_defaults=True):
    """What keeps a job out of the queue while it waits; see `jobs.start_gate`.

    held_by: the person who ordered its hold, as TENANT/USER; empty: it is not held.
    depends_on: its dependencies that do not hold yet, and those that never can.
    never: why one of them never can, in words; empty: all of them may come to hold.
    """

    held_by: str = ""
    depends_on: list[Dependency] = field(default_factory=list[Dependency])
    never: str = ""

    @property
    def is_shut(self) -> bool:
        """True while the job may not start."""
        return bool(self.held_by or self.depends_on)
