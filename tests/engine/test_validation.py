"""`aryl node uncordon` of a node in quarantine: its agent is told to check now, by a new number."""

from __future__ import annotations

import pytest
from msgspec import UNSET, UnsetType

from common.messages import DesiredState, decode, encode
from common.model import NodeRole, Pool
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import LeaderStarted, OperatorAction, OperatorAsked
from tests.engine.scripted_nodes import N, Reporting, service, settings

A = OperatorAction


def ask(cell: Reporting, action: A) -> None:
    """An operator's order to the node."""
    cell.handle(OperatorAsked(action=action, by="ops/me", target=N, reason="mended"))


def told(cell: Reporting) -> int | UnsetType:
    """What the node is sent of it, as its agent reads it."""
    return decode(encode(cell.engine.desired(N)), DesiredState).validation


def quarantined(pool: Pool = Pool.INFERENCE) -> Reporting:
    """A node that says that it is in quarantine."""
    cell = Reporting(pool, *([service()] if pool == Pool.INFERENCE else []))
    cell.role = NodeRole.QUARANTINED
    cell.report()
    return cell


@pytest.mark.parametrize("pool", list(Pool))
def test_an_uncordon_of_a_node_in_quarantine_is_an_order_to_it(pool: Pool) -> None:
    """A new desired state carries it, until the node is heard in another role."""
    cell = quarantined(pool)
    generation = cell.node.desired.generation
    assert told(cell) is UNSET
    ask(cell, A.UNCORDON)
    assert cell.node.desired.generation > generation
    assert told(cell) is not UNSET
    cell.role = cell.node.home_role
    cell.report()
    assert told(cell) is UNSET


@pytest.mark.parametrize("action", [A.CORDON, A.DRAIN])
def test_no_other_order_ends_a_quarantine(action: A) -> None:
    """Least of all one that keeps work away."""
    cell = quarantined()
    ask(cell, action)
    assert told(cell) is UNSET


def test_an_uncordon_of_a_node_that_is_well_is_none_for_its_next_quarantine() -> None:
    """Agents are told nothing then, so that one of an older version takes its orders."""
    cell = Reporting(Pool.INFERENCE, service())
    ask(cell, A.UNCORDON)
    cell.role = NodeRole.QUARANTINED
    cell.report()
    assert told(cell) is UNSET


def test_each_uncordon_has_a_number_of_its_own() -> None:
    """Also two within a second, and the first of a coordinator whose journal was lost."""
    cell = quarantined()
    numbers: list[int | UnsetType] = []
    for _ in range(3):
        ask(cell, A.UNCORDON)
        cell.now_s -= 0.9
        numbers.append(told(cell))
    cell.now_s += 10.0
    epoch = cell.engine.state.epoch
    cell.engine = Engine(settings(service()))
    cell.handle(LeaderStarted(epoch=epoch + 1, holder="t2", settings=settings(service())))
    cell.report()
    assert told(cell) is UNSET
    ask(cell, A.UNCORDON)
    numbers.append(told(cell))
    assert len(set(numbers)) == len(numbers)
