"""Invariants of nodes that are left alone for a while: a state that breaks one is told."""

from __future__ import annotations

from collections.abc import Callable

from common.model import NodeName
from coordinator.engine.engine import Engine
from coordinator.engine.nodes.start_failures import MOST
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import ClusterState
from tests.engine.scripted_nodes import BlackHole
from tests.tables import each_row

T0, GONE = NodeName("t0"), NodeName("gone")


def closed_and_drained() -> Engine:
    """t0 refused too many starts, and is drained by a deadline that is to come."""
    cell = BlackHole(nodes=1)
    for number in range(MOST):
        cell.submit(f"j{number}")
        cell.passes()
    cell.handle(OperatorAsked(action=OperatorAction.DRAIN, by="ops/ada", target=T0, deadline_s=1e6))
    state = cell.engine.state
    assert state.nodes[T0].failed_starts.closed_reason
    assert set(state.closed_until_s) == set(state.drains) == {T0}
    return cell.engine


def _for_ever(state: ClusterState) -> None:
    del state.closed_until_s[T0]


def _without_reason(state: ClusterState) -> None:
    state.nodes[T0].failed_starts.closed_reason = ""


def _closed_stranger(state: ClusterState) -> None:
    state.closed_until_s[GONE] = 1e6


def _drained_stranger(state: ClusterState) -> None:
    state.drains[GONE] = state.drains[T0]


def _deadline_alone(state: ClusterState) -> None:
    state.nodes[T0].cordon.is_draining = False


@each_row(
    ("spoil", "told"),
    [
        (_for_ever, "t0 is closed for ever"),
        (_without_reason, "t0 opens again, and is not closed"),
        (_closed_stranger, "gone is closed or drained, and no node of the cell"),
        (_drained_stranger, "gone is closed or drained, and no node of the cell"),
        (_deadline_alone, "t0 has the deadline of a drain, and is not drained"),
    ],
)
def test_a_state_that_would_leave_a_node_alone_by_mistake_is_told(
    spoil: Callable[[ClusterState], None], told: str
) -> None:
    """Each half without the other, and what is left of a node that was removed."""
    engine = closed_and_drained()
    assert engine.check(are_copies_too=False) == []
    spoil(engine.state)
    [fault] = engine.check(are_copies_too=False)
    assert fault.startswith(told)
