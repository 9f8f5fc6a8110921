"""What the fleet as it is could never run: known anew after each change of the fleet."""

from __future__ import annotations

from common.model import NodeName
from tests.engine.scripted_nodes import BlackHole


def test_what_could_never_run_can_when_a_node_joins() -> None:
    """Who asked before is answered by the fleet as it is now."""
    cell = BlackHole(nodes=1)
    job = cell.submit("gang", workers=2, gpus=2)
    [why] = cell.engine.explain.why_never(job.job_id)
    assert why.startswith("can never run here")
    cell.boots[NodeName("t1")] = "b1"
    cell.report("t1")
    assert cell.engine.explain.why_never(job.job_id) == ()


def test_what_could_never_run_can_when_a_node_has_more_gpus() -> None:
    """One that was added to it, or that it did not see before."""
    cell = BlackHole(nodes=1)
    job = cell.submit("large", gpus=3)
    assert cell.engine.explain.why_never(job.job_id)
    cell.report("t0", gpus=("x0", "x1", "x2"))
    assert cell.engine.explain.why_never(job.job_id) == ()
