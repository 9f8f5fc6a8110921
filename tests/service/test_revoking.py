"""Orders to take one lent node back, as any client of the API sends them."""

from __future__ import annotations

import pytest

from common.api import ApiError, ApiErrorCode, Done, Operate
from common.model import NodeName, NodeRole
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from tests.service.cell import Cell, on_loan

I0 = NodeName("i0")


def revoked(cell: Cell) -> list[str]:
    """What the journal says was called back, by whatever name it has there."""
    asked = [entry.event for _, record in cell.journal() for entry in record.entries]
    return [
        event.target
        for event in asked
        if isinstance(event, OperatorAsked) and event.action == OperatorAction.REVOKE_LOAN
    ]


@pytest.mark.parametrize("is_by_node", [False, True])
async def test_a_loan_is_revoked_by_its_id_or_its_node(is_by_node: bool) -> None:
    """Either names it, what is answered and recorded is its id, and the node comes home."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        [loan] = coordinator.engine.state.loans.values()
        order = Operate(
            action=OperatorAction.REVOKE_LOAN, target=I0 if is_by_node else loan.lease_id
        )
        assert await cell.ask(order, tenant="ops") == Done(detail=f"revoke_loan {loan.lease_id}")
        assert revoked(cell) == [loan.lease_id]
        nodes = coordinator.engine.state.nodes
        await cell.until(lambda: nodes[I0].role == NodeRole.SERVING)
        assert loan.returned_at_s is not None


async def test_a_node_that_is_not_lent_is_not_revoked() -> None:
    """Neither one that came home, nor one that never left, nor one that nobody knows."""
    async with Cell(inference=2) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        [loan] = coordinator.engine.state.loans.values()
        other = next(name for name in coordinator.engine.state.nodes if name != loan.node)
        order = Operate(action=OperatorAction.REVOKE_LOAN, target=loan.node)
        await cell.ask(order, tenant="ops")
        await cell.until(lambda: loan.returned_at_s is not None)
        before = revoked(cell)
        home = f"there is no loan of {loan.node}, which is serving"
        over = f"loan {loan.lease_id} came home already: {home}"
        never = (
            f"there is no loan of {other}, which is {coordinator.engine.state.nodes[other].role}"
        )
        for target, code, said in (
            (loan.node, ApiErrorCode.CONFLICT, home),
            (loan.lease_id, ApiErrorCode.CONFLICT, over),
            (other, ApiErrorCode.NOT_FOUND, never),
            ("t9", ApiErrorCode.NOT_FOUND, "no loan 't9'; known: "),
            ("", ApiErrorCode.NOT_FOUND, "no loan ''; known: "),
        ):
            order = Operate(action=OperatorAction.REVOKE_LOAN, target=target)
            refused = await cell.ask(order, tenant="ops")
            assert isinstance(refused, ApiError)
            assert refused.code == code
            assert refused.message.startswith(said)
            assert refused.field
        assert revoked(cell) == before
