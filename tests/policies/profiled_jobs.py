"""Jobs that tell how they speed up, and what is decided for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from common.model import JobId, JobState
from common.profile import JobProfile
from coordinator.policies.aryl.elastic_jobs import Share, shares_of
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.scaling import give_back, share_flexible
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)

SPEEDUP = ((4, 1.3), (8, 0.6), (16, 0.8))
"""Four GPUs are the fastest, as ElasticFlow measured of a YOLOv3 on T4."""

DIP = ((1, 1.0), (2, 0.5), (3, 2.0), (4, 1.9))
"""Two workers are slower than one, three are the best."""


def told(job: JobView, speedup: Iterable[tuple[int, float]]) -> JobView:
    """A job that tells how it speeds up."""
    return replace(job, profile=JobProfile(speedup=tuple(speedup)))


def running(
    name: str,
    *,
    workers: tuple[int, int],
    on: Sequence[str],
    left_s: float = 10_000.0,
    speedup: Iterable[tuple[int, float]] = (),
    gpus: int = 1,
) -> JobView:
    """A running elastic job, one worker per named node, base first. left_s: on its base gang."""
    placed = [
        make_worker_view(name, index, node, gpus=gpus, is_flexible=index >= workers[0])
        for index, node in enumerate(on)
    ]
    job = make_job_view(
        name,
        state=JobState.RUNNING,
        workers=workers,
        gpus_per_worker=gpus,
        remaining_work_s=left_s * workers[0],
        placed=placed,
    )
    return told(job, speedup)


def node(name: str, jobs: Iterable[JobView] = (), *, gpus: int = 8) -> NodeView:
    """A training node with the workers that the jobs have there."""
    mine = [worker for job in jobs for worker in job.placed if worker.node == name]
    return make_node_view(name, gpus=gpus, workers=mine)


def decided(snapshot: ClusterSnapshot, name: str = "aryl") -> tuple[Decision, ...]:
    """What a pass decides."""
    return policy(name).allocate(snapshot, b"").decisions


def size_of(decision: Decision) -> int:
    """Workers that a start gives."""
    assert isinstance(decision, Start)
    return sum(placement.worker_count for placement in decision.placements)


def phase_2(nodes: Iterable[NodeView], jobs: Sequence[JobView]) -> dict[JobId, Share]:
    """Flexible demand alone, re-solved."""
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=[make_service_view()])
    room, shares = PlacementState(snapshot), shares_of(snapshot.jobs, now_s=0.0)
    share_flexible(room, list(shares.values()))
    give_back(room, shares.values())
    return dict(shares)
