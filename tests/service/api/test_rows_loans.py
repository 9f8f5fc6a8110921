"""Reclaims, lapses and turn-backs: one count in `status`, of a service and of its loans."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.api import ServiceRow
from common.messages import NodeReport
from common.model import NodeName, NodeRole, Pool, TurnBack
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan, Reclaim
from coordinator.service.api.rows import loan_row, service_row, status
from coordinator.service.nodes.report_folding import Folder, facts_of
from coordinator.sim.run.cluster import Delays
from tests.engine.state.test_loan_outcome import SLOW, WAY_S, says
from tests.harness.cluster.engine import CHAT, EngineHarness

I0 = NodeName("i0")
FOLDER = Folder(lost_after_s=1e9, load_period_s=1e9, progress_period_s=1e9)


def lent(delays: Delays = SLOW) -> EngineHarness:
    """One node is lent; its service has a deadline of 60 s, its lease 30 s."""
    harness = EngineHarness(delays=delays)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.wait(6.0)
    return harness


def ordered(harness: EngineHarness) -> None:
    """The node is called home, for 60 s."""
    reclaim = Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="load rose")
    harness.decide(reclaim, lend=True)


def told(harness: EngineHarness) -> tuple[ServiceRow, tuple[object, ...]]:
    """The service's row, and (reclaims, late ones, lapses, late ones) by `status`."""
    engine, now_s = harness.engine, max(harness.sim.loop.now_s, harness.engine.state.now_s)
    found = status(
        engine, FOLDER, cell="c", bad_messages=0, up_s=0.0, now_s=now_s, clock_warning=""
    ).figures
    names = ("reclaims", "reclaims_late", "leases_lapsed", "lapses_late")
    row = service_row(engine, FOLDER, CHAT, now_s=now_s)
    by_status = tuple(found[name] for name in names)
    assert (row.reclaims, row.reclaims_late, row.lapses, row.lapses_late) == by_status
    return row, by_status


def loan_of(harness: EngineHarness) -> LoanEntry:
    """The one loan."""
    [loan] = harness.engine.state.loans.values()
    return loan


@pytest.mark.parametrize(("unattended_s", "late"), [(0.0, 0), (17.0, 1)])
def test_a_lapse_is_told_as_one_everywhere(unattended_s: float, late: int) -> None:
    """With the deadline that it had: what the TTL left of the service's."""
    harness = lent()
    harness.sim.handle(says(harness, NodeRole.SERVING, WAY_S | {"unattended": unattended_s}))
    row, counts = told(harness)
    assert counts == (0, 0, 1, late)
    assert (row.last_reclaim_s, row.last_returned_at_s) == (None, None)
    shown = loan_row(loan_of(harness), now_s=1e6)
    assert (shown.state, shown.lapse_s, shown.reclaim_s) == ("lapsed", 14.0 + unattended_s, None)
    assert (shown.lapse_deadline_s, shown.is_late) == (30.0, bool(late))


@pytest.mark.parametrize(("way_s", "late"), [(20.0, 0), (90.0, 1)])
def test_a_reclaim_is_told_as_one_everywhere_from_its_order_on(way_s: float, late: int) -> None:
    """Before its node is home, when its deadline is over, and when it has come."""
    harness = lent(Delays(warm_up_s=way_s))
    ordered(harness)
    assert told(harness)[1] == (1, 0, 0, 0)
    harness.wait(way_s - 1.0)
    assert told(harness)[1] == (1, late, 0, 0)
    harness.wait(2.0)
    row, counts = told(harness)
    assert counts == (1, late, 0, 0)
    assert row.last_reclaim_s == pytest.approx(way_s, abs=2.0)
    shown = loan_row(loan_of(harness), now_s=1e6)
    assert (shown.state, shown.lapse_deadline_s, shown.is_late) == ("returned", None, bool(late))


def test_who_may_have_left_and_never_says_so_is_a_late_reclaim_while_nobody_knows() -> None:
    """There is never a late one of none."""
    harness = EngineHarness(delays=SLOW)
    harness.toggle_deaf(I0)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    ordered(harness)
    assert told(harness)[1] == (0, 0, 0, 0)
    harness.engine.state.now_s += 61.0
    assert told(harness)[1] == (1, 1, 0, 0)
    harness.sim.handle(says(harness, NodeRole.SERVING))
    assert told(harness)[1] == (0, 0, 0, 0)
    assert harness.engine.state.counters.loans_cancelled == 1


def test_a_lapse_on_the_way_that_was_given_up_is_late_if_it_was_by_then() -> None:
    """Its node was confirmed dead or moved: that does not mend the promise."""
    harness = lent()
    harness.sim.handle(says(harness, NodeRole.VACATING))
    moved = replace(says(harness, NodeRole.VACATING), home_pool=Pool.TRAINING, service=None)
    harness.engine.state.now_s += 31.0
    assert told(harness)[1] == (0, 0, 1, 1)
    harness.engine.handle(moved, now_s=harness.engine.state.now_s)
    assert loan_row(loan_of(harness), now_s=1e6).state == "ended"
    assert told(harness)[1] == (0, 0, 1, 1)


def test_a_report_of_a_turn_back_is_one_in_status_and_of_its_service() -> None:
    """In the same report that no longer has the lease; a late one is late in both."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    entry, loan = harness.node("i0"), loan_of(harness)
    report = NodeReport(
        node=I0,
        boot_id=entry.boot_id,
        sequence=1,
        home_pool=Pool.INFERENCE,
        role=NodeRole.VACATING,
        epoch=harness.engine.state.epoch,
        generation=entry.desired.generation,
        instance="one",
        period_s=1.0,
        service=CHAT,
        turned_back=TurnBack(lease_id=loan.lease_id, reason="GPU-1 is used"),
    )
    harness.sim.handle(facts_of(report))
    assert (loan.turned_back, loan.is_lapsed) == ("GPU-1 is used", False)
    for now_s, late in ((60.0, 0), (61.0, 1)):
        harness.engine.state.now_s = now_s
        row = service_row(harness.engine, FOLDER, CHAT, now_s=now_s)
        counts = (row.turn_backs, row.turn_backs_late, row.lapses, row.reclaims)
        assert counts == (1, late, 0, 0)
        found = status(
            harness.engine,
            FOLDER,
            cell="c",
            bad_messages=0,
            up_s=0.0,
            now_s=now_s,
            clock_warning="",
        ).figures
        assert (found["turn_backs"], found["turn_backs_late"]) == (1, late)
        assert (found["leases_lapsed"], found["reclaims"]) == (0, 0)
