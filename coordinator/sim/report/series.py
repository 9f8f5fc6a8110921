"""Time series of a run: GPUs held, nodes lent, jobs waiting, on an even grid.

GPU-seconds are those of `engine.state.accounting`, extended from the last event to the requested
instant. Between events nothing changes, so the integrals are exact.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from common.model import JobState, NodeRole
from coordinator.engine.engine import Engine

POINTS_WANTED = 400
"""Points over the span of submissions; a run that lasts longer is thinned at twice that."""

EVENTS_PER_LOOK = 500
"""Events between two words about progress."""


class Usage(Struct, frozen=True, kw_only=True):
    """GPU-seconds since the run began, as `engine.accounting` defines them."""

    training_held_gpu_s: float = 0.0
    training_gpu_s: float = 0.0
    on_loan_held_gpu_s: float = 0.0
    on_loan_gpu_s: float = 0.0


class Point(Struct, frozen=True, kw_only=True):
    """The cluster at one instant.

    usage: until then. lent_nodes, queue_jobs, queue_gpus: at that instant; the queue's GPUs are
        its base demand.
    """

    at_s: float
    usage: Usage
    lent_nodes: int
    queue_jobs: int
    queue_gpus: int


class _Seen(Struct, frozen=True):
    """What a point shows of the cluster apart from its usage; events alone change it."""

    lent_nodes: int
    queue_jobs: int
    queue_gpus: int


class Recorder:
    """Samples an engine on a grid of instants while a simulation runs.

    Args:
        length_s: the span of submissions; its end is sampled exactly. If all jobs arrive at one
            instant, the span is the whole run.
        progress: called with (jobs that ended, events) now and then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        length_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._length_s = length_s
        self._progress = progress
        self._step_s = max(length_s / POINTS_WANTED, 1.0)
        self._next_s = 0.0
        self._events = 0
        self.points: list[Point] = []
        self.at_length: Point | None = None

    def watch(self, now_s: float) -> None:
        """An event is about to happen: look at every instant of the grid up to it."""
        self._events += 1
        if self._progress is not None and self._events % EVENTS_PER_LOOK == 0:
            self._progress(self._ended(), self._events)
        is_length_over = now_s >= self._length_s > 0 and self.at_length is None
        if not is_length_over and now_s < self._next_s:
            return
        seen = self._seen()  # of many instants the same, where events are far apart
        if is_length_over:
            self.at_length = self._point(self._length_s, seen)
        while self._next_s <= now_s:
            self.points.append(self._point(self._next_s, seen))
            if len(self.points) > 2 * POINTS_WANTED:
                self.points = self.points[::2]
                self._step_s *= 2
            self._next_s = self.points[-1].at_s + self._step_s

    def finish(self, now_s: float) -> None:
        """The run is over."""
        seen = self._seen()
        if self.at_length is None:
            self.at_length = self._point(max(self._length_s, now_s), seen)
        self.points.append(self._point(now_s, seen))
        if self._progress is not None:
            self._progress(self._ended(), self._events)

    def _ended(self) -> int:
        counters = self._engine.state.counters
        return counters.jobs_finished + counters.jobs_failed + counters.jobs_rejected

    def _seen(self) -> _Seen:
        state = self._engine.state
        pending, on_loan = JobState.PENDING, NodeRole.ON_LOAN
        waiting = [job for job in state.live() if job.state == pending]
        lent = sum([node.role == on_loan for node in state.nodes.values()])
        return _Seen(lent, len(waiting), sum([job.spec.base_demand_gpus for job in waiting]))

    def _point(self, at_s: float, seen: _Seen) -> Point:
        return Point(
            at_s=at_s,
            usage=self._usage(at_s),
            lent_nodes=seen.lent_nodes,
            queue_jobs=seen.queue_jobs,
            queue_gpus=seen.queue_gpus,
        )

    def _usage(self, at_s: float) -> Usage:
        counters = self._engine.state.counters
        since_s = at_s - (counters.integrated_at_s or 0.0)
        rates = self._engine.gpu_counts
        return Usage(
            training_held_gpu_s=counters.training_held_gpu_s + rates[0] * since_s,
            training_gpu_s=counters.training_gpu_s + rates[1] * since_s,
            on_loan_held_gpu_s=counters.on_loan_held_gpu_s + rates[2] * since_s,
            on_loan_gpu_s=counters.on_loan_gpu_s + rates[3] * since_s,
        )
