"""Jobs that fail by themselves while they compute, and what that costs. Must not know policies, nor
where the failures come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct, field

from common.failures import Failure
from common.messages import WorkerOrder, WorkerPhase
from common.model import JobId, NodeName, WorkerKey
from coordinator.sim.cluster import PretendNode
from coordinator.sim.failure_table import Trouble
from coordinator.sim.loop import Loop

EXIT_CODE = 1
AGAIN_S = 10.0
"""A job that is suspended when it should fail is looked at again so much later."""


class ReasonFigures(Struct, frozen=True, kw_only=True):
    """Of one reason; fields as in `FailureFigures`."""

    trials: int = 0
    gpu_s: float = 0.0


class FailureFigures(Struct, frozen=True, kw_only=True):
    """What failures cost.

    trials: attempts that failed by themselves. jobs: that had one. gpu_s: GPU-seconds that failed
    attempts held their GPUs for, each worker while it was there, from the start of the gang on.
    """

    trials: int = 0
    jobs: int = 0
    gpu_s: float = 0.0
    by_reason: dict[str, ReasonFigures] = {}


class _Gang(Struct):
    """One attempt. workers: those there now, where, on how many GPUs each.

    gpu_s: held by the whole gang until `counted_at_s`.
    """

    attempt: int
    workers: dict[WorkerKey, tuple[NodeName, int]] = field(
        default_factory=dict[WorkerKey, tuple[NodeName, int]]
    )
    gpu_s: float = 0.0
    counted_at_s: float = 0.0
    is_whole: bool = False

    def count(self, now_s: float) -> None:
        """Time has passed with these workers."""
        if self.is_whole:
            gpus = sum(count for _, count in self.workers.values())
            self.gpu_s += gpus * (now_s - self.counted_at_s)
        self.counted_at_s = now_s


class Failing:
    """Lets attempts end as their jobs' troubles say.

    Args:
        troubles: how jobs fail; those that are not named do not.
        failure_of: the failure of a reason, as a node would read it in the log.
        runs_s: how long the base gang of each of these jobs runs in all. Its pre-run does not show
            a failure that comes later: the gang would end before.
    """

    def __init__(
        self,
        troubles: Mapping[JobId, Trouble],
        failure_of: Callable[[str], Failure],
        loop: Loop,
        nodes: Mapping[NodeName, PretendNode],
        runs_s: Mapping[JobId, float],
    ) -> None:
        self._troubles = troubles
        self._failure_of = failure_of
        self._loop = loop
        self._nodes = nodes
        self._runs_s = runs_s
        self._gangs: dict[JobId, _Gang] = {}
        self._trials: dict[JobId, int] = {}
        self._by_reason: dict[str, ReasonFigures] = {}
        for node in nodes.values():
            node.left = self._left

    def figures(self) -> FailureFigures:
        """What has failed up to now."""
        return FailureFigures(
            trials=sum(self._trials.values()),
            jobs=len(self._trials),
            gpu_s=sum(found.gpu_s for found in self._by_reason.values()),
            by_reason=dict(sorted(self._by_reason.items())),
        )

    def started(self, node: NodeName, order: WorkerOrder) -> None:
        """A worker begins; a gang whose base is there runs towards its failure."""
        job_id, attempt = order.key.job_id, order.key.attempt
        trouble = self._troubles.get(job_id)
        if trouble is None:
            return
        gang = self._gangs.get(job_id)
        if gang is None or gang.attempt != attempt:
            gang = self._gangs[job_id] = _Gang(attempt)
        gang.count(self._loop.now_s)
        gang.workers[order.key] = (node, len(order.gpu_uuids))
        base = order.spec.workers_on(order.gpu_type).min
        after_s = trouble.after_s(self._trials.get(job_id, 0))
        is_prerun = order.spec.prerun.gang is not None
        if is_prerun and after_s is not None and after_s >= self._runs_s[job_id]:
            return
        if after_s is not None and not gang.is_whole and len(gang.workers) >= base:
            gang.is_whole = True
            self._loop.after(after_s, partial(self._fail, job_id, gang))

    def _left(self, key: WorkerKey) -> None:
        """A worker is gone: the rest of its gang goes on, or is being stopped as well."""
        gang = self._gangs.get(key.job_id)
        if gang is not None and key in gang.workers:
            gang.count(self._loop.now_s)
            del gang.workers[key]

    def _fail(self, job_id: JobId, gang: _Gang) -> None:
        if self._gangs.get(job_id) is not gang:
            return  # another attempt runs
        phases = {key: self._phase(key, node) for key, (node, _) in gang.workers.items()}
        if WorkerPhase.SUSPENDED in phases.values():
            self._loop.after(AGAIN_S, partial(self._fail, job_id, gang))
            return
        running = [key for key, phase in phases.items() if phase == WorkerPhase.RUNNING]
        if not running:
            return  # it has ended, or is being stopped
        key = min(running)
        node = self._nodes[gang.workers[key][0]]
        gang.count(self._loop.now_s)
        del self._gangs[job_id]
        reason = self._troubles[job_id].reason
        self._trials[job_id] = self._trials.get(job_id, 0) + 1
        known = self._by_reason.get(reason, ReasonFigures())
        self._by_reason[reason] = ReasonFigures(
            trials=known.trials + 1, gpu_s=known.gpu_s + gang.gpu_s
        )
        node.exited(key, EXIT_CODE, self._failure_of(reason))

    def _phase(self, key: WorkerKey, name: NodeName) -> WorkerPhase | None:
        phases = (WorkerPhase.RUNNING, WorkerPhase.SUSPENDED)
        return next((each for each in phases if key in self._nodes[name].keys(each)), None)
