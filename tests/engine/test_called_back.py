"""Loans that are called back before they were heard to begin: reclaims, or nothing at all."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.accounting import figures
from coordinator.engine.state.loan_outcome import is_late
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan, Reclaim
from coordinator.service.api import rows
from coordinator.sim.run.cluster import Delays
from tests.engine.house import CHAT, House
from tests.tables import each_row

SLOW = Delays(drain_s=5.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
I0 = NodeName("i0")
RECLAIM = Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="load rose")
FREED_S = {"vacate": 0.0, "device_free": 1.0}
WAY_S = FREED_S | {"server_ready": 100.0}


def called_back() -> House:
    """A cell whose node i0 is draining when it is called back, and does not hear of it."""
    house = House(delays=SLOW)
    house.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    assert house.node("i0").role == NodeRole.DRAINING
    house.wait(1.0)
    house.toggle_deaf(I0)
    house.decide(RECLAIM, lend=True)
    return house


def says(house: House, role: NodeRole, stage_durations_s: dict[str, float] | None = None) -> None:
    """A report of i0 that knows the latest order and holds no lease."""
    said = replace(house.report("i0", role), stage_durations_s=stage_durations_s or {})
    house.engine.handle(said, now_s=house.engine.state.now_s)


def passes(house: House, seconds: float) -> None:
    """The engine's clock goes on, and nothing is heard."""
    house.engine.state.now_s += seconds


def loan_of(house: House) -> LoanEntry:
    """The one loan."""
    [loan] = house.engine.state.loans.values()
    return loan


def counted(house: House) -> tuple[int, int, int, float | None]:
    """(cancelled, reclaims, late ones, longest of them)."""
    found = figures(house.engine.state)
    return found.loans_cancelled, found.reclaims, found.reclaims_late, found.reclaim_s.max


WAYS: dict[str, list[tuple[float, NodeRole, dict[str, float]]]] = {
    "every report": [
        (0.0, NodeRole.VACATING, {}),
        (1.0, NodeRole.WARMING, FREED_S),
        (100.0, NodeRole.SERVING, WAY_S),
    ],
    "only its start": [(0.0, NodeRole.VACATING, {}), (101.0, NodeRole.SERVING, {})],
    "only that it was on loan": [(0.0, NodeRole.ON_LOAN, {}), (101.0, NodeRole.SERVING, {})],
    "only its warm-up": [(1.0, NodeRole.WARMING, {}), (100.0, NodeRole.SERVING, {})],
    "only its end": [(101.0, NodeRole.SERVING, WAY_S)],
}


@each_row("heard", sorted(WAYS))
def test_a_node_that_had_stopped_its_server_is_reclaimed(heard: str) -> None:
    """Its service missed it, whatever was heard on the way: the return is timed and judged."""
    house = called_back()
    for after_s, role, stages_s in WAYS[heard]:
        passes(house, after_s)
        says(house, role, stages_s)
    assert (loan_of(house).begun_at_s, is_late(loan_of(house))) == (None, True)
    assert counted(house) == (0, 1, 1, 101.0)
    [line] = [line for line in house.engine.state.stories if line.what.startswith("home again")]
    assert (line.what, line.reason) == ("home again, late", "101.0 s of 60.0 s")
    assert rows.loan_row(loan_of(house), now_s=0.0).reclaim_s == 101.0


def test_a_node_that_had_not_stopped_its_server_is_no_reclaim() -> None:
    """However late it says so: it served all the time but for the drain, and nothing is judged."""
    house = called_back()
    passes(house, 101.0)
    assert counted(house) == (0, 0, 0, None)
    says(house, NodeRole.SERVING)
    assert not is_late(loan_of(house))
    assert counted(house) == (1, 0, 0, None)
    assert rows.loan_row(loan_of(house), now_s=0.0).reclaim_s is None


def test_the_way_home_from_an_earlier_loan_proves_nothing_of_this_one() -> None:
    """An order to go that was overtaken leaves the stages of the way before in a node's reports."""
    house = House(delays=SLOW)
    says(house, NodeRole.SERVING, WAY_S)
    house.toggle_deaf(I0)
    house.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    house.decide(RECLAIM, lend=True)
    passes(house, 101.0)
    says(house, NodeRole.SERVING, WAY_S)
    assert counted(house) == (1, 0, 0, None)


def test_a_server_that_quarantine_restarts_was_not_stopped_for_the_loan() -> None:
    """A fault while draining is no reclaim, as long as nobody heard that the node vacated."""
    house = called_back()
    for role in (NodeRole.QUARANTINED, NodeRole.WARMING, NodeRole.SERVING):
        passes(house, 50.0)
        says(house, role, {} if role != NodeRole.SERVING else {"server_ready": 50.0})
    assert counted(house) == (1, 0, 0, None)


def test_a_lease_that_ended_before_its_loan_began_is_timed_where_the_server_was_stopped() -> None:
    """Nobody ordered it home, and its service missed it all the same: a lapse like any other."""
    house = House(delays=SLOW)
    house.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    passes(house, 5.0)
    says(house, NodeRole.VACATING)
    passes(house, 101.0)
    says(house, NodeRole.SERVING, WAY_S)
    loan = loan_of(house)
    assert (loan.begun_at_s, loan.lapse_s, is_late(loan)) == (None, 101.0, True)
    found = figures(house.engine.state)
    assert (found.leases_lapsed, found.lapses_late, counted(house)) == (1, 1, (0, 0, 0, None))


def test_that_a_server_was_stopped_is_remembered_by_the_next_leader() -> None:
    """One leader heard that the node was on its way, another one that it is home."""
    house = called_back()
    says(house, NodeRole.VACATING)
    fresh = Engine(house.engine.settings, decode_state(house.engine.encode_state()))
    fresh.policy = house.engine.policy
    house.engine = fresh
    passes(house, 30.0)
    says(house, NodeRole.SERVING)
    assert counted(house) == (0, 1, 0, 30.0)


def test_a_node_that_has_not_let_go_of_one_loan_is_not_lent_again() -> None:
    """Else the first would stay open for ever, as a late way home: nothing tells two apart."""
    house = House()
    house.toggle_deaf(I0)
    lend = Loan(node=I0, service=CHAT, reason="idle")
    house.decide(lend, lend=True)
    house.decide(RECLAIM, lend=True)
    house.decide(lend, lend=True)
    assert loan_of(house).reclaim_ordered_at_s is not None
    house.toggle_deaf(I0)
    house.wait(1.0)
    assert loan_of(house).returned_at_s is not None
    house.decide(lend, lend=True)
    assert len(house.engine.state.loans) == 2
