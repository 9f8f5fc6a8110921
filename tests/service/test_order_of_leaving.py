"""What leaves a leader leaves after its record: orders to nodes wait for the journal."""

from __future__ import annotations

from common.api import Submit, Submitted
from tests.service.cell import Cell, make_spec


async def test_an_order_waits_for_its_own_record() -> None:
    """A node that obeys what the journal never had would run a worker that the next leader does not
    know: while the pass's record is not written, nothing of the pass is ordered."""
    async with Cell() as cell:
        await cell.lead()
        leader, agent = cell.leaders[0], cell.agents["t0"]
        before = agent.generation
        reply = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(reply, Submitted)
        assert agent.generation == before, "the submit is written, and no pass has run yet"
        count = len(cell.records)
        leader.journal.is_down = True
        await cell.clock.advance(1.0)
        node = leader.coordinator.engine.state.nodes[agent.name]
        assert node.desired.generation > before, "the pass has run"
        assert len(cell.records) == count
        assert (agent.generation, agent.running()) == (before, [])
        leader.journal.is_down = False
        await cell.until(lambda: bool(agent.running()))
        assert len(cell.records) > count
