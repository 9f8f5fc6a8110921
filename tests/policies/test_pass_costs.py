"""What a pass costs grows with the fleet and with the starts, and not with their product."""

from __future__ import annotations

from functools import partial

import pytest

from coordinator.policies.registry import policy
from tests.benchmarks.bench_pass import make_cluster
from tests.policies.counted_calls import steps

FEW, MANY = 100, 400


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aryl:reservation_after_s=null", "fifo-skip"])
def test_four_times_the_nodes_cost_a_pass_at_most_four_times_as_much(name: str) -> None:
    """As many jobs wait on a small fleet as on a large one, of which each node is new.

    Without reservations: the oldest gangs have one on the small fleet alone, and fewer jobs start.
    """
    took: list[int] = []
    for nodes in (FEW, MANY):
        snapshot = make_cluster(nodes, 40)
        took.append(steps(partial(policy(name).allocate, snapshot, b"")))
    assert took[1] < MANY // FEW * took[0], took
