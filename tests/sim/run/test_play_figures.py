"""Figures of a run in cells where the easy reading of them would be wrong."""

from __future__ import annotations

import pytest

from common.clock import SystemClock
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import ScalingCurve
from coordinator.workloads.shaping import RuntimeModel
from tests.sim.run.test_play import job, played, workload


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


EXACT = "qos-elasticflow:margin=1"
PROMISED = (
    job("first", 0.0, 500.0, 8, deadline_s=600.0),
    job("second", 0.0, 500.0, 8, deadline_s=1005.0),
    job("hopeless", 0.0, 500.0, 8, deadline_s=20.0),
)
"""The second is promised a start at 500 s; where starts take time, of which the cell was not told,
that is too late."""
UNTOLD = {"start_p99_s": 0.0, "restart_p99_s": 0.0, "resize_p99_s": 0.0}


@pytest.mark.parametrize(("has_delays", "missed"), [(False, 0), (True, 1)])
def test_promises_and_broken_ones_are_counted(has_delays: bool, missed: int) -> None:
    """Of three jobs two are promised their deadlines; one that is late all the same counts."""
    options = RunOptions(policy=EXACT, has_delays=has_delays, check=True, engine=UNTOLD)
    run = play(workload(*PROMISED), options, clock=SystemClock())
    result = run.result
    assert (result.promised, result.promises_missed, result.jobs_rejected) == (2, missed, 1)
    late = [row for row in run.rows if row.is_promised and row.jct_s > (row.deadline_s or 0.0)]
    assert len(late) == missed


def test_what_cannot_be_kept_is_not_promised() -> None:
    """Told what a start takes a cell refuses the second job instead of breaking its word."""
    result = played(workload(*PROMISED), EXACT, has_delays=True).result
    assert (result.promised, result.promises_missed, result.jobs_rejected) == (1, 0, 2)


def test_where_nobody_promises_there_is_nothing_to_break() -> None:
    """Neither figure is told of a policy that promises nothing, though deadlines are missed."""
    run = played(workload(*PROMISED), "fifo")
    assert (run.result.promised, run.result.promises_missed) == (None, None)
    assert [row.is_promised for row in run.rows] == [False] * 3


def test_what_was_promised_is_no_part_of_a_life() -> None:
    """Policies that treat all jobs alike are alike, though one of them promised something."""
    jobs = workload(*PROMISED[:2])
    assert played(jobs, "fifo").fingerprint == played(jobs, EXACT).fingerprint
