"""The line that waits as a part of the knapsack's value: what it weighs, and whom it lets grow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.model import JobState, NodeRole
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.queue_weight import queue_weight
from coordinator.policies.contract.decisions import Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view


def running(name: str, *, gang: int, most: int, work_s: float, flexible: int = 0) -> JobView:
    """A job whose base gang of one GPU each runs on the one node, with flexible workers or not."""
    return make_job_view(
        name,
        state=JobState.RUNNING,
        workers=(gang, most),
        remaining_work_s=work_s,
        placed=[
            make_worker_view(name, index, "n1", is_flexible=index >= gang)
            for index in range(gang + flexible)
        ],
    )


def crowd(count: int, *, types: tuple[str, ...] = ()) -> list[JobView]:
    """Jobs that wait and fit nowhere."""
    return [
        make_job_view(f"waits{number}", workers=(2, 2), gpus_per_worker=8, types=types)
        for number in range(count)
    ]


def cell(*waiting: JobView) -> ClusterSnapshot:
    """Eight GPUs, one of them free: a worker more saves `narrow` 100 s and `wide` 90 s."""
    jobs = [
        running("narrow", gang=1, most=2, work_s=200.0),
        running("wide", gang=4, most=5, work_s=1800.0),
        running("fixed", gang=2, most=2, work_s=9000.0),
    ]
    return on_one_node(jobs, waiting)


def on_one_node(jobs: Sequence[JobView], waiting: Sequence[JobView]) -> ClusterSnapshot:
    """Those that run and those that wait."""
    workers = [worker for job in jobs for worker in job.placed]
    node = make_node_view("n1", role=NodeRole.TRAINING, workers=workers)
    return make_snapshot(nodes=[node], jobs=[*jobs, *waiting])


def who_grows(snapshot: ClusterSnapshot, name: str) -> list[str]:
    """Jobs that get a worker more."""
    decisions = policy(name).allocate(snapshot, b"").decisions
    return [each.job_id for each in decisions if isinstance(each, Resize) and each.added]


@pytest.mark.parametrize(("part", "weight"), [(1.0, 6.0), (0.5, 3.5)])
def test_a_second_counts_for_whoever_moves_up_by_it(part: float, weight: float) -> None:
    """Ten jobs wait for eight GPUs: when four come free a second sooner, that is five in all."""
    snapshot = cell(*crowd(10))
    weigh = queue_weight(PlacementState(snapshot), part)
    assert weigh is not None
    (wide,) = (job for job in snapshot.jobs if job.job_id == "wide")
    assert weigh(wide, "H100") == weight


def test_only_the_line_for_its_gpu_type_counts() -> None:
    """Those who wait for other GPUs are not helped by these."""
    snapshot = cell(*crowd(10, types=("T4",)))
    weigh = queue_weight(PlacementState(snapshot), 1.0)
    assert weigh is not None
    assert {weigh(job, "H100") for job in snapshot.jobs if job.gpu_type} == {1.0}


def test_the_job_that_frees_more_grows_where_others_wait() -> None:
    """A free GPU goes to the job that saves itself most, as in the paper; with the knob turned and
    a line behind, to the one whose gang keeps more GPUs from it."""
    for name in ("aryl", "aryl:queue_weight=1"):
        assert who_grows(cell(), name) == ["narrow"]
    assert who_grows(cell(*crowd(10)), "aryl") == ["narrow"]
    assert who_grows(cell(*crowd(10)), "aryl:queue_weight=1") == ["wide"]


def test_the_job_that_frees_more_keeps_its_workers_where_others_wait() -> None:
    """Room for a base gang is made where least is lost: of the job itself, as in the
    paper, or of
    the line as well."""
    jobs = [
        running("narrow", gang=1, most=2, work_s=200.0, flexible=1),
        running("wide", gang=4, most=5, work_s=1800.0, flexible=1),
        running("fixed", gang=1, most=1, work_s=9000.0),
    ]
    snapshot = on_one_node(jobs, [make_job_view("small", remaining_work_s=60.0), *crowd(10)])

    def who_shrinks(name: str) -> list[str]:
        decisions = policy(name).allocate(snapshot, b"").decisions
        return [each.job_id for each in decisions if isinstance(each, Resize)]

    assert who_shrinks("aryl") == ["wide"]
    assert who_shrinks("aryl:queue_weight=1") == ["narrow"]


def test_a_job_that_starts_is_weighed_like_one_that_runs() -> None:
    """Of two that start in one pass the one with the larger gang gets the GPU that is left."""
    starting = [
        make_job_view("narrow", workers=(1, 2), remaining_work_s=200.0),
        make_job_view("wide", workers=(4, 5), remaining_work_s=1800.0),
    ]
    fixed = running("fixed", gang=2, most=2, work_s=9000.0)
    snapshot = on_one_node([fixed], [*starting, *crowd(10)])

    def workers(name: str) -> dict[str, int]:
        decisions = policy(name).allocate(snapshot, b"").decisions
        return {
            each.job_id: sum(placement.worker_count for placement in each.placements)
            for each in decisions
            if isinstance(each, Start)
        }

    assert workers("aryl") == {"narrow": 2, "wide": 4}
    assert workers("aryl:queue_weight=1") == {"narrow": 1, "wide": 5}
