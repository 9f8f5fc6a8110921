"""Gangs and growth over several GPU types: who may, on what, and only where it pays."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.errors import ConfigError
from common.jobspec import parse
from common.model import GpuRequest, JobState, NodeName, NodeRole
from coordinator.policies.contract.decisions import Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

T4_FOR_ONE = 2


def job(name: str, *, workers: tuple[int, int], ratio: float = 0.7) -> JobView:
    """Workers of one V100, or of two T4s for each where the attempt spans both."""
    plain = make_job_view(
        name, workers=workers, types=("V100", "T4"), multiplier={"T4": T4_FOR_ONE}
    )
    return replace(plain, gpu=replace(plain.gpu, heterogeneous_speed_ratio=ratio))


def running(name: str, count: int, *, most: int, ratio: float) -> tuple[JobView, list[WorkerView]]:
    """A job with so many base workers on the training node."""
    workers = [make_worker_view(name, index, "t") for index in range(count)]
    view = replace(
        job(name, workers=(count, most), ratio=ratio),
        state=JobState.RUNNING,
        gpu_type="V100",
        placed=tuple(workers),
        is_resizable=True,
    )
    return view, workers


def cluster(
    *jobs: JobView, v100: int, t4: int, workers: list[WorkerView] | None = None
) -> ClusterSnapshot:
    """One training node, and one lent node of another type."""
    training = make_node_view("t", gpu_type="V100", gpus=v100, workers=workers or [])
    lent = make_node_view("i", gpu_type="T4", gpus=t4, role=NodeRole.ON_LOAN)
    return make_snapshot(nodes=[training, lent], jobs=jobs, services=[make_service_view()])


def starts(snapshot: ClusterSnapshot) -> dict[str, dict[NodeName, int]]:
    """Workers per node of each gang that starts."""
    return {
        decision.job_id: {p.node: p.worker_count for p in decision.placements}
        for decision in policy("aryl").allocate(snapshot, b"").decisions
        if isinstance(decision, Start)
    }


def test_a_gang_spans_only_where_one_type_has_not_room_enough() -> None:
    """One type first, in the job's own order; then as many as fit there and the rest elsewhere."""
    gang = job("a", workers=(3, 3))
    assert starts(cluster(gang, v100=3, t4=8)) == {"a": {"t": 3}}
    assert starts(cluster(gang, v100=2, t4=6)) == {"a": {"i": 6}}  # whole on T4s: two for one
    assert starts(cluster(gang, v100=2, t4=2)) == {"a": {"t": 2, "i": 1}}
    assert starts(cluster(gang, v100=2, t4=1)) == {}  # one T4 stands for nothing
    assert starts(cluster(gang, v100=1, t4=3)) == {}


def test_a_job_that_may_not_span_does_not() -> None:
    """Without a ratio, and under a strict order, a gang is of one type."""
    plain = job("a", workers=(3, 3), ratio=0.0)
    assert starts(cluster(plain, v100=2, t4=2)) == {}
    strict = policy("fifo").allocate(cluster(job("a", workers=(3, 3)), v100=2, t4=2), b"")
    assert strict.decisions == ()


def test_spanning_comes_after_everybody_who_needs_one_type() -> None:
    """The T4s go to a longer job that fits there whole, not to a shorter one that would span."""
    short = job("a", workers=(3, 3))
    long = make_job_view("b", types=("T4",), gpus_per_worker=2, remaining_work_s=9e6)
    assert starts(cluster(short, long, v100=2, t4=2)) == {"b": {"i": 1}}


def test_no_gpu_is_promised_twice() -> None:
    """A worker on T4s holds two of them: of four, one taken, another job can grow by one only."""
    worker = make_worker_view("e", 0, "i")
    grower = replace(
        make_job_view("e", workers=(1, 4), types=("T4",)),
        state=JobState.RUNNING,
        gpu_type="T4",
        placed=(worker,),
        is_resizable=True,
    )
    training = make_node_view("t", gpu_type="V100", gpus=1)
    lent = make_node_view("i", gpu_type="T4", gpus=4, role=NodeRole.ON_LOAN, workers=[worker])
    snapshot = make_snapshot(
        nodes=[training, lent],
        jobs=[job("a", workers=(2, 2)), grower],
        services=[make_service_view()],
    )
    assert starts(snapshot) == {"a": {"t": 1, "i": 1}}
    decisions = policy("aryl").allocate(snapshot, b"").decisions
    added = [p.worker_count for d in decisions if isinstance(d, Resize) for p in d.added]
    assert added == [1]


@each_row(
    ("base", "most", "ratio", "grown"),
    [(4, 6, 0.7, 2), (5, 6, 0.7, 0), (5, 6, 1.0, 1), (2, 4, 0.5, 0)],
)
def test_growth_elsewhere_must_beat_the_pace_that_it_costs(
    base: int, most: int, ratio: float, grown: int
) -> None:
    """4 at full speed or 6 at 0.7 is 4.2; 5 or 4.2; 2 or 2."""
    view, workers = running("a", base, most=most, ratio=ratio)
    snapshot = cluster(view, v100=base, t4=8, workers=workers)
    decisions = policy("aryl").allocate(snapshot, b"").decisions
    added = [p for d in decisions if isinstance(d, Resize) for p in d.added]
    assert sum(p.worker_count for p in added) == grown
    assert all(p.node == "i" and p.is_flexible for p in added)


def test_what_stands_for_one_is_a_whole_number_of_gpus() -> None:
    """Types that do not divide cannot be spanned; nor can one that was not asked for."""
    gpu = GpuRequest(
        types=("A", "B", "C"),
        worker_multiplier={"A": 2, "B": 4, "C": 3},
        heterogeneous_speed_ratio=0.7,
    )
    assert gpu.gpus_for_one("B", "A") == 2
    assert gpu.gpus_for_one("A", "A") == 1
    assert gpu.gpus_for_one("C", "A") is None
    assert gpu.gpus_for_one("A", "B") is None
    assert gpu.gpus_for_one("D", "A") is None
    assert replace(gpu, heterogeneous_speed_ratio=0.0).gpus_for_one("B", "A") is None


def test_a_ratio_without_two_types_is_a_mistake() -> None:
    """The file's author meant something else."""
    given = {"name": "a", "command": ["x"], "workers": {"min": 1, "max": 1}}
    with pytest.raises(ConfigError, match=r"needs two or more types in gpu\.types"):
        parse({**given, "gpu": {"heterogeneous_speed_ratio": 0.7, "types": ["A"]}}, source="f")
    parse({**given, "gpu": {"heterogeneous_speed_ratio": 0.7, "types": ["A", "B"]}}, source="f")
