"""The GPU type on which each job is planned, where it accepts several.

A promise is kept on the type for which it was made, because that type's GPUs were planned for it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial

from msgspec import structs

from common.model import JobId, JobState
from coordinator.policies.contract.free_gpus import FreeGpus, accepted_types
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.pooling import by_deadline, choices, hosting_types
from coordinator.policies.schedulers.qos.applicants import gang_of
from coordinator.policies.schedulers.qos.sizes import least_in_time


class Kinds:
    """The GPU type of each job; none for a waiting job that fits on no present type.

    A waiting pre-run counts as its plan, the gang behind it.

    of: by job; a pass changes it.
    free: for waiting jobs with a promise, another type on which the gang has free GPUs, while it
        has none on its own.

    Args:
        let_in: jobs with a promised deadline, met or not. before: on which types.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        floor: FreeGpus,
        let_in: Container[str],
        before: Mapping[str, str],
    ) -> None:
        jobs = (gang_of(job) if job.state == JobState.PENDING else job for job in snapshot.jobs)
        snapshot = structs.replace(snapshot, jobs=tuple(jobs))
        self._hosting = hosting_types(snapshot, floor)
        some_day = _hosted_if_all_were_open(snapshot)
        self.of: dict[JobId, str] = {}
        own: dict[JobId, str] = {}
        for job in snapshot.jobs:
            accepted = accepted_types(job, floor)
            if job.gpu_type is not None:
                self.of[job.job_id] = job.gpu_type
            elif job.job_id in let_in:
                # Where none of its nodes takes workers now it waits for that: no other type's plan
                # includes it.
                had = before.get(job.job_id, "")
                is_kept = had and job.accepts(had)
                own[job.job_id] = had if is_kept else next(iter(accepted or job.gpu.types), "")
            elif accepted and job.deadline_at_s is not None and job.job_id not in some_day:
                self.of[job.job_id] = accepted[0]  # so that it gets the reason that it fits nowhere
        standing = {name: kind for name, kind in own.items() if self.others(name, (kind,))}
        size = partial(least_in_time, now_s=snapshot.now_s)
        found = choices(
            snapshot, floor, self._hosting, order=by_deadline, size=size, standing=standing
        )
        self.of |= found | own
        self.free = {name: found[name] for name, kind in standing.items() if found[name] != kind}

    def others(self, name: JobId, but: Container[str]) -> list[str]:
        """Types whose nodes could hold the gang of one that waits, without these."""
        return [kind for kind in self._hosting.get(name, ()) if kind not in but]

    def could_hold(self, job: JobView, kind: str) -> bool:
        """Whether the nodes of a type would hold a gang that waits, if they were all free."""
        return job.state != JobState.PENDING or kind in self._hosting.get(job.job_id, ())


def _hosted_if_all_were_open(snapshot: ClusterSnapshot) -> Container[str]:
    """Waiting jobs that would fit if no node were closed: they get that reason, and ask when the
    nodes are back.
    """
    nodes = tuple(structs.replace(node, is_schedulable=True) for node in snapshot.nodes)
    snapshot = structs.replace(snapshot, nodes=nodes)
    return hosting_types(snapshot, FreeGpus(snapshot)).keys()
