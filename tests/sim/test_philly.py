"""The Philly study's scheduler on a packaged slice of a real trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.model import NodeName
from coordinator.policies.contract.decisions import FAIR_SHARE, FRAGMENTATION
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.play import play

SLICE = Path(__file__).parents[1] / "data" / "sim" / "itp_slice.csv"


@pytest.mark.slow
@pytest.mark.parametrize("is_rough", [False, True], ids=["ideal", "faults, delays and failures"])
def test_every_job_ends_and_its_waiting_is_accounted_for(is_rough: bool) -> None:
    """No invariant breaks; what jobs waited for is never more than what they waited."""
    workload = read_workload(str(SLICE), cluster="4x8/2+0x8")
    workload = structs.replace(workload, jobs=workload.jobs[:50])
    crashes = (Crash(node=NodeName("t00001"), at_s=5000.0, down_s=600.0),) if is_rough else ()
    options = RunOptions(
        policy="philly",
        check=True,
        has_delays=is_rough,
        crashes=crashes,
        loss_ratio=0.05 if is_rough else 0.0,
        failures=FailureSource.PHILLY if is_rough else FailureSource.NONE,
    )
    result = play(workload, options, clock=SystemClock()).result
    assert (result.jobs_failed > 0) == is_rough
    kinds = {kind for size in result.waits.values() for kind in size}
    assert kinds <= {FAIR_SHARE, FRAGMENTATION}
    waited_s = sum(each.waited_s for size in result.waits.values() for each in size.values())
    assert waited_s > 0
    if not is_rough:
        assert waited_s <= result.queueing_s.mean * result.jobs + 1.0
