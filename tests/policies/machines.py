"""Snapshots with CPUs and memory, and what a pass decides on them; must not know the rules."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Allocation, Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView, TenantView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

GB = 10**9


def machine(
    name: str, *, gpus: int = 8, cpus: int = 0, memory_gb: int = 0, jobs: tuple[JobView, ...] = ()
) -> NodeView:
    """A training node with the workers that jobs have there."""
    workers = [worker for job in jobs for worker in job.placed if worker.node == name]
    made = make_node_view(name, gpus=gpus, workers=workers)
    return replace(made, cpus=cpus, memory_bytes=memory_gb * GB)


def job(
    name: str,
    tenant: str = "a",
    *,
    gpus: int = 1,
    cpus: int = 0,
    memory_gb: int = 0,
    workers: tuple[int, int] = (1, 1),
    nodes: tuple[str, ...] = (),
    submitted_at_s: float = 0.0,
    work_s: float = 3600.0,
    last_resized_at_s: float | None = None,
) -> JobView:
    """A job that waits, or runs with a worker on each node named; the first are its base gang."""
    placed = [
        make_worker_view(name, index, node, gpus=gpus, is_flexible=index >= workers[0])
        for index, node in enumerate(nodes)
    ]
    made = make_job_view(
        name,
        state=JobState.RUNNING if nodes else JobState.PENDING,
        workers=workers,
        gpus_per_worker=gpus,
        placed=placed,
        submitted_at_s=submitted_at_s,
        remaining_work_s=work_s,
        resizes_latest_at_s=last_resized_at_s,
    )
    return replace(
        made, tenant=tenant, cpus_per_worker=cpus, memory_bytes_per_worker=memory_gb * GB
    )


def cell(*nodes: NodeView, jobs: tuple[JobView, ...], now_s: float = NOW_S) -> ClusterSnapshot:
    """A snapshot of these."""
    return make_snapshot(nodes=nodes, jobs=jobs, now_s=now_s)


def full(*jobs: JobView, gpus: int = 8) -> ClusterSnapshot:
    """One node with all of these."""
    return cell(machine("n0", gpus=gpus, jobs=jobs), jobs=jobs)


def with_weights(snapshot: ClusterSnapshot, weights: Mapping[str, float]) -> ClusterSnapshot:
    """Tenants that weigh so much."""
    tenants = [TenantView(name=name, weight=weight) for name, weight in sorted(weights.items())]
    return replace(snapshot, tenants=tuple(tenants))


def started(allocation: Allocation) -> list[str]:
    """Jobs that start, in order."""
    return [d.job_id for d in allocation.decisions if isinstance(d, Start)]


def decide(name: str, snapshot: ClusterSnapshot, memory: bytes = b"") -> Allocation:
    """A pass under a policy."""
    return policy(name).allocate(snapshot, memory)


def placed(allocation: Allocation) -> dict[str, dict[str, int]]:
    """Workers by node of each job that starts, in order."""
    return {
        d.job_id: {placement.node: placement.worker_count for placement in d.placements}
        for d in allocation.decisions
        if isinstance(d, Start)
    }


def stopped(name: str, snapshot: ClusterSnapshot, memory: bytes = b"") -> list[str]:
    """Who is preempted in a pass."""
    found = decide(name, snapshot, memory)
    return [each.job_id for each in found.decisions if isinstance(each, Preempt)]
