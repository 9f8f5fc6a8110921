"""The lowest probability that a loan outlives a job at which the loan pays for the job.

A job that waits for training nodes can take a lent one instead. If it ends before the load comes
back, it has saved its wait at home, W. It has also saved the queue there the GPU-seconds that it
would have held: with n other jobs in the queue for the G GPUs of a type, each moves up by g L / G
seconds, where g is the job's GPUs and L its length. That is E = n g L / G in all. If it does not,
it loses on average half of its length, and the queue gains half of E. With p the chance that the
loan outlives it, p (W + E) + (1 - p) (E - L) / 2 is what it brings, and a lent node pays from

    p = (L - E) / (L + E + 2 W)

on. Where the queue is long any odds will do. Where training nodes come free soon, a job does better
to wait for them.

W is the wait under shortest job first: the work of the shorter waiting jobs spread over all GPUs of
the type, and the time until nodes have room for the job as running jobs end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from math import inf

from common.model import JobId
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.estimates import base_runtime_s
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView


class Odds:
    """The odds of the waiting jobs at the start of a pass."""

    def __init__(self, snapshot: ClusterSnapshot, room: PlacementState) -> None:
        self._snapshot = snapshot
        self._room = room
        self._lines: dict[str, _Line] = {}

    def needed(self, job: JobView, stays_s: float) -> float:
        """The chance from which on a loan pays, 0 to 1; 0 where no training node would ever do.

        stays_s: for how long the job needs the lent node, in seconds.
        """
        gains_s = [
            self._line(kind).gain_s(job)
            for kind in sorted(self._room.home_types)
            if job.accepts(kind)
        ]
        if not gains_s or stays_s <= 0.0:
            return 0.0
        wait_s, line_s = min(gains_s, key=sum)  # at home it would run where it is best off
        return max(0.0, stays_s - line_s) / (stays_s + line_s + 2.0 * wait_s)

    def _line(self, gpu_type: str) -> _Line:
        if gpu_type not in self._lines:
            self._lines[gpu_type] = _Line(self._snapshot, self._room, gpu_type)
        return self._lines[gpu_type]


class _Line:
    """The training nodes of one GPU type, and the jobs that wait for them."""

    def __init__(self, snapshot: ClusterSnapshot, room: PlacementState, gpu_type: str) -> None:
        self._gpu_type = gpu_type
        self._now_s = snapshot.now_s
        self._jobs = snapshot.jobs
        self._nodes = [
            occupied.node
            for occupied in room.index.nodes
            if occupied is not None and occupied.service is None
            if occupied.node.gpu_type == gpu_type
        ]
        self._gpus = sum(node.gpus for node in self._nodes)
        waiting = sorted(
            (base_runtime_s(job, gpu_type, self._now_s), job.base_gpus_on(gpu_type))
            for line in room.index.lines
            if line[0].accepts(gpu_type)
            for job in line
        )
        self._runs_s = [runtime_s for runtime_s, _ in waiting]
        work_gpu_s = (runtime_s * gpus for runtime_s, gpus in waiting)
        self._before_gpu_s = list(accumulate(work_gpu_s, initial=0.0))
        self._openings_s: dict[int, list[float]] = {}

    def gain_s(self, job: JobView) -> tuple[float, float]:
        """Waiting that is saved if a job of the line runs elsewhere: its own and that of others."""
        runtime_s = base_runtime_s(job, self._gpu_type, self._now_s)
        others = max(0, len(self._runs_s) - 1)
        held_gpu_s = job.base_gpus_on(self._gpu_type) * runtime_s
        return self._wait_s(job, runtime_s), others * held_gpu_s / self._gpus

    def _wait_s(self, job: JobView, runtime_s: float) -> float:
        before_gpu_s = self._before_gpu_s[bisect_left(self._runs_s, runtime_s)]
        size, count = job.gpus_per_worker, job.workers_on(self._gpu_type).min
        if size not in self._openings_s:
            self._openings_s[size] = sorted(
                at_s for node in self._nodes for at_s in self._openings(node, size)
            )
        opens_s = self._openings_s[size]
        room_s = opens_s[count - 1] if count <= len(opens_s) else inf
        return before_gpu_s / self._gpus + room_s

    def _openings(self, node: NodeView, size: int) -> Iterator[float]:
        """In how many seconds a node has room for a first worker of a size, a second one, .."""
        leaving = sorted(
            (self._left_s.get(worker.job_id, inf), worker.freed_gpus)
            for worker in node.workers
            if not worker.is_flexible and not worker.is_leaving
        )
        free = node.gpus - node.barred_gpus - sum(gpus for _, gpus in leaving)
        yield from [0.0] * (free // size)
        for left_s, gpus in leaving:
            if left_s == inf:
                return
            yield from [left_s] * ((free + gpus) // size - free // size)
            free += gpus

    @cached_property
    def _left_s(self) -> Mapping[JobId, float]:
        return {
            job.job_id: base_runtime_s(job, self._gpu_type, self._now_s)
            for job in self._jobs
            if job.gpu_type == self._gpu_type
        }
