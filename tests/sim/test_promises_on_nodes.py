"""Promises on nodes whose free GPUs are in pieces, played."""

from __future__ import annotations

from common.clock import SystemClock
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import NodeGroup
from tests.sim.run.test_play import job, workload

JOBS = (
    job("a", 0.0, 5000.0, 2, deadline_s=20_000.0),
    job("x", 1.0, 100.0, 2, deadline_s=10_000.0),
    job("b", 2.0, 5000.0, 2, deadline_s=20_000.0),
    job("y", 3.0, 100.0, 2, deadline_s=10_000.0),
    job("whole", 1000.0, 600.0, 4, deadline_s=900.0),
)
"""Pairs on each of two nodes of four; half of both is free when a job of a whole node comes."""


def played(policy: str) -> Run:
    """With delays, and the invariants looked at after every event."""
    options = RunOptions(policy=policy, has_delays=True, saves=Saves.ON_REQUEST, check=True)
    nodes = (NodeGroup(count=2, gpus=4, gpu_type="V100"),)
    return play(workload(*JOBS, nodes=nodes), options, clock=SystemClock())


def test_a_promise_is_kept_as_another_job_moves() -> None:
    """It would wait for hours beside its GPUs; the one that moves is in time as well."""
    still = played("qos-elasticflow:migrates=false").result
    found = played("qos-elasticflow").result
    assert (still.promised, still.promises_missed, still.migrations) == (5, 1, 0)
    assert (found.promised, found.promises_missed, found.migrations) == (5, 0, 1)
    assert (found.preemptions, found.deadlines_met_ratio) == (0, 1.0)
