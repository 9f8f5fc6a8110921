"""What a frozen cell decides: nothing, but that services get back what their load needs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import Mode, NodeRole
from coordinator.policies.contract.decisions import Reclaim, Recommend, Resize
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import POLICIES, policy
from tests.builders import (
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.tables import each_row


def short(mode: Mode = Mode.ACT) -> ClusterSnapshot:
    """A frozen cell in which a service has no node and needs one; both of its nodes are lent.

    The flexible worker on l2 is of a job that runs in training; another job waits.
    """
    nodes, jobs = make_cluster({"l1": {"gang": 8}}, flexible={"l2": {"grown": 8}})
    home = make_node_view("t1", free_gpus=0)
    return make_snapshot(
        nodes=[*nodes, home],
        jobs=[*jobs, make_job_view("waits", gpus_per_worker=8)],
        services=[make_service_view(mode=mode, load=5.0)],
        is_frozen=True,
    )


@each_row("name", sorted(POLICIES))
def test_a_frozen_service_that_is_short_gets_its_node_back(name: str) -> None:
    """By every policy, in the way that it knows: the promise to services comes first."""
    decisions = policy(name).lend(short())
    assert len([d for d in decisions if isinstance(d, Reclaim)]) == 1
    assert policy(name).allocate(short(), b"kept").decisions == ()


def test_the_only_resize_in_a_frozen_cell_is_of_the_node_that_goes_home() -> None:
    """Its flexible worker leaves, and nothing is preempted."""
    resize, reclaim = policy("aryl").lend(short())
    assert isinstance(resize, Resize)
    assert (resize.job_id, resize.added) == ("grown", ())
    assert isinstance(reclaim, Reclaim)
    assert reclaim.node == "l2"


@pytest.mark.parametrize("mode", Mode)
def test_what_was_lent_comes_home_to_a_frozen_service_in_every_mode(mode: Mode) -> None:
    """The promise outlives the mode, and a freeze on top of it; nothing is only noted."""
    decisions = policy("aryl").lend(short(mode))
    assert [d.node for d in decisions if isinstance(d, Reclaim)] == ["l2"]
    assert not [d for d in decisions if isinstance(d, Recommend)]


@pytest.mark.parametrize("mode", Mode)
def test_nothing_is_lent_recommended_or_noted_while_frozen(mode: Mode) -> None:
    """A spare node that a job waits for stays where it is, and nobody is told what would be."""
    nodes = [
        make_node_view(name, role=NodeRole.SERVING, serving_since_s=0.0) for name in ("s1", "s2")
    ]
    wants = make_job_view("wants", gpus_per_worker=8)
    service = make_service_view(mode=mode, load=0.0)
    snapshot = make_snapshot(nodes=nodes, jobs=[wants], services=[service])
    assert len(policy("aryl").lend(snapshot)) == 1
    assert policy("aryl").lend(replace(snapshot, is_frozen=True)) == ()
