"""What feeds systemd's watchdog: a coordinator that does its part, whichever part that is.

`PATIENCE_S` is the unit's `WatchdogSec`: whoever is silent for so long is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from common.api import Submit
from common.errors import Fenced
from coordinator.service.ports import Lost
from tests.harness.cluster.coordinator import Cell, make_settings, make_spec, submit
from tests.harness.fakes import FakeClock, MemoryJournal, MemorySnapshots
from tests.harness.inbox import PATIENCE_S as DEADLINE_S
from tests.harness.servers import running_nats
from tests.harness.sockets import short_path

PATIENCE_S = 30.0


class Watchdog:
    """PID 1's end: when it was fed, and how long it had to wait at most."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.fed_at_s: list[float] = []

    def feed(self) -> None:
        """WATCHDOG=1."""
        self.fed_at_s.append(self._clock.now_s())

    def longest_wait_s(self, since_s: float) -> float:
        """Between two meals, from an instant up to now."""
        times = [since_s, *(at_s for at_s in self.fed_at_s if at_s > since_s), self._clock.now_s()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


class SlowJournal(MemoryJournal):
    """One whose records come slowly, each in time."""

    def __init__(self, records: list[bytes], clock: FakeClock, record_s: float) -> None:
        super().__init__(records)
        self._clock = clock
        self._record_s = record_s
        self.read_count = 0

    async def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes] | Lost]:
        """Records from a sequence on; time passes before each."""
        async for record in super().read(from_sequence):
            await self._clock.sleep(self._record_s)
            self.read_count += 1
            yield record


class SlowSnapshots(MemorySnapshots):
    """Ones that come slowly."""

    def __init__(self, clock: FakeClock, load_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._load_s = load_s

    async def load(self) -> tuple[int, bytes] | None:
        """The newest one; time passes before."""
        await self._clock.sleep(self._load_s)
        return await super().load()


class StuckJournal(MemoryJournal):
    """One that takes records until it is stuck, and then answers nothing, for ever."""

    is_stuck = False

    async def append(self, record: bytes) -> int:
        """Write, or never return."""
        if self.is_stuck:
            await asyncio.Event().wait()
        return await super().append(record)


async def test_a_standby_feeds_its_watchdog() -> None:
    """It does all that is asked of it: were it killed every 30 s, it would be no hot standby."""
    async with Cell() as cell:
        await cell.lead("one")
        watchdog = Watchdog(cell.clock)
        since_s = cell.clock.now_s()
        standby = cell.launch("two", progress=watchdog.feed)
        await cell.clock.advance(4 * PATIENCE_S)
        assert not standby.coordinator.is_leading
        assert watchdog.longest_wait_s(since_s) < PATIENCE_S / 2


async def test_a_long_rebuild_feeds_its_watchdog() -> None:
    """Each step of it is progress: killed in its middle it would begin again, for ever."""
    settings = make_settings(snapshot_records=10_000)
    step_s = 0.6 * PATIENCE_S
    async with Cell() as cell:
        await cell.lead("one", settings)
        for number in range(9):
            await submit(cell, f"j{number}")
        await cell.leaders[0].crash()
        watchdog = Watchdog(cell.clock)
        since_s = cell.clock.now_s()
        journal = SlowJournal(cell.records, cell.clock, step_s)
        cell.snapshots = SlowSnapshots(cell.clock, step_s)
        again = cell.launch("two", settings, journal, progress=watchdog.feed).coordinator
        limit_s = PATIENCE_S * len(cell.records)
        await cell.clock.advance_until(lambda: again.is_leading, limit_s=limit_s)
        assert journal.read_count > 2
        assert watchdog.longest_wait_s(since_s) < PATIENCE_S


async def test_a_rebuild_that_is_stuck_starves_its_watchdog() -> None:
    """It listens and renews its lease meanwhile; only a restart makes it lead."""
    async with Cell() as cell:
        await cell.lead("one")
        await cell.leaders[0].crash()
        watchdog = Watchdog(cell.clock)
        journal = SlowJournal(cell.records, cell.clock, 100 * PATIENCE_S)
        again = cell.launch("two", journal=journal, progress=watchdog.feed)
        await cell.clock.advance(PATIENCE_S)
        since_s = cell.clock.now_s()
        await cell.clock.advance(2 * PATIENCE_S)
        assert not again.coordinator.is_leading
        assert watchdog.longest_wait_s(since_s) == 2 * PATIENCE_S


async def test_a_leader_that_decides_feeds_its_watchdog() -> None:
    """Also while nothing happens in its cell."""
    async with Cell() as cell:
        watchdog = Watchdog(cell.clock)
        cell.launch("one", progress=watchdog.feed)
        await cell.clock.advance(PATIENCE_S)
        since_s = cell.clock.now_s()
        await cell.clock.advance(4 * PATIENCE_S)
        assert watchdog.longest_wait_s(since_s) < PATIENCE_S / 2


async def test_a_leader_that_is_stuck_starves_its_watchdog_and_loses_its_lead() -> None:
    """It hears nodes and decides nothing: that must not look alive, and a standby leads."""
    async with Cell() as cell:
        watchdog = Watchdog(cell.clock)
        journal = StuckJournal(cell.records)
        leader = cell.launch("one", journal=journal, progress=watchdog.feed)
        await cell.until(lambda: leader.coordinator.is_leading)
        journal.is_stuck = True
        asking = asyncio.create_task(
            cell.caller.request(
                *cell.request(Submit(spec=make_spec(), request_id="r")), timeout_s=1.0
            )
        )
        await cell.clock.advance(5.0)
        since_s = cell.clock.now_s()
        stall_s = leader.coordinator.settings.leader_stall_s
        await cell.clock.advance(stall_s - 5.0)
        assert leader.coordinator.may_act()
        standby = cell.launch("two").coordinator
        await cell.clock.advance(2 * PATIENCE_S - stall_s + 5.0)
        await asyncio.gather(asking, return_exceptions=True)
        assert not leader.coordinator.may_act()
        assert standby.may_act()
        assert watchdog.longest_wait_s(since_s) == 2 * PATIENCE_S
        with pytest.raises(Fenced, match="decisions made no progress for"):
            leader.task.result()


async def test_a_leader_that_waits_for_nats_feeds_its_watchdog() -> None:
    """It tries again for as long as its lease lasts, which may be longer than the patience."""
    settings = make_settings(leader_ttl_s=8 * PATIENCE_S)
    async with Cell() as cell:
        watchdog = Watchdog(cell.clock)
        leader = cell.launch("one", settings, progress=watchdog.feed)
        await cell.until(lambda: leader.coordinator.is_leading)
        leader.journal.is_down = True
        since_s = cell.clock.now_s()
        await cell.clock.advance(2 * PATIENCE_S)
        assert leader.coordinator.is_leading
        assert watchdog.longest_wait_s(since_s) < PATIENCE_S / 2


# --- real processes -------------------------------------------------------------------------


@contextlib.contextmanager
def pid1(directory: Path, name: str) -> Iterator[socket.socket]:
    """PID 1's end of one unit's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as heard:
        heard.bind(str(directory / name))
        yield heard


async def until_told(heard: socket.socket, words: str, *, count: int = 1) -> None:
    """Read what a daemon tells PID 1 until the words came so many times."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(2 * DEADLINE_S):
        while count:
            count -= words in (await loop.sock_recv(heard, 4096)).decode()


@contextlib.asynccontextmanager
async def coordinator(config: Path, notify: Path) -> AsyncIterator[None]:
    """The real program, as its unit starts it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.service.daemon", "--config", str(config),
        env={**os.environ, "NOTIFY_SOCKET": str(notify)}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.nats
@pytest.mark.slow
async def test_a_standby_of_two_real_coordinators_says_that_it_lives(tmp_path: Path) -> None:
    """It is ready, feeds its watchdog while the other one leads, and takes over from it."""
    config = tmp_path / "coordinator.toml"
    async with running_nats(tmp_path / "nats") as server, contextlib.AsyncExitStack() as stack:
        config.write_text(f'cell = "c"\nnats_url = "{server.url}"\nrebuild_wait_s = 0.0\n')
        directory = stack.enter_context(short_path(tmp_path))
        one, two = (stack.enter_context(pid1(directory, name)) for name in ("one", "two"))
        async with coordinator(config, directory / "one"):
            await until_told(one, "STATUS=leading")
            await stack.enter_async_context(coordinator(config, directory / "two"))
            await until_told(two, "READY=1")
            await until_told(two, "WATCHDOG=1", count=3)
            await until_told(one, "WATCHDOG=1", count=3)
        await until_told(two, "STATUS=leading")
