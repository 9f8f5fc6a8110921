"""Stops that make room within a tenant's limits, where GPUs are free but its quota is used up.

Placement stops a job only where GPUs are short. A share is planned without the jobs that it leaves
nothing to. If these run on beside free GPUs, they still count against the quota that a start needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.model import JobId
from coordinator.policies.contract.decisions import Decision, Preempt
from coordinator.policies.contract.free_gpus import is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import listed, unsaved
from coordinator.policies.parts.grants import Why
from coordinator.policies.tenants.gpu_flow import Flow, job_of
from coordinator.policies.tenants.tenancy import Count, Tenancy


def with_quota_stops(
    snapshot: ClusterSnapshot,
    decisions: Sequence[Decision],
    granted: Collection[JobId],
    why: Why,
) -> tuple[Decision, ...]:
    """The decisions, preceded by the stops without which tenants forbid those that take GPUs.

    The lowest priority is stopped first, of these the smallest loss, and no job without which there
    is room enough. Where all that may be stopped leave too little, none is.

    granted: jobs that have workers or are to start, and are not stopped. why: the reason for the
        others.
    """
    return _Stops(snapshot, decisions, granted).made(why)


class _Stops:
    """One pass. takers: the job for which each is stopped."""

    def __init__(
        self, snapshot: ClusterSnapshot, decisions: Sequence[Decision], granted: Collection[JobId]
    ) -> None:
        self._now_s = snapshot.now_s
        self._flow = Flow(snapshot)
        self._tenancy = Tenancy(snapshot)
        self._decisions = decisions
        self._lefts = self._flow.lefts(decisions)
        gone = {each.job_id for each in decisions if isinstance(each, Preempt)}
        self._staying = sorted(
            (
                job
                for job in snapshot.jobs
                if is_movable(job) and job.job_id not in granted and job.job_id not in gone
            ),
            key=lambda job: (job.priority, job.lost_gpu_s(self._now_s), job.job_id),
        )
        self._takers: dict[JobId, list[JobId]] = {}

    def made(self, why: Why) -> tuple[Decision, ...]:
        first = len(self._decisions)
        for at, (decision, left) in enumerate(zip(self._decisions, self._lefts, strict=True)):
            job = job_of(self._flow, decision)
            if job is None:
                continue
            self._tenancy.leave(job, left.used)
            taken = sum(self._flow.taken(decision).values())
            if not taken:
                continue
            first = min(first, at)
            if taken > self._tenancy.room(job):
                self._make_room(job, taken)
            if taken <= self._tenancy.room(job):
                self._tenancy.take(job, taken)
        stops = [self._stop(job_id, takers, why) for job_id, takers in self._takers.items()]
        return (*self._decisions[:first], *stops, *self._decisions[first:])

    def _make_room(self, job: JobView, gpus: int) -> None:
        going: list[tuple[JobView, Count]] = []
        for other in self._staying:
            if self._tenancy.room(job) >= gpus:
                break
            used = self._used(other)
            self._tenancy.leave(other, used)
            going.append((other, used))
        is_enough = self._tenancy.room(job) >= gpus
        needed: list[JobView] = []
        # Only now does it show who gives room: some give it no more than together.
        for other, used in reversed(going):
            self._tenancy.take(other, used)
            if is_enough and self._tenancy.room(job) < gpus:
                self._tenancy.leave(other, used)
                needed.append(other)
        for other in reversed(needed):
            self._takers[other.job_id] = [job.job_id]
            self._staying.remove(other)

    def _used(self, job: JobView) -> Count:
        stop = Preempt(job_id=job.job_id, predicted_cost_gpu_s=0.0, reason="")
        return self._flow.lefts((stop,))[0].used

    def _stop(self, job_id: JobId, takers: Sequence[JobId], why: Why) -> Decision:
        lost_gpu_s = self._flow.jobs[job_id].lost_gpu_s(self._now_s)
        return Preempt(
            job_id=job_id,
            predicted_cost_gpu_s=lost_gpu_s,
            beneficiary=", ".join(takers),
            reason=f"{why(takers)}: {listed(takers, 'needs', 'need')} its room within the "
            f"quotas of tenants; {unsaved(lost_gpu_s)}",
        )
