"""The cost of a restart to jobs that do not save their work: a stop would set them back.

Schedulers that end turns and leases for fairness assume that a stopped job later continues where it
was. A job that never saves starts over each time, and of two that take turns neither ever
ends. So a job is not stopped for another one's turn if its stops would then throw away more work
than they left. All stops together therefore cost a job less work than it needs, and every job ends.
Until then it keeps its base gang and pays for it by the policy's own measure: the GPU time counts
as received, and its share or its finish-time fairness falls.
"""

from __future__ import annotations

from common.model import JobId
from coordinator.policies.contract.free_gpus import is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView

MOST_LOST_RATIO = 0.5
"""The largest fraction of a job's computed work that stops may lose."""


def is_resumed(job: JobView, now_s: float) -> bool:
    """Whether it goes on after a stop from where it was: it saves when it is asked to.

    Unless stops have cost it so much already that its word is worth nothing.
    """
    most_gpu_s = MOST_LOST_RATIO * job.attained_service_gpu_s(now_s)
    return job.saves.saves_when_asked and job.preemptions.wasted_gpu_s <= most_gpu_s


def loss_gpu_s(job: JobView, now_s: float) -> float:
    """GPU-seconds of work that a stop now is expected to throw away; none of a job that is resumed
    where it was.
    """
    return 0.0 if is_resumed(job, now_s) else job.lost_gpu_s(now_s)


def loss_s(job: JobView, now_s: float) -> float:
    """The same in seconds of its base gang."""
    return loss_gpu_s(job, now_s) / job.base_gpus


def is_set_back(job: JobView, now_s: float) -> bool:
    """Whether a stop now would cost a running job more than stops leave to it, all together.

    True of a job that has not saved yet and never was stopped, as soon as it has computed anything.
    """
    loss = loss_gpu_s(job, now_s)
    spent_gpu_s = job.attained_service_gpu_s(now_s)
    return loss > 0.0 and job.preemptions.wasted_gpu_s + loss > MOST_LOST_RATIO * spent_gpu_s


def keeps_gang(job: JobView, now_s: float) -> bool:
    """Whether it may be stopped by the rules of the cell, and shall not, for its work's sake."""
    return is_movable(job) and is_set_back(job, now_s)


def told(job: JobView, now_s: float, when: str = "when its turn ends") -> tuple[str, ...]:
    """As text: that a job is not stopped for others, and why; empty if it may be."""
    if not keeps_gang(job, now_s):
        return ()
    lost = f"{loss_gpu_s(job, now_s):.0f} GPU-s of work"
    return (f"it keeps its base gang {when}: a stop would lose {lost}, most of it",)


def told_of(snapshot: ClusterSnapshot, job_id: JobId, *when: str) -> tuple[str, ...]:
    """The same of a job by its name; nothing of one that is not there."""
    jobs = (job for job in snapshot.jobs if job.job_id == job_id)
    return next((told(job, snapshot.now_s, *when) for job in jobs), ())
