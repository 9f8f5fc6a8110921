"""Cooldowns: jobs that were preempted or resized recently, and when they may be again.

The engine refuses to preempt a job for another one's turn too soon (`min_runtime_s`). So no job is
stopped over and over, and a stopped job runs for at least that long once it runs again. With the
preemption the engine refuses the start that needed the GPUs. A policy therefore sees the cooldown
beforehand, and wakes when the first job may be stopped. A resize has a cooldown too
(`resize_cooldown_s`, longer where the job's resizes were measured to be expensive). The engine does
not enforce that one.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Allocation
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView

RESTS_PER_COST = 10.0
"""A cooldown is this many times the cost of a resize: growing takes up a tenth of the job's time.
"""


def allocated(
    decide: Callable[[ClusterSnapshot, bytes], Allocation],
    snapshot: ClusterSnapshot,
    memory: bytes,
) -> Allocation:
    """One scheduling pass, by a snapshot that says whose turn cannot be ended yet."""
    stopped = snapshot.jobs if snapshot.index is None else snapshot.index.preempted
    ends_s = [end_s for job in stopped if (end_s := rests_until_s(snapshot, job)) is not None]
    if not ends_s:
        return decide(snapshot, memory)
    jobs = tuple(
        job if rests_until_s(snapshot, job) is None else replace(job, is_resting=True)
        for job in snapshot.jobs
    )
    allocation = decide(replace(snapshot, jobs=jobs), memory)
    if not any(job.state == JobState.PENDING for job in jobs):
        return allocation
    wakes_s = [*ends_s] if allocation.wake_at_s is None else [*ends_s, allocation.wake_at_s]
    return replace(allocation, wake_at_s=min(wakes_s))


def rests_until_s(snapshot: ClusterSnapshot, job: JobView) -> float | None:
    """Until when a job that has its place may not be stopped for another one; None: it may be."""
    preempted_at_s = job.preemptions.latest_at_s
    if preempted_at_s is None or job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        return None
    until_s = rest_ends_s(preempted_at_s, job.attempt.started_at_s, snapshot.min_runtime_s)
    return until_s if until_s > snapshot.now_s else None


def rest_ends_s(preempted_at_s: float, ran_at_s: float | None, min_runtime_s: float) -> float:
    """When a job that was preempted may be again for another one's turn.

    It counts from when the job runs again, however long it waited: else a long wait uses the time
    up. Before that it counts from the stop. ran_at_s: when its present attempt ran; None: not yet.
    """
    return max(preempted_at_s, ran_at_s or 0.0) + min_runtime_s


def resizable_at_s(snapshot: ClusterSnapshot, job: JobView) -> float | None:
    """When the cooldown after a job's last resize is over; None: it is by now."""
    if job.resizes.latest_at_s is None:
        return None
    rest_s = snapshot.resize_cooldown_s
    if job.resizes.cost_s is not None:
        rest_s = max(rest_s, RESTS_PER_COST * job.resizes.cost_s)
    at_s = job.resizes.latest_at_s + rest_s
    return at_s if at_s > snapshot.now_s else None


def most_workers_now(snapshot: ClusterSnapshot, job: JobView, gpu_type: str) -> int:
    """Workers of a GPU type that the job may have after this pass.

    A running job that may not be resized yet has no more than now. GPUs given to it beyond that
    would idle until it may.
    """
    may_grow = job.is_resizable and resizable_at_s(snapshot, job) is None
    if job.state == JobState.PENDING or may_grow:
        return job.workers_on(gpu_type).max
    return present_workers(job)
