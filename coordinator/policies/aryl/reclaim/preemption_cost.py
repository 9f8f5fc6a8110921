"""Preemption cost of a job, by two models; and the jobs that end by themselves in time.

The paper counts jobs, so that the fewest users are hit (Lyra, EuroSys'23, section 4). The other
model counts expected lost GPU-seconds: the work since the last verified checkpoint, the restart,
and the wait in the queue before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from statistics import median

from common.model import JobId, JobState
from coordinator.policies.contract.estimates import late_ratio
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView

RESTART_S = 63.0
"""Mean time that a preemption costs apart from lost work: to save, stop, start elsewhere and load
(Lyra, EuroSys'23, section 7.5, measured on its testbed)."""

LEAST_WAIT_S = 5.0
"""A job at its very end still has to report; less than this is not waited."""


class CostModel(StrEnum):
    """What a preemption counts."""

    JOBS = "jobs"
    """Every job the same; among equal numbers of jobs the least lost GPU-seconds."""
    LOST_GPU_S = "lost-gpu-s"
    """Expected lost GPU-seconds."""


class Costs:
    """Prices of the running jobs of one snapshot, worked out when first asked for."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot
        self._now_s = snapshot.now_s

    @cached_property
    def _jobs(self) -> dict[JobId, JobView]:
        return {job.job_id: job for job in self._snapshot.jobs}

    def expected_lost_gpu_s(self, job_id: JobId) -> float:
        """GPU-seconds that a preemption now is expected to cost; 0 of an unknown job.

        A job that has verified no checkpoint in this attempt counts the median age of the others'
        checkpoints, or its own running time if that is shorter: to report makes no job cheaper than
        most of those that are silent, and silence protects none.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return 0.0
        gpus = _gpus(job)
        lost_gpu_s = job.lost_gpu_s(self._now_s)
        age_s = self._silent_age_s
        if age_s is not None and _is_silent(job):
            lost_gpu_s = min(lost_gpu_s, age_s * job.saves.unsaved_gpus)
        return lost_gpu_s + gpus * (RESTART_S + self._requeue_wait_s(job))

    @cached_property
    def _silent_age_s(self) -> float | None:
        """Median age of the checkpoints that were reported; None when there are none."""
        ages = [
            job.lost_gpu_s(self._now_s) / job.saves.unsaved_gpus
            for job in self._snapshot.jobs
            if job.saves.unsaved_gpus and not _is_silent(job)
        ]
        return median(ages) if ages else None

    @cached_property
    def _queue(self) -> tuple[list[float], list[float]]:
        """Running times of the waiting jobs, rising, and the GPU-seconds of each and all before."""
        waiting = sorted(
            (job.work_left_s(self._now_s) / job.workers.min, job.base_gpus)
            for job in self._snapshot.jobs
            if job.state == JobState.PENDING
        )
        return [run_s for run_s, _ in waiting], list(accumulate(s * gpus for s, gpus in waiting))

    @cached_property
    def _gpus_there(self) -> int:
        return sum(node.gpus for node in self._snapshot.nodes if node.is_schedulable)

    def _requeue_wait_s(self, job: JobView) -> float:
        """The work that waits and would go first, shortest first, over all GPUs that take work."""
        run_s, ahead_gpu_s = self._queue
        before = bisect_left(run_s, job.work_left_s(self._now_s) / job.workers.min)
        if not before or not self._gpus_there:
            return 0.0
        return ahead_gpu_s[before - 1] / self._gpus_there

    def ends_within_s(self, job_id: JobId) -> float | None:
        """Seconds within which a job ends by itself, with room for a wrong estimate; None: unknown.

        A job that is not running yet, or is stopping, does not end by itself.
        """
        job = self._jobs.get(job_id)
        if job is None or job.state not in (JobState.RUNNING, JobState.RESIZING):
            return None
        ratio = late_ratio(job.estimate.source)
        workers = job.estimate.work_rate or sum(1 for worker in job.placed if not worker.is_leaving)
        if ratio is None or not workers:
            return None
        return max(LEAST_WAIT_S, ratio * job.work_left_s(self._now_s) / workers)


def _gpus(job: JobView) -> int:
    return sum(worker.gpus for worker in job.placed if not worker.is_leaving)


def _is_silent(job: JobView) -> bool:
    """Whether all that its attempt has done would be lost: it has verified no checkpoint."""
    saves = job.saves
    return job.attempt.started_at_s is not None and bool(saves.unsaved_gpus) and not saves.has_saved


def prices(costs: Costs, model: CostModel, job_ids: Iterable[JobId]) -> dict[JobId, float]:
    """The cost of each job in a model."""
    if model == CostModel.JOBS:
        return dict.fromkeys(job_ids, 1.0)
    return {job_id: max(1.0, costs.expected_lost_gpu_s(job_id)) for job_id in job_ids}
