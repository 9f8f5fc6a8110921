"""A node of each of two GPU types, jobs that take both, and what qos-elasticflow does with them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Allocation, Reject, Start
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    TenantView,
)
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

EXACT = "qos-elasticflow:margin=1"
BOTH = ("A100", "H100")


def asks(
    name: str, work_s: float, within_s: float | None, *, gpus: int = 8, types: Sequence[str] = BOTH
) -> JobView:
    """A job for GPUs of either type that wants to be done so long from now."""
    made = make_job_view(name, gpus_per_worker=gpus, remaining_work_s=work_s, types=tuple(types))
    made = replace(made, submitted_at_s=NOW_S)
    return replace(made, deadline_at_s=None if within_s is None else NOW_S + within_s)


def runs(job: JobView, kind: str) -> JobView:
    """It has the whole node of a type."""
    worker = make_worker_view(job.job_id, 0, kind, gpus=job.gpus_per_worker)
    return job_with(
        job,
        state=JobState.RUNNING,
        gpu_type=kind,
        placed=(worker,),
        first_started_at_s=NOW_S,
        as_of_s=NOW_S,
    )


def cell(
    jobs: Sequence[JobView],
    *,
    now_s: float = NOW_S,
    closed: Sequence[str] = (),
    tenants: tuple[TenantView, ...] = (),
) -> ClusterSnapshot:
    """A node of eight GPUs of each type, named after it."""
    nodes: list[NodeView] = []
    for kind in BOTH:
        workers = [worker for job in jobs for worker in job.placed if worker.node == kind]
        made = make_node_view(kind, gpu_type=kind, workers=workers)
        nodes.append(replace(made, is_schedulable=kind not in closed))
    return replace(make_snapshot(nodes=nodes, jobs=jobs, now_s=now_s), tenants=tenants)


def decided(snapshot: ClusterSnapshot, memory: bytes = b"", name: str = EXACT) -> Allocation:
    """One pass."""
    return policy(name).allocate(snapshot, memory)


def starts(allocation: Allocation) -> dict[str, str]:
    """GPU types of those that start."""
    return {made.job_id: made.gpu_type for made in allocation.decisions if isinstance(made, Start)}


def rejects(allocation: Allocation) -> dict[str, float | None]:
    """The earliest dates of those that are refused."""
    return {
        made.job_id: made.earliest_s for made in allocation.decisions if isinstance(made, Reject)
    }


def promised(allocation: Allocation) -> tuple[set[str], dict[str, str]]:
    """Who has a plan, and the types that are remembered of those that take several."""
    memory = msgspec.msgpack.decode(allocation.memory)
    return set(memory[0]), memory[8]
