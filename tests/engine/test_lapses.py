"""Leases that ended by themselves: how long the way home took, and whether that was late."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import LeaseId, NodeName, NodeRole
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.accounting import ReclaimTimes, figures
from coordinator.engine.state.events import NodeReported
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan
from coordinator.sim.run.cluster import Delays
from tests.engine.house import CHAT, House

SLOW = Delays(drain_s=5.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
WAY_S = {"vacate": 3.0, "device_free": 1.0, "server_ready": 10.0}


def lent() -> House:
    """A cell of which one node is lent; its service has a deadline of 60 s, its lease 30 s."""
    house = House(delays=SLOW)
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    house.wait(6.0)
    return house


def loan_of(house: House) -> LoanEntry:
    """The one loan."""
    [loan] = house.engine.state.loans.values()
    return loan


def says(
    house: House, role: NodeRole, stage_durations_s: dict[str, float] | None = None
) -> NodeReported:
    """A report of the lent node, which holds no lease any more."""
    return replace(house.report("i0", role), stage_durations_s=stage_durations_s or {})


@pytest.mark.parametrize(("unattended_s", "is_late"), [(0.0, False), (16.0, False), (17.0, True)])
def test_a_lapse_that_took_longer_than_the_promise_is_late(
    unattended_s: float, is_late: bool
) -> None:
    """The TTL is gone of the deadline when the lease ends; what the node has measured counts from
    there, however late the first word of it was heard."""
    house = lent()
    house.wait(100.0)
    stages_s = WAY_S | {"unattended": unattended_s}
    house.sim.handle(says(house, NodeRole.SERVING, stages_s))
    loan = loan_of(house)
    assert (loan.lapse_s, loan_outcome.is_late(loan)) == (14.0 + unattended_s, is_late)
    found = figures(house.engine.state)
    assert (found.leases_lapsed, found.lapses_late) == (1, int(is_late))
    assert (found.reclaims, found.reclaims_late) == (0, 0)
    assert (found.lapse_s.max, found.reclaim_s) == (14.0 + unattended_s, ReclaimTimes())


def test_a_lapse_is_not_late_because_nobody_led_while_it_ended() -> None:
    """Its first word was heard by one leader, and its end long after by the next one."""
    house = lent()
    house.sim.handle(says(house, NodeRole.VACATING))
    report = says(house, NodeRole.SERVING, WAY_S)
    house.engine.handle(report, now_s=house.engine.state.now_s + 600.0)
    assert loan_of(house).lapse_s == 14.0
    assert figures(house.engine.state).lapses_late == 0


def test_a_node_that_measured_nothing_is_judged_by_what_was_heard() -> None:
    """An agent of an earlier version: from the first word of the lapse to serving again."""
    house = lent()
    house.sim.handle(says(house, NodeRole.VACATING))
    house.engine.handle(says(house, NodeRole.SERVING), now_s=house.engine.state.now_s + 31.0)
    assert loan_of(house).lapse_s == 31.0
    assert figures(house.engine.state).lapses_late == 1


def test_a_drain_that_was_turned_back_by_itself_is_never_late() -> None:
    """The loan had not begun: the service had its node all the time but for the drain."""
    house = House(delays=SLOW)
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    house.engine.handle(
        says(house, NodeRole.SERVING, {"unattended": 500.0}),
        now_s=house.engine.state.now_s + 600.0,
    )
    assert (loan_of(house).is_lapsed, loan_of(house).lapse_s) == (True, None)
    assert figures(house.engine.state).lapses_late == 0


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
