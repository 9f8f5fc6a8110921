"""Published figures of Gavel's round engine against ours, on Shockwave's 120-job trace.

Origin: the artefact of Shockwave (NSDI'23; uw-mad-dash/shockwave), 32 GPUs of one type, rounds of
120 s. There a job that did not run in the round before loses 20 s, and batch sizes grow while jobs
run; durations in the trace are those at the first batch size. The full trace is read where
ARYL_TRACES names its directory.
"""

from __future__ import annotations

import os

import pytest
from msgspec import structs

from common.clock import SystemClock
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.run.build import RunOptions, TimesTaken
from coordinator.sim.run.play import play
from coordinator.sim.run.runtime import Saves

TRACE = "shockwave/120_0.2_5_100_40_25_0-0.5-0.5_0.6-0.3-0.09-0.01_multigpu_dynamic.trace.gz"
NOTHING = TimesTaken(**dict.fromkeys(TimesTaken.__struct_fields__, 0.0))

needs_traces = pytest.mark.skipif(
    not os.environ.get("ARYL_TRACES"), reason="ARYL_TRACES names no directory of full traces"
)


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "jct_s", "makespan_s"),
    [
        ("las", 11274.117, 33207.663),
        ("themis-lp:round_s=120:spare=even", 11301.977, 31928.739),
    ],
)
def test_the_rounds_of_the_artefact_come_out(policy: str, jct_s: float, makespan_s: float) -> None:
    """Mean completion time and makespan are within 5 % of the artefact's own."""
    options = RunOptions(
        policy=policy,
        saves=Saves.ON_REQUEST,
        times=structs.replace(NOTHING, start_s=20.0),
        coalesce_s=0.0,
        engine={"min_runtime_s": 0.0, "resize_cooldown_s": 0.0},
    )
    workload = read_workload(TRACE, cluster="1x32+0x8")
    found = play(workload, options, clock=SystemClock()).result
    assert found.jct_s.mean == pytest.approx(jct_s, rel=0.05)
    assert found.makespan_s == pytest.approx(makespan_s, rel=0.05)
