"""The lease loop alone: what it asks, what it concludes, and what it arms when."""

from __future__ import annotations

import asyncio

import pytest

from agent.agent import MIN_REPORT_GAP_S
from agent.lease.renewal import DISARM_RETRY_S, RETRIES_PER_TTL, LastResort, LeaseKeeper
from common import subjects
from common.bus import BusMessage
from common.errors import Unavailable
from common.messages import RenewReply, RenewRequest, decode, encode
from common.model import LeaseId, NodeRole
from tests.harness.fakes import FakeBus, FakeClock, FakeNetwork
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import LifeHarness, lease
from tests.harness.node.models import ModelLastResort
from tests.tables import each_row

TTL_S, MARGIN_S = 30.0, 2.0


class Harness:
    """A keeper over a node's real life, a coordinator that a test scripts, and a last resort."""

    def __init__(self, *, inference: bool = True) -> None:
        self.life_harness = LifeHarness(inference=inference)
        if inference:
            self.life_harness.serve()
        self.clock = FakeClock(now_s=self.life_harness.now_s)
        network = FakeNetwork()
        self.bus = FakeBus(network, clock=self.clock)
        self.peer = FakeBus(network, clock=self.clock)
        self.resort = ModelLastResort(self.clock)
        self.asked_at_s: list[float] = []
        self.answers_after_s = 0.0
        self.is_granting: bool | None = True
        """None: the coordinator does not answer."""
        self.granted_ttl_s = 0.0
        self.nonce_ahead = 0
        self.changes = 0
        self.keeper = LeaseKeeper(
            self.life_harness.life,
            cell="c1",
            bus=self.bus,
            clock=self.clock,
            last_resort=self.resort,
            margin_s=MARGIN_S,
            changed=self._changed,
        )

    async def _changed(self) -> None:
        self.changes += 1

    async def __aenter__(self) -> Harness:
        await self.peer.subscribe(subjects.node_renew("c1", "n1"), self._answer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.peer.close()

    async def _answer(self, message: BusMessage) -> None:
        request = decode(message.data, RenewRequest)
        self.asked_at_s.append(self.clock.now_s())
        await self.clock.sleep(self.answers_after_s)
        if self.is_granting is None:
            return
        reply = RenewReply(
            lease_id=request.lease_id, nonce=request.nonce + self.nonce_ahead,
            is_granted=self.is_granting, epoch=1, ttl_s=self.granted_ttl_s, reason="the load rises",
        )  # fmt: skip
        await message.respond(encode(reply))

    def lend(self, name: str = "l1-1") -> None:
        """The coordinator orders the loan."""
        self.life_harness.now_s = self.clock.now_s()
        self.life_harness.want(NodeRole.ON_LOAN, lease=lease(name, ttl_s=TTL_S))

    async def step(self) -> None:
        """One step of the keeper, however long it waits for its answer."""
        doing = asyncio.create_task(self.keeper.step())
        await self.clock.advance_until(doing.done, limit_s=TTL_S)
        await doing

    async def advance(self, delta_s: float) -> None:
        """Time in which the keeper is called as the agent calls it."""
        end_s = self.clock.now_s() + delta_s
        while self.clock.now_s() < end_s:
            await self.step()
            await self.clock.advance(0.5)

    @property
    def until_s(self) -> float | None:
        """End of the lease as the node knows it."""
        return self.life_harness.memory.lease_until_s


def test_a_model_of_a_last_resort_is_one() -> None:
    """The type checker compares it with what the agent asks for."""
    resort: LastResort = ModelLastResort(FakeClock())
    assert resort is not None


async def test_the_ttl_runs_from_the_moment_that_the_answered_request_was_sent() -> None:
    """An answer that took its time prolongs nothing: clocks of two machines are never compared."""
    async with Harness() as harness:
        harness.lend()
        harness.answers_after_s = 5.0
        sent_at_s = harness.clock.now_s()
        await harness.step()
        assert harness.clock.now_s() == sent_at_s + 5.0
        assert harness.until_s == sent_at_s + TTL_S


async def test_it_asks_every_third_of_the_ttl_and_not_in_between() -> None:
    """Two requests may be lost before a lease ends."""
    async with Harness() as harness:
        harness.lend()
        await harness.advance(2 * TTL_S)
        gaps_s = [b - a for a, b in zip(harness.asked_at_s, harness.asked_at_s[1:], strict=False)]
        assert len(harness.asked_at_s) >= 6
        assert all(TTL_S / 3 <= gap_s <= TTL_S / 3 + 0.5 for gap_s in gaps_s)


async def test_an_answer_may_shorten_the_ttl_and_never_lengthen_it() -> None:
    """The TTL agreed on is what the coordinator counts on for the way home."""
    async with Harness() as harness:
        harness.lend()
        harness.granted_ttl_s = 10.0
        sent_at_s = harness.clock.now_s()
        await harness.step()
        assert harness.until_s == sent_at_s + 10.0
        harness.granted_ttl_s = 1e6
        await harness.clock.advance(10.0 / 3)  # a shorter TTL is asked for more often
        sent_at_s = harness.clock.now_s()
        await harness.step()
        assert harness.until_s == sent_at_s + TTL_S


@pytest.mark.parametrize("is_granting", [True, False])
async def test_an_answer_to_another_request_says_nothing(is_granting: bool) -> None:
    """A grant of an earlier request, late on its way, is no word that the loan goes on now; a
    refusal that answers something else sends nobody home."""
    async with Harness() as harness:
        harness.lend()
        await harness.step()
        until_s, changes = harness.until_s, harness.changes
        harness.is_granting, harness.nonce_ahead = is_granting, -1
        await harness.clock.advance(TTL_S / 3)
        await harness.step()
        assert len(harness.asked_at_s) == 2
        assert (harness.until_s, harness.changes, harness.keeper.failures) == (until_s, changes, 1)
        assert harness.life_harness.memory.lease is not None


async def test_silence_is_counted_and_prolongs_nothing() -> None:
    """The next third of the TTL asks again."""
    async with Harness() as harness:
        harness.lend()
        await harness.step()
        until_s = harness.until_s
        harness.is_granting = None
        await harness.clock.advance(TTL_S / 3)
        await harness.step()
        assert (harness.until_s, harness.keeper.failures) == (until_s, 1)
        harness.is_granting = True
        await harness.clock.advance(TTL_S / 3)
        await harness.step()
        assert until_s is not None
        assert harness.until_s is not None
        assert harness.until_s > until_s


async def test_nobody_is_asked_any_more_when_the_lease_is_over() -> None:
    """A late grant must not turn back a node that is on its way home."""
    async with Harness() as harness:
        harness.lend()
        harness.is_granting = None
        await harness.advance(TTL_S + 15.0)
        assert all(asked_at_s < harness.asked_at_s[0] + TTL_S for asked_at_s in harness.asked_at_s)


async def test_a_refusal_reaches_the_node_with_its_reason() -> None:
    """The node turns home at once and says why."""
    async with Harness() as harness:
        harness.lend()
        harness.is_granting = False
        await harness.step()
        harness.life_harness.steps(3)
        assert harness.life_harness.memory.lease is None
        assert harness.changes == 1


async def test_the_last_resort_is_armed_before_the_first_request_is_answered() -> None:
    """From the moment that a lease was taken: the agent may die before the coordinator answers."""
    async with Harness() as harness:
        harness.lend()
        harness.is_granting = None
        taken_at_s = harness.clock.now_s()
        asking = asyncio.create_task(harness.keeper.step())
        await harness.clock.settle()
        assert harness.asked_at_s == [taken_at_s]
        assert harness.resort.fires_at_s == taken_at_s + TTL_S + MARGIN_S
        asking.cancel()


async def test_each_renewal_puts_the_last_resort_off_to_a_margin_after_the_new_end() -> None:
    """A living agent turns home first."""
    async with Harness() as harness:
        harness.lend()
        for _ in range(3):
            await harness.step()
            assert harness.until_s is not None
            assert harness.resort.fires_at_s == harness.until_s + MARGIN_S
            await harness.clock.advance(TTL_S / 3)


async def test_a_last_resort_that_could_not_be_armed_is_tried_again_with_the_next_renewal() -> None:
    """Not in a storm, and the renewals themselves go on."""
    async with Harness() as harness:
        harness.lend()
        harness.resort.failures = [Unavailable("systemd"), OSError("disk"), Unavailable("systemd")]
        await harness.advance(TTL_S / 3 - 1.0)
        assert harness.resort.arm_count == 2  # before the request, and after its answer
        assert harness.until_s is not None
        await harness.advance(TTL_S / 3)
        assert harness.resort.is_armed()
        assert harness.keeper.failures == 3


@pytest.mark.parametrize("inference", [True, False])
async def test_a_node_at_home_is_disarmed_once(inference: bool) -> None:
    """Also by an agent that is new and cannot know what the one before it armed."""
    async with Harness(inference=inference) as harness:
        harness.resort.fires_at_s = harness.clock.now_s() + 5.0
        await harness.step()
        assert not harness.resort.is_armed()
        harness.resort.failures = [Unavailable("nobody should call")]
        await harness.advance(60.0)
        assert harness.keeper.failures == 0


async def test_a_disarm_that_failed_is_tried_again_after_a_pause() -> None:
    """An armed last resort at home does no harm, so there is no hurry."""
    async with Harness() as harness:
        harness.resort.fires_at_s = harness.clock.now_s() + 500.0
        harness.resort.failures = [Unavailable("systemd")]
        await harness.step()
        await harness.step()
        assert harness.resort.is_armed()
        assert harness.keeper.failures == 1
        await harness.clock.advance(DISARM_RETRY_S)
        await harness.step()
        assert not harness.resort.is_armed()


async def test_after_a_failure_it_asks_again_sooner() -> None:
    """While the leader changes nobody listens: the first one who does must be asked soon."""
    harness = Harness()
    harness.lend()
    for failures in (1, 2, 3):
        await harness.step()
        assert harness.keeper.failures == failures
        assert harness.keeper.wait_s == pytest.approx(TTL_S / RETRIES_PER_TTL)
        await harness.clock.advance(TTL_S / RETRIES_PER_TTL)
    async with harness:
        await harness.step()
        assert harness.until_s == harness.clock.now_s() + TTL_S
        assert harness.keeper.wait_s == pytest.approx(TTL_S / 3)


async def test_a_new_lease_after_the_old_one_is_asked_for_and_armed_at_once() -> None:
    """Nothing of the old lease's clock is left."""
    async with Harness() as harness:
        harness.lend()
        await harness.step()
        harness.life_harness.want(NodeRole.SERVING)
        harness.life_harness.steps(4)
        assert harness.life_harness.role() == NodeRole.SERVING
        harness.lend("l1-2")
        await harness.step()
        assert len(harness.asked_at_s) == 2
        assert harness.life_harness.memory.lease is not None
        assert harness.life_harness.memory.lease.lease_id == LeaseId("l1-2")
        assert harness.until_s == harness.clock.now_s() + TTL_S


async def test_a_late_answer_to_a_lease_that_ended_meanwhile_arms_nothing() -> None:
    """The node is on its way home by then."""
    async with Harness() as harness:
        harness.lend()
        harness.answers_after_s = 3.0
        asking = asyncio.create_task(harness.keeper.step())
        await harness.clock.settle()
        harness.life_harness.want(NodeRole.SERVING)
        harness.life_harness.steps(4)
        arm_count = harness.resort.arm_count
        await harness.clock.advance(4.0)
        await asking
        assert (harness.until_s, harness.resort.arm_count) == (None, arm_count)


async def test_the_keeper_says_how_long_it_has_nothing_to_do() -> None:
    """None without a lease."""
    async with Harness() as harness:
        waits_s = [harness.keeper.wait_s]
        harness.lend()
        waits_s.append(harness.keeper.wait_s)
        await harness.step()
        waits_s.append(harness.keeper.wait_s)
        assert waits_s == [None, 0.0, pytest.approx(TTL_S / 3)]


# --- the agent that runs it -------------------------------------------------------------------


async def test_a_node_leaves_its_routing_with_its_last_resort_armed() -> None:
    """An agent that was killed with its first command under way would leave it away for ever."""
    async with AgentHarness(inference=True) as harness:
        await harness.until_role(NodeRole.SERVING)
        harness.stall.begin("arm")
        await harness.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
        await harness.clock.advance(TTL_S / 2)
        assert not harness.last_resort.is_armed()
        assert "unroute" not in harness.machine.commands
        assert harness.report.role == NodeRole.SERVING
        harness.stall.end()
        await harness.clock.settle()
        assert harness.last_resort.is_armed()
        assert "unroute" in harness.machine.commands
        await harness.until_role(NodeRole.ON_LOAN)


@each_row("failures", [[], [Unavailable("systemd")]])
@each_row("after_ratio", [0.0, 0.25, 0.5, 0.75])
async def test_a_loan_begins_with_its_order_and_not_at_the_next_look(
    after_ratio: float, failures: list[Exception]
) -> None:
    """Also where its last resort could not be armed, which its report counts."""
    async with AgentHarness(inference=True) as harness:
        await harness.until_role(NodeRole.SERVING)
        await harness.clock.advance(after_ratio * harness.settings.step_period_s)
        harness.last_resort.failures = list(failures)
        await harness.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
        await harness.clock.advance(MIN_REPORT_GAP_S)  # so long a report that was sent lasts
        assert "unroute" in harness.machine.commands
        await harness.until_role(NodeRole.ON_LOAN)
        agent = harness.report.agent
        assert agent is not None
        assert agent.lease_failures == len(failures)


async def test_a_loan_that_is_called_off_before_it_began_moves_nothing() -> None:
    """Whatever still hangs: the node serves, and takes the next one."""
    async with AgentHarness(inference=True) as harness:
        await harness.until_role(NodeRole.SERVING)
        harness.stall.begin("arm")
        await harness.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
        await harness.want(NodeRole.SERVING)
        await harness.clock.advance(1.0)
        harness.stall.end()
        await harness.clock.advance(1.0)
        assert (harness.report.role, harness.report.lease) == (NodeRole.SERVING, None)
        assert "unroute" not in harness.machine.commands
        await harness.want(NodeRole.ON_LOAN, lease=lease("l1-2", ttl_s=TTL_S))
        await harness.until_role(NodeRole.ON_LOAN)
