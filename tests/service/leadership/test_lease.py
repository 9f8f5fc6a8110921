"""The leader's lease: one contract, for JetStream and for a key in memory."""

from __future__ import annotations

import asyncio
from math import inf, nan

import msgspec
import pytest

from common.errors import ConfigError, Fenced, Unavailable
from coordinator.service.leadership.lease import KeyEntry, LeaderLease
from coordinator.service.leadership.process import ProcessId
from tests.harness.fakes import FakeClock, MemoryKey, memory_lease
from tests.harness.inbox import PATIENCE_S
from tests.service.places import MARGIN_S, TTL_S, Place, while_time_passes
from tests.tables import each_row


async def test_a_free_lease_is_taken_at_once(place: Place) -> None:
    """Epoch 1, valid for the TTL less the margin from when it was asked for."""
    clock = FakeClock()
    lease = await place.lease(clock)
    assert await lease.acquire("a", lambda: 0) == 1
    assert lease.valid_until_s == clock.now_s() + TTL_S - MARGIN_S


async def test_the_epoch_is_above_all_that_agents_report(place: Place) -> None:
    """An agent that saw epoch 41 must not be commanded by a lower one after a loss of JetStream."""
    assert await (await place.lease(FakeClock())).acquire("a", lambda: 41) == 42


async def test_an_epoch_that_agents_report_while_a_standby_waits_counts(place: Place) -> None:
    """They were heard before it took the lease: the key that is empty by then knows nothing."""
    clock = FakeClock()
    holder, standby = await place.lease(clock), await place.lease(clock)
    await holder.acquire("a", lambda: 0)
    reported = [0]
    waiting = asyncio.ensure_future(standby.acquire("b", lambda: reported[0]))
    await while_time_passes(clock, clock.sleep(TTL_S / 2))
    reported.append(reported.pop() + 41)
    assert await while_time_passes(clock, waiting) == 42


async def test_a_renewal_counts_from_when_it_was_sent(place: Place) -> None:
    """It prolongs by the whole TTL, as often as it is asked."""
    clock = FakeClock()
    lease = await place.lease(clock)
    await lease.acquire("a", lambda: 0)
    for _ in range(3):
        await clock.advance(TTL_S / 2)
        await lease.renew()
        assert lease.valid_until_s == clock.now_s() + TTL_S - MARGIN_S


class SlowKey(MemoryKey):
    """A key whose answer takes a while after the value was written."""

    def __init__(self, clock: FakeClock, answer_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._answer_s = answer_s

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Compare-and-set; the revision comes late."""
        revision = await super().put(value, last_revision=last_revision)
        await self._clock.sleep(self._answer_s)
        return revision


async def test_the_time_of_an_answer_is_no_time_to_lead() -> None:
    """The others count from when the value was written: a lease that counted from its answer would
    outlive their patience, and two would lead."""
    clock = FakeClock()
    lease = memory_lease(SlowKey(clock, MARGIN_S), clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S)
    asked_s = clock.now_s()
    assert await while_time_passes(clock, lease.acquire("a", lambda: 0)) == 1
    assert clock.now_s() >= asked_s + MARGIN_S
    assert lease.valid_until_s == asked_s + TTL_S - MARGIN_S
    renewed_s = clock.now_s()
    await while_time_passes(clock, lease.renew())
    assert lease.valid_until_s == renewed_s + TTL_S - MARGIN_S


@each_row(
    "odd",
    [{"ttl_s": inf}, {"ttl_s": nan}, {"ttl_s": 1e300}, {"ttl_s": -1.0}, {"epoch": 2**64 - 1}],
)
async def test_a_value_that_no_coordinator_wrote_is_waited_out_like_a_lease(
    odd: dict[str, float],
) -> None:
    """Nobody would ever lead after an endless one, nor after the last epoch there is."""
    clock, key = FakeClock(), MemoryKey()
    value = {"holder": "x", "nonce": "n", "epoch": 7, "ttl_s": TTL_S} | odd
    await key.put(msgspec.msgpack.encode(value), last_revision=0)
    lease = memory_lease(key, clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S)
    began_s = clock.now_s()
    assert await while_time_passes(clock, lease.acquire("a", lambda: 41)) == 42
    assert began_s + TTL_S <= clock.now_s() < began_s + 2 * TTL_S


async def test_a_standby_waits_until_the_holder_is_silent(place: Place) -> None:
    """While the holder renews nobody else leads; when it stops, its own time ends first."""
    clock = FakeClock()
    holder, standby = await place.lease(clock), await place.lease(clock)
    await holder.acquire("a", lambda: 0)
    waiting = asyncio.ensure_future(standby.acquire("b", lambda: 0))
    for _ in range(4):
        await while_time_passes(clock, clock.sleep(TTL_S / 2))
        await holder.renew()
    assert not waiting.done()
    assert await while_time_passes(clock, waiting) == 2
    assert clock.now_s() >= holder.valid_until_s + MARGIN_S
    assert standby.valid_until_s > clock.now_s()


async def test_a_standby_waits_for_as_long_as_the_holder_was_promised() -> None:
    """The TTL is the holder's own: one with a shorter TTL in its settings would lead beside it."""
    clock, key = FakeClock(), MemoryKey()
    holder = memory_lease(key, clock=clock, ttl_s=60.0, margin_s=MARGIN_S)
    standby = memory_lease(key, clock=clock, ttl_s=2.0, margin_s=MARGIN_S)
    began_s = clock.now_s()
    await holder.acquire("a", lambda: 0)
    assert await while_time_passes(clock, standby.acquire("b", lambda: 0)) == 2
    assert clock.now_s() >= began_s + 60.0
    assert clock.now_s() >= holder.valid_until_s


FIRST = ProcessId(boot_id="b", pid_namespace="n", pid=7, start_ticks=70)


async def test_a_holder_whose_process_has_ended_is_not_waited_for() -> None:
    """A coordinator that was killed and started again leads at once, with the next epoch."""
    clock, key = FakeClock(), MemoryKey()
    killed = memory_lease(key, clock=clock, ttl_s=TTL_S, process=FIRST)
    assert await killed.acquire("a", lambda: 0) == 1
    again = memory_lease(key, clock=clock, ttl_s=TTL_S, ended={FIRST})
    async with asyncio.timeout(PATIENCE_S):
        assert await again.acquire("a", lambda: 0) == 2


async def test_a_holder_whose_process_is_not_known_to_have_ended_is_waited_for() -> None:
    """Another one's end says nothing about it: it may act until its TTL is over."""
    clock, key = FakeClock(), MemoryKey()
    holder = memory_lease(key, clock=clock, ttl_s=TTL_S, process=FIRST)
    await holder.acquire("a", lambda: 0)
    others = {msgspec.structs.replace(FIRST, pid=8), msgspec.structs.replace(FIRST, boot_id="c")}
    standby = memory_lease(key, clock=clock, ttl_s=TTL_S, ended=others)
    assert await while_time_passes(clock, standby.acquire("b", lambda: 0)) == 2
    assert clock.now_s() >= holder.valid_until_s


async def test_the_ttl_of_another_counts_from_the_first_look_at_it(place: Place) -> None:
    """What passed before somebody wants the lease counts as well: no time need pass any more."""
    clock = FakeClock()
    holder, standby = await place.lease(clock), await place.lease(clock)
    await holder.acquire("a", lambda: 0)
    await standby.look()
    await clock.advance(TTL_S)
    async with asyncio.timeout(PATIENCE_S):
        assert await standby.acquire("b", lambda: 0) == 2


async def test_a_look_before_a_renewal_counts_for_nothing(place: Place) -> None:
    """Who renews since then lives: its TTL begins anew."""
    clock = FakeClock()
    holder, standby = await place.lease(clock), await place.lease(clock)
    await holder.acquire("a", lambda: 0)
    await standby.look()
    await clock.advance(TTL_S / 2)
    await holder.renew()
    waiting = asyncio.ensure_future(standby.acquire("b", lambda: 0))
    await while_time_passes(clock, clock.sleep(TTL_S / 2))
    assert not waiting.done()
    assert await while_time_passes(clock, waiting) == 2
    assert clock.now_s() >= holder.valid_until_s + MARGIN_S


async def test_a_holder_that_was_replaced_is_fenced(place: Place) -> None:
    """Its renewal names who leads, and it may not act from then on, however slow its clock is."""
    clock = FakeClock()
    old, new = await place.lease(FakeClock()), await place.lease(clock)
    await old.acquire("old", lambda: 0)
    await while_time_passes(clock, new.acquire("new", lambda: 0))
    with pytest.raises(Fenced, match=r"held by new \(epoch 2\)"):
        await old.renew()
    assert old.valid_until_s < clock.now_s()
    with pytest.raises(Fenced):
        await old.renew()
    await new.renew()


async def test_a_lease_that_ran_out_is_not_prolonged(place: Place) -> None:
    """Not even if nobody has taken it: whoever slept through its end starts afresh."""
    clock = FakeClock()
    lease, standby = await place.lease(clock), await place.lease(clock)
    await lease.acquire("a", lambda: 0)
    await standby.look()
    await clock.sleep_through(TTL_S)
    with pytest.raises(Fenced, match=f"ran out {MARGIN_S:.1f} s ago"):
        await lease.renew()
    assert lease.valid_until_s < clock.now_s()
    assert await while_time_passes(clock, standby.acquire("b", lambda: 0)) == 2


async def test_a_released_lease_is_taken_without_a_wait(place: Place) -> None:
    """A planned takeover needs no TTL to run out; the old holder may not act any more."""
    clock = FakeClock()
    old, new = await place.lease(clock), await place.lease(clock)
    await old.acquire("old", lambda: 0)
    await old.release()
    await old.release()  # nothing is held: nothing happens
    assert old.valid_until_s < clock.now_s()
    assert await new.acquire("new", lambda: 0) == 2
    with pytest.raises(Fenced):
        await old.renew()


async def test_of_two_that_take_at_once_one_leads(place: Place) -> None:
    """Compare-and-set lets one win; the other goes on waiting."""
    clock = FakeClock()
    one, other = await place.lease(clock), await place.lease(clock)
    tasks = {
        asyncio.ensure_future(one.acquire("1", lambda: 0)),
        asyncio.ensure_future(other.acquire("2", lambda: 0)),
    }
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await clock.advance(0.0)
    assert [task.result() for task in done] == [1]
    assert len(waiting) == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_no_version_can_read_is_waited_out(place: Place) -> None:
    """A foreign value in the key is a lease like any other: nobody leads before a TTL went by."""
    clock = FakeClock()
    await (await place.key()).put(b"\xc1 not a lease", last_revision=0)
    lease = await place.lease(clock)
    started_s = clock.now_s()
    assert await while_time_passes(clock, lease.acquire("a", lambda: 0)) == 1
    assert clock.now_s() - started_s >= TTL_S


async def test_a_key_is_written_only_at_its_revision(place: Place) -> None:
    """A write with an older revision changes nothing and says so by None."""
    key = await place.key()
    assert await key.get() is None
    first = await key.put(b"1", last_revision=0)
    assert first is not None
    assert await key.put(b"late", last_revision=0) is None
    second = await key.put(b"2", last_revision=first)
    assert second is not None
    assert await key.put(b"late", last_revision=first) is None
    assert await key.get() == KeyEntry(b"2", second)


# --- lost answers, in memory -----------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost", "unanswered"])
async def test_a_take_without_an_answer_is_tried_again(fault: str) -> None:
    """Whether or not the write came through, the same process leads a moment later: it does not
    wait for its own lease to run out."""
    clock, key = FakeClock(), MemoryKey()
    key.faults.writes = [fault]
    lease = memory_lease(key, clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S)
    began_s = clock.now_s()
    await while_time_passes(clock, lease.acquire("a", lambda: 0))
    assert clock.now_s() - began_s < TTL_S / 4
    assert lease.valid_until_s > clock.now_s()
    await lease.renew()


@pytest.mark.parametrize("fault", ["lost", "unanswered"])
async def test_a_renewal_without_an_answer_prolongs_nothing(fault: str) -> None:
    """It is not known to be prolonged: the old end stays, and the next renewal works."""
    clock, key = FakeClock(), MemoryKey()
    lease = memory_lease(key, clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S)
    await lease.acquire("a", lambda: 0)
    end_s = lease.valid_until_s
    await clock.advance(1.0)
    key.faults.writes = [fault]
    with pytest.raises(Unavailable):
        await lease.renew()
    assert lease.valid_until_s == end_s
    await lease.renew()
    assert lease.valid_until_s == end_s + 1.0


async def test_a_standby_outlives_an_outage() -> None:
    """While the key cannot be read nobody takes it; afterwards waiting goes on."""
    clock, key = FakeClock(), MemoryKey()
    key.is_down = True
    waiting = asyncio.ensure_future(memory_lease(key, clock=clock).acquire("a", lambda: 0))
    await clock.advance(10 * TTL_S)
    assert not waiting.done()
    key.is_down = False
    assert await while_time_passes(clock, waiting) == 1


@pytest.mark.parametrize("margin_s", [-1.0, TTL_S, TTL_S + 1])
def test_a_margin_must_leave_time_to_act(margin_s: float) -> None:
    """A margin that eats the TTL would make a leader that never acts."""
    with pytest.raises(ConfigError, match="leader_margin_s"):
        LeaderLease(MemoryKey(), clock=FakeClock(), ttl_s=TTL_S, margin_s=margin_s, nonce="n")


# --- keeping ----------------------------------------------------------------------------------


async def test_a_lease_is_kept_while_decisions_make_progress(place: Place) -> None:
    """Progress that pauses for less than the stall costs nothing; without it the lease runs out."""
    clock = FakeClock()
    lease, standby = await place.lease(clock), await place.lease(clock)
    await lease.acquire("a", lambda: 0)
    progressed_at_s = [clock.now_s()]
    keeping = asyncio.ensure_future(lease.keep(lambda: progressed_at_s[-1], stall_s=TTL_S))
    waiting = asyncio.ensure_future(standby.acquire("b", lambda: 0))
    for _ in range(4):
        await while_time_passes(clock, clock.sleep(0.9 * TTL_S))
        progressed_at_s.append(clock.now_s())
    assert not keeping.done()
    assert not waiting.done()
    assert await while_time_passes(clock, waiting) == 2
    assert clock.now_s() - progressed_at_s[-1] <= 2.5 * TTL_S
    with pytest.raises(Fenced, match="ran out: decisions made no progress for"):
        await keeping


async def test_a_renewal_under_way_does_not_keep_a_released_lease() -> None:
    """A renewal whose answer is still due when the holder stops comes before the release."""
    clock, key = FakeClock(), MemoryKey()
    lease = memory_lease(key, clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S)
    await lease.acquire("a", lambda: 0)
    key.faults.writes = ["unanswered"]
    with pytest.raises(Unavailable):
        await lease.renew()
    await lease.release()
    other = memory_lease(key, clock=clock, ttl_s=TTL_S, margin_s=MARGIN_S)
    async with asyncio.timeout(PATIENCE_S):
        assert await other.acquire("b", lambda: 0) == 2
