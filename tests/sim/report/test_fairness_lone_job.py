"""A job that has the cluster to itself is at its bound and at rho 1, however it speeds up."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.clock import SystemClock
from coordinator.sim.report.fairness import Lived, ratios
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.workloads.records import NodeGroup, ScalingCurve, TraceJob, Workload
from coordinator.workloads.shaping import RuntimeModel
from tests.tables import each_row

CURVE = ScalingCurve(
    model="vgg16",
    gpu_type="V100",
    batch_size=64,
    points=((1, 1.0), (2, 1.9), (4, 3.4), (8, 5.0)),
)
DIPPING = structs.replace(CURVE, points=((1, 1.0), (2, 1.9), (4, 3.4), (8, 3.0)))
"""Eight GPUs are slower than four: its best time is not on all of its workers."""

JOB = TraceJob(
    job_id="a",
    submit_s=0.0,
    duration_s=3600.0,
    gpus=2,
    model="vgg16",
    batch_size=64,
    gpus_per_worker=1,
    min_workers=2,
    max_workers=8,
)


def alone(runtime: RuntimeModel, *, has_delays: bool = False) -> Run:
    """The job on a node with as many GPUs as it can use; workers may be added for nothing."""
    options = RunOptions(
        policy="aryl-elastic:resize_cost_s=0",
        has_delays=has_delays,
        speedup=runtime,
        curves={("vgg16", 64): CURVE},
    )
    nodes = (NodeGroup(count=1, gpus=8, gpu_type="V100"),)
    of = Workload(name="w", jobs=(JOB,), loads=(), nodes=nodes, length_s=10.0)
    return play(of, options, clock=SystemClock())


@each_row("runtime", list(RuntimeModel))
def test_a_lone_job_has_rho_exactly_1(runtime: RuntimeModel) -> None:
    """Without delays its time is the bound, and a private cluster would not have been faster."""
    found = alone(runtime).result
    assert found.jct_s.mean == pytest.approx(found.jct_bound_s, rel=1e-9)
    assert found.finish_time_fairness.mean == pytest.approx(1.0, rel=1e-9)
    assert found.finish_time_fairness.share_above_1 == 0.0


@each_row("runtime", list(RuntimeModel))
def test_delays_alone_make_nobody_unfair(runtime: RuntimeModel) -> None:
    """A private cluster has the same ones, and the job starts on all its workers at once."""
    found = alone(runtime, has_delays=True).result
    assert found.jct_s.mean > found.jct_bound_s
    assert found.finish_time_fairness.mean == pytest.approx(1.0, rel=1e-9)


def lived(worth: tuple[tuple[int, float], ...]) -> Lived:
    """800 GPU-seconds at a base gang of two."""
    return Lived(
        app="a", submitted_at_s=0.0, finished_at_s=1.0, alone_gpu_s=800.0, gpus=8, worth=worth
    )


def test_what_more_gpus_are_worth_decides_the_time_on_a_share() -> None:
    """Below the gang in proportion, between two sizes in proportion to both, above the last not."""
    job = lived(((2, 2.0), (4, 3.0), (8, 4.0)))
    shares = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 64.0)
    expected = (800.0, 400.0, 320.0, 800 / 3, 800 / 3.5, 200.0, 200.0)
    assert [job.running_s(share) for share in shares] == pytest.approx(expected)
    assert job.least_gpu_s == 800.0
    assert lived(((2, 2.0), (4, 5.0), (8, 5.0))).least_gpu_s == pytest.approx(640.0)


def test_the_work_of_an_app_is_counted_where_a_gpu_is_worth_most() -> None:
    """Three jobs that need 640 GPU-seconds each at their best size: 240 s on eight GPUs alone."""
    worth = ((2, 2.0), (4, 5.0), (8, 5.0))
    jobs = [structs.replace(lived(worth), finished_at_s=240.0) for _ in range(3)]
    assert ratios(jobs, 8) == {"a": pytest.approx(1.0)}


def test_workers_that_slow_a_job_down_are_not_used_on_a_share_of_its_own() -> None:
    """The best of the counts that fit counts, as in the bound."""
    of = Workload(
        name="w",
        jobs=(JOB,),
        loads=(),
        nodes=(NodeGroup(count=1, gpus=8, gpu_type="V100"),),
        length_s=10.0,
    )
    options = RunOptions(
        policy="fifo",
        has_delays=False,
        speedup=RuntimeModel.TABLE,
        curves={("vgg16", 64): DIPPING},
    )
    found = play(of, options, clock=SystemClock()).result
    slower = found.jct_s.mean / found.jct_bound_s
    assert found.finish_time_fairness.mean == pytest.approx(slower, rel=1e-9)
    assert slower > 1.0
