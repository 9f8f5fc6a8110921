"""The true work of jobs as it runs down: speed by workers, saving, the cost of a stop.

It holds the truth that a real training job would hold itself. Work is in worker-seconds of the
reference GPU type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import floor, fsum

from msgspec import Struct

from common.messages import WorkerOrder
from common.model import Checkpoint, JobId, NodeName, Progress, StopReason, WorkerKey
from coordinator.engine.state.events import ProgressReported
from coordinator.sim.run.attempts import Attempt, Saves, Truth
from coordinator.sim.run.colocation import Colocation
from coordinator.sim.run.loop import Loop
from coordinator.workloads.records import SpeedUp

__all__ = ["STEPS_PER_WORKER_S", "RunRules", "Runtime", "Saves"]  # with how a job saves

STEPS_PER_WORKER_S = 1000
"""Progress is reported in whole steps: this many in a worker-second."""
SAID_AFTER_S = 1e-3
"""A regular save is reported this long after it was made; by then it is made despite rounding."""


class RunRules(Struct, frozen=True, kw_only=True):
    """The costs of stops and changes, in seconds; the defaults cost nothing.

    saves: for every job; None: jobs that have a checkpoint path save on request, others never.
    save_period_s: of computing between two saves of `PERIODIC`.
    restart_s: an attempt after the first loads and warms up for this long before it computes (63 s
        with the save, section 7.5).
    resize_s: a gang that changes its worker count stands still for this long (its rendezvous).
    progress_after_s: a job reports progress this long after each start and resize; its pace is even
        until the next one. None: it never does.
    is_progress_repeated: it reports again each time that twice as long has passed, because its
        warm-up then distorts its pace less and less.
    """

    saves: Saves | None = None
    save_period_s: float = 1800.0
    restart_s: float = 0.0
    resize_s: float = 0.0
    progress_after_s: float | None = None
    is_progress_repeated: bool = False
    shared_progress_s: float = 30.0
    """A job also reports whenever it is suspended, resumed or packed, and at this interval while it
    computes beside others: the policy can then judge whether sharing pays.
    """


class Runtime:
    """All jobs of a run.

    Args:
        finished: called when a job's work is done, with its workers and their nodes.
        tell: receives the jobs' progress reports.
        type_of: GPU types of nodes; a worker on a node that it does not name has its attempt's.
        rack_of: racks of nodes; those that it does not name stand in one.
    """

    def __init__(
        self,
        loop: Loop,
        rules: RunRules,
        *,
        finished: Callable[[JobId, dict[WorkerKey, NodeName]], None],
        tell: Callable[[ProgressReported], None],
        type_of: Mapping[NodeName, str] | None = None,
        rack_of: Mapping[NodeName, str] | None = None,
    ) -> None:
        self._loop = loop
        self._rules = rules
        self._finished = finished
        self._tell = tell
        self._type_of = type_of or {}
        self._rack_of = rack_of or {}
        self._jobs: dict[JobId, Truth] = {}
        self._colocation = Colocation()
        self.lost_gpu_s = 0.0
        """GPU-seconds of computing that was thrown away."""
        self.paced: Callable[[JobId, Truth], None] = lambda job_id, job: None
        """Called when a job's gang goes on at a pace or after a pause that may be another, or
        ceases; before its end is planned.
        """
        self.put_aside: Callable[[WorkerKey], None] = lambda key: None
        self.taken_up: Callable[[WorkerOrder], None] = lambda order: None
        """Called for every worker that is suspended or resumed, also for unknown ones."""
        self.truth: Callable[[JobId], Truth] | None = None
        """The truth of a job that starts and was not added: a task that entered the line later.
        None: there is no such job."""

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
        self._jobs[job_id] = Truth(
            work_s=work_s,
            speedup=speedup,
            gpus_per_worker=gpus_per_worker,
            saves=saves,
            path=path or f"/checkpoints/{job_id}",
        )

    def go_on(
        self, job_id: JobId, truth: Truth, running: Iterable[tuple[NodeName, WorkerOrder]]
    ) -> None:
        """A job that is under way, with its workers that computed until now; it does not warm up
        again.
        """
        self._jobs[job_id] = truth
        orders = list(running)
        for node, order in orders:
            self.started(node, order)
        attempt = truth.attempt
        if attempt is None:
            return
        attempt.paused_until_s = self._loop.now_s
        for _, order in orders:
            if order.is_suspended:
                attempt.suspended.add(order.key)
                self._colocation.leave(order.key)
        self._set_pace(truth, attempt)
        self._run_on(job_id, truth, attempt)

    def done_s(self, job_ids: Iterable[JobId]) -> float:
        """Work that these jobs have done and not lost up to now, in worker-seconds in all."""
        return fsum(self._jobs[job_id].done_by_s(self._loop.now_s) for job_id in job_ids)

    # --- workers come and go ------------------------------------------------------------------

    def started(self, node: NodeName, order: WorkerOrder) -> None:
        """A worker computes from now on, with the others of its gang."""
        job_id = order.key.job_id
        if job_id not in self._jobs and self.truth is not None:
            self._jobs[job_id] = self.truth(job_id)
        job = self._jobs[job_id]
        attempt = job.attempt
        if attempt is None or not attempt.admits(order.key):
            self.given_up(order.key.job_id)  # it is on a node that does not report
            attempt = job.attempt = self._begin(job, order)
        self._advance(job, attempt)
        attempt.workers[order.key] = node
        if self._type_of.get(node, order.gpu_type) != order.gpu_type:
            job.heterogeneous_speed_ratio = order.spec.gpu.heterogeneous_speed_ratio
            attempt.elsewhere[order.key] = len(order.gpu_uuids)
        met = self._colocation.enter(order)
        self._changed(order.key.job_id, job, attempt)
        self._retune(met | {order.key.job_id} if met else met)

    def _begin(self, job: Truth, order: WorkerOrder) -> Attempt:
        now_s = self._loop.now_s
        is_again = order.key.attempt > 1
        return Attempt(
            number=order.key.attempt,
            multiplier=order.spec.gpu.worker_multiplier.get(order.gpu_type, 1),
            profile=order.spec.profile,
            at_s=now_s,
            paused_until_s=now_s + (self._rules.restart_s if is_again else 0.0),
        )

    def asked(self, key: WorkerKey, reason: StopReason) -> None:
        """A worker is asked to stop.

        One that saves on request ceases to compute then, as does one whose work is over or that its
        gang goes on without. A preempted job that cannot answer goes on as a whole until `stopped`:
        it makes no regular save meanwhile, and does not finish.
        """
        job = self._jobs[key.job_id]
        attempt = job.attempt
        if reason != StopReason.PREEMPT or job.saves == Saves.ON_REQUEST:
            self._leave(key, is_asked=True)
        elif attempt is not None and key in attempt.workers:
            self._advance(job, attempt)
            attempt.is_leaving = True
            self._run_on(key.job_id, job, attempt)

    def stopped(self, key: WorkerKey) -> None:
        """A worker that was asked to stop has ended."""
        self._leave(key, is_asked=True)

    def crashed(self, key: WorkerKey) -> None:
        """A worker's node is gone, and with it the unsaved work."""
        self._leave(key, is_asked=False)

    def given_up(self, job_id: JobId) -> None:
        """Its gang computes no more and saves nothing: one worker failed, or was lost without a
        stop.
        """
        attempt = self._jobs[job_id].attempt
        for key in () if attempt is None else tuple(attempt.workers):
            self._leave(key, is_asked=False)

    def _leave(self, key: WorkerKey, *, is_asked: bool) -> None:
        job = self._jobs[key.job_id]
        attempt = job.attempt
        if attempt is None or key not in attempt.workers:
            return
        self._advance(job, attempt)
        was_whole = attempt.is_whole
        del attempt.workers[key]
        attempt.elsewhere.pop(key, None)
        attempt.suspended.discard(key)
        met = self._colocation.leave(key)
        self._changed(key.job_id, job, attempt)
        if was_whole and not attempt.is_whole:
            self._break(key.job_id, job, attempt, is_asked=is_asked)
        self._retune(met)

    # --- workers are put aside and take up again ----------------------------------------------

    def suspended(self, key: WorkerKey) -> None:
        """A worker computes no more for now, so that its gang does not either."""
        self.put_aside(key)
        attempt = self._jobs[key.job_id].attempt
        if attempt is None or key not in attempt.workers:
            return
        met = self._colocation.leave(key)
        if attempt.suspended:
            attempt.suspended.add(key)  # the gang has ceased with the first of them
        else:
            attempt.pause_left_s = max(0.0, attempt.paused_until_s - self._loop.now_s)
            self._retune({key.job_id}, suspending=key)
        self._retune(met)

    def resumed(self, order: WorkerOrder) -> None:
        """A suspended worker computes again, if all of its gang do."""
        self.taken_up(order)
        attempt = self._jobs[order.key.job_id].attempt
        if attempt is None or order.key not in attempt.suspended:
            return
        attempt.suspended.discard(order.key)
        met = self._colocation.enter(order)
        if not attempt.suspended:
            resumes_s = self._loop.now_s + attempt.pause_left_s
            attempt.paused_until_s = max(attempt.paused_until_s, resumes_s)
            met.add(order.key.job_id)
        self._retune(met)

    def _retune(self, job_ids: set[JobId], *, suspending: WorkerKey | None = None) -> None:
        """The pace of gangs is another, though their workers are the same."""
        for job_id in sorted(job_ids):
            job = self._jobs[job_id]
            attempt = job.attempt
            if attempt is None:
                continue
            self._advance(job, attempt)
            if suspending is not None:
                attempt.suspended.add(suspending)
            self._set_pace(job, attempt)
            self._say_now(job_id, job, attempt)
            self._run_on(job_id, job, attempt)

    def _break(self, job_id: JobId, job: Truth, attempt: Attempt, *, is_asked: bool) -> None:
        """The gang is no longer whole: its attempt is over, saved work stays."""
        if job.saves == Saves.ON_REQUEST and is_asked:
            job.saved_s, job.unsaved_gpu_s = job.done_s, 0.0
            job.saved_at_s = self._loop.now_s
        self.lost_gpu_s += job.unsaved_gpu_s
        job.lost_gpu_s += job.unsaved_gpu_s
        if job.saved_s > 0:
            self._say_saved(job_id, job, attempt, self._progress(job))
        job.done_s, job.unsaved_gpu_s = job.saved_s, 0.0

    def _say_saved(
        self, job_id: JobId, job: Truth, attempt: Attempt, progress: Progress | None = None
    ) -> None:
        saved = Checkpoint(step=self._steps(job.saved_s), path=job.path, is_verified=True)
        self._tell(
            ProgressReported(
                job_id=job_id,
                attempt=attempt.number,
                checkpoint=saved,
                progress=progress,
                saved_ago_s=self._loop.now_s - job.saved_at_s,
            )
        )

    # --- time passes --------------------------------------------------------------------------

    def _advance(self, job: Truth, attempt: Attempt) -> None:
        """Count the work up to now; a gang that is not whole makes none."""
        now_s = self._loop.now_s
        computed_s = max(0.0, now_s - max(attempt.at_s, attempt.paused_until_s))
        attempt.at_s = now_s
        if attempt.rate == 0 or computed_s == 0:
            return
        own = len(attempt.workers) - len(attempt.elsewhere)
        gpus = attempt.share * (own * job.gpus_per_worker + sum(attempt.elsewhere.values()))
        until_s = attempt.computed_s + computed_s
        job.done_s += computed_s * attempt.rate
        job.unsaved_gpu_s += computed_s * gpus
        if job.saves == Saves.PERIODIC and not attempt.is_leaving:
            period_s = self._rules.save_period_s
            since_s = until_s - floor(until_s / period_s) * period_s
            if since_s < computed_s:
                job.saved_s = job.done_s - since_s * attempt.rate
                job.unsaved_gpu_s = since_s * gpus
                job.saved_at_s = now_s - since_s
        attempt.computed_s = until_s

    def _changed(self, job_id: JobId, job: Truth, attempt: Attempt) -> None:
        """Its worker count is another: pace, rendezvous, and when it will be done."""
        now_s = self._loop.now_s
        was_whole = attempt.is_whole
        self._set_pace(job, attempt)
        if attempt.is_whole and attempt.whole_at_s is None:
            attempt.whole_at_s = now_s
        elif attempt.is_whole and was_whole and now_s > (attempt.whole_at_s or 0.0):
            attempt.paused_until_s = max(attempt.paused_until_s, now_s + self._rules.resize_s)
        self._run_on(job_id, job, attempt)

    def _set_pace(self, job: Truth, attempt: Attempt) -> None:
        """By workers, their nodes, and the other jobs on their GPUs."""
        count, multiplier = len(attempt.workers), attempt.multiplier
        attempt.rate = job.speedup.rate(count, multiplier=multiplier) / multiplier
        if attempt.elsewhere:
            attempt.rate *= job.heterogeneous_speed_ratio
        if attempt.profile.rack_speed_ratio < 1.0 or attempt.profile.far_speed_ratio < 1.0:
            attempt.rate *= self._locality_ratio(attempt)
        attempt.is_whole = attempt.rate > 0
        attempt.share, attempt.is_packed = 1.0, False
        if self._colocation.is_shared and attempt.workers:
            shares = [self._colocation.share(key) for key in attempt.workers]
            attempt.share, attempt.is_packed = sum(shares) / len(shares), min(shares) < 1.0
        if attempt.is_packed:
            attempt.rate *= min(map(self._colocation.speed_ratio, attempt.workers))
        if attempt.suspended:
            attempt.rate = 0.0

    def _run_on(self, job_id: JobId, job: Truth, attempt: Attempt) -> None:
        """From here on at its present pace: when it will be done, speak and save."""
        attempt.version += 1
        self.paced(job_id, job)
        if attempt.rate == 0 or attempt.is_leaving:
            return
        wait_s = max(0.0, attempt.paused_until_s - self._loop.now_s)
        left_s = wait_s + max(0.0, job.work_s - job.done_s) / attempt.rate
        self._loop.after(left_s, partial(self._finish, job_id, attempt, attempt.version))
        after_s = self._rules.progress_after_s
        if after_s is not None and wait_s + after_s < left_s:
            say = partial(self._say, job_id, attempt, attempt.version, after_s)
            self._loop.after(wait_s + after_s, say)
        if job.saves == Saves.PERIODIC:
            self._save_later(job_id, attempt, attempt.version, wait_s)

    def _locality_ratio(self, attempt: Attempt) -> float:
        nodes = set(attempt.workers.values())
        racks = {self._rack_of.get(node, "") for node in nodes}
        return attempt.profile.locality_ratio(len(nodes), len(racks))

    def _save_later(self, job_id: JobId, attempt: Attempt, version: int, wait_s: float) -> None:
        """Say of the next regular save that it is there, a moment after it was made."""
        period_s = self._rules.save_period_s
        next_s = period_s - attempt.computed_s % period_s + SAID_AFTER_S
        self._loop.after(wait_s + next_s, partial(self._saved, job_id, attempt, version))

    def _saved(self, job_id: JobId, attempt: Attempt, version: int) -> None:
        """As a live job's shim would tell it; asked for or not, it says nothing of its progress."""
        if self._is_now(job_id, attempt, version):
            job = self._jobs[job_id]
            self._advance(job, attempt)
            self._say_saved(job_id, job, attempt)
            self._save_later(job_id, attempt, version, 0.0)

    def _is_now(self, job_id: JobId, attempt: Attempt, version: int) -> bool:
        return self._jobs[job_id].attempt is attempt and attempt.version == version

    def _finish(self, job_id: JobId, attempt: Attempt, version: int) -> None:
        if self._is_now(job_id, attempt, version):
            self._jobs[job_id].attempt = None
            met = {other for key in attempt.workers for other in self._colocation.leave(key)}
            self._finished(job_id, attempt.workers)
            self._retune(met)

    def _say(self, job_id: JobId, attempt: Attempt, version: int, after_s: float) -> None:
        if not self._is_now(job_id, attempt, version):
            return
        job = self._jobs[job_id]
        self._advance(job, attempt)
        if self._rules.is_progress_repeated:
            say = partial(self._say, job_id, attempt, version, 2.0 * after_s)
            self._loop.after(after_s, say)
        said = self._progress(job)
        self._tell(ProgressReported(job_id=job_id, attempt=attempt.number, progress=said))

    def _say_now(self, job_id: JobId, job: Truth, attempt: Attempt) -> None:
        """Report the work done before its pace changed, and again while GPUs are shared."""
        if not attempt.is_whole:
            return
        said = self._progress(job)
        self._tell(ProgressReported(job_id=job_id, attempt=attempt.number, progress=said))
        if attempt.is_packed and not attempt.suspended:
            again = partial(self._say_again, job_id, attempt)
            self._loop.after(self._rules.shared_progress_s, again)

    def _say_again(self, job_id: JobId, attempt: Attempt) -> None:
        job = self._jobs[job_id]
        if job.attempt is attempt and attempt.is_packed and not attempt.suspended:
            self._advance(job, attempt)
            self._say_now(job_id, job, attempt)

    def _progress(self, job: Truth) -> Progress:
        return Progress(step=self._steps(job.done_s), total_steps=self._steps(job.work_s))

    def _steps(self, work_s: float) -> int:
        return max(1, round(work_s * STEPS_PER_WORKER_S))
