"""A node that drains until after its deadline, as its operators see it, and which command hangs."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from agent.core.inference_server import SLOW_S
from agent.core.state import HookKind
from common import subjects
from common.api import (
    Describe,
    Description,
    Done,
    Events,
    GetEvents,
    GetStatus,
    ListLoans,
    ListServices,
    Loans,
    Operate,
    Services,
    Status,
)
from common.messages import CommandReport, DesiredState, NodeReport, decode, encode
from common.model import NodeName, NodeRole
from coordinator.engine.state.accounting import Figures
from coordinator.engine.state.events import NodeReported, OperatorAction
from coordinator.service.coordinator import Coordinator
from coordinator.service.nodes.report_folding import Folder
from coordinator.sim.run.replay import replay
from tests.harness.cluster.agents import CHAT, DELAYS
from tests.harness.cluster.coordinator import CELL, Agent, Cell, make_settings, submit
from tests.harness.node.life import LifeHarness, lease
from tests.service.wire import example

I0 = NodeName("i0")
DEADLINE_S = 60.0
"""Of the one service in `make_settings`."""
LATE = (0, 1, 1)
CANCELLED = (1, 0, 0)
"""(loans cancelled, reclaims, late ones)."""
LOST_AFTER_S = 15.0


class Stuck:
    """A cell whose node i0 drains, was called back, and does not come home until it is let go."""

    def __init__(self) -> None:
        self.cell = Cell(training=1, inference=1)
        spec = self.cell.agents[I0].spec
        slow = replace(DELAYS, drain_s=1e6)
        self.agent = Agent(self.cell.network, self.cell.clock, spec, delays=slow)
        self.cell.agents[I0] = self.agent
        self._obey = self.agent.node.obey

    async def begin(self) -> Coordinator:
        """A leader; its second job gets the node, which is then called back."""
        leader = await self.cell.lead()
        nodes = leader.engine.state.nodes
        for name in ("one", "two"):
            await submit(self.cell, name)
        await self.cell.until(lambda: nodes[I0].role == NodeRole.DRAINING)
        self.agent.node.obey = self._hang  # type: ignore[method-assign]  # its route command hangs
        recall = Operate(action=OperatorAction.RECALL, target=CHAT, reason="load")
        assert isinstance(await self.cell.ask(recall, tenant="ops"), Done)
        return leader

    def _hang(self, desired: DesiredState) -> None:
        """The order is known, and nothing comes of it."""

    def let_go(self) -> None:
        """It serves again, by the order that it has."""
        self.agent.node.obey = self._obey  # type: ignore[method-assign]  # as it was
        self.agent.node.obey(self.agent.desired[-1])
        assert self.agent.node.role == NodeRole.SERVING

    async def counts(self) -> tuple[int, int, int]:
        """(cancelled, reclaims, late ones), in which all that is asked for agrees."""
        status = await self.cell.ask(GetStatus())
        loans = await self.cell.ask(ListLoans(is_live_only=False))
        services = await self.cell.ask(ListServices())
        assert isinstance(status, Status)
        assert isinstance(loans, Loans)
        assert isinstance(services, Services)
        [loan], [service] = loans.rows, services.rows
        found = msgspec.convert(status.figures, Figures)
        late = found.reclaims_late
        assert (service.reclaims, service.reclaims_late) == (found.reclaims, late)
        assert loan.is_late == bool(late)
        assert loan.reclaim_deadline_s == DEADLINE_S
        if loan.returned_at_s is not None:
            assert loan.reclaim_s == service.last_reclaim_s == found.reclaim_s.max
        return found.loans_cancelled, found.reclaims, late

    async def said(self) -> list[str]:
        """What is told of the node's way home."""
        events = await self.cell.ask(GetEvents())
        assert isinstance(events, Events)
        return [f"{row.what}: {row.reason}" for row in events.rows if "home again" in row.what]

    async def explained(self) -> str:
        """Why the node is where it is."""
        found = await self.cell.ask(Describe(kind="node", name=I0))
        assert isinstance(found, Description)
        return "\n".join(found.why)


async def at_home(stuck: Stuck) -> None:
    """The leader hears that it serves."""
    leader = stuck.cell.leaders[-1].coordinator
    node = leader.engine.state.nodes[I0]
    await stuck.cell.until(lambda: node.contact.is_heard and node.role == NodeRole.SERVING)


@pytest.mark.parametrize(("away_s", "expected"), [(50.0, CANCELLED), (75.0, LATE)])
async def test_all_that_tells_of_a_drain_says_the_same_before_and_after_it_is_over(
    away_s: float, expected: tuple[int, int, int]
) -> None:
    """Its reports say nothing new all the while, and the journal brings the same figures again."""
    stuck = Stuck()
    async with stuck.cell:
        await stuck.begin()
        await stuck.cell.clock.advance(away_s)
        is_late = expected == LATE
        assert (await stuck.counts())[2] == is_late
        assert ("a late reclaim" in await stuck.explained()) == is_late
        stuck.let_go()
        await at_home(stuck)
        assert await stuck.counts() == expected
        assert len(await stuck.said()) == is_late
        assert all(line.startswith("home again, late: ") for line in await stuck.said())
        result = replay(stuck.cell.journal())
        found = result.figures
        assert (found.loans_cancelled, found.reclaims, found.reclaims_late) == expected
        assert result.differences == ()


@pytest.mark.parametrize(("led_s", "expected"), [(30.0, CANCELLED), (85.0, LATE)])
async def test_a_restart_forgets_no_late_drain(
    led_s: float, expected: tuple[int, int, int]
) -> None:
    """The node is home before anybody leads again: what the last leader had heard counts, and what
    nobody heard does not."""
    stuck = Stuck()
    async with stuck.cell:
        await stuck.begin()
        await stuck.cell.clock.advance(led_s)
        await stuck.cell.leaders[-1].crash()
        stuck.let_go()
        await stuck.cell.clock.advance(DEADLINE_S)
        await stuck.cell.lead("two", make_settings())
        await at_home(stuck)
        assert await stuck.counts() == expected
        assert not stuck.cell.leaders[-1].coordinator.engine.check()


async def test_a_restart_while_it_drains_forgets_nothing_either() -> None:
    """Its first report to the new leader says it anew."""
    stuck = Stuck()
    async with stuck.cell:
        await stuck.begin()
        await stuck.cell.leaders[-1].crash()
        await stuck.cell.clock.advance(DEADLINE_S)
        await stuck.cell.lead("two", make_settings())
        stuck.let_go()
        await at_home(stuck)
        assert await stuck.counts() == LATE


def says(sequence: int, role: NodeRole, *, boot_id: str = "b") -> NodeReport:
    """A report of a node in a role."""
    plain = {**example(NodeReport), "node": I0, "sequence": sequence, "role": role}
    return replace(msgspec.convert(plain, NodeReport), boot_id=boot_id, workers=())


def folder() -> Folder:
    """A node is LOST after 15 s."""
    return Folder(lost_after_s=LOST_AFTER_S, load_period_s=1e9, progress_period_s=1e9)


def heard(found: NodeReported | None) -> bool | None:
    """Whether the move was; None of no news."""
    return None if found is None else found.is_move_heard


def test_a_move_is_heard_where_the_report_before_it_was() -> None:
    """Also where that one was no news; the move is told once."""
    fold = folder().fold
    assert heard(fold(says(1, NodeRole.DRAINING), now_s=0.0)) is False
    for second in range(1, 101):
        assert fold(says(second + 1, NodeRole.DRAINING), now_s=float(second)) is None
    assert heard(fold(says(102, NodeRole.SERVING), now_s=101.0)) is True
    assert heard(fold(says(103, NodeRole.SERVING), now_s=102.0)) is None
    other = replace(says(104, NodeRole.SERVING), detail="another thing")
    assert heard(fold(other, now_s=103.0)) is False


@pytest.mark.parametrize(("gap_s", "is_heard"), [(15.0, True), (15.5, False)])
def test_a_move_is_not_heard_after_a_silence_by_which_a_node_is_lost(
    gap_s: float, is_heard: bool
) -> None:
    """Whoever did not listen meanwhile has not heard it either, though the node was not silent."""
    one = folder()
    one.listened(now_s=0.0, period_s=1.0)
    one.fold(says(1, NodeRole.DRAINING), now_s=0.0)
    one.listened(now_s=gap_s, period_s=1.0)
    assert one.silent_s(I0, now_s=gap_s) < LOST_AFTER_S
    assert heard(one.fold(says(2, NodeRole.SERVING), now_s=gap_s)) is is_heard


def test_a_boot_is_no_move_that_was_heard() -> None:
    """Nobody knows what the node did when its power went."""
    fold = folder().fold
    fold(says(1, NodeRole.DRAINING), now_s=0.0)
    assert heard(fold(says(2, NodeRole.SERVING, boot_id="c"), now_s=1.0)) is False


def test_what_is_said_again_is_no_move_that_was_heard() -> None:
    """A new leader is told where a node is; when it came there, nobody who led has heard."""
    one = folder()
    one.fold(says(1, NodeRole.DRAINING), now_s=0.0)
    home = says(2, NodeRole.SERVING)
    assert heard(one.fold(home, now_s=1.0)) is True
    assert heard(one.say_again(home, now_s=2.0)) is False


WORKERS = "workers that do not end within their grace are killed"


def test_an_agent_tells_of_a_command_that_does_not_end() -> None:
    """Not of one that is as quick as they are, nor of one that has ended."""
    harness = LifeHarness(at_s=100.0)
    harness.serve()
    harness.answers_hooks = False
    harness.want(NodeRole.ON_LOAN, lease=lease())
    harness.step()
    assert harness.hooks[-1] == HookKind.UNROUTE
    life, began_at_s = harness.life, harness.now_s
    assert life.slow_command(began_at_s + SLOW_S) is UNSET
    told = CommandReport(name="unroute", running_s=40.0)
    assert life.slow_command(began_at_s + 40.0) == told
    life.hook_done(HookKind.UNROUTE, error="", now_s=began_at_s + 41.0)
    assert life.slow_command(began_at_s + 60.0) is UNSET


def test_a_report_without_one_has_the_bytes_that_it_always_had() -> None:
    """A coordinator of an older version refuses what it does not know."""
    report = msgspec.convert(example(NodeReport), NodeReport)
    assert report.slow_command is not UNSET
    quick = encode(replace(report, slow_command=UNSET))
    assert "slow_command" not in msgspec.msgpack.decode(quick)
    assert decode(quick, NodeReport).slow_command is UNSET


async def test_who_asks_why_a_node_is_late_is_told_of_the_command() -> None:
    """And not of workers, which have gone long ago."""
    stuck = Stuck()
    async with stuck.cell:
        await stuck.begin()
        await stuck.cell.clock.advance(75.0)
        said = await stuck.explained()
        assert "a late reclaim" in said
        assert WORKERS in said
        stuck.agent.is_silent = True
        slow = CommandReport(name="stop", running_s=95.0)
        report = replace(stuck.agent.make_report(), slow_command=slow)
        await stuck.agent.bus.publish(subjects.node_report(CELL, I0), encode(report))
        await stuck.cell.clock.settle()
        said = await stuck.explained()
        assert "a late reclaim; its stop command has run for 95 s and has not ended" in said
        assert WORKERS not in said
        await stuck.cell.clock.advance(5.0)
        assert "its stop command has run for 100 s and has not ended" in await stuck.explained()
