"""What humans order of the cell, its services, nodes and loans, and where it changes nothing."""

from __future__ import annotations

import msgspec
import pytest

from common.model import JobState, LeaseId, NodeRole, Pool
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import NodeSilent, OperatorAction, OperatorAsked
from tests.engine.house import CHAT, state
from tests.engine.scripted_nodes import CODE, N, Reporting, service, settings

A = OperatorAction


def ask(cell: Reporting, action: OperatorAction, target: str = "") -> None:
    """An operator's order."""
    cell.handle(OperatorAsked(action=action, by="ops/ada", target=target))


def recalled(engine: Engine) -> dict[str, bool]:
    """Which services lend nothing by an operator's order."""
    return {str(name): entry.is_recalled for name, entry in engine.state.services.items()}


def with_code(cell: Reporting, *, is_new_process: bool) -> Engine:
    """The cell goes on with one more service in its settings."""
    services = (service(), service(CODE))
    if is_new_process:
        return Engine(settings(*services), decode_state(cell.engine.encode_state()))
    cell.lead(*services)
    return cell.engine


@pytest.mark.parametrize("is_new_process", [True, False])
def test_a_recall_of_all_holds_for_services_that_come_during_it(*, is_new_process: bool) -> None:
    """An upgrade stands between a recall of all and its end: a release whose settings have one more
    service would lend from it meanwhile."""
    cell = Reporting(Pool.INFERENCE, service())
    ask(cell, A.RECALL)
    engine = with_code(cell, is_new_process=is_new_process)
    assert recalled(engine) == {CHAT: True, CODE: True}
    ended = OperatorAsked(action=A.END_RECALL, by="ops/ada", target="")
    engine.handle(ended, now_s=cell.now_s + 1.0)
    assert recalled(engine) == {CHAT: False, CODE: False}
    assert not engine.state.is_recalled


def test_a_service_that_comes_during_a_recall_lends_none_of_its_nodes() -> None:
    """Until the recall of all has ended; nothing else keeps this one."""
    cell = Reporting(Pool.INFERENCE, service(CODE))
    ask(cell, A.RECALL)
    cell.lead(service(CODE), service())
    cell.report()
    cell.submit("j")
    assert cell.loan_pass().decisions == ()
    ask(cell, A.END_RECALL)
    assert len(cell.loan_pass().decisions) == 1


@pytest.mark.parametrize(
    "orders",
    [
        [(A.RECALL, CHAT)],
        [(A.RECALL, ""), (A.END_RECALL, "")],
        [(A.SET_MODE, "")],
    ],
)
def test_without_a_recall_of_all_a_new_service_may_lend(
    orders: list[tuple[OperatorAction, str]],
) -> None:
    """A recall of one service is of that one, and one that has ended is over."""
    cell = Reporting(Pool.INFERENCE, service())
    for action, target in orders:
        value = "act" if action == A.SET_MODE else ""
        cell.handle(OperatorAsked(action=action, by="ops/ada", target=target, value=value))
    assert not recalled(with_code(cell, is_new_process=True))[CODE]


def test_the_end_of_one_services_recall_leaves_that_of_all_the_others() -> None:
    """The services that are yet to come are among those."""
    cell = Reporting(Pool.INFERENCE, service())
    ask(cell, A.RECALL)
    ask(cell, A.END_RECALL, CHAT)
    assert recalled(with_code(cell, is_new_process=False)) == {CHAT: False, CODE: True}


def test_the_mode_of_all_services_ends_no_recall() -> None:
    """Which has an end of its own; a service that comes after the change is as the others."""
    cell = Reporting(Pool.INFERENCE, service())
    ask(cell, A.RECALL)
    cell.handle(OperatorAsked(action=A.SET_MODE, by="ops/ada", target="", value="act"))
    assert recalled(with_code(cell, is_new_process=False)) == {CHAT: True, CODE: True}


def test_only_a_node_that_is_lost_can_be_confirmed_dead() -> None:
    """Of one that is heard it would end jobs that run."""
    cell = Reporting(Pool.TRAINING)
    job = cell.submit("j")
    cell.passes()
    cell.run(job)
    held = [slot.holder for slot in cell.node.gpus]
    ask(cell, A.CONFIRM_DEAD, N)
    assert (state(job), job.attempt.number, job.counts.node_faults) == (JobState.RUNNING, 1, 0)
    assert [slot.holder for slot in cell.node.gpus] == held
    assert (cell.node.role, cell.node.lease) == (NodeRole.TRAINING, None)
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    assert cell.node.role == NodeRole.LOST
    ask(cell, A.CONFIRM_DEAD, N)
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 1)


def test_the_revocation_of_a_loan_that_is_over_changes_nothing() -> None:
    """Its node may be lent anew by now, and that loan was not meant."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    first = cell.lend()
    ask(cell, A.REVOKE_LOAN, first)
    cell.lease_id = None
    for cell.role in (NodeRole.VACATING, NodeRole.WARMING, NodeRole.SERVING):
        cell.report()
    second = cell.lend()
    assert second != first
    before = msgspec.to_builtins(cell.node)
    ask(cell, A.REVOKE_LOAN, first)
    ask(cell, A.REVOKE_LOAN, LeaseId("never"))
    assert msgspec.to_builtins(cell.node) == before
    assert cell.engine.state.loans[second].reclaim_ordered_at_s is None
    ask(cell, A.REVOKE_LOAN, second)
    assert cell.engine.state.loans[second].reclaim_ordered_at_s is not None
