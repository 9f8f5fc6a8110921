"""Cells at midnight for tests of loan lifetimes: a day that is known, lent nodes, who waits."""

from __future__ import annotations

from functools import cache
from math import cos, pi

from msgspec.structs import replace

from common.model import JobState, NodeRole, Preemptibility
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.seasonal_load import DAY_S, Season
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)

MIDNIGHT_S = 10 * DAY_S
HOUR_S = 3600.0
ONLY_LIFETIMES = "aryl:lifetime_quantile=0.9"


@cache
def ten_days(*, bursts: float = 0.0) -> Season:
    """Loads from 10 at midnight to 90 at noon, ten days alike.

    bursts: so much more in half an hour of every three, another one on every second day.
    """
    season = Season()
    for step in range(10 * 288 + 1):
        at_s = step * 300.0
        is_burst = step % 36 < 6 if step // 288 % 2 else 6 <= step % 36 < 12
        load = 50.0 - 40.0 * cos(2.0 * pi * at_s / DAY_S) + bursts * is_burst
        season = season.after(at_s, load)
    return season


def cell(jobs: list[JobView], lent: list[NodeView], *, season: Season | None = None) -> (
    ClusterSnapshot
):  # fmt: skip
    """Midnight: a service of ten nodes of 10 requests per second, some of them lent."""
    serving = [
        make_node_view(f"s{number}", role=NodeRole.SERVING, gpu_type="H100")
        for number in range(10 - len(lent))
    ]
    service = replace(
        make_service_view(capacity_per_node=10.0, load=10.0, return_s=120.0),
        season=ten_days() if season is None else season,
    )
    return make_snapshot(
        nodes=[*serving, *lent], jobs=jobs, services=[service], now_s=MIDNIGHT_S
    )  # fmt: skip


def lent_node(name: str, *jobs: str) -> NodeView:
    """A lent node with a base worker of 8 GPUs of each job."""
    workers = [make_worker_view(job, 0, name, gpus=8) for job in jobs]
    return make_node_view(name, role=NodeRole.ON_LOAN, gpu_type="H100", workers=workers)


def hours(job_id: str, count: float, *, workers: int = 1) -> JobView:
    """A waiting job of that many hours."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=8,
        remaining_work_s=count * HOUR_S * workers,
    )


def with_home(*, is_claimed: bool) -> ClusterSnapshot:
    """Nine lent nodes, a load with bursts, nine jobs of two hours, and two training nodes.

    Both are busy for ten hours; or one is free and kept for a gang that waited long.
    """
    left_s = {"t1": 10 * HOUR_S, "t2": 10 * HOUR_S}
    waiting = [
        replace(hours(f"j{number}", 1.8), submitted_at_s=MIDNIGHT_S - 5.0) for number in range(9)
    ]
    if is_claimed:
        left_s = {"t2": 0.3 * HOUR_S}
        waiting.append(replace(hours("gang", 1.0, workers=2), preemptibility=Preemptibility.NON))
    busy = [
        make_job_view(
            f"busy-{name}",
            state=JobState.RUNNING,
            gpus_per_worker=8,
            remaining_work_s=each_s,
            placed=[make_worker_view(f"busy-{name}", 0, name, gpus=8)],
        )
        for name, each_s in left_s.items()
    ]
    home = [
        make_node_view(
            name, workers=[worker for job in busy for worker in job.placed if worker.node == name]
        )
        for name in ("t1", "t2")
    ]
    lent = [lent_node(f"l{number}") for number in range(9)]
    found = cell([*busy, *waiting], lent, season=ten_days(bursts=20.0))
    return make_snapshot(
        nodes=[*home, *found.nodes], jobs=found.jobs, services=found.services, now_s=found.now_s
    )


def starts(snapshot: ClusterSnapshot, name: str = ONLY_LIFETIMES) -> list[str]:
    """Who starts."""
    decisions = policy(name).allocate(snapshot, b"").decisions
    return [decision.job_id for decision in decisions if isinstance(decision, Start)]
