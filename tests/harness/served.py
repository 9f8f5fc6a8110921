"""Jobs that have attained service, on nodes of given sizes, and what a policy does with them."""

from __future__ import annotations

from collections.abc import Sequence

from common.model import JobState
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)


def served_job(
    name: str,
    gpus: int = 1,
    *,
    node: str | None = None,
    served: float = 0.0,
    first_s: float | None = None,
    waits_since_s: float | None = None,
    submitted_at_s: float = 0.0,
    profile: JobProfile | None = None,
    workers: int = 1,
) -> JobView:
    """A job with that service by now; it runs where a node is named."""
    placed = [make_worker_view(name, i, node, gpus=gpus) for i in range(workers)] if node else []
    view = make_job_view(
        name,
        state=JobState.RUNNING if node else JobState.PENDING,
        workers=(workers, workers),
        gpus_per_worker=gpus,
        submitted_at_s=submitted_at_s,
        placed=placed,
    )
    return job_with(
        view,
        attained_gpu_s=served,
        computing_gpus=gpus * workers if node else 0,
        as_of_s=NOW_S,
        first_started_at_s=first_s,
        waiting_since_s=None if node else (NOW_S if waits_since_s is None else waits_since_s),
        profile=profile or JobProfile(),
    )


def cell(jobs: Sequence[JobView], *, now_s: float = NOW_S, **gpus: int) -> ClusterSnapshot:
    """Nodes of so many GPUs with these jobs."""
    nodes: list[NodeView] = []
    for name, count in gpus.items():
        workers = [worker for each in jobs for worker in each.placed if worker.node == name]
        nodes.append(make_node_view(name, gpus=count, workers=workers))
    return make_snapshot(nodes=nodes, jobs=jobs, now_s=now_s)


def changed(snapshot: ClusterSnapshot, name: str, memory: bytes = b"") -> tuple[list[str], ...]:
    """(who stops, who starts) in a pass."""
    decisions = policy(name).allocate(snapshot, memory).decisions
    return (
        [decision.job_id for decision in decisions if isinstance(decision, Preempt)],
        [decision.job_id for decision in decisions if isinstance(decision, Start)],
    )
