"""A frozen cell as its service sees it: what it is told, and what comes home."""

from __future__ import annotations

from common.api import Describe, Description, Done, Jobs, ListJobs, Operate
from common.model import NodeName, NodeRole
from coordinator.engine.state.events import LoadMeasured
from tests.service.cell import CHAT, LEASE_TTL_S, Cell, on_loan, submit


async def test_a_service_of_a_frozen_cell_is_told_its_promise_and_has_it_kept() -> None:
    """Nothing more is lent, jobs wait, leases are renewed; and its node comes home for its load."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        assert isinstance(await cell.ask(Operate(action="freeze"), tenant="ops"), Done)
        found = await cell.ask(Describe(kind="service", name=CHAT))
        assert isinstance(found, Description)
        [said] = [why for why in found.why if "frozen" in why]
        assert "nodes that its load needs still come home" in said
        await submit(cell, "waits")
        await cell.clock.advance(3.0 * LEASE_TTL_S)
        node = coordinator.engine.state.nodes[NodeName("i0")]
        assert node.role == NodeRole.ON_LOAN
        coordinator.decider.post(LoadMeasured(service=CHAT, load=9.0))
        await cell.until(lambda: node.serving_since_s is not None)
        listed = await cell.ask(ListJobs(is_live_only=True))
        assert isinstance(listed, Jobs)
        waiting = [row for row in listed.rows if row.state == "pending"]
        assert {row.name for row in waiting} >= {"waits"}
        assert all("nothing is started, resized or lent" in row.blockers[0] for row in waiting)
