"""Preemptive orders: the jobs with the least work left run, and others make room.

These are the textbook orders SRTF (least remaining time) and SRSF (least remaining time x GPUs;
Tiresias, NSDI'19, section 3). They are good where stopping is free, and elsewhere a measure of the
possible. Where job lengths are unknown, they are as good as the estimates.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.policies.contract.decisions import Allocation, PendingReason
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.parts.grants import carry_out
from coordinator.policies.parts.priority_line import Turns, takes_turns
from coordinator.policies.policy import NoKnobs, Parts, Policy, joint

RANK_DIGITS = 3
"""Ranks are compared to the millisecond: rounding must not preempt a job."""

Left = Callable[[JobView, float], float]
"""How much a job has left at an instant; the least runs first."""


def remaining_time(job: JobView, now_s: float) -> float:
    """Seconds left with the base gang."""
    return job.work_left_s(now_s) / job.workers.min


def remaining_service(job: JobView, now_s: float) -> float:
    """GPU-seconds left."""
    return job.work_left_s(now_s) * job.gpus_per_worker


def walk(snapshot: ClusterSnapshot, left: Left) -> Turns:
    """One walk along the line of those that run and those that wait."""

    def rank(job: JobView) -> tuple[object, ...]:
        left_now = round(left(job, snapshot.now_s), RANK_DIGITS)
        return (-job.priority, left_now, job.submitted_at_s, job.job_id)

    def why(job: JobView) -> str:
        left_s = remaining_time(job, snapshot.now_s)
        return f"{left_s:.0f} s left by {job.estimate.source}, priority {job.priority}"

    return Turns(snapshot, sorted(filter(takes_turns, snapshot.jobs), key=rank), why)


def why_waiting(snapshot: ClusterSnapshot, left: Left) -> tuple[PendingReason, ...]:
    """Why each job that waits would not start in a pass now."""
    return tuple(
        PendingReason(
            job_id=job.job_id,
            blockers=(
                f"needs {counted(job.workers.min, 'worker')} of "
                f"{counted(job.gpus_per_worker, 'GPU')}; jobs with less left leave room "
                f"for at most {room}",
            ),
        )
        for job, room in walk(snapshot, left).held
    )


def _preemptive(name: str, description: str, left: Left) -> Policy:
    def allocate(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        plan = carry_out(snapshot, walk(snapshot, left).grants)
        return Allocation(decisions=plan.decisions, memory=memory)

    def hold(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
        return why_waiting(snapshot, left)

    return joint(
        name,
        description,
        knobs=NoKnobs(),
        allocate=allocate,
        pending_reasons=hold,
        parts=Parts(order=left.__name__.replace("_", " "), size="base demand", place="best fit"),
    )


POLICIES = (
    _preemptive(
        "srtf",
        "least remaining time first, preempting jobs with more left",
        remaining_time,
    ),
    _preemptive(
        "srsf",
        "least remaining time x GPUs first, preempting jobs with more left",
        remaining_service,
    ),
)
