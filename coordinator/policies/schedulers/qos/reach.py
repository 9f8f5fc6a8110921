"""The sizes that tenants' quotas allow jobs in a pass that shares GPUs out in turn. Pure.

A job gets no GPU that the quota would refuse, so no GPU is kept for refused growth.
"""

from __future__ import annotations

from common.model import JobId
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.schedulers.qos.quotas import has_limits
from coordinator.policies.tenants.tenancy import Tenancy


class Reach:
    """The GPUs that each tenant may still take in a pass. A running job keeps its own."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._tenancy = Tenancy(snapshot) if has_limits(snapshot.tenants) else None
        self._taken: dict[JobId, int] = {}

    def most(self, job: JobView, gpus_each: int, gpus: int) -> int:
        """Workers of a GPU count each that it can have of a number of GPUs."""
        if self._tenancy is None:
            return gpus // gpus_each
        has = present_workers(job) * job.gpus_per_worker + self._taken.get(job.job_id, 0)
        return int(min(gpus, has + max(0.0, self._tenancy.room(job)))) // gpus_each

    def take(self, job: JobView, gpus: int) -> None:
        """Give the job a number of GPUs, those that it has included; GPUs that it gives back are
        for later passes.
        """
        if self._tenancy is None:
            return
        before = self._taken.get(job.job_id, 0)
        more = gpus - present_workers(job) * job.gpus_per_worker - before
        if more > 0:
            self._tenancy.take(job, more)
            self._taken[job.job_id] = before + more
