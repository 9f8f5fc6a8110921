"""Turns, packing and moves on a packaged slice of real jobs: figures that were measured once."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from coordinator.sim.inputs.inputs import parse_crash, read_workload
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves

SLICE = Path(__file__).parents[1] / "data" / "sim" / "itp_slice.csv"

pytestmark = pytest.mark.slow


def run(policy: str, *, jobs: int, **options: object) -> Run:
    """The first jobs of the slice on 16 nodes of 4 GPUs; all save on request."""
    workload = read_workload(str(SLICE), cluster="16x4+0x8")
    workload = structs.replace(workload, jobs=workload.jobs[:jobs])
    base = RunOptions(policy=policy, has_delays=False, saves=Saves.ON_REQUEST)
    return play(workload, structs.replace(base, **options), clock=SystemClock())


GOLDEN = {
    "fifo": (37893.4, 19107.7, 550427),
    "srtf": (22674.4, 3888.6, 590533),
    "gandiva": (26794.1, 2722.0, 562643),
}
"""Policy: mean JCT, mean queueing, makespan, in seconds, as docs/policies/gandiva.md has them."""


@pytest.mark.parametrize("policy", sorted(GOLDEN))
def test_the_figures_of_the_page_are_those_of_the_code(policy: str) -> None:
    """Whoever changes a rule sees what it does to real jobs, and mends the page."""
    found = run(policy, jobs=120).result
    jct_s, queueing_s, makespan_s = GOLDEN[policy]
    assert found.jct_s.mean == pytest.approx(jct_s, abs=0.1)
    assert found.queueing_s.mean == pytest.approx(queueing_s, abs=0.1)
    assert found.makespan_s == pytest.approx(makespan_s, abs=1.0)


def test_invariants_hold_through_turns_crashes_and_lost_messages() -> None:
    """After every single event, and all jobs end."""
    crashes = (parse_crash("t00000@5000+600"), parse_crash("t00003@20000+900"))
    found = run(
        "gandiva:slice_s=300",
        jobs=40,
        has_delays=True,
        loss_ratio=0.05,
        crashes=crashes,
        check=True,
    )
    assert found.result.jobs == 40
