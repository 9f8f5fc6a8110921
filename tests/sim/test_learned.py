"""Running times that nobody knows: jobs are not stopped for each other for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.sim.run.runtime import Saves

SLICE = Path(__file__).parents[1] / "data" / "sim" / "itp_slice.csv"


@pytest.mark.parametrize("policy", ["srtf", "srsf"])
def test_what_jobs_told_of_their_pace_ends_the_stopping(policy: str) -> None:
    """Jobs that lose all their work with each stop, and whose length nobody declared: each is tried
    about once until its progress tells, and is then as long as it said."""
    workload = read_workload(str(SLICE), cluster="4x8")
    jobs = tuple(job for job in workload.jobs if job.gpus <= 16)[:40]
    options = RunOptions(policy=policy, is_oracle=False, has_delays=False, saves=Saves.NEVER)
    found = play(structs.replace(workload, jobs=jobs), options, clock=SystemClock())
    assert found.result.jobs == len(jobs)
    assert 0 < found.result.preemptions < len(jobs)
