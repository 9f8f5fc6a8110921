"""An agent whose event loop turns while one of its duties gets nowhere does not look alive."""

from __future__ import annotations

import asyncio

from agent.lease.renewal import RESORT_LIMIT_S
from agent.watchdog import SPARE_S, Duties
from agent.workers.lost import ASK_S, LOOK_S
from agent.workers.starters import START_TIMEOUT_S
from common.messages import StopOrder
from common.model import NodeRole, StopReason
from tests.harness.fakes import FakeClock
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import key, lease, order
from tests.tables import each_row

R = NodeRole
TTL_S = 30.0
LIMITS = {
    "statuses": ("statuses", 0.0),
    "ledger": ("ledger", 0.0),
    "start": ("StartWorker", 2 * (START_TIMEOUT_S + ASK_S + 2 * LOOK_S)),
    "sample": ("sample", 2.0),
    "arm": ("lease", TTL_S + 2 * RESORT_LIMIT_S),
}
"""The duty that cannot get on at a place, and the time that it may take there."""


@each_row("place", LIMITS)
async def test_an_agent_with_a_duty_that_gets_nowhere_feeds_no_watchdog(place: str) -> None:
    """Whatever else goes on: the duty is named, and it is over as soon as it gets on."""
    duty, limit_s = LIMITS[place]
    async with AgentHarness(inference=True) as agent:
        await agent.lend(ttl_s=TTL_S)
        agent.stall.begin(place)
        wanting = asyncio.create_task(agent.want(R.ON_LOAN, order(), lease=lease(ttl_s=TTL_S)))
        await agent.clock.advance(TTL_S / 2 + limit_s + SPARE_S)
        await asyncio.gather(wanting, return_exceptions=True)
        assert set(agent.node.duties.overdue()) == {duty}
        fed = agent.steps
        await agent.clock.advance(60.0)
        assert agent.steps == fed
        agent.stall.end()
        await agent.clock.advance(5.0)
        assert agent.node.duties.overdue() == ()
        assert agent.steps > fed


async def test_a_worker_that_is_slow_to_start_is_no_duty_that_gets_nowhere() -> None:
    """What has a time limit of its own is given that time."""
    async with AgentHarness() as agent:
        agent.stall.begin("start")
        await agent.want(R.TRAINING, order())
        await agent.clock.advance(2 * (START_TIMEOUT_S + ASK_S + 2 * LOOK_S))
        assert agent.node.duties.overdue() == ()


async def test_a_stop_that_looks_through_all_processes_is_no_duty_that_gets_nowhere() -> None:
    """On a busy machine each look takes its time, until the limit that it has."""
    async with AgentHarness() as agent:
        await agent.want(R.TRAINING, order())
        await agent.clock.advance(5.0)
        agent.stall.begin("stop")
        stop = StopOrder(key=key(), reason=StopReason.CANCEL, grace_s=9.0)
        await agent.want(R.TRAINING, order(), stops=(stop,))
        await agent.clock.advance(ASK_S + 2 * LOOK_S)
        assert agent.node.duties.overdue() == ()
        await agent.clock.advance(2 * SPARE_S)
        assert agent.node.duties.overdue() == ("StopWorker",)
        agent.stall.end()


async def test_an_agent_that_has_nothing_to_do_is_well() -> None:
    """Waiting is no duty: a day of it is nothing overdue, at home and on loan."""
    async with AgentHarness(inference=True) as agent:
        await agent.clock.advance(600.0)
        assert agent.node.duties.overdue() == ()
        await agent.lend(ttl_s=TTL_S)
        await agent.clock.advance(600.0)
        assert agent.report.role == R.ON_LOAN
        assert agent.node.duties.overdue() == ()
        fed = agent.steps
        await agent.clock.advance(10.0)
        assert agent.steps > fed


def test_a_leg_is_overdue_from_its_limit_until_it_ends() -> None:
    """Several at once are told in the order in which they began."""
    clock = FakeClock()
    now_s = [clock.now_s()]
    fed: list[float] = []
    duties = Duties(lambda: now_s[0], progress=lambda: fed.append(now_s[0]))
    with duties.leg("slow", within_s=5.0):
        with duties.leg("quick"):
            now_s[0] += SPARE_S
            assert duties.overdue() == ("quick",)
            now_s[0] += 5.0
            assert duties.overdue() == ("slow", "quick")
        assert duties.overdue() == ("slow",)
        duties.progressed()
        assert fed == []
    duties.progressed()
    assert fed == [now_s[0]]
