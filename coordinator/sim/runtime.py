"""How the true work of jobs runs down: speed by workers, saving, what a stop costs.

Must not know why workers start or stop, nor what a scheduler believes: it holds the truth that a
real training job would hold itself. Work is in worker-seconds of the reference GPU type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from math import floor

from msgspec import Struct, field

from common.messages import WorkerOrder
from common.model import Checkpoint, JobId, NodeName, Progress, WorkerKey
from coordinator.engine.events import ProgressReported
from coordinator.sim.loop import Loop
from coordinator.workloads.records import SpeedUp

STEPS_PER_WORKER_S = 1000
"""Progress is told in whole steps: this many in a worker-second."""


class Saves(StrEnum):
    """What of a job's work outlives its gang."""

    NEVER = "never"
    """Nothing: it starts over (Lyra, EuroSys'23, section 4)."""
    ON_REQUEST = "on_request"
    """All, when it is asked to stop; nothing when its node dies."""
    PERIODIC = "periodic"
    """What was done at its last regular save."""


class RunRules(Struct, frozen=True, kw_only=True):
    """What stopping and changing costs, in seconds; the defaults cost nothing.

    saves: for every job; None: jobs that have a checkpoint path save on request, others never.
    save_period_s: of computing between two saves of `PERIODIC`.
    restart_s: an attempt after the first loads and warms up for so long before it computes
        (63 s with the save, section 7.5).
    resize_s: a gang that changes its worker count stands still for so long (its rendezvous).
    progress_after_s: a job says how far it is so long after each start and resize; its pace is
        even until the next one. None: it never does.
    is_progress_repeated: it says so again each time that twice as long has passed, since what it
        took to warm up then distorts its pace less and less.
    """

    saves: Saves | None = None
    save_period_s: float = 1800.0
    restart_s: float = 0.0
    resize_s: float = 0.0
    progress_after_s: float | None = None
    is_progress_repeated: bool = False


class _Attempt(Struct):
    """A gang that computes, or waits for its missing workers."""

    number: int
    multiplier: int
    at_s: float
    """Until when its work is counted."""
    paused_until_s: float = 0.0
    whole_at_s: float | None = None
    workers: dict[WorkerKey, NodeName] = field(default_factory=dict[WorkerKey, NodeName])
    elsewhere: dict[WorkerKey, int] = field(default_factory=dict[WorkerKey, int])
    """GPUs of workers on another GPU type than the attempt's: one slows the whole gang down."""
    rate: float = 0.0
    """Reference work per second now."""
    computed_s: float = 0.0
    version: int = 0


class _Job(Struct):
    """The truth about one job."""

    work_s: float
    speedup: SpeedUp
    gpus_per_worker: int
    saves: Saves
    path: str
    heterogeneous_speed_ratio: float = 0.0
    done_s: float = 0.0
    saved_s: float = 0.0
    unsaved_gpu_s: float = 0.0
    attempt: _Attempt | None = None


class Runtime:
    """All jobs of a run.

    Args:
        finished: told when a job's work is done, with its workers and their nodes.
        tell: where the jobs' words about their progress go.
        type_of: GPU types of nodes; a worker on a node that it does not name has its attempt's.
    """

    def __init__(
        self,
        loop: Loop,
        rules: RunRules,
        *,
        finished: Callable[[JobId, dict[WorkerKey, NodeName]], None],
        tell: Callable[[ProgressReported], None],
        type_of: Mapping[NodeName, str] | None = None,
    ) -> None:
        self._loop = loop
        self._rules = rules
        self._finished = finished
        self._tell = tell
        self._type_of = type_of or {}
        self._jobs: dict[JobId, _Job] = {}
        self.lost_gpu_s = 0.0
        """GPU-seconds of computing that was thrown away."""

    def add(
        self,
        job_id: JobId,
        *,
        work_s: float,
        speedup: SpeedUp,
        gpus_per_worker: int,
        path: str | None = None,
    ) -> None:
        """A job, before it starts; `path` is where it saves, None where it never does."""
        saves = self._rules.saves
        if saves is None:
            saves = Saves.NEVER if path is None else Saves.ON_REQUEST
        self._jobs[job_id] = _Job(
            work_s=work_s,
            speedup=speedup,
            gpus_per_worker=gpus_per_worker,
            saves=saves,
            path=path or f"/checkpoints/{job_id}",
        )

    # --- workers come and go ------------------------------------------------------------------

    def started(self, node: NodeName, order: WorkerOrder) -> None:
        """A worker computes from now on, with the others of its gang."""
        job = self._jobs[order.key.job_id]
        attempt = job.attempt
        if attempt is None or attempt.number != order.key.attempt:
            attempt = job.attempt = self._begin(job, order)
        self._advance(job, attempt)
        attempt.workers[order.key] = node
        if self._type_of.get(node, order.gpu_type) != order.gpu_type:
            job.heterogeneous_speed_ratio = order.spec.gpu.heterogeneous_speed_ratio
            attempt.elsewhere[order.key] = len(order.gpu_uuids)
        self._changed(order.key.job_id, job, attempt)

    def _begin(self, job: _Job, order: WorkerOrder) -> _Attempt:
        now_s = self._loop.now_s
        is_again = order.key.attempt > 1
        return _Attempt(
            number=order.key.attempt,
            multiplier=order.spec.gpu.worker_multiplier.get(order.gpu_type, 1),
            at_s=now_s,
            paused_until_s=now_s + (self._rules.restart_s if is_again else 0.0),
        )

    def stopped(self, key: WorkerKey) -> None:
        """A worker was asked to stop and computes no more."""
        self._leave(key, is_asked=True)

    def crashed(self, key: WorkerKey) -> None:
        """A worker's node is gone, and with it what was not saved."""
        self._leave(key, is_asked=False)

    def _leave(self, key: WorkerKey, *, is_asked: bool) -> None:
        job = self._jobs[key.job_id]
        attempt = job.attempt
        if attempt is None or key not in attempt.workers:
            return
        self._advance(job, attempt)
        was_whole = attempt.rate > 0
        del attempt.workers[key]
        attempt.elsewhere.pop(key, None)
        self._changed(key.job_id, job, attempt)
        if was_whole and attempt.rate == 0:
            self._break(key.job_id, job, attempt, is_asked=is_asked)

    def _break(self, job_id: JobId, job: _Job, attempt: _Attempt, *, is_asked: bool) -> None:
        """The gang is whole no more: its attempt is over, what was saved stays."""
        if job.saves == Saves.ON_REQUEST and is_asked:
            job.saved_s, job.unsaved_gpu_s = job.done_s, 0.0
        self.lost_gpu_s += job.unsaved_gpu_s
        job.done_s, job.unsaved_gpu_s = job.saved_s, 0.0
        if job.saved_s > 0:
            saved = self._steps(job.saved_s)
            self._tell(
                ProgressReported(
                    job_id=job_id,
                    attempt=attempt.number,
                    checkpoint=Checkpoint(step=saved, path=job.path, is_verified=True),
                    progress=Progress(step=saved, total_steps=self._steps(job.work_s)),
                )
            )

    # --- time passes --------------------------------------------------------------------------

    def _advance(self, job: _Job, attempt: _Attempt) -> None:
        """Count the work up to now; a gang that is not whole makes none."""
        now_s = self._loop.now_s
        computed_s = max(0.0, now_s - max(attempt.at_s, attempt.paused_until_s))
        attempt.at_s = now_s
        if attempt.rate == 0 or computed_s == 0:
            return
        own = len(attempt.workers) - len(attempt.elsewhere)
        gpus = own * job.gpus_per_worker + sum(attempt.elsewhere.values())
        until_s = attempt.computed_s + computed_s
        job.done_s += computed_s * attempt.rate
        job.unsaved_gpu_s += computed_s * gpus
        if job.saves == Saves.PERIODIC:
            period_s = self._rules.save_period_s
            since_s = until_s - floor(until_s / period_s) * period_s
            if since_s < computed_s:
                job.saved_s = job.done_s - since_s * attempt.rate
                job.unsaved_gpu_s = since_s * gpus
        attempt.computed_s = until_s

    def _changed(self, job_id: JobId, job: _Job, attempt: _Attempt) -> None:
        """Its worker count is another: pace, rendezvous, and when it will be done."""
        now_s = self._loop.now_s
        count = len(attempt.workers)
        was_whole = attempt.rate > 0
        multiplier = attempt.multiplier
        attempt.rate = job.speedup.rate(count, multiplier=multiplier) / multiplier
        if attempt.elsewhere:
            attempt.rate *= job.heterogeneous_speed_ratio
        attempt.version += 1
        if attempt.rate == 0:
            return
        if attempt.whole_at_s is None:
            attempt.whole_at_s = now_s
        elif was_whole and now_s > attempt.whole_at_s:
            paused_until_s = now_s + self._rules.resize_s
            attempt.paused_until_s = max(attempt.paused_until_s, paused_until_s)
        wait_s = max(0.0, attempt.paused_until_s - now_s)
        left_s = wait_s + max(0.0, job.work_s - job.done_s) / attempt.rate
        self._loop.after(left_s, partial(self._finish, job_id, attempt, attempt.version))
        after_s = self._rules.progress_after_s
        if after_s is not None and wait_s + after_s < left_s:
            say = partial(self._say, job_id, attempt, attempt.version, after_s)
            self._loop.after(wait_s + after_s, say)

    def _is_now(self, job_id: JobId, attempt: _Attempt, version: int) -> bool:
        return self._jobs[job_id].attempt is attempt and attempt.version == version

    def _finish(self, job_id: JobId, attempt: _Attempt, version: int) -> None:
        if self._is_now(job_id, attempt, version):
            self._jobs[job_id].attempt = None
            self._finished(job_id, attempt.workers)

    def _say(self, job_id: JobId, attempt: _Attempt, version: int, after_s: float) -> None:
        if not self._is_now(job_id, attempt, version):
            return
        job = self._jobs[job_id]
        self._advance(job, attempt)
        done, total = self._steps(job.done_s), self._steps(job.work_s)
        progress = Progress(step=done, total_steps=total)
        if self._rules.is_progress_repeated:
            say = partial(self._say, job_id, attempt, version, 2.0 * after_s)
            self._loop.after(after_s, say)
        self._tell(ProgressReported(job_id=job_id, attempt=attempt.number, progress=progress))

    def _steps(self, work_s: float) -> int:
        return max(1, round(work_s * STEPS_PER_WORKER_S))
