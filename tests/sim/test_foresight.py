"""The policy `foresight` in whole runs: all jobs end, and equal arguments give equal runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.clock import SystemClock
from coordinator.sim.report.statistics import estimate
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import play_task
from coordinator.sim.run.play import play
from tests.sim.reports import demo_task
from tests.sim.small import small

PLAY = """
import msgspec
from common.clock import SystemClock
from coordinator.sim.run.play import play
from coordinator.sim.run.build import RunOptions
from tests.sim.small import small
run = play(small(80), RunOptions(policy="foresight", seed=3, loss_ratio=0.02), clock=SystemClock())
result = msgspec.structs.replace(run.result, wall_s=0.0, peak_rss_bytes=0)
print(msgspec.json.encode((result, run.rows)).decode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss_ratio", [0.0, 0.02])
def test_every_job_ends_and_the_engine_stays_whole(loss_ratio: float) -> None:
    """Claims, lifetimes and lending by quantile leave no job behind, with messages lost or not."""
    options = RunOptions(policy="foresight", seed=1, loss_ratio=loss_ratio, check=True)
    run = play(small(80), options, clock=SystemClock())
    assert len(run.rows) == run.result.jobs
    assert run.result.reclaims_late == 0


@pytest.mark.slow
def test_the_hash_seed_changes_nothing() -> None:
    """Two processes with other hash seeds print the same bytes."""
    said = {
        subprocess.run(
            [sys.executable, "-c", PLAY],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "4242")
    }
    assert len(said) == 1


@pytest.mark.slow
def test_it_is_no_worse_than_aryl_where_nothing_is_known_yet() -> None:
    """On a day of load that nobody has seen before, jobs wait and take no longer than with `aryl`
    by more than its interval, and as many lent GPUs are used."""
    runs = {
        policy: [play_task(demo_task(policy, seed=seed)).result for seed in (1, 2, 3)]
        for policy in ("aryl", "foresight")
    }
    for figure in ("queueing_s", "jct_s"):
        aryl, ours = (
            estimate([getattr(run, figure).mean for run in runs[policy]])
            for policy in ("aryl", "foresight")
        )
        assert aryl.half_width is not None
        assert ours.mean <= aryl.mean + aryl.half_width
    lent = {policy: min(run.on_loan_gpu_ratio for run in each) for policy, each in runs.items()}
    assert lent["foresight"] >= 0.9 * lent["aryl"]
