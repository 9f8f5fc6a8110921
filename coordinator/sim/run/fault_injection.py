"""Fault injection: jobs that fail while they compute, and the cost of that.

A failure is a point of the job's program. Its clock is the time, in seconds, that the base gang
would have computed up to there. So it stands still while the job waits, is suspended, warms up or
changes its size. It runs as fast as the gang does, and goes back with work that a preemption lost.
However a scheduler cuts a job into attempts, the same failures occur, equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from msgspec import Struct, field

from common.failures import Failure
from common.messages import WorkerOrder, WorkerPhase
from common.model import JobId, NodeName, WorkerKey
from coordinator.sim.inputs.failure_table import Trouble
from coordinator.sim.run.attempts import Truth
from coordinator.sim.run.cluster import PretendNode
from coordinator.sim.run.colocation import Colocation
from coordinator.sim.run.loop import Loop
from coordinator.sim.run.runtime import Runtime

EXIT_CODE = 1


class ReasonFigures(Struct, frozen=True, kw_only=True):
    """Figures of one reason; fields as in `FailureFigures`."""

    trials: int = 0
    gpu_s: float = 0.0


class FailureFigures(Struct, frozen=True, kw_only=True):
    """The cost of failures.

    trials: attempts that failed by themselves. jobs: that had one.
    gpu_s: GPU-seconds on the way to a failure, from the whole gang's first start, or the failure
        before. Each worker counts while it was there and not suspended, with its part of shared
        GPUs, in all attempts on that way, without the losses of their preemptions.
    """

    trials: int = 0
    jobs: int = 0
    gpu_s: float = 0.0
    by_reason: dict[str, ReasonFigures] = {}


class _Worker(Struct):
    node: NodeName
    gpus: int
    is_suspended: bool = False


class _Try(Struct):
    """A job's way to its next failure, or to its end, over as many attempts as that takes.

    attempt: the present one, and `workers` those of it that are there.
    fails_at_s: the work done when it fails, as in `Truth`; None: not known yet, or never.
    left_s: of a pre-run, until it fails, at `counted_at_s`; None: it does not.
    gpu_s: had of its GPUs until `counted_at_s`; gpus: the number that it has since then.
    lost_gpu_s: the loss by preemptions of the job; `lost_before_gpu_s` before this try.
    """

    attempt: int
    is_prerun: bool
    workers: dict[WorkerKey, _Worker] = field(default_factory=dict[WorkerKey, _Worker])
    is_whole: bool = False
    is_planned: bool = False
    fails_at_s: float | None = None
    left_s: float | None = None
    gpu_s: float = 0.0
    gpus: float = 0.0
    counted_at_s: float = 0.0
    lost_gpu_s: float = 0.0
    lost_before_gpu_s: float = 0.0
    version: int = 0

    def count(self, now_s: float) -> None:
        """Time has passed with these GPUs."""
        passed_s = now_s - self.counted_at_s
        self.gpu_s += self.gpus * passed_s
        if self.left_s is not None and self.gpus:
            self.left_s = max(0.0, self.left_s - passed_s)
        self.counted_at_s = now_s


class Failing:
    """Lets attempts end by their jobs' troubles.

    Args:
        troubles: how jobs fail; jobs that are not named do not.
        failure_of: the failure of a reason, as a node would read it in the log.
        runtime: the work of jobs, and their present pace.
        runs_s: how long the base gang of each of these jobs runs in all. A failure that would come
            later does not come; neither in its pre-run, as the gang would end before.
    """

    def __init__(
        self,
        troubles: Mapping[JobId, Trouble],
        failure_of: Callable[[str], Failure],
        loop: Loop,
        nodes: Mapping[NodeName, PretendNode],
        runtime: Runtime,
        runs_s: Mapping[JobId, float],
    ) -> None:
        self._troubles = troubles
        self._failure_of = failure_of
        self._loop = loop
        self._nodes = nodes
        self._runtime = runtime
        self._runs_s = runs_s
        self._tries: dict[JobId, _Try] = {}
        self._failed: dict[JobId, int] = {}
        """The last attempt of a job that failed: its remaining workers are being stopped."""
        self._colocation = Colocation()
        """All workers, of pre-runs too, until they have really ended."""
        self._trials: dict[JobId, int] = {}
        self._by_reason: dict[str, ReasonFigures] = {}
        for node in nodes.values():
            node.left = self._left
        runtime.paced = self._paced
        runtime.put_aside = self._put_aside
        runtime.taken_up = self._taken_up

    def figures(self) -> FailureFigures:
        """The failures up to now."""
        return FailureFigures(
            trials=sum(self._trials.values()),
            jobs=len(self._trials),
            gpu_s=sum(found.gpu_s for found in self._by_reason.values()),
            by_reason=dict(sorted(self._by_reason.items())),
        )

    # --- workers come and go ------------------------------------------------------------------

    def started(self, node: NodeName, order: WorkerOrder) -> None:
        """A worker begins; called before `Runtime.started`, which gives its pace from then on."""
        job_id, attempt = order.key.job_id, order.key.attempt
        met = self._colocation.enter(order)
        if job_id in self._troubles and self._failed.get(job_id) != attempt:
            is_prerun = order.spec.prerun.gang is not None
            found = self._try_of(job_id, attempt, is_prerun=is_prerun)
            found.workers[order.key] = _Worker(node, len(order.gpu_uuids))
            base = order.spec.workers_on(order.gpu_type).min
            found.is_whole = found.is_whole or len(found.workers) >= base
        self._recount(met | {job_id})

    def _try_of(self, job_id: JobId, attempt: int, *, is_prerun: bool) -> _Try:
        """The job's try, which goes on in another attempt; a pre-run makes no headway for it."""
        found = self._tries.get(job_id)
        if found is not None and found.attempt == attempt:
            return found
        if found is None or found.is_prerun or is_prerun:
            found = self._tries[job_id] = _Try(attempt, is_prerun, counted_at_s=self._loop.now_s)
            if is_prerun:
                after_s = self._troubles[job_id].after_s(self._trials.get(job_id, 0))
                is_early = after_s is not None and after_s < self._runs_s[job_id]
                found.left_s = after_s if is_early else None
            return found
        found.count(self._loop.now_s)
        found.attempt, found.is_whole, found.gpus = attempt, False, 0.0
        found.workers.clear()
        return found

    def _left(self, key: WorkerKey) -> None:
        """A worker is gone: the rest of its gang goes on, or is being stopped as well."""
        met = self._colocation.leave(key)
        found = self._tries.get(key.job_id)
        if found is not None:
            found.workers.pop(key, None)
        self._recount(met | {key.job_id})

    def _put_aside(self, key: WorkerKey) -> None:
        self._switch(key, self._colocation.leave(key), is_suspended=True)

    def _taken_up(self, order: WorkerOrder) -> None:
        self._switch(order.key, self._colocation.enter(order), is_suspended=False)

    def _switch(self, key: WorkerKey, met: set[JobId], *, is_suspended: bool) -> None:
        found = self._tries.get(key.job_id)
        if found is not None and key in found.workers:
            found.workers[key].is_suspended = is_suspended
        self._recount(met | {key.job_id})

    def _recount(self, job_ids: Iterable[JobId]) -> None:
        """The GPUs that these jobs have are others now."""
        for job_id in sorted(job_ids):
            found = self._tries.get(job_id)
            if found is None:
                continue
            found.count(self._loop.now_s)
            found.gpus = 0.0
            if found.is_whole:
                found.gpus = sum(
                    worker.gpus * self._colocation.share(key)
                    for key, worker in found.workers.items()
                    if not worker.is_suspended
                )
            if found.is_prerun:
                self._plan(job_id, found, found.left_s if found.gpus else None)

    # --- the clock ----------------------------------------------------------------------------

    def _paced(self, job_id: JobId, job: Truth) -> None:
        """Its gang goes on so from now on: when it comes to its failure, if it does."""
        found, attempt = self._tries.get(job_id), job.attempt
        if found is None or attempt is None or attempt.number != found.attempt:
            return
        found.lost_gpu_s = job.lost_gpu_s
        left_s = None
        if attempt.rate > 0 and not attempt.is_leaving:
            wait_s = max(0.0, attempt.paused_until_s - self._loop.now_s)
            if not found.is_planned:
                found.is_planned, found.lost_before_gpu_s = True, job.lost_gpu_s
                found.fails_at_s = self._fails_at_s(job_id, job, wait_s)
            if found.fails_at_s is not None:
                ahead_s = found.fails_at_s - job.done_s
                # Behind it stands only a try that is to fail within its warm-up.
                left_s = wait_s + ahead_s / (
                    attempt.rate if ahead_s > 0 else self._base(job_id, job)
                )
        self._plan(job_id, found, left_s)

    def _base(self, job_id: JobId, job: Truth) -> float:
        """Work that the base gang does in a second."""
        return job.work_s / self._runs_s[job_id]

    def _fails_at_s(self, job_id: JobId, job: Truth, warm_up_s: float) -> float | None:
        """The work done when a try fails that begins now; None: it does not fail.

        A job's fault is at one point of its program; other failures come at a time after the start.
        Their times are of attempts, and so include the warm-up of the one in which the try begins.
        It fails if that is before the end of a job that does all of its work then. Saved work thus
        spares it no failure: where less is left, the failure comes at the end.
        """
        trouble, failed_before = self._troubles[job_id], self._trials.get(job_id, 0)
        after_s = trouble.after_s(failed_before)
        if after_s is None:
            return None
        computed_s = after_s - warm_up_s
        # A first try's attempt warms up only where a pre-run was or the first gang never began.
        if (computed_s if failed_before else after_s) >= self._runs_s[job_id]:
            return None
        since = 0.0 if trouble.trials is None else job.done_s
        return min(since + computed_s * self._base(job_id, job), job.work_s)

    def _plan(self, job_id: JobId, found: _Try, left_s: float | None) -> None:
        found.version += 1
        if left_s is not None:
            self._loop.after(left_s, partial(self._fail, job_id, found, found.version))

    def _fail(self, job_id: JobId, found: _Try, version: int) -> None:
        if self._tries.get(job_id) is not found or found.version != version:
            return  # it goes another way since
        running = [
            key
            for key, worker in found.workers.items()
            if key in self._nodes[worker.node].keys(WorkerPhase.RUNNING)
        ]
        if not running:
            return  # it has ended, or is being stopped
        key = min(running)
        node = self._nodes[found.workers[key].node]
        found.count(self._loop.now_s)
        del self._tries[job_id]
        self._failed[job_id] = found.attempt
        reason = self._troubles[job_id].reason
        self._trials[job_id] = self._trials.get(job_id, 0) + 1
        known = self._by_reason.get(reason, ReasonFigures())
        lost_gpu_s = found.lost_gpu_s - found.lost_before_gpu_s
        self._by_reason[reason] = ReasonFigures(
            trials=known.trials + 1, gpu_s=known.gpu_s + max(0.0, found.gpu_s - lost_gpu_s)
        )
        self._runtime.given_up(job_id)
        node.exited(key, EXIT_CODE, self._failure_of(reason))
