"""What a pass costs: it grows with the fleet and with the starts, not with their product, and what
it looked at goes as the pass ends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest

from common.model import NodeRole
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import policy
from tests.benchmarks.bench_pass import make_cluster as bench_cluster
from tests.harness.builders import (
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.policies.counted_calls import steps
from tests.tables import each_row

FEW, MANY = 100, 400


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aryl:reservation_after_s=null", "fifo-skip"])
def test_four_times_the_nodes_cost_a_pass_at_most_four_times_as_much(name: str) -> None:
    """As many jobs wait on a small fleet as on a large one, of which each node is new.

    Without reservations: the oldest gangs have one on the small fleet alone, and fewer jobs start.
    """
    took: list[int] = []
    for nodes in (FEW, MANY):
        snapshot = bench_cluster(nodes, 40)
        took.append(steps(partial(policy(name).allocate, snapshot, b"")))
    assert took[1] < MANY // FEW * took[0], took


def busy_cell() -> ClusterSnapshot:
    """Base and flexible workers, a job that starts, and one that waits for what could be lent."""
    nodes, jobs = make_cluster({"n1": {"base": 2}, "n2": {"wide": 4}}, flexible={"n3": {"wide": 2}})
    nodes = [*nodes, make_node_view("n4"), make_node_view("n5")]
    nodes += [make_node_view(name, role=NodeRole.SERVING) for name in ("s1", "s2", "s3")]
    small = make_job_view("a small one", gpus_per_worker=1, workers=(1, 4))
    large = make_job_view("large one", gpus_per_worker=8, workers=(3, 3))
    services = [make_service_view(load=0.0, min_serving=0)]
    return make_snapshot(nodes=nodes, jobs=[*jobs, small, large], services=services)


def garbage_of(run: Callable[[], object]) -> int:
    """Objects that only the search for garbage finds after a call; what it makes once, such as
    what is remembered of a module, is made before."""
    run()
    gc.collect()
    gc.disable()
    try:
        run()
        return gc.collect()
    finally:
        gc.enable()


@each_row("name", ["fifo", "sjf", "aryl", "foresight", "aryl-loan"])
def test_a_scheduling_pass_leaves_no_garbage(name: str) -> None:
    """All that it made goes with it: what it saw of the cluster would else stay for thousands of
    passes."""
    bundle, snapshot = policy(name), busy_cell()
    assert garbage_of(lambda: bundle.allocate(snapshot, b"")) == 0
    assert bundle.allocate(snapshot, b"").decisions


@pytest.mark.parametrize("name", ["aryl", "aryl-loan"])
def test_a_loan_pass_leaves_no_garbage(name: str) -> None:
    """As a scheduling pass, of which it tries one first."""
    bundle, snapshot = policy(name), busy_cell()
    assert garbage_of(lambda: bundle.lend(snapshot)) == 0
    assert bundle.lend(snapshot)
