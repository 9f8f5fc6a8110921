"""ElasticFlow's Figure 8(a), published by its authors, against the engine.

195 jobs of the ITP trace with deadlines on 16 nodes of 4 T4, any number of GPUs by measured scaling
curves (pkusys/ElasticFlow). Read where ARYL_TRACES names the directory of full traces.
"""

from __future__ import annotations

import os

import pytest

from coordinator.sim.run.compare import play_task
from docs.research.golden_elasticflow import ROWS, task

needs_traces = pytest.mark.skipif(
    not os.environ.get("ARYL_TRACES"), reason="ARYL_TRACES names no directory of full traces"
)


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("row", [name for name, each in ROWS.items() if each.is_comparable])
def test_the_published_shares_of_jobs_in_time_come_out(row: str) -> None:
    """Whoever plays the figure with our engine meets as many deadlines, within 0.02."""
    found = play_task(task(row)).result.deadlines_met_ratio
    assert found == pytest.approx(ROWS[row].published, abs=0.02)
