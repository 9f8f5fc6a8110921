"""Reads are shared and take turns: a flood of them neither blocks the loop nor refuses a change."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import subjects
from common.api import Done, ListNodes, Nodes, Submit, Submitted
from common.errors import Unavailable
from common.messages import Message, encode
from coordinator.client import Client
from coordinator.service.api import queries as api_queries
from coordinator.service.api.handlers import Api
from coordinator.service.api.shared_reads import MAX_BUILDS, MAX_WAIT_S, Reads
from coordinator.service.request_tasks import Requests
from tests.harness.cluster.coordinator import CELL, Cell, make_spec
from tests.harness.fakes import FakeClock, FakeMessage


class Desk:
    """Reads whose answers are numbered, each of which takes its time to build."""

    def __init__(self, build_s: float = 0.0) -> None:
        self.clock = FakeClock()
        self.built_at_s: list[float] = []
        self.reads = Reads(clock=self.clock, finish=self._finish)
        self._build_s = build_s

    async def _finish(self, reply: Message) -> bytes:
        return encode(reply)

    def build(self) -> Message:
        """The next number; the clock moves, and no other task runs."""
        self.built_at_s.append(self.clock.now_s())
        self.clock.jump(self._build_s)
        return Done(detail=str(len(self.built_at_s)))

    def ask(self, key: bytes) -> asyncio.Task[bytes]:
        """A request for it."""
        return asyncio.create_task(self.reads.answer(key, self.build))


def detail(asked: asyncio.Task[bytes]) -> str:
    """The number of an answer."""
    return msgspec.msgpack.decode(asked.result(), type=Done).detail


async def test_all_who_ask_before_a_build_begins_share_it() -> None:
    """And none is answered by a build that began before it asked."""
    desk = Desk()
    first = [desk.ask(b"x") for _ in range(256)]
    await desk.clock.settle()
    then = [desk.ask(b"x") for _ in range(256)]
    await desk.clock.settle()
    assert {detail(one) for one in first} == {"1"}
    assert {detail(one) for one in then} == {"2"}


async def test_the_loop_rests_after_a_build_for_as_long_as_it_took() -> None:
    """So other work has at least half of the loop, however many reads wait."""
    desk = Desk(build_s=1.0)
    asked = [desk.ask(str(number).encode()) for number in range(4)]
    await desk.clock.advance(7.0)
    assert all(one.done() for one in asked)
    starts = desk.built_at_s
    assert [start - starts[0] for start in starts] == [0.0, 2.0, 4.0, 6.0]


async def test_one_more_different_read_than_may_wait_is_refused() -> None:
    """At once, with the advice to ask again; those that wait are answered."""
    desk = Desk()
    asked = [desk.ask(str(number).encode()) for number in range(MAX_BUILDS)]
    late = desk.ask(b"late")
    again = desk.ask(b"0")
    await desk.clock.advance(1.0)
    with pytest.raises(Unavailable, match=f"{MAX_BUILDS} different reads wait here; ask again"):
        late.result()
    assert all(one.done() for one in (*asked, again))
    assert len(desk.built_at_s) == MAX_BUILDS


async def test_a_read_that_waits_in_vain_is_not_built() -> None:
    """Not one whose caller waits no longer, nor one that is refused for its age."""
    desk = Desk(build_s=MAX_WAIT_S)
    first, second, third = (desk.ask(key) for key in (b"1", b"2", b"3"))
    await asyncio.sleep(0)
    third.cancel()
    await desk.clock.advance(3 * MAX_WAIT_S)
    assert detail(first) == "1"
    with pytest.raises(Unavailable, match="ask again"):
        second.result()
    assert len(desk.built_at_s) == 1


async def test_a_build_that_breaks_breaks_its_own_requests_alone() -> None:
    """Those that wait behind it are answered."""
    desk = Desk()

    def broken() -> Message:
        raise ValueError("broken")

    bad = asyncio.create_task(desk.reads.answer(b"bad", broken))
    good = desk.ask(b"good")
    await desk.clock.settle()
    with pytest.raises(ValueError, match="broken"):
        bad.result()
    assert detail(good) == "1"


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 5))
def test_pages_that_end_by_time_hold_each_row_once(rows: list[int], per_page: int) -> None:
    """A slow page holds at least one row, and the next one goes on behind it."""
    found: list[int] = []
    has_more = True
    while has_more:
        overs = iter([*[False] * (per_page - 1), True])
        taken, has_more = api_queries.page(rows[len(found) :], is_over=overs.__next__)
        assert len(taken) == min(per_page, len(rows) - len(found))
        found += taken
    assert found == rows


class CreepingClock(FakeClock):
    """Virtual time that moves a little at each look at it."""

    def now_s(self) -> float:
        self.jump(0.006)
        return super().now_s()


async def test_lists_of_many_callers_are_built_in_slices_and_shared() -> None:
    """Each caller sees every node once, though a slice holds but a few of them."""
    async with Cell(training=12) as cell:
        coordinator = await cell.lead()
        coordinator.clock = CreepingClock(now_s=cell.clock.now_s())  # of its looks alone
        clients = [Client(cell.caller, cell=CELL, tenant="t", user=f"u{n}") for n in range(20)]
        found = await cell.meanwhile(
            asyncio.gather(*(client.ask(ListNodes(), Nodes) for client in clients))
        )
        assert [[row.node for row in one.rows] for one in found] == [sorted(cell.agents)] * 20
        first = await cell.ask(ListNodes())
        assert isinstance(first, Nodes)
        assert first.has_more


async def test_a_flood_of_reads_refuses_no_change() -> None:
    """Reads and changes have limits of their own."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        answers: list[bytes] = []
        async with Requests(Api(coordinator).serve, clock=cell.clock, limit=2) as requests:

            async def take(request: Message) -> None:
                verb = str(request.__struct_config__.tag)
                subject = subjects.api(CELL, "team", "ann", verb)
                await requests.take(FakeMessage(subject, encode(request), answers.append))

            for _ in range(5):
                await take(ListNodes())
            await take(Submit(spec=make_spec(), request_id="r"))
            await cell.until(lambda: len(answers) == 6)
        replies = [cell.reply(answer) for answer in answers]
        assert sum(isinstance(reply, Nodes) for reply in replies) == 2
        assert sum(isinstance(reply, Submitted) for reply in replies) == 1
        assert "2 reads are being answered; ask again" in str(replies)
