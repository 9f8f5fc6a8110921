"""A standby that waited long takes over what is, not what was when it began to wait."""

from __future__ import annotations

from common.api import GetStatus, Status
from tests.service.cell import Cell, make_settings, running, starts, submit


async def test_the_epoch_of_a_standby_is_above_all_that_was_reported_while_it_waited() -> None:
    """All of JetStream is lost hours later: agents refuse nothing of it, and it stays leader."""
    async with Cell() as cell:
        cell.launch("one")
        standby = cell.launch("two").coordinator  # asks for the lease before any agent has an epoch
        await cell.until(lambda: cell.leaders[0].coordinator.is_leading)
        await running(cell, cell.leaders[0].coordinator)
        await cell.leaders[0].crash()
        cell.records.clear()
        cell.key.entry = cell.snapshots.saved = None
        await cell.until(lambda: standby.is_leading)
        await submit(cell, "after")
        assert [start.epoch for start in starts(cell)] == [2]
        agent = cell.agents["t0"]
        await cell.until(lambda: agent.epoch == 2)
        assert not agent.refused
        assert not cell.leaders[1].task.done()


async def test_a_new_leader_answers_from_its_own_lead() -> None:
    """Before its first record is written, the state has the epoch and the policy of the last."""
    async with Cell() as cell:
        await cell.lead()
        await cell.leaders[0].crash()
        second = cell.launch("two", make_settings(policy="tetris"))
        await cell.until(lambda: second.coordinator.is_leading)
        assert second.coordinator.engine.state.epoch == 1, "it has not begun"
        reply = await cell.ask(GetStatus())
        assert isinstance(reply, Status)
        assert (reply.epoch, reply.policy) == (2, "tetris")
