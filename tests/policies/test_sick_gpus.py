"""A node that serves with a GPU that is not well: no policy lends it, and its service counts it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import Mode, NodeRole
from coordinator.policies.contract.decisions import Loan, Recommend
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import POLICIES, policy
from tests.builders import make_job_view, make_node_view, make_service_view, make_snapshot
from tests.tables import each_row

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
