"""Loans that are called back before they begin or while their nodes drain, and late drains."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import LeaseId, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.accounting import figures, with_overdue
from coordinator.engine.state.events import Event, LeaderStarted, NodeReported, NodeSilent, PassDue
from coordinator.engine.state.loan_outcome import is_late
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan, Reclaim
from coordinator.service.api import rows
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness
from tests.tables import each_row

SLOW = Delays(drain_s=5.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
I0 = NodeName("i0")
RECLAIM = Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="load rose")
FREED_S = {"vacate": 0.0, "device_free": 1.0}
WAY_S = FREED_S | {"server_ready": 100.0}


def called_back() -> EngineHarness:
    """A cell whose node i0 is draining when it is called back, and does not hear of it."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    assert harness.node("i0").role == NodeRole.DRAINING
    harness.wait(1.0)
    harness.toggle_deaf(I0)
    harness.decide(RECLAIM, lend=True)
    return harness


def says(
    harness: EngineHarness, role: NodeRole, stage_durations_s: dict[str, float] | None = None
) -> None:
    """A report of i0 that knows the latest order and holds no lease."""
    said = replace(harness.report("i0", role), stage_durations_s=stage_durations_s or {})
    harness.engine.handle(said, now_s=harness.engine.state.now_s)


def passes(harness: EngineHarness, seconds: float) -> None:
    """The engine's clock goes on, and nothing is heard."""
    harness.engine.state.now_s += seconds


def loan_of(harness: EngineHarness) -> LoanEntry:
    """The one loan."""
    [loan] = harness.engine.state.loans.values()
    return loan


def counted(harness: EngineHarness) -> tuple[int, int, int, float | None]:
    """(cancelled, reclaims, late ones, longest of them)."""
    found = figures(harness.engine.state)
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
    harness = called_back()
    for after_s, role, stages_s in WAYS[heard]:
        passes(harness, after_s)
        says(harness, role, stages_s)
    assert (loan_of(harness).begun_at_s, is_late(loan_of(harness))) == (None, True)
    assert counted(harness) == (0, 1, 1, 101.0)
    [line] = [line for line in harness.engine.state.stories if line.what.startswith("home again")]
    assert (line.what, line.reason) == ("home again, late", "101.0 s of 60.0 s")
    assert rows.loan_row(loan_of(harness), now_s=0.0).reclaim_s == 101.0


def test_a_node_that_had_not_stopped_its_server_is_no_reclaim() -> None:
    """However late it says so: it served all the time but for the drain, and nothing is judged."""
    harness = called_back()
    passes(harness, 101.0)
    assert counted(harness) == (0, 0, 0, None)
    says(harness, NodeRole.SERVING)
    assert not is_late(loan_of(harness))
    assert counted(harness) == (1, 0, 0, None)
    assert rows.loan_row(loan_of(harness), now_s=0.0).reclaim_s is None


def test_the_way_home_from_an_earlier_loan_proves_nothing_of_this_one() -> None:
    """An order to go that was overtaken leaves the stages of the way before in a node's reports."""
    harness = EngineHarness(delays=SLOW)
    says(harness, NodeRole.SERVING, WAY_S)
    harness.toggle_deaf(I0)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.decide(RECLAIM, lend=True)
    passes(harness, 101.0)
    says(harness, NodeRole.SERVING, WAY_S)
    assert counted(harness) == (1, 0, 0, None)


def test_a_server_that_quarantine_restarts_was_not_stopped_for_the_loan() -> None:
    """A fault while draining is no reclaim, as long as nobody heard that the node vacated."""
    harness = called_back()
    for role in (NodeRole.QUARANTINED, NodeRole.WARMING, NodeRole.SERVING):
        passes(harness, 50.0)
        says(harness, role, {} if role != NodeRole.SERVING else {"server_ready": 50.0})
    assert counted(harness) == (1, 0, 0, None)


def test_a_lease_that_ended_before_its_loan_began_is_timed_where_the_server_was_stopped() -> None:
    """Nobody ordered it home, and its service missed it all the same: a lapse like any other."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    passes(harness, 5.0)
    says(harness, NodeRole.VACATING)
    passes(harness, 101.0)
    says(harness, NodeRole.SERVING, WAY_S)
    loan = loan_of(harness)
    assert (loan.begun_at_s, loan.lapse_s, is_late(loan)) == (None, 101.0, True)
    found = figures(harness.engine.state)
    assert (found.leases_lapsed, found.lapses_late, counted(harness)) == (1, 1, (0, 0, 0, None))


def test_that_a_server_was_stopped_is_remembered_by_the_next_leader() -> None:
    """One leader heard that the node was on its way, another one that it is home."""
    harness = called_back()
    says(harness, NodeRole.VACATING)
    fresh = Engine(harness.engine.settings, decode_state(harness.engine.encode_state()))
    fresh.policy = harness.engine.policy
    harness.engine = fresh
    passes(harness, 30.0)
    says(harness, NodeRole.SERVING)
    assert counted(harness) == (0, 1, 0, 30.0)


def test_a_node_that_has_not_let_go_of_one_loan_is_not_lent_again() -> None:
    """Else the first would stay open for ever, as a late way home: nothing tells two apart."""
    harness = EngineHarness()
    harness.toggle_deaf(I0)
    lend = Loan(node=I0, service=CHAT, reason="idle")
    harness.decide(lend, lend=True)
    harness.decide(RECLAIM, lend=True)
    harness.decide(lend, lend=True)
    assert loan_of(harness).reclaim_ordered_at_s is not None
    harness.toggle_deaf(I0)
    harness.wait(1.0)
    assert loan_of(harness).returned_at_s is not None
    harness.decide(lend, lend=True)
    assert len(harness.engine.state.loans) == 2


DEADLINE_S = RECLAIM.deadline_s
LOST_AFTER_S = 15.0
CANCELLED = (1, 0, 0, None)
"""(cancelled, reclaims, late ones, longest of them)."""


def report(
    harness: EngineHarness,
    role: NodeRole,
    *,
    lease_id: LeaseId | None = None,
    is_move_heard: bool = False,
    boot_id: str | None = None,
) -> NodeReported:
    """A report of i0 that knows the latest order."""
    said = harness.report("i0", role)
    return replace(
        said, boot_id=boot_id or said.boot_id, lease_id=lease_id, is_move_heard=is_move_heard
    )


def happens(harness: EngineHarness, event: Event) -> None:
    """It enters now, and nothing is broken."""
    harness.engine.handle(event, now_s=harness.engine.state.now_s)
    assert harness.engine.check() == []


def moves(harness: EngineHarness, role: NodeRole) -> None:
    """It is in another role, and was heard in the one before until now."""
    happens(harness, report(harness, role, is_move_heard=True))


def late_now(harness: EngineHarness) -> int:
    """Late reclaims by `status`, with which the loan's row and the count of loans agree."""
    state = harness.engine.state
    found = with_overdue(figures(state), state, state.now_s)
    tally = loan_outcome.tally(state.loans.values(), state.now_s)
    assert (found.reclaims, found.reclaims_late) == (tally.reclaims, tally.reclaims_late)
    row = rows.loan_row(loan_of(harness), now_s=state.now_s)
    assert row.is_late == (found.reclaims_late > 0)
    return found.reclaims_late


def is_late_by(harness: EngineHarness, took_s: float) -> None:
    """It was late, with this time from the order on, in every place that says so."""
    assert counted(harness) == (0, 1, 1, took_s)
    assert late_now(harness) == 1
    [line] = [line for line in harness.engine.state.stories if line.what.startswith("home again")]
    assert (line.what, line.reason) == ("home again, late", f"{took_s:.1f} s of {DEADLINE_S:.1f} s")
    row = rows.loan_row(loan_of(harness), now_s=harness.engine.state.now_s)
    assert (row.state, row.begun_at_s, row.reclaim_s) == ("returned", None, took_s)


def test_a_node_that_is_heard_to_leave_its_drain_after_its_deadline_is_a_late_reclaim() -> None:
    """What was said of it while it was away is true when it is home."""
    harness = called_back()
    passes(harness, 101.0)
    assert late_now(harness) == 1
    moves(harness, NodeRole.SERVING)
    is_late_by(harness, 101.0)


def test_a_node_that_says_that_it_drains_after_its_deadline_is_a_late_reclaim() -> None:
    """Whether or not it was heard from then on until it served."""
    harness = called_back()
    passes(harness, 61.0)
    happens(harness, report(harness, NodeRole.DRAINING))
    assert counted(harness) == (0, 1, 0, None)
    passes(harness, 40.0)
    happens(harness, report(harness, NodeRole.SERVING))
    is_late_by(harness, 101.0)


@each_row("took_s", [0.0, 1.0, 59.0, 60.0, 60.5, 61.0, 200.0])
def test_the_instant_of_the_deadline_is_in_time_and_what_is_after_it_is_not(took_s: float) -> None:
    """A node that serves by then is a cancelled loan: its service has missed nothing that counts.
    What was late once stays so."""
    harness = called_back()
    passes(harness, took_s)
    was_late = late_now(harness)
    moves(harness, NodeRole.SERVING)
    assert late_now(harness) == was_late == (took_s > DEADLINE_S)
    assert counted(harness) == ((0, 1, 1, took_s) if was_late else CANCELLED)
    passes(harness, 1000.0)
    assert late_now(harness) == was_late


def test_a_move_that_nobody_heard_says_nothing_of_when_it_was() -> None:
    """The report before it may be old: it may have served for as long as nobody heard it."""
    harness = called_back()
    passes(harness, 101.0)
    happens(harness, report(harness, NodeRole.SERVING))
    assert (late_now(harness), counted(harness)) == (0, CANCELLED)


def test_a_drain_that_ends_after_the_deadline_is_one_reclaim() -> None:
    """It is counted when it is known, and not again for each thing that is heard later."""
    harness = called_back()
    passes(harness, 61.0)
    happens(harness, report(harness, NodeRole.DRAINING))
    for role in (NodeRole.VACATING, NodeRole.WARMING, NodeRole.SERVING):
        passes(harness, 1.0)
        moves(harness, role)
        assert late_now(harness) == 1
    is_late_by(harness, 64.0)


@pytest.mark.parametrize(("drained_s", "expected"), [(59.0, CANCELLED), (61.0, (0, 1, 1, 91.0))])
def test_a_fault_mends_no_drain_that_was_late_and_makes_none_late(
    drained_s: float, expected: tuple[int, int, int, float | None]
) -> None:
    """What quarantine takes is no drain; what was late before it is."""
    harness = called_back()
    passes(harness, drained_s)
    for role in (NodeRole.QUARANTINED, NodeRole.WARMING, NodeRole.SERVING):
        moves(harness, role)
        passes(harness, 15.0)
    assert counted(harness)[:3] == expected[:3]


@pytest.mark.parametrize(("drained_s", "is_late"), [(59.0, False), (60.0, False), (61.0, True)])
def test_of_a_node_that_fell_silent_counts_until_when_it_was_heard(
    drained_s: float, is_late: bool
) -> None:
    """Not when it was given up for LOST, nor when it was heard again."""
    harness = called_back()
    passes(harness, drained_s + LOST_AFTER_S)
    happens(harness, NodeSilent(node=I0, silent_s=LOST_AFTER_S))
    passes(harness, 100.0)
    happens(harness, report(harness, NodeRole.SERVING))
    took_s = drained_s + LOST_AFTER_S + 100.0
    assert counted(harness) == ((0, 1, 1, took_s) if is_late else CANCELLED)


def test_of_a_node_that_did_not_drain_silence_after_the_deadline_makes_nothing_late() -> None:
    """It served until nobody heard it: the order to go had not come to it."""
    harness = EngineHarness()
    harness.toggle_deaf(I0)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.decide(RECLAIM, lend=True)
    passes(harness, 80.0)
    happens(harness, NodeSilent(node=I0, silent_s=LOST_AFTER_S))
    happens(harness, report(harness, NodeRole.SERVING))
    assert counted(harness) == CANCELLED


@pytest.mark.parametrize(("led_s", "is_late"), [(59.0, False), (60.0, False), (61.0, True)])
def test_of_a_node_that_is_home_when_another_leads_counts_until_when_the_last_one_led(
    led_s: float, is_late: bool
) -> None:
    """Who led had heard it drain until the last fact that it took, whoever stands in the journal
    next; nobody knows what was while nobody led. A second new leader knows no more."""
    harness = called_back()
    passes(harness, led_s)
    happens(harness, PassDue())
    harness.engine = again(harness.engine)
    for epoch, holder in ((2, "second"), (3, "third")):
        now_s = harness.engine.state.now_s + 20.0
        harness.engine.handle(LeaderStarted(epoch=epoch, holder=holder), now_s=now_s)
        assert loan_of(harness).is_drain_late == is_late
    happens(harness, report(harness, NodeRole.SERVING))
    assert counted(harness) == ((0, 1, 1, led_s + 40.0) if is_late else CANCELLED)


def again(engine: Engine) -> Engine:
    """The engine from its own snapshot."""
    fresh = Engine(engine.settings, decode_state(engine.encode_state()))
    fresh.policy = engine.policy
    return fresh


def test_a_loan_that_begins_after_its_deadline_is_one_reclaim() -> None:
    """Its order waits, as for a job, and its node drains on: it begins when it was late already."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.toggle_deaf(I0)
    loan = loan_of(harness)
    loan.reclaim_ordered_at_s, loan.reclaim_deadline_s = harness.engine.state.now_s, DEADLINE_S
    passes(harness, 61.0)
    happens(harness, report(harness, NodeRole.DRAINING, lease_id=loan.lease_id))
    assert (loan.begun_at_s, late_now(harness)) == (None, 1)
    happens(harness, report(harness, NodeRole.ON_LOAN, lease_id=loan.lease_id))
    assert (loan.begun_at_s, late_now(harness)) == (harness.engine.state.now_s, 1)


@pytest.mark.parametrize(("deaf_s", "is_late"), [(50.0, False), (60.5, True), (100.0, True)])
def test_a_simulated_node_is_judged_as_a_live_one(deaf_s: float, is_late: bool) -> None:
    """It is heard all the time, though it says nothing new while it drains."""
    harness = EngineHarness(delays=Delays(drain_s=1000.0))
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.toggle_deaf(I0)
    harness.decide(RECLAIM, lend=True)
    harness.wait(deaf_s)
    assert harness.node("i0").role == NodeRole.DRAINING
    assert (loan_outcome.overdue_s(loan_of(harness), harness.sim.loop.now_s) > 0) == is_late
    harness.toggle_deaf(I0)
    harness.wait(1.0)
    assert harness.node("i0").role == NodeRole.SERVING
    assert late_now(harness) == is_late
    assert counted(harness)[:3] == ((0, 1, 1) if is_late else CANCELLED[:3])


def test_a_late_drain_is_remembered_by_the_next_leader() -> None:
    """One leader heard it, another one that the node is home."""
    harness = called_back()
    passes(harness, 61.0)
    happens(harness, report(harness, NodeRole.DRAINING))
    harness.engine = again(harness.engine)
    happens(harness, report(harness, NodeRole.SERVING))
    is_late_by(harness, 61.0)
