"""The promise of a reclaim is that of its first order, and every place counts the same reclaims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import NodeName, NodeRole
from coordinator.engine.loans.lifecycle import note_order
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.accounting import figures, with_overdue
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import (
    LeaderStarted,
    LoadMeasured,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan
from coordinator.sim.run.cluster import Delays
from tests.engine.house import CHAT, House
from tests.engine.loans.test_delayed_reclaim import QUICK, waiting_house, waits

I0 = NodeName("i0")
PROMISE_S = 60.0
SLOW = Delays(drain_s=5.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
OVER_S = 1e-6
"""Two sums of the same seconds differ by less."""


def order(house: House, action: OperatorAction) -> None:
    """An operator's order of the lent node."""
    [loan] = house.engine.state.loans.values()
    target = {
        OperatorAction.REVOKE_LOAN: str(loan.lease_id),
        OperatorAction.RECALL: str(CHAT),
    }.get(action, str(I0))
    house.sim.handle(OperatorAsked(action=action, by="ops/ada", target=target))
    house.settle()


def due_s(loan: LoanEntry) -> float:
    """When the node was promised to be home."""
    assert loan.reclaim_ordered_at_s is not None
    assert loan.reclaim_deadline_s is not None
    return loan.reclaim_ordered_at_s + loan.reclaim_deadline_s


@pytest.mark.parametrize("how", ["revoke", "recall", "policy"])
def test_an_order_during_a_wait_moves_no_promise(how: str) -> None:
    """The service asked when the wait began: what is left of that is what the node gets."""
    house = waiting_house()
    [loan] = house.engine.state.loans.values()
    ordered_at_s, decide_s = house.engine.state.now_s, loan.decide_s
    house.wait(20.0)
    if how == "policy":
        house.decide(replace(waits(), wait_s=0.0), lend=True)
    else:
        recall, revoke = OperatorAction.RECALL, OperatorAction.REVOKE_LOAN
        order(house, recall if how == "recall" else revoke)
    assert (loan.reclaim_ordered_at_s, loan.reclaim_deadline_s) == (ordered_at_s, PROMISE_S)
    assert (loan.called_home_at_s, loan.decide_s) == (ordered_at_s + 20.0, decide_s)
    assert house.node("i0").homecoming.reclaim_at_s == ordered_at_s + PROMISE_S
    assert house.engine.desired(I0).reclaim_in_s == pytest.approx(PROMISE_S - 20.0)
    assert not house.engine.state.awaited
    house.wait(30.0)
    assert loan_outcome.reclaim_s(loan) == pytest.approx(20.0 + 3.0 + 1.0 + 10.0)
    assert not loan_outcome.is_late(loan)


def test_how_old_the_load_was_is_told_of_the_order_that_was_promised() -> None:
    """A second one does not make the decision look slower, nor quicker, than it was."""
    house = House(delays=QUICK)
    house.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    house.wait(1.0)
    house.start(house.submit("stays", work_s=1000.0), "i0")
    house.sim.handle(LoadMeasured(service=CHAT, load=1.0))
    house.wait(3.0)
    house.decide(waits(), lend=True)
    [loan] = house.engine.state.loans.values()
    assert loan.decide_s == 3.0
    house.wait(5.0)
    house.decide(replace(waits(), wait_s=0.0), lend=True)
    assert (loan.decide_s, house.engine.state.awaited) == (3.0, {})


def test_what_comes_home_after_the_first_order_s_deadline_is_late() -> None:
    """However soon after the last order that is."""
    house = waiting_house()
    [loan] = house.engine.state.loans.values()
    house.wait(20.0)
    house.toggle_deaf(I0)
    order(house, OperatorAction.REVOKE_LOAN)
    house.wait(35.0)
    house.toggle_deaf(I0)
    house.wait(15.0)
    assert house.node("i0").role == NodeRole.SERVING
    assert loan_outcome.is_late(loan)
    assert house.engine.state.counters.reclaims_late == 1


def test_an_order_with_less_time_brings_the_promise_forward() -> None:
    """Its service may want nodes back sooner than it did when the wait began."""
    house = waiting_house()
    [loan] = house.engine.state.loans.values()
    ordered_at_s = house.engine.state.now_s
    house.wait(10.0)
    house.decide(replace(waits(), wait_s=0.0, deadline_s=15.0), lend=True)
    assert due_s(loan) == house.node("i0").homecoming.reclaim_at_s == ordered_at_s + 25.0


@pytest.mark.parametrize("ends", ["lost", "dead"])
def test_an_order_that_waits_is_a_reclaim_wherever_it_is_counted(ends: str) -> None:
    """From the order on, also where its node falls silent, or never comes home by it."""
    house = waiting_house()
    assert (counted(house), told(house)) == ((1, 0), (1, 0))
    lose(house)
    assert house.node("i0").role == NodeRole.LOST
    assert (counted(house), told(house)) == ((1, 0), (1, 0))
    if ends == "dead":
        order(house, OperatorAction.CONFIRM_DEAD)
        order(house, OperatorAction.REMOVE)
    assert (counted(house), told(house)) == ((1, 0), (1, 0))
    now_s = house.engine.state.now_s + PROMISE_S + 1.0
    assert counted(house, now_s) == told(house, now_s)


def test_an_order_that_waits_before_the_loan_is_heard_to_begin_is_a_reclaim_from_then_on() -> None:
    """It is none while nobody knows whether its node leaves, and one as soon as it has left."""
    house = House(delays=SLOW)
    house.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    house.wait(1.0)
    assert house.node("i0").role == NodeRole.DRAINING
    [loan] = house.engine.state.loans.values()
    engine = house.engine
    note_order(Context(engine.state, engine.settings, engine.state.now_s), loan, waits())
    assert (counted(house), told(house)) == ((0, 0), (0, 0))
    house.wait(10.0)
    assert house.node("i0").role == NodeRole.ON_LOAN
    assert (counted(house), told(house)) == ((1, 0), (1, 0))


def counted(house: House, now_s: float | None = None) -> tuple[int, int]:
    """Reclaims and late ones by the counters, as scripts and tables read them."""
    state = house.engine.state
    found = with_overdue(figures(state), state, state.now_s if now_s is None else now_s)
    return found.reclaims, found.reclaims_late


def told(house: House, now_s: float | None = None) -> tuple[int, int]:
    """Reclaims and late ones by the loans themselves, as the rows of a service read them."""
    state = house.engine.state
    found = loan_outcome.tally(state.loans.values(), state.now_s if now_s is None else now_s)
    return found.reclaims, found.reclaims_late


def lose(house: House) -> None:
    """The lent node is not heard any more."""
    house.engine.handle(NodeSilent(node=I0, silent_s=20.0), now_s=house.engine.state.now_s)


STEPS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 40.0)),
    st.tuples(st.just("waits"), st.floats(1.0, 50.0)),
    st.tuples(st.sampled_from(["reclaim", "longer"]), st.floats(1.0, 300.0)),
    st.tuples(st.sampled_from(["revoke", "recall", "lost", "deaf", "leader"]), st.just(0.0)),
)


@given(steps=st.lists(STEPS, min_size=1, max_size=10), waits_s=st.floats(1.0, 50.0))
def test_the_promise_of_a_reclaim_never_moves_later(
    steps: list[tuple[str, float]], waits_s: float
) -> None:
    """Whatever is ordered, promised or heard after the first order; nor does a node get longer
    than is promised, and all who count reclaims count alike."""
    house = House(delays=QUICK)
    house.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    house.wait(1.0)
    house.start(house.submit("stays", work_s=1000.0), "i0")
    house.wait(1.0)
    house.decide(waits(waits_s), lend=True)
    [loan] = house.engine.state.loans.values()
    promised_s = due_s(loan)
    for what, value in steps:
        step(house, what, value)
        assert due_s(loan) <= promised_s + OVER_S
        promised_s = due_s(loan)
        node = house.node("i0")
        if loan.returned_at_s is None and node.homecoming.reclaim_at_s is not None:
            assert node.homecoming.reclaim_at_s <= promised_s + OVER_S
        assert counted(house) == told(house)


def step(house: House, what: str, value: float) -> None:
    """One thing that happens to a lent node that was called back."""
    engine = house.engine
    match what:
        case "wait":
            house.wait(value)
        case "waits":
            house.decide(waits(value), lend=True)
        case "reclaim":
            house.decide(replace(waits(), wait_s=0.0, deadline_s=value), lend=True)
        case "longer":
            (service,) = engine.settings.services
            longer = replace(service, reclaim_deadline_s=PROMISE_S + value)
            settings = replace(engine.settings, services=(longer,))
            lead(house, LeaderStarted(epoch=0, holder="next", settings=settings))
        case "leader":
            lead(house, LeaderStarted(epoch=0, holder="next"))
        case "lost":
            lose(house)
        case "deaf":
            house.toggle_deaf(I0)
        case "recall":
            order(house, OperatorAction.RECALL)
            order(house, OperatorAction.END_RECALL)
        case _:
            order(house, OperatorAction.REVOKE_LOAN)


def lead(house: House, event: LeaderStarted) -> None:
    """Somebody begins to lead, and hears every node."""
    policy = house.engine.policy
    house.sim.handle(event)
    house.engine.policy = policy
    for node in house.sim.nodes.values():
        node.report_soon()
    house.wait(1.0)
