"""Life cycles: what the tables allow, and that nothing else happens."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import TypeVar

import pytest

from common.errors import TransitionError
from common.lifecycle import (
    HEARD,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    JobEvent,
    NodeEvent,
    advance,
)
from common.model import FINAL_JOB_STATES, JobState, NodeRole
from tests.tables import each_row

ILLEGAL_NODE_MOVES = [
    (role, event)
    for role, event in product(NodeRole, NodeEvent)
    if event not in NODE_TRANSITIONS[role]
]
ILLEGAL_JOB_MOVES = [
    (state, event)
    for state, event in product(JobState, JobEvent)
    if event not in JOB_TRANSITIONS[state]
]


State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def reachable(table: Mapping[State, Mapping[Event, State]], start: State) -> set[State]:
    """Every state that some sequence of events leads to."""
    found = {start}
    edge = [start]
    while edge:
        for state in table[edge.pop()].values():
            if state not in found:
                found.add(state)
                edge.append(state)
    return found


def test_every_role_can_be_reached() -> None:
    """No role of a node is dead letter: each is reached from SERVING."""
    assert reachable(NODE_TRANSITIONS, NodeRole.SERVING) == set(NodeRole)


def test_every_job_state_can_be_reached() -> None:
    """Each job state is reached from PENDING."""
    assert reachable(JOB_TRANSITIONS, JobState.PENDING) == set(JobState)


@each_row("role", NodeRole)
def test_no_role_is_a_trap(role: NodeRole) -> None:
    """From wherever a node is, there is a way back to serving."""
    assert NodeRole.SERVING in reachable(NODE_TRANSITIONS, role)


@each_row("state", JobState)
def test_a_job_can_always_end_and_an_ended_job_stays(state: JobState) -> None:
    """Every live state leads to each final one that is left; a final state knows no event."""
    if state in FINAL_JOB_STATES:
        assert reachable(JOB_TRANSITIONS, state) == {state}
    else:
        assert reachable(JOB_TRANSITIONS, state) >= FINAL_JOB_STATES


@each_row(("role", "event"), ILLEGAL_NODE_MOVES)
def test_an_illegal_move_of_a_node_is_named(role: NodeRole, event: NodeEvent) -> None:
    """What is not in the table raises, and says which node, from where, on what."""
    with pytest.raises(TransitionError) as error:
        advance(NODE_TRANSITIONS, role, event, who="n1")
    assert "n1" in str(error.value)
    assert role.value in str(error.value)
    assert event.value in str(error.value)


@each_row(("state", "event"), ILLEGAL_JOB_MOVES)
def test_an_illegal_move_of_a_job_is_named(state: JobState, event: JobEvent) -> None:
    """What is not in the table raises, and says which job, from where, on what."""
    with pytest.raises(TransitionError) as error:
        advance(JOB_TRANSITIONS, state, event, who="j1")
    assert "j1" in str(error.value)
    assert state.value in str(error.value)
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
        role = advance(NODE_TRANSITIONS, role, event, who="n1")
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
    lost = advance(NODE_TRANSITIONS, role, NodeEvent.SILENT, who="n1")
    assert lost is NodeRole.LOST
    assert advance(NODE_TRANSITIONS, lost, HEARD[role], who="n1") is role
