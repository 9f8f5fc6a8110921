"""The index beside a real JetStream: it follows the stream, whoever leads and whatever is lost."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from common.bus import NatsBus
from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from coordinator.engine.state.tables import ClusterState
from coordinator.service.api.rows import history_lines
from coordinator.service.history.index import Asked
from coordinator.service.history.keeper import RETRY_S, IndexKeeper, directory
from coordinator.service.journal.history import Historian, Tail
from coordinator.service.journal.history_stream import History
from tests.harness.cluster.coordinator import at_once
from tests.harness.fakes import FakeClock, MemoryHistory
from tests.harness.inbox import PATIENCE_S
from tests.harness.servers import running_nats
from tests.service.journal.test_history import told
from tests.service.places import CELL, JetStream

STREAM = f"ARYL_HISTORY_{CELL}"


def test_the_index_is_where_the_site_or_the_unit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else in a temporary directory that is the same at each start, and open to no other user."""
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/one:/var/cache/two")
    assert directory("/srv/index") == Path("/srv/index")
    assert directory("") == Path("/var/cache/one")
    monkeypatch.delenv("CACHE_DIRECTORY")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = directory("")
    assert own == directory("")
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(ConfigError, match=r"history_index_dir: .* of this user alone"):
        directory("")


class Poisoned(MemoryHistory):
    """Its first answer makes the reader fail in a way that no code foresees."""

    is_poisoned = True

    async def tail(self, sequence: int, *, most: int) -> Tail:
        """Messages from a sequence on."""
        if self.is_poisoned:
            self.is_poisoned = False
            raise LookupError("a bug")
        return await super().tail(sequence, most=most)


async def test_a_fault_of_the_index_ends_no_coordinator(tmp_path: Path) -> None:
    """It is logged, and the index is made again after a while."""
    clock, state = FakeClock(), ClusterState()
    told(state, 3)
    history = Poisoned(list(history_lines(state, state.stories, 0)))
    keeper = IndexKeeper(history, path=tmp_path / "index", clock=clock, in_thread=at_once)
    task = asyncio.create_task(keeper.run())
    await clock.advance(RETRY_S + 5.0)
    assert keeper.number == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_damage_that_only_a_question_meets_is_mended(tmp_path: Path) -> None:
    """The reading of the stream writes elsewhere in the file, and would go on for ever."""
    clock, state, path = FakeClock(), ClusterState(), tmp_path / "index"
    told(state, 20_000)
    history = MemoryHistory(list(history_lines(state, state.stories, 0)))
    keeper = IndexKeeper(history, path=path, clock=clock, in_thread=at_once)
    task = asyncio.create_task(keeper.run())
    await clock.advance(RETRY_S)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    half = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(half - half % 4096)
        file.write(b"\xa5" * 40_960)
    with pytest.raises(Unavailable, match="malformed"):
        await keeper.ask(lambda index: index.lines(Asked(limit=20_000)))
    await clock.advance(RETRY_S + 5.0)
    assert len(await keeper.ask(lambda index: index.lines(Asked(limit=20_000)))) == 20_000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Machine:
    """One coordinator's part in the history: it copies what it decided, and keeps an index."""

    def __init__(self, bus: NatsBus, path: Path) -> None:
        self.bus = bus
        self.history = History(bus, cell=CELL, kept_s=0.0)
        self.historian = Historian(self.history, clock=SystemClock())
        reads = History(bus, cell=CELL, kept_s=0.0)
        self.keeper = IndexKeeper(reads, path=path, clock=SystemClock())

    @contextlib.asynccontextmanager
    async def running(self, *, leads: bool) -> AsyncIterator[None]:
        """The tasks of a leader, or those of a standby."""
        tasks = [asyncio.create_task(self.keeper.run())]
        tasks += [asyncio.create_task(self.historian.run())] if leads else []
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def numbers(self) -> list[int]:
        """The lines that its index has."""
        found = await self.keeper.ask(lambda index: index.lines(Asked(limit=10_000)))
        return [line.number for line in found]


async def until(condition: Callable[[], bool], keeper: IndexKeeper) -> None:
    """Let a keeper look at its stream until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await keeper.caught_up(10**9, within_s=0.01)


@pytest.mark.nats
@pytest.mark.slow
async def test_it_follows_the_stream_through_changes_of_the_leader(tmp_path: Path) -> None:
    """A standby has what the leader has, and goes on alone; lines that the stream drops by their
    age, or loses with all of JetStream, leave the index as well."""
    state = ClusterState()
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        place = JetStream(server, stack)
        one = Machine(await place.bus(), tmp_path / "one")
        two = Machine(await place.bus(), tmp_path / "two")
        async with two.running(leads=False), one.running(leads=True):
            told(state, 700)
            one.historian.journaled(state)
            for machine in (one, two):
                assert await machine.keeper.caught_up(700, within_s=PATIENCE_S) == 700
            assert await one.numbers() == await two.numbers() == list(range(1, 701))
        async with two.running(leads=True):
            told(state, 50)
            two.historian.journaled(state)
            assert await two.keeper.caught_up(750, within_s=PATIENCE_S) == 750
            stream = two.bus.jetstream(timeout_s=PATIENCE_S)
            await stream.purge_stream(STREAM, seq=301)
            first: list[float | None] = []

            def is_cut() -> bool:
                return first[-1:] == [301.0]

            async with asyncio.timeout(PATIENCE_S):
                while not is_cut():
                    await two.keeper.caught_up(751, within_s=0.01)
                    first.append(await two.keeper.ask(lambda index: index.first_at_s()))
            assert await two.numbers() == list(range(301, 751))
            await stream.delete_stream(STREAM)
            fresh = ClusterState()
            told(fresh, 3)
            await History(two.bus, cell=CELL, kept_s=0.0).open()
            again = Historian(History(two.bus, cell=CELL, kept_s=0.0), clock=SystemClock())
            again.journaled(fresh)
            copying = asyncio.create_task(again.run())
            await until(lambda: two.keeper.number == 3, two.keeper)
            assert await two.numbers() == [1, 2, 3]
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
