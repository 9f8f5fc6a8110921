"""Queues of Tiresias: the queue of a job, its place there, and when time alone changes that.

Source: NSDI'19, section 3.2 (discretised priorities) and section 3.2.5 (starvation). A job is in
the queue in whose limits its attained service lies, so that service moves it down, never up; a long
wait takes it back to the first queue and counts its service from 0 there.

Where a queue is kept in the order of entry (`Line.ENTRY`), it is remembered, as the public
simulator has it; else everything but the returns to the first queue follows from the snapshot. A
job that waits unseen keeps its place and its last return: it is out of sight, not gone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import pairwise
from math import inf

from msgspec import Struct

from common.errors import ConfigError
from common.model import JobId, JobState, PositiveFloat
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.knobs import Idle, KnobSet

SLACK_S = 1e-3
"""Limits are compared to the millisecond: rounding must not put off a crossing for ever."""

STOPPED = frozenset({JobState.PENDING, JobState.PREEMPTING, JobState.SUSPENDED})


class Line(StrEnum):
    """The order in which the jobs of one queue stand."""

    FIRST_START = "first-start"
    """The job that started first; jobs without a start by submission (section 3.2.2)."""
    RUNNING = "running"
    """Running jobs before waiting ones, both by first start: no job stops one of its queue."""
    ENTRY = "entry"
    """Running jobs before waiting ones, both in order of entry into the queue (public simulator).
    """


class QueueKnobs(KnobSet, frozen=True, kw_only=True):
    """Knobs of the queues.

    limits: attained service in GPU-seconds at which a job moves to the next queue, ascending; one
        queue more than limits. The paper's traces: one limit of an hour of GPU time.
    promote: a job that waits this many times as long as it has run returns to the first queue;
        None: never (PROMOTEKNOB; the paper's default is infinity).
    line: order of the jobs within a queue.
    mixes_units: cross limits as the public simulator does: only at events, and at instants
        computed from GPU-seconds less seconds; with `line=entry` only.
    """

    limits: tuple[PositiveFloat, ...] = (3600.0,)
    promote: PositiveFloat | None = None
    line: Line = Line.RUNNING
    mixes_units: bool = False

    def __post_init__(self) -> None:
        """Refuse limits that do not ascend.

        Raises:
            ConfigError: states the error.
        """
        if not all(low < high for low, high in pairwise((0.0, *self.limits))):
            raise ConfigError(f"limits: {self.limits}, expected GPU-seconds above 0 that ascend")
        if self.mixes_units and self.line != Line.ENTRY:
            raise ConfigError("mixes_units: expected together with line=entry only")

    def idle(self) -> Idle:
        """Those of the queues, without limits: all jobs stand in one."""
        return {} if self.limits else dict.fromkeys(("promote", "mixes_units"), ("limits",))

    @property
    def promotes(self) -> bool:
        """True if a wait promotes any job: without limits all stand in one queue for good."""
        return self.promote is not None and bool(self.limits)


class QueueMemory(Struct, frozen=True):
    """The state that the snapshot lacks.

    promoted: GPU-seconds that jobs had attained when they last went back to the first queue.
    queues: in the order of entry; at_s: of the pass that put them so.
    """

    promoted: dict[JobId, float] = {}
    queues: tuple[tuple[JobId, ...], ...] = ()
    at_s: float = -inf


def submission(job: JobView) -> tuple[float, JobId]:
    """Key of the order of submission."""
    return job.submitted_at_s, job.job_id


class Queues:
    """The queues at one instant."""

    def __init__(self, knobs: QueueKnobs, snapshot: ClusterSnapshot, memory: QueueMemory) -> None:
        self._knobs = knobs
        self._now_s = snapshot.now_s
        self._jobs = {job.job_id: job for job in snapshot.jobs}
        self._live = snapshot.unseen | self._jobs.keys()
        self._promoted = {
            job_id: gpu_s for job_id, gpu_s in memory.promoted.items() if job_id in self._live
        }
        self._queue: dict[JobId, int] = {}
        self._place: dict[JobId, int] = {}
        self._kept: tuple[tuple[JobId, ...], ...] = ()
        if knobs.line == Line.ENTRY:
            self._follow(memory)
        else:
            for job in snapshot.jobs:
                self._queue[job.job_id] = self._by_service(job)
                if self._has_waited(job):
                    self._return(job)

    @property
    def memory(self) -> QueueMemory:
        """The memory for the next pass."""
        return QueueMemory(self._promoted, self._kept, self._now_s if self._kept else -inf)

    def service_gpu_s(self, job: JobView) -> float:
        """GPU-seconds since the job last came into the first queue."""
        attained_gpu_s = job.attained_service_gpu_s(self._now_s)
        return max(0.0, attained_gpu_s - self._promoted.get(job.job_id, 0.0))

    def number(self, job: JobView) -> int:
        """The queue of a job, from 0."""
        return self._queue[job.job_id]

    def is_last(self, job: JobView) -> bool:
        """Whether it is in the queue without a limit."""
        return self._queue[job.job_id] == len(self._knobs.limits)

    def rank(self, job: JobView) -> tuple[float, ...]:
        """Place in its queue; ties go by submission."""
        if self._knobs.line == Line.ENTRY:
            return (self._place[job.job_id],)
        first_s = inf if job.attempt.first_started_at_s is None else job.attempt.first_started_at_s
        if self._knobs.line == Line.RUNNING:
            return (job.state == JobState.PENDING, first_s)
        return (first_s,)

    # --- who is where -----------------------------------------------------------------------

    def _by_service(self, job: JobView) -> int:
        slack_gpu_s = SLACK_S * job.base_gpus
        return bisect_right(self._knobs.limits, self.service_gpu_s(job) + slack_gpu_s)

    def _has_waited(self, job: JobView) -> bool:
        at_s = self._promotion_at_s(job)
        return at_s is not None and at_s <= self._now_s + SLACK_S

    def _promotion_at_s(self, job: JobView) -> float | None:
        """When a long wait takes it back to the first queue; None: it is there or does not wait."""
        promote = self._knobs.promote
        if promote is None or job.state != JobState.PENDING:
            return None
        if self._queue[job.job_id] == 0 or job.waiting_since_s is None:
            return None
        ran_s = self.service_gpu_s(job) / job.base_gpus
        return job.waiting_since_s + promote * ran_s

    def _return(self, job: JobView) -> None:
        self._queue[job.job_id] = 0
        self._promoted[job.job_id] = job.attained_service_gpu_s(self._now_s)

    def _follow(self, memory: QueueMemory) -> None:
        """Put the queues as they are now: arrivals, demotions and returns go to their ends."""
        queues: list[list[JobId]] = [[] for _ in range(len(self._knobs.limits) + 1)]
        for number, names in enumerate(memory.queues):
            live = [name for name in names if name in self._live]
            runs = [name for name in live if self._runs(name)]
            waits = [name for name in live if not self._runs(name)]
            queues[min(number, len(self._knobs.limits))] += [*runs, *waits]
        for number, line in enumerate(queues):
            self._queue.update(dict.fromkeys(line, number))
        # Jobs that run as they arrive were another policy's.
        for job in sorted(self._arrived(), key=lambda job: (job.state in STOPPED, submission(job))):
            self._queue[job.job_id] = self._by_service(job)
            queues[self._queue[job.job_id]].append(job.job_id)
        if self._now_s > memory.at_s:
            for job in sorted(self._movers(), key=submission):
                self._move(job, queues)
        self._kept = tuple(tuple(names) for names in queues)
        for names in self._kept:
            self._place.update((name, place) for place, name in enumerate(names))

    def _runs(self, job_id: JobId) -> bool:
        """True if a live job runs; a hidden one waits."""
        job = self._jobs.get(job_id)
        return job is not None and job.state not in STOPPED

    def _arrived(self) -> Iterator[JobView]:
        return (job for job in self._jobs.values() if job.job_id not in self._queue)

    def _movers(self) -> Iterator[JobView]:
        """Jobs that leave their queues now."""
        last = len(self._knobs.limits)
        for job in self._jobs.values():
            before = self._queue[job.job_id]
            if (before < last and self._by_service(job) > before) or self._has_waited(job):
                yield job

    def _move(self, job: JobView, queues: list[list[JobId]]) -> None:
        """One queue down, or back to the first; of two crossings at once the next pass sees one."""
        before = self._queue[job.job_id]
        if self._has_waited(job):
            self._return(job)
        else:
            self._queue[job.job_id] = before + 1
        queues[before].remove(job.job_id)
        queues[self._queue[job.job_id]].append(job.job_id)

    # --- when that changes ------------------------------------------------------------------

    def wake_at_s(self, runs: Iterable[JobView], waits: Iterable[JobView]) -> float | None:
        """The first instant at which a job changes its queue by itself; None: none will.

        runs, waits: after the pass. While no job waits the queues do not matter, unless the order
            of entry is kept: a new job triggers a pass of its own.
        """
        waiting = list(waits)
        if not waiting and self._knobs.line != Line.ENTRY:
            return None
        return min((*self._crossings_s(runs), *self._promotions_s(waiting)), default=None)

    def _crossings_s(self, runs: Iterable[JobView]) -> Iterator[float]:
        for job in runs:
            number, service_gpu_s = self._queue[job.job_id], self.service_gpu_s(job)
            if number == len(self._knobs.limits):
                continue
            limit_gpu_s, gpus = self._knobs.limits[number], job.base_gpus
            if self._knobs.mixes_units:
                yield self._now_s + (limit_gpu_s - service_gpu_s / gpus) // gpus
            elif job.progress.computing_gpus:
                yield self._now_s + (limit_gpu_s - service_gpu_s) / job.progress.computing_gpus
            else:
                # It computes from now on at the earliest, and on more GPUs where a worker
                # counts more than once; the pass that comes too early asks again.
                gpus *= max(job.gpu.worker_multiplier.values(), default=1)
                yield self._now_s + (limit_gpu_s - service_gpu_s) / gpus

    def _promotions_s(self, waits: Iterable[JobView]) -> Iterator[float]:
        for job in waits:
            at_s = self._promotion_at_s(job)
            if at_s is not None:
                yield at_s
