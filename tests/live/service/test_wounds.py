"""A journal that is damaged on a real server's disk: what each part makes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest
from nats.js import api

from common import subjects
from common.api import (
    Done,
    Events,
    GetEvents,
    GetStatus,
    Jobs,
    ListJobs,
    Operate,
    Status,
    StoryRow,
    Submit,
    Submitted,
)
from common.bus import connect_nats
from common.clock import SystemClock
from common.errors import Fenced, Unavailable
from common.messages import Message
from coordinator.client import Client
from coordinator.demo.nats_server import NatsServer
from coordinator.engine.state.settings import EngineSettings
from coordinator.service.daemon import run
from coordinator.service.journal import jetstream as store
from coordinator.service.journal.journal_stream import Journal
from coordinator.service.ports import JournalPort, Wounded
from coordinator.service.settings import CoordinatorSettings
from tests.harness.cluster.coordinator import make_spec
from tests.harness.inbox import PATIENCE_S
from tests.harness.servers import running_nats
from tests.service.places import CELL, JetStream, lost, opened, records, written
from tests.service.wounds import WOUNDS, flip_acknowledged, flip_tail, hurt, remove_all

pytestmark = [pytest.mark.nats, pytest.mark.slow]

STREAM = f"ARYL_JOURNAL_{CELL}"
COUNT = 20
MANY_REQUESTS = 10
"""More than a coordinator sends before it looks at the lease for the first time."""
M = TypeVar("M", bound=Message)
HOW = [(name, is_stopped) for name in WOUNDS for is_stopped in (False, True)]


async def appended(journal: JournalPort, data: bytes) -> int:
    """Append as a leader does, which mends a wounded journal and writes again until it holds."""
    async with asyncio.timeout(PATIENCE_S * 3):
        while True:
            with contextlib.suppress(Unavailable):
                try:
                    sequence = await journal.append(data)
                except Wounded:
                    await journal.mend()
                    continue
                if await journal.holds(sequence, data):
                    return sequence
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("name", "is_stopped"), HOW)
async def test_what_is_left_is_read_and_the_journal_goes_on(
    tmp_path: Path, name: str, is_stopped: bool
) -> None:
    """Every record that is written after a wound can be read, in its order; each one from before is
    read as it was or named as lost; a writer that was overtaken since is fenced."""
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        place = JetStream(server, stack)
        journal = await opened(place)
        wrote = [b"record %d " % number + b"x" * 200 for number in range(1, COUNT + 1)]
        for record in wrote:
            await journal.append(record)
        await hurt(server, WOUNDS[name], is_stopped=is_stopped)
        other = await opened(place)
        new = [b"new %d" % number for number in range(3)]
        sequences = [await appended(journal, record) for record in new]
        assert sequences == sorted(set(sequences))
        again = await opened(place)
        found = await records(again)
        assert [data for _, data in found if data.startswith(b"new")][-3:] == new
        old = [(sequence, data) for sequence, data in found if not data.startswith(b"new")]
        assert old == [one for one in enumerate(wrote, start=1) if one in old]
        assert len(old) < COUNT
        gone = await lost(again)
        told = {number for first, last in gone for number in range(first, last + 1)}
        there = {sequence for sequence, _ in found}
        assert told.isdisjoint(there)
        assert told | there == set(range(again.first_sequence, again.last_sequence + 1))
        with pytest.raises((Fenced, Wounded)):
            await written(other, b"overtaken")


async def test_a_stream_that_is_deleted_under_a_leader_is_made_again(jetstream: JetStream) -> None:
    """The append says that it is gone, not that nobody answers; mended, it takes the record."""
    journal = await opened(jetstream)
    await journal.append(b"one")
    await (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S).delete_stream(STREAM)
    with pytest.raises(Wounded, match="gone"):
        await journal.append(b"two")
    await journal.mend()
    assert await journal.append(b"two") == 1


async def test_a_record_whose_checksum_is_wrong_is_lost_and_no_other(jetstream: JetStream) -> None:
    """Bytes that changed where the server does not see it never reach the engine."""
    journal = await opened(jetstream)
    await journal.append(b"one")
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    headers = {store.WRITER_HEADER: "w", store.CHECKSUM_HEADER: f"{0:08x}"}
    await stream.publish(subjects.journal(CELL), b"changed", headers=headers)
    again = await opened(jetstream)
    await again.append(b"three")
    assert await records(again) == [(1, b"one"), (3, b"three")]
    assert await lost(again) == [(2, 2)]


async def test_an_append_whose_connection_is_lost_is_not_waited_for(tmp_path: Path) -> None:
    """No answer comes on it any more; the next try finds out what became of the record."""
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        journal = await opened(JetStream(server, stack))
        assert await journal.append(b"one") == 1
        assert isinstance(journal, Journal)
        never: asyncio.Future[api.PubAck] = asyncio.get_running_loop().create_future()
        appending = asyncio.create_task(journal._while_connected(never))
        await asyncio.sleep(0)  # it waits now
        await server.kill()
        with pytest.raises(Unavailable, match="connection was lost"):
            await appending
        await server.start()
        assert await written(journal, b"two") == 2


async def test_an_append_passes_a_flood_of_foreign_messages_at_once(jetstream: JetStream) -> None:
    """However many came before it, one call writes the record, and each is counted once."""
    journal = await opened(jetstream)
    stranger, count = await jetstream.bus(), store.FETCH_COUNT + 20
    for _ in range(count):
        await stranger.publish(subjects.journal(CELL), b"garbage")
    stream = stranger.jetstream(timeout_s=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S * 6):
        while (await stream.stream_info(STREAM)).state.last_seq < count:
            await SystemClock().sleep(0.05)
    assert await journal.append(b"record") == count + 1
    assert journal.foreign_count == count


async def test_a_snapshot_outlives_the_deletion_of_its_stream(jetstream: JetStream) -> None:
    """What is saved into a stream that was made again is not purged with what is no more."""
    snapshots = await jetstream.snapshots()
    for number in range(1, 4):
        await snapshots.save(number, b"state %d" % number)
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    await stream.delete_stream(f"ARYL_SNAPSHOT_{CELL}")
    await snapshots.save(4, b"state 4")
    assert await (await jetstream.snapshots()).load() == (4, b"state 4")


# --- coordinators ---------------------------------------------------------------------------


class Pair:
    """Two coordinators, a submitter, and the jobs that were acknowledged."""

    def __init__(self, server: NatsServer, client: Client) -> None:
        self.server = server
        self.client = client
        self.acknowledged: set[str] = set()
        self.engine = EngineSettings()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str) -> None:
        """Begin, at first as a standby."""
        settings = CoordinatorSettings(
            cell=CELL,
            nats_url=self.server.url,
            name=name,
            rebuild_wait_s=0.0,
            pass_period_s=0.5,
            engine=self.engine,
            leader_ttl_s=PATIENCE_S,  # whatever ends it, it is no slow machine
        )
        self._tasks[name] = asyncio.create_task(run(settings))

    async def until_standing_by(self, name: str) -> None:
        """Wait until a coordinator has looked at the leader's lease, and not only begun."""
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.server.monitoring_url}/connz") as answer:
                    found = (await answer.json())["connections"]
                sent = [one["in_msgs"] for one in found if one.get("name") == name]
                if sent and max(sent) >= MANY_REQUESTS:
                    return
                await asyncio.sleep(0.05)

    async def kill(self, name: str) -> None:
        """Cut it off; nothing is saved, and its lease is not given up."""
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for name in list(self._tasks):
            await self.kill(name)

    def has_ended(self, name: str) -> bool:
        """Whether it stepped down."""
        return self._tasks[name].done()

    async def submit(self, count: int = 1) -> None:
        """Submit until each is acknowledged."""
        for _ in range(count):
            name = f"j{len(self.acknowledged)}"
            request = Submit(spec=make_spec(name), request_id=name)
            self.acknowledged.add((await self._answered(request, Submitted)).job_id)

    async def jobs(self) -> set[str]:
        """Ids of the jobs that the cell knows."""
        return {row.job_id for row in (await self._answered(ListJobs(), Jobs)).rows}

    async def epoch(self) -> int:
        return (await self._answered(GetStatus(), Status)).epoch

    async def events(self, subject: str) -> list[StoryRow]:
        """All that is told of something, page by page."""
        rows: list[StoryRow] = []
        after, has_more = 0, True
        while has_more:
            page = await self._answered(GetEvents(subject=subject, after=after), Events)
            rows += page.rows
            after, has_more = page.last, page.has_more
        return rows

    async def order(self, count: int) -> None:
        """Orders to the whole cell that change nothing."""
        for _ in range(count):
            await self._answered(Operate(action="thaw"), Done)

    async def losses(self) -> list[StoryRow]:
        """What the cell says of lost records."""
        return [row for row in await self.events("cell") if "lost" in row.what]

    async def _answered(self, request: Message, kind: type[M]) -> M:
        async with asyncio.timeout(PATIENCE_S * 6):
            while True:
                with contextlib.suppress(Unavailable):
                    return await self.client.ask(request, kind)
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def pair(directory: Path) -> AsyncIterator[Pair]:
    """A server and nothing on it yet."""
    async with running_nats(directory) as server:
        bus = await connect_nats(server.url, identity="ops_ada", clock=SystemClock())
        found = Pair(server, Client(bus, cell=CELL, tenant="ops", user="ada", timeout_s=2.0))
        try:
            yield found
        finally:
            await found.close()
            await bus.close()


ALIVE = [("flip_tail", True), ("flip_middle", True), ("remove_blocks", False)]
ALIVE += [("remove_stream", False), ("remove_all", False), ("flip_acknowledged", False)]
WOUNDS_OF_A_LEADER = {
    **WOUNDS,
    "remove_all": remove_all,
    "flip_acknowledged": flip_acknowledged,
}
"""Its last record may be without an acknowledgement when the server freezes: that one it writes
again, and nothing is lost."""


@pytest.mark.parametrize(("name", "is_stopped"), ALIVE)
async def test_a_leader_that_is_alive_mends_its_journal(
    tmp_path: Path, name: str, is_stopped: bool
) -> None:
    """It goes on in its epoch and acknowledges; it names the records that are gone; a standby that
    takes over afterwards has every job."""
    wound = WOUNDS_OF_A_LEADER[name]
    async with pair(tmp_path / "nats") as cell:
        cell.start("one")
        await cell.submit(6)
        epoch = await cell.epoch()
        cell.start("two")
        await cell.until_standing_by("two")
        await hurt(cell.server, wound, is_stopped=is_stopped)
        await cell.submit(2)
        assert (await cell.epoch(), cell.has_ended("one")) == (epoch, False)
        if not is_stopped:
            [told] = await cell.losses()
            assert "no job or order is lost" in told.reason
        assert await cell.jobs() == cell.acknowledged
        await cell.kill("one")
        await cell.submit()
        assert await cell.epoch() == epoch + 1
        assert await cell.jobs() == cell.acknowledged


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_cell_whose_leader_died_with_the_tail_names_what_is_lost(
    tmp_path: Path, is_stopped: bool
) -> None:
    """It begins although records are gone; every job of the others is there, and one event says
    which records are not."""
    async with pair(tmp_path / "nats") as cell:
        cell.start("one")
        await cell.submit(6)
        await cell.kill("one")
        await hurt(cell.server, flip_tail, is_stopped=is_stopped)
        before = set(cell.acknowledged)
        for name in ("two", "three"):
            cell.start(name)
            await cell.submit()
            assert len(before & await cell.jobs()) >= len(before) - 1
            if is_stopped:  # the index of its blocks shows that there was more
                [told] = await cell.losses()
                assert "forgotten" in told.reason
            await cell.kill(name)


async def test_history_outlives_leaders_and_servers(tmp_path: Path) -> None:
    """A job that was submitted long before the state's newest line has its story, under the leader
    that saw it, after a kill of the server, and under the standby; each order is told once."""
    async with pair(tmp_path / "nats") as cell:
        cell.engine = EngineSettings(story_lines_kept=10)
        cell.start("one")
        await cell.submit()
        [job_id] = cell.acknowledged
        await cell.order(30)
        await cell.server.kill()
        await cell.server.start()
        await cell.order(30)
        told = [await cell.events(job_id)]
        await cell.kill("one")
        cell.start("two")
        await cell.order(30)
        told.append(await cell.events(job_id))
        for rows in told:
            assert [(row.what, row.reason) for row in rows] == [("submitted", "by ops/ada")]
        orders = [row.number for row in await cell.events("cell") if row.what == "thaw"]
        assert len(orders) == len(set(orders))
        assert len(orders) >= 90
