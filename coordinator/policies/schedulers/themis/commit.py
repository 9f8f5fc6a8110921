"""Results of auctions as decisions: the only step by which GPUs change hands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Placement, merge
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.parts.grants import Grant, Plan, carry_out
from coordinator.policies.schedulers.themis.leases import Leases


class Given(Struct, frozen=True, kw_only=True):
    """Workers given to a job beyond those that it keeps, and the reason."""

    gpu_type: str = ""
    more: tuple[Placement, ...] = ()
    why: str = "its lease goes on"


NOTHING = Given()


def committed(
    snapshot: ClusterSnapshot, floor: FreeGpus, leases: Leases, given: Mapping[JobId, Given]
) -> Plan:
    """Decisions, in order of kept and given GPUs; a job whose GPUs were not taken keeps them."""

    def place(floor: FreeGpus, job: JobView, _: str, count: int) -> tuple[Placement, ...]:
        more = given.get(job.job_id, NOTHING).more
        return given_where(floor, job, leases.returned(job), more, count)

    grants = [
        grant
        for job in snapshot.jobs
        if (grant := _grant(job, leases, given.get(job.job_id))) is not None
    ]
    plan = carry_out(snapshot, grants, floor=floor, place=place)
    for job_id in sorted(leases.back - given.keys()):
        # A stopped job has no lease; a spared one has its GPUs for another lease.
        leases.renew(job_id)
    return plan


def _grant(job: JobView, leases: Leases, given: Given | None) -> Grant | None:
    kept = len(leases.kept[job.job_id])
    if not kept and given is None:
        return None
    given = given or NOTHING
    workers = kept + sum(placement.worker_count for placement in given.more)
    if job.state != JobState.PENDING:
        return Grant(job=job, workers=workers, reason=given.why)
    return Grant(
        job=job,
        workers=workers,
        reason=given.why,
        gpu_type=given.gpu_type,
        placements=merge(list(given.more)),
    )


def _by_node(more: Iterable[Placement]) -> dict[NodeName, int]:
    """Workers that were given, over all steps."""
    found: dict[NodeName, int] = {}
    for placement in more:
        found[placement.node] = found.get(placement.node, 0) + placement.worker_count
    return found


def given_where(
    floor: FreeGpus,
    job: JobView,
    returned: Iterable[WorkerView],
    more: Iterable[Placement],
    count: int,
) -> tuple[Placement, ...]:
    """Where a running job grows: by the auction, beyond its workers there."""
    own: dict[NodeName, int] = {}
    for worker in returned:
        own[worker.node] = own.get(worker.node, 0) + 1
    found: list[Placement] = []
    for node, workers in _by_node(more).items():
        room = floor.free.get(node, 0) // job.gpus_per_worker
        here = min(workers - own.get(node, 0), room, count)
        if here > 0:
            count -= here
            found.append(Placement(node=node, worker_count=here))
    return tuple(found)
