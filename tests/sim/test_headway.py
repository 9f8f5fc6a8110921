"""A run in which jobs only take turns at being stopped is ended; how patient it is can be said."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.sim.inputs import parse_cluster
from coordinator.sim.run import play
from coordinator.sim.runtime import Saves
from coordinator.sim.stage import RunOptions
from tests.sim.small import small


def test_long_jobs_in_short_turns_need_more_patience() -> None:
    """Too many facts without a job's end are no headway, unless the run is told to wait longer."""
    some = small(2)
    jobs = tuple(structs.replace(job, submit_s=0, gpus=4, duration_s=20_000) for job in some.jobs)
    workload = structs.replace(some, jobs=jobs, loads=(), nodes=parse_cluster("1x4+0x8"))
    options = RunOptions(policy="gandiva-sets", has_delays=False, saves=Saves.ON_REQUEST)
    impatient = structs.replace(options, idle_events=0)
    with pytest.raises(ConfigError, match="makes no headway"):
        play(workload, impatient, clock=SystemClock())
    assert play(workload, options, clock=SystemClock()).result.jobs == len(jobs)
