"""The policy `foresight` in whole runs: all jobs end, and equal arguments give equal runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.clock import SystemClock
from coordinator.sim.run import play
from coordinator.sim.stage import RunOptions
from tests.sim.small import small

PLAY = """
import msgspec
from common.clock import SystemClock
from coordinator.sim.run import play
from coordinator.sim.stage import RunOptions
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
