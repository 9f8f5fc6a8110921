"""A frozen cell: it decides nothing, but no service waits for its nodes because of that."""

from __future__ import annotations

from common.model import JobState, NodeRole, Pool
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    LoadMeasured,
    LoanPassDue,
    OperatorAction,
    OperatorAsked,
)
from coordinator.policies.contract.decisions import Loan, Preempt, Reclaim
from tests.engine.house import CHAT, state
from tests.engine.scripted_nodes import Reporting, service


def freeze(cell: Reporting, *, off: bool = False) -> None:
    """An operator's order."""
    action = OperatorAction.THAW if off else OperatorAction.FREEZE
    cell.handle(OperatorAsked(action=action, by="ops/ada"))


def loaded(cell: Reporting, load: float) -> Outcome:
    """The loan pass after a load was measured."""
    cell.handle(LoadMeasured(service=CHAT, load=load))
    return cell.handle(LoanPassDue())


def test_a_service_gets_back_what_its_load_needs_while_the_cell_is_frozen() -> None:
    """Its node would stay away for as long as its lease is renewed; the job there is preempted."""
    cell = Reporting(Pool.INFERENCE, service())
    job = cell.submit("j")
    lease_id = cell.lend()
    cell.run(job)
    freeze(cell)
    outcome = loaded(cell, 5.0)
    assert [type(decision) for decision in outcome.decisions] == [Preempt, Reclaim]
    assert cell.node.desired.role == NodeRole.SERVING
    assert cell.engine.may_renew(cell.node.name, lease_id) == "the loan was called back"
    assert state(job) == JobState.PREEMPTING


def test_a_frozen_cell_lends_nothing_until_it_is_thawed() -> None:
    """Also what is spare and wanted."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    freeze(cell)
    assert cell.loan_pass().decisions == ()
    freeze(cell, off=True)
    assert [type(decision) for decision in cell.loan_pass().decisions] == [Loan]


def test_a_frozen_cell_keeps_what_its_service_does_not_need() -> None:
    """The freeze itself brings nobody home: leases are renewed as before."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    lease_id = cell.lend()
    freeze(cell)
    assert loaded(cell, 0.0).decisions == ()
    assert cell.engine.may_renew(cell.node.name, lease_id) == ""
