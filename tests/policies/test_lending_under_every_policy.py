"""What no policy lends, and what comes home under every policy: of a frozen cell, in each mode of a
service, and with a GPU that is not well."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import Mode, NodeRole
from coordinator.policies.contract.decisions import Loan, Reclaim, Recommend, Resize
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import POLICIES, policy
from tests.harness.builders import (
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


@pytest.mark.parametrize("mode", list(Mode))
def test_what_is_lent_comes_home_in_every_mode(mode: Mode) -> None:
    """A service that no longer lets Aryl act has lent nodes: its load still takes them back."""
    nodes = [
        make_node_view("s0", role=NodeRole.SERVING),
        make_node_view("s1", role=NodeRole.ON_LOAN),
    ]
    service = make_service_view(load=19.0, mode=mode)
    decisions = policy("aryl").lend(make_snapshot(nodes=nodes, services=[service]))
    assert [(type(d), d.node) for d in decisions if isinstance(d, Reclaim)] == [(Reclaim, "s1")]


WANTS = make_job_view("wants", gpus_per_worker=4)


LENDING = sorted(name for name in POLICIES if POLICIES[name].parts.loan)


def cell(*sick: str, mode: Mode = Mode.ACT) -> ClusterSnapshot:
    """Two nodes that serve nobody, the longest serving first, and a job that fits beside one GPU
    that is not well."""
    nodes = [
        replace(
            make_node_view(name, role=NodeRole.SERVING, serving_since_s=since_s),
            sick_gpus=int(name in sick),
            free_gpus=8 - int(name in sick),
        )
        for name, since_s in (("n1", 1.0), ("n2", 2.0))
    ]
    service = make_service_view(mode=mode, load=0.0, min_serving=0)
    return make_snapshot(nodes=nodes, jobs=[WANTS], services=[service])


@each_row("name", LENDING)
def test_another_node_is_lent_and_none_where_there_is_no_other(name: str) -> None:
    """By every policy that lends, also by those that lend all that is spare."""
    made = policy(name)
    assert "n1" in {d.node for d in made.lend(cell()) if isinstance(d, Loan)}
    assert {d.node for d in made.lend(cell("n1")) if isinstance(d, Loan)} == {"n2"}
    assert made.lend(cell("n1", "n2")) == ()


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.RECOMMEND])
def test_its_loan_is_neither_recommended_nor_noted(mode: Mode) -> None:
    """A shadow loan of it would say that a real one had been possible."""
    decisions = policy("aryl").lend(cell("n1", mode=mode))
    assert [d.node for d in decisions if isinstance(d, Recommend)] == ["n2"]
