"""Pollux where several workers of a type stand for one of a job's range: all counts are of that."""

from __future__ import annotations

import msgspec
import pytest

from common.model import JobState
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.grants import Plan
from coordinator.policies.parts.pooling import Pool
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.pollux.genetic_search import Problem, SearchKnobs
from coordinator.policies.schedulers.pollux.rounds import workers_after
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)


def double(*, most: int = 8) -> JobView:
    """It runs with four workers on a type of which two stand for one; its smallest gang is two."""
    return make_job_view(
        "double",
        state=JobState.RUNNING,
        workers=(1, most),
        multiplier={"H100": 2},
        placed=[make_worker_view("double", at, "n", is_flexible=at >= 2) for at in range(4)],
    )


def alone(job: JobView, *, gpus: int) -> ClusterSnapshot:
    """On a node with so many GPUs."""
    return make_snapshot(
        nodes=[make_node_view("n", gpus=gpus, workers=job.placed)], jobs=[job], now_s=NOW_S
    )


def test_a_search_counts_workers_of_the_range() -> None:
    """Each of two GPUs: what it has, what fits, and what its fair share is worth."""
    job = double()
    problem = Problem(SearchKnobs(), Pool(gpu_type="H100", gpus=12, jobs=(job,)), NOW_S)
    assert (problem.now.tolist(), problem.most.tolist()) == ([2], [6])
    assert problem.sizes.tolist() == [2]
    assert problem.values[0, 6] == pytest.approx(1.0, abs=0.05)
    assert problem.values[0, 2] == pytest.approx(2 / 6)


def test_what_a_plan_leaves_a_job_is_counted_by_its_range() -> None:
    """Two workers more are one."""
    job = double()
    more = Resize(
        job_id=job.job_id, reason="", added=(Placement(node=job.placed[0].node, worker_count=2),)
    )
    plan = Plan(decisions=(more,), holds=(), wake_at_s=None)
    pool = Pool(gpu_type="H100", gpus=12, jobs=(job,))
    assert workers_after(plan, pool).tolist() == [3]


def test_a_job_grows_to_twice_what_it_held_on_its_type() -> None:
    """From two of its range to four, which are eight workers; sixteen GPUs are there."""
    job = double()
    allocation = policy("pollux").allocate(alone(job, gpus=16), b"")
    [grown] = allocation.decisions
    assert isinstance(grown, Resize)
    assert sum(place.worker_count for place in grown.added) == 4
    assert msgspec.msgpack.decode(allocation.memory)["held"] == {"double": 2}


@pytest.mark.parametrize(("most", "is_told"), [(2, False), (8, True)])
def test_who_has_all_workers_of_its_range_is_told_of_no_limit(most: int, is_told: bool) -> None:
    """Four workers are two, and no more where two is its most."""
    job = double(most=most)
    snapshot = alone(job, gpus=16)
    found = policy("pollux")
    memory = found.allocate(snapshot, b"").memory
    assert bool(found.standing(snapshot, memory, job.job_id)) is is_told
