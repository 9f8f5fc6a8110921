"""Versions that differ in a cell: whichever is upgraded first decides what stands still."""

from __future__ import annotations

import msgspec
import pytest

from common.api import GetStatus, Status
from common.bus import BusMessage
from common.errors import Unavailable
from common.messages import DesiredReply, encode
from common.model import JobState, NodeName, NodeRole
from coordinator.service.coordinator import Coordinator
from tests.harness.cluster.agents import DELAYS
from tests.harness.cluster.coordinator import Agent, Cell, job, on_loan, running, submit
from tests.harness.fakes import FakeBus

R = NodeRole
NEW_FIELD = "colour"


class VersionBus(FakeBus):
    """The bus of a node whose reports have a field that nobody here knows, once it is newer."""

    is_newer = False

    async def publish(self, subject: str, data: bytes) -> None:
        """As `FakeBus.publish`."""
        if self.is_newer and subject.endswith(".report"):
            data = msgspec.msgpack.encode({**msgspec.msgpack.decode(data), NEW_FIELD: "blue"})
        await super().publish(subject, data)


class OlderAgent(Agent):
    """One that refuses each desired state for a field that it does not know, once it is older."""

    is_older = False

    async def _on_desired(self, message: BusMessage) -> None:
        if not self.is_older:
            await super()._on_desired(message)
            return
        error = f"DesiredState: Object contains unknown field `{NEW_FIELD}`"
        reply = DesiredReply(
            is_accepted=False, epoch=self.epoch, generation=self.generation, error=error
        )
        await message.respond(encode(reply))


def role(coordinator: Coordinator, name: str) -> NodeRole:
    """A node's, as its coordinator sees it."""
    return coordinator.engine.state.nodes[NodeName(name)].role


async def bad_messages(cell: Cell) -> int:
    """As `aryl status` has them."""
    status = await cell.ask(GetStatus())
    assert isinstance(status, Status)
    return status.bad_messages


async def test_an_agent_that_is_upgraded_before_its_coordinator_is_not_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its reports are counted and told once with node and field, its node is lost and its loan not
    prolonged; other nodes go on, and it is back with the first report that is read."""
    cell = Cell(inference=1)
    agent = cell.agents["i0"]
    agent.bus = bus = VersionBus(cell.network, clock=cell.clock)
    async with cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        [elsewhere] = {key.job_id for key in cell.agents["t0"].running()}
        assert (await agent.renew()).is_granted
        assert await bad_messages(cell) == 0
        bus.is_newer = True
        await cell.until(lambda: role(coordinator, "i0") == R.LOST)
        assert await bad_messages(cell) > 0
        told = [line for line in caplog.messages if NEW_FIELD in line]
        assert [line.startswith("bad reports of i0: ") for line in told] == [True]
        with pytest.raises(Unavailable):
            await agent.renew()
        assert job(coordinator, elsewhere).state == JobState.RUNNING
        assert cell.leaders[0].bus.handler_error_count == 0
        bus.is_newer = False  # as to a coordinator that is upgraded as well
        await cell.until(lambda: role(coordinator, "i0") != R.LOST)
        assert (await agent.renew()).is_granted


async def test_a_coordinator_that_is_upgraded_before_an_agent_hears_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The agent refuses its orders, which are counted and told once with node and field: what runs
    goes on and its end counts, nothing new begins there, and all of it does after its upgrade."""
    cell = Cell()
    agent = OlderAgent(cell.network, cell.clock, cell.agents["t0"].spec, delays=DELAYS)
    cell.agents["t0"] = agent
    async with cell:
        coordinator = await cell.lead()
        first = await running(cell, coordinator)
        agent.is_older = True
        second = await submit(cell, "second")
        [key] = agent.running()
        agent.node.exited(key, 0)
        await cell.until(lambda: job(coordinator, first).state == JobState.SUCCEEDED)
        await cell.clock.advance(2 * coordinator.settings.lost_after_s)
        assert role(coordinator, "t0") == R.TRAINING
        assert agent.running() == []
        assert coordinator.dispatcher.refusals > 0
        told = [line for line in caplog.messages if NEW_FIELD in line]
        assert [line.startswith("node t0 refused generation ") for line in told] == [True]
        agent.is_older = False
        await cell.until(lambda: job(coordinator, second).state == JobState.RUNNING)
