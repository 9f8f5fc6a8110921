"""The roles of a node: what the table allows, and that nothing else happens."""

from __future__ import annotations

from itertools import product

import pytest

from common.errors import TransitionError
from common.model import NodeRole
from common.node_role_table import HEARD, NODE_TRANSITIONS, NodeEvent, next_role
from tests.common.reachable import reachable
from tests.tables import each_row

ILLEGAL_MOVES = [
    (role, event)
    for role, event in product(NodeRole, NodeEvent)
    if event not in NODE_TRANSITIONS[role]
]


def test_every_role_can_be_reached() -> None:
    """No role of a node is dead letter: each is reached from SERVING."""
    assert reachable(NODE_TRANSITIONS, NodeRole.SERVING) == set(NodeRole)


@each_row("role", NodeRole)
def test_no_role_is_a_trap(role: NodeRole) -> None:
    """From wherever a node is, there is a way back to serving."""
    assert NodeRole.SERVING in reachable(NODE_TRANSITIONS, role)


@each_row(("role", "event"), ILLEGAL_MOVES)
def test_an_illegal_move_of_a_node_is_named(role: NodeRole, event: NodeEvent) -> None:
    """What is not in the table raises, and says which node, from where, on what."""
    with pytest.raises(TransitionError) as error:
        next_role(role, event, who="n1")
    assert "n1" in str(error.value)
    assert role.value in str(error.value)
    assert event.value in str(error.value)


def test_a_loan_goes_out_and_home() -> None:
    """The life of a loan, as the design draws it."""
    role = NodeRole.SERVING
    path = [role]
    for event in (
        NodeEvent.LEND,
        NodeEvent.DRAINED,
        NodeEvent.VACATE,
        NodeEvent.DEVICE_FREE,
        NodeEvent.HEALTHY,
    ):
        role = next_role(role, event, who="n1")
        path.append(role)
    assert path == [
        NodeRole.SERVING,
        NodeRole.DRAINING,
        NodeRole.ON_LOAN,
        NodeRole.VACATING,
        NodeRole.WARMING,
        NodeRole.SERVING,
    ]


def test_a_lent_node_serves_only_after_its_device_was_free() -> None:
    """No single event takes ON_LOAN or VACATING to SERVING."""
    assert NodeRole.SERVING not in NODE_TRANSITIONS[NodeRole.ON_LOAN].values()
    assert NodeRole.SERVING not in NODE_TRANSITIONS[NodeRole.VACATING].values()


@each_row("role", [role for role in NodeRole if role is not NodeRole.LOST])
def test_a_lost_node_comes_back_as_what_it_reports(role: NodeRole) -> None:
    """Silence changes nothing on the node: it returns to the role that its agent names."""
    lost = next_role(role, NodeEvent.SILENT, who="n1")
    assert lost is NodeRole.LOST
    assert next_role(lost, HEARD[role], who="n1") is role
