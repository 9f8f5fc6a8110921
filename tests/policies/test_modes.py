"""What a service's mode changes, and what it never does."""

from __future__ import annotations

import pytest

from common.model import Mode, NodeRole
from coordinator.policies.contract.decisions import Reclaim
from coordinator.policies.registry import policy
from tests.builders import make_node_view, make_service_view, make_snapshot


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
