"""A keeper waits for an answer while its node goes on: what is said of one lease is of no other."""

from __future__ import annotations

import pytest

from common.model import LeaseId, NodeRole
from tests.agent.bench import Bench, lease

OLD, NEW = LeaseId("l1-1"), LeaseId("l1-2")


@pytest.fixture
def bench() -> Bench:
    """A node on its way to its second loan."""
    bench = Bench()
    bench.serve()
    bench.want(NodeRole.ON_LOAN, lease=lease(NEW))
    bench.step()
    return bench


def test_a_grant_of_one_lease_prolongs_no_other(bench: Bench) -> None:
    """Nobody granted the one that the node has, so its loan is not confirmed."""
    bench.life.renewed(OLD, bench.now_s + 1000.0)
    assert bench.memory.lease_until_s is None


def test_a_refusal_of_one_lease_ends_no_other(bench: Bench) -> None:
    """The one that the node has was granted: it goes on loan."""
    bench.life.refused(OLD, "the load rises")
    bench.life.renewed(NEW, bench.now_s + 1000.0)
    bench.steps(6)
    assert bench.role() == NodeRole.ON_LOAN
