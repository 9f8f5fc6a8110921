"""Figures of a run in cells where the easy reading of them would be wrong."""

from __future__ import annotations

import pytest

from common.clock import SystemClock
from coordinator.sim.run import play
from coordinator.sim.runtime import Saves
from coordinator.sim.stage import RunOptions
from coordinator.workloads.records import ScalingCurve
from coordinator.workloads.shaping import RuntimeModel
from tests.sim.test_run import job, played, workload


def test_the_bound_is_by_the_best_size_and_not_by_the_largest() -> None:
    """A measured job that is slower on four GPUs than on two has its bound by two."""
    points = ((1, 1.0), (2, 1.8), (4, 1.2))
    curve = ScalingCurve(model="m", gpu_type="V100", batch_size=8, points=points)
    measured = job(
        *("a", 0.0, 90.0, 1),
        gpus_per_worker=1,
        min_workers=1,
        max_workers=4,
        model="m",
        batch_size=8,
    )
    options = RunOptions(
        policy="sjf", has_delays=False, speedup=RuntimeModel.TABLE, curves={("m", 8): curve}
    )
    result = play(workload(measured), options, clock=SystemClock()).result
    assert result.jct_bound_s == pytest.approx(90.0 / 1.8)
    assert result.jct_bound_s <= result.jct_s.mean


def test_the_part_that_was_preempted_is_of_all_jobs_refused_ones_too() -> None:
    """One job is stopped for another, and a third is refused: one of three, not of two."""
    jobs = (
        job("long", 0.0, 500.0, 8, deadline_s=9000.0),
        job("urgent", 100.0, 50.0, 8, deadline_s=60.0),
        job("hopeless", 150.0, 500.0, 8, deadline_s=20.0),
    )
    result = played(workload(*jobs), "qos-elasticflow:margin=1", saves=Saves.ON_REQUEST).result
    assert (result.jobs, result.jobs_rejected, result.preemptions) == (3, 1, 1)
    assert result.preempted_jobs_ratio == pytest.approx(1 / 3)
