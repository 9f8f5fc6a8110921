"""Leases that ended by themselves, and loans that a node gave up: their times, and late ones."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from common.api import LoanRow
from common.model import LeaseId, NodeName, NodeRole, TurnBack
from coordinator.engine.engine import decode_state
from coordinator.engine.loans.lifecycle import note_order
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.accounting import Figures, ReclaimTimes, figures, with_overdue
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import NodeReported
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan, Reclaim
from coordinator.service.api import explain_node, rows
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness

SLOW = Delays(drain_s=5.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
WAY_S = {"vacate": 3.0, "device_free": 1.0, "server_ready": 10.0}


def lent() -> EngineHarness:
    """A cell of which one node is lent; its service has a deadline of 60 s, its lease 30 s."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.wait(6.0)
    return harness


def loan_of(harness: EngineHarness) -> LoanEntry:
    """The one loan."""
    [loan] = harness.engine.state.loans.values()
    return loan


def says(
    harness: EngineHarness, role: NodeRole, stage_durations_s: dict[str, float] | None = None
) -> NodeReported:
    """A report of the lent node, which holds no lease any more."""
    return replace(harness.report("i0", role), stage_durations_s=stage_durations_s or {})


@pytest.mark.parametrize(("unattended_s", "is_late"), [(0.0, False), (16.0, False), (17.0, True)])
def test_a_lapse_that_took_longer_than_the_promise_is_late(
    unattended_s: float, is_late: bool
) -> None:
    """The TTL is gone of the deadline when the lease ends; what the node has measured counts from
    there, however late the first word of it was heard."""
    harness = lent()
    harness.wait(100.0)
    stages_s = WAY_S | {"unattended": unattended_s}
    harness.sim.handle(says(harness, NodeRole.SERVING, stages_s))
    loan = loan_of(harness)
    assert (loan.lapse_s, loan_outcome.is_late(loan)) == (14.0 + unattended_s, is_late)
    found = figures(harness.engine.state)
    assert (found.leases_lapsed, found.lapses_late) == (1, int(is_late))
    assert (found.reclaims, found.reclaims_late) == (0, 0)
    assert (found.lapse_s.max, found.reclaim_s) == (14.0 + unattended_s, ReclaimTimes())


def test_a_lapse_is_not_late_because_nobody_led_while_it_ended() -> None:
    """Its first word was heard by one leader, and its end long after by the next one."""
    harness = lent()
    harness.sim.handle(says(harness, NodeRole.VACATING))
    report = says(harness, NodeRole.SERVING, WAY_S)
    harness.engine.handle(report, now_s=harness.engine.state.now_s + 600.0)
    assert loan_of(harness).lapse_s == 14.0
    assert figures(harness.engine.state).lapses_late == 0


def test_a_node_that_measured_nothing_is_judged_by_what_was_heard() -> None:
    """An agent of an earlier version: from the first word of the lapse to serving again."""
    harness = lent()
    harness.sim.handle(says(harness, NodeRole.VACATING))
    harness.engine.handle(says(harness, NodeRole.SERVING), now_s=harness.engine.state.now_s + 31.0)
    assert loan_of(harness).lapse_s == 31.0
    assert figures(harness.engine.state).lapses_late == 1


def test_a_drain_that_was_turned_back_by_itself_is_never_late() -> None:
    """The loan had not begun: the service had its node all the time but for the drain."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.engine.handle(
        says(harness, NodeRole.SERVING, {"unattended": 500.0}),
        now_s=harness.engine.state.now_s + 600.0,
    )
    assert (loan_of(harness).is_lapsed, loan_of(harness).lapse_s) == (True, None)
    assert figures(harness.engine.state).lapses_late == 0


def test_a_lease_that_ended_before_its_node_had_left_is_overdue_never() -> None:
    """Its service has had its node all the time, however long no word of that comes."""
    loan = LoanEntry(
        lease_id=LeaseId("l1-1"),
        node=NodeName("i0"),
        service=CHAT,
        decided_at_s=0.0,
        reason="idle",
        is_lapsed=True,
        lapsed_at_s=5.0,
        lapse_deadline_s=30.0,
    )
    assert loan_outcome.overdue_s(loan, 1000.0) == 0.0
    assert loan_outcome.tally([loan], 1000.0).lapses_late == 0
    left = replace(loan, is_server_stopped=True)
    assert loan_outcome.overdue_s(left, 1000.0) == 1000.0 - 5.0 - 30.0
    assert loan_outcome.tally([left], 1000.0).lapses_late == 1


WHY = "GPU GPU-1 is used by process 4711, which is not the server's"


def draining() -> EngineHarness:
    """A cell of which one node was told to be lent; its service has a deadline of 60 s."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    return harness


def turned(
    harness: EngineHarness,
    role: NodeRole,
    stages_s: dict[str, float] | None = None,
    *,
    of: str = "",
) -> NodeReported:
    """A report of the node that gave the loan up, or one of another name."""
    back = TurnBack(lease_id=LeaseId(of) if of else loan_of(harness).lease_id, reason=WHY)
    return msgspec.structs.replace(says(harness, role, stages_s), turned_back=back)


def counts(found: Figures) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(all, late) turn-backs, lapses and reclaims."""
    return (
        (found.turn_backs, found.turn_backs_late),
        (found.leases_lapsed, found.lapses_late),
        (found.reclaims, found.reclaims_late),
    )


def shown(loan: LoanEntry, now_s: float = 0.0) -> LoanRow:
    """Its row."""
    return rows.loan_row(loan, now_s=now_s)


@pytest.mark.parametrize(("way_s", "is_late"), [(14.0, False), (60.0, False), (61.0, True)])
def test_a_turn_back_is_told_as_one_and_has_the_whole_deadline(way_s: float, is_late: bool) -> None:
    """Nobody's TTL ran out, so none is counted; its service could have asked when it turned."""
    harness = draining()
    harness.sim.handle(turned(harness, NodeRole.VACATING))
    stages_s = WAY_S | {"unattended": way_s - 14.0}
    harness.sim.handle(turned(harness, NodeRole.SERVING, stages_s))
    loan = loan_of(harness)
    assert (loan.is_lapsed, loan_outcome.is_late(loan)) == (False, is_late)
    found = figures(harness.engine.state)
    assert counts(found) == ((1, int(is_late)), (0, 0), (0, 0))
    assert (found.turn_back_s, found.lapse_s) == (
        ReclaimTimes(p50=way_s, max=way_s),
        ReclaimTimes(),
    )
    row = shown(loan)
    assert (row.state, row.turned_back, row.reclaim_reason) == ("turned back", WHY, WHY)
    assert (row.turn_back_s, row.turn_back_deadline_s) == (way_s, 60.0)
    assert (row.lapse_s, row.lapse_deadline_s, row.reclaim_s) == (None, None, None)
    assert row.is_late == is_late


def test_explain_says_why_the_node_turned_back_and_of_no_ttl() -> None:
    """Of a loan that lapsed it says the TTL, as ever."""
    harness = draining()
    harness.sim.handle(turned(harness, NodeRole.VACATING))
    said = " ".join(explain_node.loan_reasons(loan_of(harness)))
    assert f"its node turned back before it began: {WHY}" in said
    assert "TTL" not in said
    lapsed = draining()
    lapsed.sim.handle(says(lapsed, NodeRole.VACATING))
    assert "TTL ran out" in " ".join(explain_node.loan_reasons(loan_of(lapsed)))


def test_a_turn_back_before_the_server_was_stopped_is_counted_and_has_no_time() -> None:
    """Its service had the node all the time."""
    harness = draining()
    harness.sim.handle(turned(harness, NodeRole.SERVING))
    loan = loan_of(harness)
    assert (loan.turned_back, loan.turn_back_s, loan.returned_at_s) == (WHY, None, 0.0)
    found = figures(harness.engine.state)
    assert (counts(found), found.turn_back_s) == (((1, 0), (0, 0), (0, 0)), ReclaimTimes())
    assert (harness.node("i0").lease, harness.node("i0").desired.role) == (None, NodeRole.SERVING)


def test_what_a_node_says_of_an_earlier_loan_is_not_taken_for_this_one() -> None:
    """A node that never took the lease still reports how the one before ended."""
    harness = draining()
    harness.sim.handle(turned(harness, NodeRole.SERVING, of="l0-0"))
    assert (loan_of(harness).turned_back, loan_of(harness).is_lapsed) == ("", True)
    assert counts(figures(harness.engine.state))[:2] == ((0, 0), (1, 0))


def test_a_node_that_turned_back_and_was_ordered_home_is_a_reclaim() -> None:
    """The order came first, and reached it on its way."""
    harness = draining()
    harness.toggle_deaf(NodeName("i0"))
    order = Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="load rose")
    harness.decide(order, lend=True)
    for role in (NodeRole.VACATING, NodeRole.SERVING):
        harness.sim.handle(turned(harness, role, WAY_S))
    assert counts(figures(harness.engine.state)) == ((0, 0), (0, 0), (1, 0))
    assert shown(loan_of(harness)).state == "returned"


def test_a_node_that_turned_back_while_an_order_waited_is_a_reclaim_with_both_promises() -> None:
    """The order waits for jobs, and keeps the lease; the time before the turn is the wait."""
    harness = draining()
    loan, state = loan_of(harness), harness.engine.state
    order = Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="load rose")
    note_order(Context(state, harness.engine.settings, state.now_s), loan, order)
    harness.engine.handle(turned(harness, NodeRole.VACATING), now_s=state.now_s + 5.0)
    home = msgspec.structs.replace(turned(harness, NodeRole.SERVING, WAY_S), home_ago_s=0.0)
    harness.engine.handle(home, now_s=state.now_s + 14.0)
    assert counts(figures(state)) == ((0, 0), (0, 0), (1, 0))
    row = shown(loan)
    assert (row.state, row.reclaim_s, row.turn_back_s) == ("returned", 19.0, None)
    assert row.stage_durations_s["wait"] == 5.0
    [told] = [line.reason for line in state.stories if line.what == "home again"]
    assert told == "19.0 s of 60.0 s, 14.0 s after it turned back"


def test_a_node_in_quarantine_that_had_not_left_breaks_no_promise() -> None:
    """As far as anybody knows its server was never stopped for the loan."""
    harness = draining()
    harness.sim.handle(turned(harness, NodeRole.QUARANTINED))
    assert (loan_of(harness).turned_back, loan_outcome.has_left(loan_of(harness))) == (WHY, False)
    assert loan_outcome.overdue_s(loan_of(harness), 600.0) == 0.0


def test_a_node_that_turned_back_and_does_not_come_is_late_when_its_deadline_is_over() -> None:
    """As a turn-back, in figures, its service's count and its node's words."""
    harness = draining()
    harness.sim.handle(turned(harness, NodeRole.VACATING))
    for now_s, late in ((60.0, 0), (61.0, 1)):
        harness.engine.state.now_s = now_s
        state = harness.engine.state
        assert counts(with_overdue(figures(state), state, now_s)) == ((1, late), (0, 0), (0, 0))
        tally = loan_outcome.tally(state.loans.values(), now_s)
        assert (tally.turn_backs, tally.turn_backs_late) == (1, late)
        assert (tally.lapses, tally.reclaims) == (0, 0)
        assert shown(loan_of(harness), now_s).state == "coming home"
        said = " ".join(explain_node.reasons(harness.engine, harness.node("i0")))
        assert ("60 s after it turned back by itself): a late way back" in said) == bool(late)


def test_a_turn_back_is_remembered_by_the_next_leader_and_an_old_journal_knows_none() -> None:
    """A state of before has no word of it; what it counted stays what it was."""
    harness = draining()
    harness.sim.handle(turned(harness, NodeRole.VACATING))
    state = decode_state(harness.engine.encode_state())
    [loan] = state.loans.values()
    assert (loan.turned_back, state.counters.turn_backs) == (WHY, 1)
    saved = msgspec.msgpack.decode(harness.engine.encode_state())
    for table in (saved["counters"], *saved["loans"].values()):
        for name in [name for name in table if name.startswith("turn")]:
            del table[name]
    [old] = decode_state(msgspec.msgpack.encode(saved)).loans.values()
    assert (old.turned_back, old.turned_back_at_s) == ("", None)
    report = msgspec.to_builtins(says(harness, NodeRole.VACATING))
    assert "turned_back" not in report
    assert msgspec.convert(report, NodeReported).turned_back is None


def test_a_loan_that_began_did_not_turn_back_whatever_its_node_says() -> None:
    """If its node says so and begins it after all, the service lost the node by a lapse."""
    harness = draining()
    began = msgspec.structs.replace(
        turned(harness, NodeRole.ON_LOAN), lease_id=loan_of(harness).lease_id
    )
    for report in (turned(harness, NodeRole.DRAINING), began, turned(harness, NodeRole.VACATING)):
        harness.sim.handle(report)
    harness.sim.handle(turned(harness, NodeRole.SERVING, WAY_S))
    assert (loan_of(harness).is_lapsed, loan_of(harness).turned_back) == (True, "")
    assert counts(figures(harness.engine.state)) == ((0, 0), (1, 0), (0, 0))
