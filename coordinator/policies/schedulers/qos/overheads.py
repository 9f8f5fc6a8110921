"""Overheads of starts and changes, and the part that estimates do not include. Pure.

An estimate counts a gang as computing from the order to run. It does not include the start of the
workers, the load of a save after a stop, nor the pause of a gang that changes its size. Where a job
reports its progress, its measured pace includes all of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct, structs

from common.model import JobId, JobState
from coordinator.policies.contract.estimates import Source
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.schedulers.qos.minimum_shares import Claim

AWAY = (JobState.PENDING, JobState.PREEMPTING)


class Overhead(Struct, frozen=True, array_like=True):
    """The memory of one attempt.

    since_s: when it was first seen. has_run: its start was counted. workers: that it had then.
    resized_at_s: its latest resize that was counted.
    unseen_s: work, in worker-seconds, that its estimate counts as done and that was not.
    """

    attempt: int = 0
    since_s: float = -inf
    has_run: bool = False
    workers: int = 0
    resized_at_s: float = -inf
    unseen_s: float = 0.0


Overheads = dict[JobId, Overhead]
"""By job; of those that have an attempt."""

NONE = Overhead()


def has_costs(snapshot: ClusterSnapshot) -> bool:
    """Whether any start or change takes time, as far as the operator says."""
    return snapshot.start_s > 0 or snapshot.restart_s > 0 or snapshot.resize_s > 0


def seen(before: Mapping[JobId, Overhead], snapshot: ClusterSnapshot) -> Overheads:
    """The overheads of every attempt now; empty where nothing takes time."""
    if not has_costs(snapshot):
        return {}
    return {
        job.job_id: _counted(job, before.get(job.job_id, NONE), snapshot)
        for job in snapshot.jobs
        if job.state not in AWAY
    }


def _counted(job: JobView, known: Overhead, snapshot: ClusterSnapshot) -> Overhead:
    ran_at_s = snapshot.now_s if job.attempt.started_at_s is None else job.attempt.started_at_s
    if known.attempt != job.attempt.number:
        known = Overhead(job.attempt.number, ran_at_s)
    if job.state == JobState.STARTING:
        return known
    factor = job.gpu.worker_multiplier.get(job.gpu_type or "", 1)
    workers = max(job.workers.min, present_workers(job) // factor)
    rate, unseen_s = job.rate(workers), known.unseen_s
    resized_at_s = -inf if job.resizes.latest_at_s is None else job.resizes.latest_at_s
    if not known.has_run:
        unseen_s = max(0.0, known.since_s + _whole_s(job, snapshot) - ran_at_s) * rate
    elif resized_at_s > known.resized_at_s:
        unseen_s += snapshot.resize_s * rate
        unseen_s += snapshot.start_s * max(0.0, rate - job.rate(known.workers))
    if job.estimate.source == Source.LIVE:
        unseen_s = 0.0
    return Overhead(job.attempt.number, known.since_s, True, workers, resized_at_s, unseen_s)


def _whole_s(job: JobView, snapshot: ClusterSnapshot) -> float:
    """The time of its present start, or its next one."""
    is_again = job.attempt.number > (0 if job.state in AWAY else 1)
    return snapshot.start_s + (snapshot.restart_s if is_again else 0.0)


def left_s(job: JobView, overhead: Overhead, now_s: float) -> float:
    """Worker-seconds left, by the estimate and its unseen part.

    A job that has outlived both has as much left as it ran over, however little. It is about to
    end, and a job that ends a moment late must not count as one with a long rest.
    """
    if job.estimate.estimated_left_s is None:
        return job.work_left_s(now_s)
    done_s = job.estimate.work_rate * max(0.0, now_s - job.as_of_s)
    return abs(job.estimate.estimated_left_s - done_s + overhead.unseen_s)


class Changes(Struct, frozen=True, kw_only=True):
    """The time of a job's next start and changes, in seconds; see `Claim`."""

    begins_s: float
    again_s: float
    resize_s: float
    grow_s: float


def changes_of(job: JobView, overhead: Overhead, snapshot: ClusterSnapshot) -> Changes | None:
    """None where nothing takes time."""
    if not has_costs(snapshot):
        return None
    again_s = snapshot.start_s + snapshot.restart_s
    begins_s = _whole_s(job, snapshot)
    if job.state == JobState.STARTING:
        begins_s = max(0.0, overhead.since_s + begins_s - snapshot.now_s)
    elif job.state not in AWAY:
        begins_s = 0.0
    return Changes(
        begins_s=begins_s,
        again_s=again_s,
        resize_s=snapshot.resize_s,
        grow_s=snapshot.start_s + snapshot.resize_s,
    )


def handed_over(
    newcomers: Sequence[Claim], nodes: Iterable[NodeView], kind: str, jobs: Iterable[JobView]
) -> list[Claim]:
    """The same, as those that find too few idle GPUs begin only when others have left theirs.

    kind: the GPU type that they would run on. jobs: those of it; the longest grace of those that
        have workers is how long a stop may take.
    """
    idle = sum(
        max(0, node.free_gpus - sum(worker.gpus for worker in node.workers if worker.is_leaving))
        for node in nodes
        if node.gpu_type == kind and node.is_schedulable
    )
    handover_s = max((job.grace_s for job in jobs if job.placed), default=0.0)
    found: list[Claim] = []
    for claim in newcomers:
        idle -= claim.sizes[0] * claim.gpus_per_worker if claim.sizes else 0
        late_s = 0.0 if idle >= 0 else handover_s
        found.append(structs.replace(claim, begins_s=claim.begins_s + late_s))
    return found
