"""Orders of operators: their predicted cost, and when they change nothing."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from common.messages import DesiredState, decode, encode
from common.model import JobState, LeaseId, NodeName, NodeRole, Pool
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import LeaderStarted, NodeSilent, OperatorAction, OperatorAsked
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Decision, Loan, Reclaim
from tests.harness.cluster.engine import CHAT, EngineHarness, state
from tests.harness.cluster.scripted_nodes import CODE, N, Reporting, service, settings

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


RAN_S = 100.0


def lent(harness: EngineHarness, *nodes: str) -> None:
    """Nodes that are on loan."""
    harness.decide(
        *(Loan(node=NodeName(node), service=CHAT, reason="idle") for node in nodes), lend=True
    )
    harness.wait(10.0)


def asked(harness: EngineHarness, action: OperatorAction, target: str = "") -> list[Reclaim]:
    """What a person's order takes back."""
    event = OperatorAsked(action=action, by="ops/ada", target=target)
    heard: list[Decision] = []
    harness.sim.hear = heard.extend
    harness.sim.handle(event)
    harness.sim.hear = None
    return [decision for decision in heard if isinstance(decision, Reclaim)]


def loans(harness: EngineHarness) -> list[LoanEntry]:
    """In the order in which they were made."""
    return list(harness.engine.state.loans.values())


def test_a_revoke_says_what_it_is_predicted_to_cost() -> None:
    """A job that saves nothing loses what it has computed; the loan bears as much."""
    harness = EngineHarness()
    lent(harness, "i0")
    job = harness.submit()
    harness.start(job, "i0")
    harness.wait(RAN_S)
    ran_s = harness.sim.loop.now_s - (job.attempt.ran_at_s or 0.0)
    [loan] = loans(harness)
    [order] = asked(harness, OperatorAction.REVOKE_LOAN, loan.lease_id)
    assert order.predicted_preemptions == 1
    assert order.predicted_cost_gpu_s == pytest.approx(8 * ran_s)
    assert loan.predicted_cost_gpu_s == order.predicted_cost_gpu_s
    harness.wait(100.0)
    assert loan.realised_preemptions == loan.predicted_preemptions
    assert loan.realised_cost_gpu_s >= loan.predicted_cost_gpu_s > 0


def test_a_recall_counts_a_job_on_two_nodes_once() -> None:
    """The first node's order stops it; the second one costs nothing more."""
    harness = EngineHarness()
    lent(harness, "i0", "i1")
    job = harness.submit(workers=(2, 2))
    harness.start(job, "i0", "i1")
    harness.wait(RAN_S)
    orders = asked(harness, OperatorAction.RECALL)
    assert [order.predicted_preemptions for order in orders] == [1, 0]
    assert orders[0].predicted_cost_gpu_s > 0
    assert orders[1].predicted_cost_gpu_s == 0.0
    assert [loan.realised_preemptions for loan in loans(harness)] == [1, 0]


def test_flexible_workers_are_released_and_cost_nothing() -> None:
    """The job goes on with its base gang."""
    harness = EngineHarness()
    lent(harness, "i0")
    job = harness.submit(workers=(1, 2))
    harness.start(job, "t0", flexible=("i0",))
    harness.wait(RAN_S)
    [order] = asked(harness, OperatorAction.RECALL, CHAT)
    assert (order.predicted_preemptions, order.predicted_cost_gpu_s) == (0, 0.0)
    assert order.released_workers == 1


def test_a_gang_that_has_not_run_is_no_preemption() -> None:
    """It waits again and loses nothing, as it is counted when the order is carried out."""
    harness = EngineHarness()
    lent(harness, "i0")
    job = harness.submit(workers=(2, 2))
    harness.toggle_deaf(NodeName("t0"))
    harness.start(job, "i0", "t0")
    [order] = asked(harness, OperatorAction.RECALL)
    assert order.predicted_preemptions == 0
    assert loans(harness)[0].realised_preemptions == 0


def order(cell: Reporting, action: A) -> None:
    """An operator's order to the node."""
    cell.handle(OperatorAsked(action=action, by="ops/me", target=N, reason="mended"))


def validation(cell: Reporting) -> int | UnsetType:
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
    assert validation(cell) is UNSET
    order(cell, A.UNCORDON)
    assert cell.node.desired.generation > generation
    assert validation(cell) is not UNSET
    cell.role = cell.node.home_role
    cell.report()
    assert validation(cell) is UNSET


@pytest.mark.parametrize("action", [A.CORDON, A.DRAIN])
def test_no_other_order_ends_a_quarantine(action: A) -> None:
    """Least of all one that keeps work away."""
    cell = quarantined()
    order(cell, action)
    assert validation(cell) is UNSET


def test_an_uncordon_of_a_node_that_is_well_is_none_for_its_next_quarantine() -> None:
    """Agents are told nothing then, so that one of an older version takes its orders."""
    cell = Reporting(Pool.INFERENCE, service())
    order(cell, A.UNCORDON)
    cell.role = NodeRole.QUARANTINED
    cell.report()
    assert validation(cell) is UNSET


def test_each_uncordon_has_a_number_of_its_own() -> None:
    """Also two within a second, and the first of a coordinator whose journal was lost."""
    cell = quarantined()
    numbers: list[int | UnsetType] = []
    for _ in range(3):
        order(cell, A.UNCORDON)
        cell.now_s -= 0.9
        numbers.append(validation(cell))
    cell.now_s += 10.0
    epoch = cell.engine.state.epoch
    cell.engine = Engine(settings(service()))
    cell.handle(LeaderStarted(epoch=epoch + 1, holder="t2", settings=settings(service())))
    cell.report()
    assert validation(cell) is UNSET
    order(cell, A.UNCORDON)
    numbers.append(validation(cell))
    assert len(set(numbers)) == len(numbers)
