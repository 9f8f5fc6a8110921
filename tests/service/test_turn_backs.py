"""A loan that its node gave up, from the node's report to the counts of its service."""

from __future__ import annotations

from common.messages import NodeReport
from common.model import NodeName, NodeRole, Pool, TurnBack
from coordinator.policies.contract.decisions import Loan
from coordinator.service.api.rows import service_row, status
from coordinator.service.nodes.report_folding import facts_of
from tests.engine.house import CHAT, House
from tests.engine.test_lapses import SLOW
from tests.service.test_kept_promises import FOLDER, I0, loan_of


def test_a_report_of_a_turn_back_is_one_in_status_and_of_its_service() -> None:
    """In the same report that no longer has the lease; a late one is late in both."""
    house = House(delays=SLOW)
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    entry, loan = house.node("i0"), loan_of(house)
    report = NodeReport(
        node=I0,
        boot_id=entry.boot_id,
        sequence=1,
        home_pool=Pool.INFERENCE,
        role=NodeRole.VACATING,
        epoch=house.engine.state.epoch,
        generation=entry.desired.generation,
        instance="one",
        period_s=1.0,
        service=CHAT,
        turned_back=TurnBack(lease_id=loan.lease_id, reason="GPU-1 is used"),
    )
    house.sim.handle(facts_of(report))
    assert (loan.turned_back, loan.is_lapsed) == ("GPU-1 is used", False)
    for now_s, late in ((60.0, 0), (61.0, 1)):
        house.engine.state.now_s = now_s
        row = service_row(house.engine, FOLDER, CHAT, now_s=now_s)
        counts = (row.turn_backs, row.turn_backs_late, row.lapses, row.reclaims)
        assert counts == (1, late, 0, 0)
        found = status(
            house.engine, FOLDER, cell="c", bad_messages=0, up_s=0.0, now_s=now_s, clock_warning=""
        ).figures
        assert (found["turn_backs"], found["turn_backs_late"]) == (1, late)
        assert (found["leases_lapsed"], found["reclaims"]) == (0, 0)
