"""The history of a cell: each line once, in order, however many come and whoever leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from common.api import Cancel, Describe, Description, Events, GetEvents, Operate
from common.bus import connect_nats
from common.clock import SystemClock
from common.errors import Unavailable
from common.history import HistoryLine
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import ClusterState, StoryLine
from coordinator.service.journal import history_stream, jetstream
from coordinator.service.journal.history import BATCH_LINES, Historian, HistoryPort
from coordinator.service.journal.history_stream import History
from tests.harness.cluster.coordinator import Cell, make_settings, running
from tests.harness.fakes import FakeClock, MemoryHistory
from tests.harness.inbox import PATIENCE_S
from tests.harness.servers import held_up, running_nats
from tests.service.places import CELL, JetStream

MANY = 10_000
SETTINGS = make_settings()
SHORT = replace(SETTINGS, engine=replace(SETTINGS.engine, story_lines_kept=20))
"""The state forgets soon, so that a few lines do for many."""


def row(number: int, subject: str = "j1") -> HistoryLine:
    return HistoryLine(
        number=number, at_s=float(number), subject=subject, what="w", reason="r" * 50
    )


async def numbers(
    history: HistoryPort, *words: str, after: int = 0, before: int = 10**9
) -> list[int]:
    """Of all lines that a history has, page by page."""
    found: list[int] = []
    has_more = True
    while has_more:
        last = found[-1] if found else after
        rows, has_more = await history.read(
            words, after=last, before=before, most_bytes=300, newest=False
        )
        found += [row.number for row in rows]
    return found


@pytest.fixture(params=["memory", pytest.param("jetstream", marks=pytest.mark.nats)])
async def history(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HistoryPort]:
    """The fake, and the real one on a server of its own."""
    if request.param == "memory":
        yield MemoryHistory()
        return
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        yield History(await JetStream(server, stack).bus(), cell=CELL, kept_s=0.0)


async def test_lines_come_back_by_subject_and_number(history: HistoryPort) -> None:
    """In order, between two numbers, the first ones or the last ones of what does not fit."""
    assert await history.open() == 0
    rows = [row(number, f"j{number % 3}") for number in range(1, 31)]
    await history.write(rows[:20])
    await history.write(rows[20:])
    assert await history.open() == 30
    assert await numbers(history) == list(range(1, 31))
    assert await numbers(history, "j1") == list(range(1, 31, 3))
    assert await numbers(history, "j1", "j2", after=10, before=15) == [11, 13, 14]
    assert await numbers(history, "j9") == []
    newest, _ = await history.read(["j0"], after=0, before=99, most_bytes=300, newest=True)
    assert newest[-1] == rows[29]
    assert 0 < len(newest) < 10


async def test_a_second_writer_is_refused_until_it_has_looked(history: HistoryPort) -> None:
    """What was written since it looked for the end is neither doubled nor overwritten."""
    await history.open()
    await history.write([row(1)])
    other = history.another() if isinstance(history, MemoryHistory) else _again(history)
    await other.open()
    await history.write([row(2)])
    with pytest.raises(Unavailable):
        await other.write([row(2)])
    assert await other.open() == 2
    await other.write([row(3)])
    assert await numbers(other) == [1, 2, 3]


def _again(history: HistoryPort) -> History:
    assert isinstance(history, History)
    return History(history._bus, cell=CELL, kept_s=0.0)


@pytest.mark.nats
async def test_what_does_not_arrive_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server or a line that hangs during a read leaves no hole in the index or in an answer."""
    for module in (history_stream, jetstream):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        history = History(await JetStream(server, stack).bus(), cell=CELL, kept_s=0.0)
        await history.open()
        await history.write([row(number) for number in range(1, 31)])
        port = urlsplit(server.url).port or 0
        for reading in ("tail", "read"):
            held = await stack.enter_async_context(held_up(port, b".MSG.NEXT."))
            url = f"nats://127.0.0.1:{held.port}"
            bus = await connect_nats(url, identity="slow", clock=SystemClock())
            stack.push_async_callback(bus.close)
            slow = History(bus, cell=CELL, kept_s=0.0)
            with pytest.raises(Unavailable):
                await (slow.tail(1, most=100) if reading == "tail" else numbers(slow))
            held.go.set()
        assert len((await slow.tail(1, most=100)).messages) == 30
        assert await numbers(slow) == list(range(1, 31))


@pytest.mark.nats
async def test_an_age_limit_may_change(tmp_path: Path) -> None:
    """The setting of the file holds, also for a stream that is there."""
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        bus = await JetStream(server, stack).bus()
        for kept_s in (0.0, 3600.0, 60.0):
            await History(bus, cell=CELL, kept_s=kept_s).open()
            info = await bus.jetstream(timeout_s=PATIENCE_S).stream_info(f"ARYL_HISTORY_{CELL}")
            assert (info.config.max_age or 0.0) == kept_s


def told(state: ClusterState, count: int, *, kept: int = 10**9) -> None:
    """A state tells so many lines more, and keeps the newest."""
    for _ in range(count):
        number = state.stories_dropped + len(state.stories) + 1
        state.stories.append(StoryLine(float(number), "j1", "w", "r"))
    dropped = max(0, len(state.stories) - kept)
    del state.stories[:dropped]
    state.stories_dropped += dropped


@contextlib.asynccontextmanager
async def copying(historian: Historian) -> AsyncIterator[None]:
    """It copies for as long as the block runs."""
    task = asyncio.create_task(historian.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_copy_goes_on_where_another_leader_ended() -> None:
    """The next one begins with a state, not with what the first one had in hand; lines that a
    server lost are written again."""
    clock, history, state = FakeClock(), MemoryHistory(), ClusterState()
    first = Historian(history, clock=clock)
    async with copying(first):
        told(state, 3 * BATCH_LINES)
        first.journaled(state)
        await clock.settle()
    told(state, 5)
    second = Historian(history, clock=clock)
    second.journaled(state)
    async with copying(second):
        await clock.settle()
        assert await numbers(history) == list(range(1, 3 * BATCH_LINES + 6))
        del history.rows[100:]
        history.server_run = "server-2"
        told(state, 1)
        second.journaled(state)
        await clock.settle()
    assert await numbers(history) == list(range(1, 3 * BATCH_LINES + 7))


async def test_a_history_that_is_away_holds_up_nothing_and_misses_nothing() -> None:
    """The state has long forgotten what is still to be written."""
    clock, history, state = FakeClock(), MemoryHistory(), ClusterState()
    historian = Historian(history, clock=clock)
    async with copying(historian):
        history.is_down = True
        for _ in range(50):
            told(state, 10, kept=20)
            historian.journaled(state)
            await clock.settle()
        history.is_down = False
        await clock.advance(5.0)
    assert await numbers(history) == list(range(1, 501))


@pytest.mark.slow
async def test_a_running_job_keeps_its_story_through_many_orders() -> None:
    """After 10,000 orders its submission and its start are told, and each order is one event."""
    async with Cell(training=1) as cell:
        coordinator = await cell.lead(settings=SHORT)
        job_id = await running(cell, coordinator)
        order = OperatorAsked(action=OperatorAction.THAW, by="ops/ada")
        for number in range(MANY):
            coordinator.decider.post(order)
            if number % 10 == 9:
                await coordinator.decider.record(order)
        await cell.clock.settle()
        found = await cell.ask(Describe(kind="job", name=job_id))
        assert isinstance(found, Description)
        assert [line.what for line in found.story][:2] == ["submitted", "start -> starting"]
        assert len(coordinator.engine.state.stories) <= SHORT.engine.story_lines_kept
        after, orders = 0, 0
        while True:
            page = await cell.ask(GetEvents(subject="cell", after=after))
            assert isinstance(page, Events)
            orders += sum(row.what == "thaw" for row in page.rows)
            after = page.last
            if not page.has_more:
                break
        assert orders == MANY + MANY // 10


async def test_who_ordered_what_and_who_was_refused_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each order of a person is one line, with the person; a refused one says why."""
    caplog.set_level("INFO")
    async with Cell(training=1) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        await cell.ask(
            Operate(action="drain", target="t0", reason="fans", deadline_s=60), tenant="ops"
        )
        await cell.ask(Operate(action="drain", target="t0"), tenant="team")
        await cell.ask(Cancel(job_id=job_id), tenant="other")
        await cell.ask(Cancel(job_id=job_id))
    lines = [line for line in caplog.messages if line.startswith(("ordered", "refused order"))]
    assert lines == [
        f"ordered submit {job_id} (j) by team/ann",
        "ordered drain t0 within 60 s by ops/ann: fans",
        "refused order drain t0 by team/ann: only tenant ops may do this",
        f"refused order cancel {job_id} by other/ann: job {job_id} belongs to team",
        f"ordered cancel {job_id} by team/ann",
    ]
