"""A gang is whole or absent: no policy starts a part of one, and the engine runs and keeps none."""

from __future__ import annotations

import pytest
from hypothesis import settings

from common.messages import OrderPhase
from common.model import JobState, NodeName
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import Policy
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, state
from tests.properties.safety import every_policy, often, settle


@pytest.mark.slow
@settings(often, max_examples=300)
@every_policy
def test_no_policy_starts_a_part_of_a_gang(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """A start has exactly the base gang, at most the largest, on nodes of one accepted type."""
    ledger, decisions = settle(snapshot, policy)
    for start in (decision for decision in decisions if isinstance(decision, Start)):
        job = ledger.jobs[start.job_id]
        span = job.workers_on(start.gpu_type)
        assert job.accepts(start.gpu_type)
        assert {ledger.nodes[p.node].gpu_type for p in start.placements} == {start.gpu_type}
        assert sum(p.worker_count for p in start.placements if not p.is_flexible) == span.min
        assert sum(p.worker_count for p in start.placements) <= span.max


def test_nobody_runs_before_every_node_of_the_gang_is_ready() -> None:
    """While one node is not ready, no order of the gang says run."""
    harness = EngineHarness(delays=Delays(ready_s=10.0))
    job = harness.submit(workers=(2, 2))
    harness.start(job, "t0", "t1")
    harness.wait(5.0)
    assert state(job) == JobState.STARTING
    orders = [
        order for name in ("t0", "t1") for order in harness.engine.desired(NodeName(name)).workers
    ]
    assert [order.phase for order in orders] == [OrderPhase.RESERVE, OrderPhase.RESERVE]
    harness.wait(6.0)
    assert state(job) == JobState.RUNNING


def test_one_failed_worker_stops_the_rest_of_its_gang() -> None:
    """No GPU stays with a gang that is not whole."""
    harness = EngineHarness()
    job = harness.submit(workers=(2, 2))
    harness.start(job, "t0", "t1")
    harness.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 1)
    harness.settle()
    assert state(job) == JobState.FAILED
    assert all(slot.holder is None for name in ("t0", "t1") for slot in harness.node(name).gpus)
