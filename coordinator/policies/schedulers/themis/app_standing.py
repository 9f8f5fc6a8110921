"""The standing of an app before an auction: its jobs, its GPUs, and its rho. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    AppRecord,
    Held,
    Measure,
    held_by,
)
from coordinator.policies.schedulers.themis.leases import Leases


class Standing(Struct, kw_only=True):
    """One app in a pass.

    held: GPUs that its jobs hold and keep, or were given in this pass.
    back: GPUs that they held until now, though the lease is over.
    least_gpus: fewer of the offered GPUs are of no use to it.
    """

    app: str
    jobs: Sequence[JobView]
    record: AppRecord
    measure: Measure
    held: dict[JobId, Held]
    back: dict[JobId, Held]
    priority: int
    least_gpus: int

    def rho(self, now_s: float, lease_s: float) -> float:
        """The key by which apps are chosen: infinite before its first GPUs; without any it grows.

        That is the long-term compensation: it grows by its own value for each lease that the app
        waits. An app whose GPUs came from another policy has the value on its share.
        """
        left_s = self.measure.left_s({**self.back, **self.held})
        if left_s < inf:
            return self.measure.rho(left_s)
        if self.record.granted_at_s is None:
            return inf
        waited_s = max(0.0, now_s - self.record.granted_at_s)
        rho = self.record.rho
        if rho == inf:
            rho = self.measure.rho(self.measure.share_left_s - waited_s)
        return rho * (1.0 + waited_s / lease_s)


def standing_of(
    app: str,
    jobs: Sequence[JobView],
    record: AppRecord,
    measure: Measure,
    leases: Leases,
    racks: Mapping[NodeName, str],
) -> Standing:
    """How an app stands before anything is auctioned."""
    return Standing(
        app=app,
        jobs=jobs,
        record=record,
        measure=measure,
        held=held_by(((job, leases.kept[job.job_id]) for job in jobs), racks),
        back=held_by(((job, job.placed) for job in jobs if job.job_id in leases.back), racks),
        priority=max(job.priority for job in jobs),
        least_gpus=min(_least_gpus(job) for job in jobs),
    )


def _least_gpus(job: JobView) -> int:
    return job.gpus_per_worker * (1 if job.is_elastic else job.workers.min)


def starved(standings: Iterable[Standing], since_s: float) -> list[tuple[Standing, JobView]]:
    """Jobs that have waited since an instant or longer, and their apps, in the order of the line.

    By priority, then by how long they have waited.
    """
    waiting = [
        (-job.priority, job.waiting_since_s or job.submitted_at_s, job.job_id, standing, job)
        for standing in standings
        for job in standing.jobs
        if job.state == JobState.PENDING
    ]
    line = sorted((each for each in waiting if each[1] <= since_s), key=lambda each: each[:3])
    return [each[3:] for each in line]
