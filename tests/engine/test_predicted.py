"""What an order of a person is predicted to cost, and what then comes of it."""

from __future__ import annotations

import pytest

from common.model import NodeName
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Decision, Loan, Reclaim
from tests.engine.house import CHAT, House

RAN_S = 100.0


def lent(house: House, *nodes: str) -> None:
    """Nodes that are on loan."""
    house.decide(
        *(Loan(node=NodeName(node), service=CHAT, reason="idle") for node in nodes), lend=True
    )
    house.wait(10.0)


def asked(house: House, action: OperatorAction, target: str = "") -> list[Reclaim]:
    """What a person's order takes back."""
    event = OperatorAsked(action=action, by="ops/ada", target=target)
    heard: list[Decision] = []
    house.sim.hear = heard.extend
    house.sim.handle(event)
    house.sim.hear = None
    return [decision for decision in heard if isinstance(decision, Reclaim)]


def loans(house: House) -> list[LoanEntry]:
    """In the order in which they were made."""
    return list(house.engine.state.loans.values())


def test_a_revoke_says_what_it_is_predicted_to_cost() -> None:
    """A job that saves nothing loses what it has computed; the loan bears as much."""
    house = House()
    lent(house, "i0")
    job = house.submit()
    house.start(job, "i0")
    house.wait(RAN_S)
    ran_s = house.sim.loop.now_s - (job.attempt.ran_at_s or 0.0)
    [loan] = loans(house)
    [order] = asked(house, OperatorAction.REVOKE_LOAN, loan.lease_id)
    assert order.predicted_preemptions == 1
    assert order.predicted_cost_gpu_s == pytest.approx(8 * ran_s)
    assert loan.predicted_cost_gpu_s == order.predicted_cost_gpu_s
    house.wait(100.0)
    assert loan.realised_preemptions == loan.predicted_preemptions
    assert loan.realised_cost_gpu_s >= loan.predicted_cost_gpu_s > 0


def test_a_recall_counts_a_job_on_two_nodes_once() -> None:
    """The first node's order stops it; the second one costs nothing more."""
    house = House()
    lent(house, "i0", "i1")
    job = house.submit(workers=(2, 2))
    house.start(job, "i0", "i1")
    house.wait(RAN_S)
    orders = asked(house, OperatorAction.RECALL)
    assert [order.predicted_preemptions for order in orders] == [1, 0]
    assert orders[0].predicted_cost_gpu_s > 0
    assert orders[1].predicted_cost_gpu_s == 0.0
    assert [loan.realised_preemptions for loan in loans(house)] == [1, 0]


def test_flexible_workers_are_released_and_cost_nothing() -> None:
    """The job goes on with its base gang."""
    house = House()
    lent(house, "i0")
    job = house.submit(workers=(1, 2))
    house.start(job, "t0", flexible=("i0",))
    house.wait(RAN_S)
    [order] = asked(house, OperatorAction.RECALL, CHAT)
    assert (order.predicted_preemptions, order.predicted_cost_gpu_s) == (0, 0.0)
    assert order.released_workers == 1


def test_a_gang_that_has_not_run_is_no_preemption() -> None:
    """It waits again and loses nothing, as it is counted when the order is carried out."""
    house = House()
    lent(house, "i0")
    job = house.submit(workers=(2, 2))
    house.toggle_deaf(NodeName("t0"))
    house.start(job, "i0", "t0")
    [order] = asked(house, OperatorAction.RECALL)
    assert order.predicted_preemptions == 0
    assert loans(house)[0].realised_preemptions == 0
