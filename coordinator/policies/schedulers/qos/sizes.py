"""The worker counts that help a job, and the speed of each: claims from views."""

from __future__ import annotations

from bisect import bisect_left
from math import inf

from common.model import JobState
from coordinator.policies.contract.free_gpus import is_movable, present_workers
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.restart_cost import is_resumed, is_set_back, loss_gpu_s
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.overheads import Changes


def sizes_of(
    job: JobView, most: int, *, powers_of_two: bool = True, largest: bool = False
) -> tuple[int, ...]:
    """Worker counts of a job up to `most`, growing; empty when its base gang is above that.

    powers_of_two: its base gang, twice that, and so on (ElasticFlow, section 4.3: together with
        buddy allocation nothing is left over); else every count in its range.
    largest: also those that are no faster than a smaller one. Else the counts end where one more
        step makes the job slower, as far as its profile shows.
    """
    sizes: list[int] = []
    size = job.workers.min
    while size <= min(most, job.workers.max):
        if not largest and sizes and job.rate(size) <= job.rate(sizes[-1]):
            break
        sizes.append(size)
        size = size * 2 if powers_of_two else size + 1
    return tuple(sizes)


def least_in_time(job: JobView, now_s: float, margin: float = 1.0) -> int:
    """The fewest workers that meet a deadline by its estimate; its base gang if none do.

    So does a pre-run: its deadline is that of the gang behind it.
    """
    least, most = job.workers.min, job.workers.max
    if job.deadline_at_s is None or job.behind is not None:
        return least
    window_s, left_s = job.deadline_at_s - now_s, margin * job.estimate_left_s(now_s)
    counts = range(least, job.profile.fastest(least, most) + 1)
    at = bisect_left(counts, True, key=lambda count: left_s <= window_s * job.rate(count))
    return counts[at] if at < len(counts) else least


def claim_of(
    job: JobView,
    now_s: float,
    sizes: tuple[int, ...],
    *,
    left_s: float,
    margin: float,
    restart_s: float,
    factor: int = 1,
    tenant: str = "",
    changes: Changes | None = None,
) -> Claim:
    """The need of a job: its remaining work times a margin, until its deadline; and the cost of its
    stop.

    factor: workers on the present GPU type that stand for one. restart_s: to stop and start again.
        tenant: whose quota it counts against.
    """
    runs = job.state not in (JobState.PENDING, JobState.PREEMPTING)
    gang_gpus = job.base_gpus * factor
    workers = max(job.workers.min, present_workers(job) // factor)
    lost_s = loss_gpu_s(job, now_s) / (workers * job.gpus_per_worker * factor)
    redo_s = margin * lost_s * job.rate(workers) + restart_s * job.rate(job.workers.min)
    return Claim(
        job_id=job.job_id,
        sizes=sizes,
        rates=tuple(job.rate(size) for size in sizes),
        gpus_per_worker=job.gpus_per_worker * factor,
        work_s=max(1e-6, left_s * margin),
        deadline_s=inf if job.deadline_at_s is None else job.deadline_at_s,
        runs=runs,
        pauses=is_resumed(job, now_s),
        redo_s=redo_s if not runs or is_movable(job) else inf,
        stop_gpu_s=loss_gpu_s(job, now_s) + restart_s * gang_gpus if runs else 0.0,
        keeps=runs and (not is_movable(job) or is_set_back(job, now_s)),
        tenant=tenant,
        predicted_s=max(1e-6, left_s) if changes else 0.0,
        present=present_workers(job) // factor,
        begins_s=changes.begins_s if changes else 0.0,
        again_s=changes.again_s if changes else 0.0,
        resize_s=changes.resize_s if changes else 0.0,
        grow_s=changes.grow_s if changes else 0.0,
    )
