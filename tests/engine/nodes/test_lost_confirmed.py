"""A lent node that an operator vouches is dead: its loan is over, and nobody waits for it."""

from __future__ import annotations

import pytest

from common.model import JobState, NodeRole, Pool
from coordinator.engine.state.events import NodeSilent, OperatorAction, OperatorAsked
from coordinator.engine.state.loan_outcome import overdue_s
from coordinator.engine.state.tables import LoanEntry
from coordinator.service.api.rows import loan_row
from tests.harness.cluster.engine import state
from tests.harness.cluster.scripted_nodes import N, Reporting, service

DEADLINE_S = 600.0


def lost_on_loan() -> tuple[Reporting, LoanEntry]:
    """A lent node with a job that fell silent, and its loan."""
    cell = Reporting(Pool.INFERENCE, service(reclaim_deadline_s=DEADLINE_S))
    job = cell.submit("j")
    lease_id = cell.lend()
    cell.run(job)
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    assert cell.node.role == NodeRole.LOST
    return cell, cell.engine.state.loans[lease_id]


def ask(cell: Reporting, action: OperatorAction, target: str = "") -> None:
    """An operator's order."""
    cell.handle(OperatorAsked(action=action, by="ops/ada", target=target))


def test_its_loan_ends_with_it_and_its_job_waits_again() -> None:
    """Free of charge, as of any node that died."""
    cell, loan = lost_on_loan()
    ask(cell, OperatorAction.CONFIRM_DEAD, N)
    assert loan_row(loan, now_s=cell.now_s).state == "ended"
    assert loan.ended_reason == "its node was confirmed dead by ops/ada"
    assert (cell.node.lease, cell.node.desired.role) == (None, NodeRole.SERVING)
    job = cell.engine.state.jobs[next(iter(cell.engine.state.jobs))]
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 1)


@pytest.mark.parametrize("is_recalled_first", [False, True])
def test_nothing_ever_waits_for_it_to_come_home(is_recalled_first: bool) -> None:
    """Whatever was ordered before or is ordered after it, the loan is not late for ever."""
    cell, loan = lost_on_loan()
    orders = [(OperatorAction.RECALL, ""), (OperatorAction.CONFIRM_DEAD, str(N))]
    for action, target in orders if is_recalled_first else reversed(orders):
        ask(cell, action, target)
    much_later_s = cell.now_s + 10.0 * DEADLINE_S
    assert (loan_row(loan, now_s=much_later_s).state, overdue_s(loan, much_later_s)) == ("ended", 0)
    assert cell.engine.state.counters.reclaims_late == 0


def test_one_that_was_late_when_it_was_given_up_stays_late() -> None:
    """Its service went without it for longer than was promised: that is not wiped out."""
    cell, loan = lost_on_loan()
    ask(cell, OperatorAction.RECALL)
    cell.now_s += DEADLINE_S
    ask(cell, OperatorAction.CONFIRM_DEAD, N)
    assert cell.engine.state.counters.reclaims_late == 1
    assert loan_row(loan, now_s=cell.now_s).is_late


def test_one_that_is_heard_after_all_is_told_to_serve_and_gives_its_lease_up() -> None:
    """It was the network: the lease of before is not renewed and not taken up again."""
    cell, loan = lost_on_loan()
    ask(cell, OperatorAction.CONFIRM_DEAD, N)
    cell.report(is_current=False)
    assert cell.node.role == NodeRole.ON_LOAN
    assert cell.engine.may_renew(N, loan.lease_id) == "the loan was called back"
    desired = cell.engine.desired(N)
    assert (desired.role, desired.lease) == (NodeRole.SERVING, None)
    assert [order.key for order in desired.workers] == []
    ended_at_s, cell.lease_id, cell.workers = loan.returned_at_s, None, ()
    for cell.role in (NodeRole.VACATING, NodeRole.WARMING, NodeRole.SERVING):
        cell.report()
    assert loan.returned_at_s == ended_at_s
    assert len(cell.engine.state.loans) == 1
    assert cell.engine.state.counters.reclaims == 0
