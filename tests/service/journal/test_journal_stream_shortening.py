"""A journal that may lose its begin: what is dropped, what never is, and who lives with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from common.api import Jobs, ListJobs, Submit, Submitted
from common.bus import connect_nats
from common.clock import SystemClock
from common.errors import ProtocolError, Unavailable
from common.messages import Message
from common.model import JobState
from coordinator.client import Client
from coordinator.service.daemon import run
from coordinator.service.ports import JournalPort
from coordinator.service.settings import CoordinatorSettings
from tests.harness.cluster.coordinator import Cell, job, make_settings, make_spec, running, submit
from tests.harness.fakes import MemorySnapshots
from tests.harness.inbox import PATIENCE_S
from tests.harness.servers import running_nats
from tests.service.places import CELL, JetStream, Place, opened, records

ALL = [(number, b"%d" % number) for number in range(1, 6)]
AN_HOUR_S = 3600.0
M = TypeVar("M", bound=Message)


@pytest.fixture
def shortened(place: Place) -> Place:
    """Where journals are made that may lose their begin."""
    place.is_shortened = True
    return place


async def written(place: Place) -> JournalPort:
    """A journal of five records."""
    journal = await opened(place)
    for _, data in ALL:
        await journal.append(data)
    return journal


async def test_what_is_old_is_dropped_up_to_the_sequence(shortened: Place) -> None:
    """The rest is read, by whoever opens it, from where it begins; sequences go on."""
    journal = await written(shortened)
    await journal.shorten(3, kept_s=0.0)
    assert journal.first_sequence == 4
    assert await records(journal) == ALL[3:]
    again = await opened(shortened)
    assert (again.first_sequence, again.last_sequence) == (4, 5)
    assert await records(again) == ALL[3:]
    assert await records(again, 5) == ALL[4:]
    assert await again.append(b"6") == 6
    await again.shorten(4, kept_s=0.0)
    assert await records(again) == [ALL[4], (6, b"6")]


async def test_what_is_young_is_kept(shortened: Place) -> None:
    """However many snapshots have it."""
    journal = await written(shortened)
    await journal.shorten(3, kept_s=AN_HOUR_S)
    assert journal.first_sequence == 1
    assert await records(journal) == ALL


async def test_the_last_record_is_never_dropped(shortened: Place) -> None:
    """The next one is written after it, and a second writer is told apart by it."""
    journal = await written(shortened)
    await journal.shorten(99, kept_s=0.0)
    assert await records(journal) == ALL[4:]
    again = await opened(shortened)
    assert await again.append(b"6") == 6


async def test_an_empty_journal_has_nothing_to_drop(shortened: Place) -> None:
    """It begins at 1, before and after."""
    journal = await opened(shortened)
    await journal.shorten(3, kept_s=0.0)
    assert (journal.first_sequence, await records(journal)) == (1, [])


@pytest.mark.nats
async def test_ages_are_by_the_clock_of_the_server(jetstream: JetStream) -> None:
    """A record that is as old as it may be is kept, the one before it is not."""
    jetstream.is_shortened = True
    journal = await written(jetstream)
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    found = [await stream.get_msg(f"ARYL_JOURNAL_{CELL}", seq=number) for number in (2, 5)]
    second, last = (message.time for message in found)
    assert second is not None
    assert last is not None
    await journal.shorten(4, kept_s=last.timestamp() - second.timestamp())
    assert await records(journal) == ALL[1:]


@pytest.mark.nats
async def test_a_stream_that_was_made_to_keep_all_keeps_all(
    jetstream: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    """NATS does not take that back: whoever wants it shorter is told, once a start."""
    await written(jetstream)
    assert not caplog.messages
    jetstream.is_shortened = True
    journal = await opened(jetstream)
    assert [line for line in caplog.messages if "journal_kept_days" in line]
    await journal.shorten(3, kept_s=0.0)
    assert await records(journal) == ALL


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.parametrize("days", [0.0, 2.0])
async def test_the_setting_reaches_the_server(tmp_path: Path, days: float) -> None:
    """Without it a stream is made that keeps all, whoever asks; no single record can be deleted."""
    async with running_nats(tmp_path / "nats") as server:
        settings = CoordinatorSettings(
            cell=CELL, nats_url=server.url, journal_kept_days=days, rebuild_wait_s=0.0
        )
        async with leading(settings):
            bus = await connect_nats(server.url, identity="look", clock=SystemClock())
            stream = bus.jetstream(timeout_s=PATIENCE_S)
            async with asyncio.timeout(PATIENCE_S):
                while f"ARYL_JOURNAL_{CELL}" not in [
                    info.config.name for info in await stream.streams_info()
                ]:
                    await SystemClock().sleep(0.05)
            config = (await stream.stream_info(f"ARYL_JOURNAL_{CELL}")).config
            assert (config.deny_purge, config.deny_delete) == (days == 0, True)
            await bus.close()


@contextlib.asynccontextmanager
async def leading(settings: CoordinatorSettings) -> AsyncIterator[None]:
    """A real coordinator for the block; it is cut off at its end."""
    running = asyncio.create_task(run(settings))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.nats
@pytest.mark.slow
async def test_a_real_restart_on_a_shortened_journal_loses_no_job(tmp_path: Path) -> None:
    """Jobs wait whose submissions were dropped long ago; the next leader has them all."""
    async with running_nats(tmp_path / "nats") as server:
        settings = CoordinatorSettings(
            cell=CELL,
            nats_url=server.url,
            rebuild_wait_s=0.0,
            pass_period_s=0.2,
            leader_ttl_s=2.0,
            snapshot_records=3,
            journal_kept_days=1e-12,
        )
        bus = await connect_nats(server.url, identity="ops_ada", clock=SystemClock())
        client = Client(bus, cell=CELL, tenant="ops", user="ada", timeout_s=2.0)
        stream = bus.jetstream(timeout_s=PATIENCE_S)

        async def first_sequence() -> int:
            return (await stream.stream_info(f"ARYL_JOURNAL_{CELL}")).state.first_seq

        wanted: set[str] = set()
        try:
            async with leading(settings):
                for number in range(5):
                    request = Submit(spec=make_spec(f"j{number}"), request_id=f"r{number}")
                    wanted.add((await answered(client, request, Submitted)).job_id)
                submitted = (await stream.stream_info(f"ARYL_JOURNAL_{CELL}")).state.last_seq
                async with asyncio.timeout(PATIENCE_S * 3):
                    while await first_sequence() <= submitted:
                        await SystemClock().sleep(0.05)
            for _ in range(2):
                async with leading(settings):
                    found = await answered(client, ListJobs(), Jobs)
                    assert {row.job_id for row in found.rows} == wanted
                    begins = await first_sequence()
                    async with asyncio.timeout(PATIENCE_S * 3):
                        while await first_sequence() == begins:
                            await SystemClock().sleep(0.05)
        finally:
            await bus.close()


async def answered(client: Client, request: Message, kind: type[M]) -> M:
    """The answer, as soon as somebody leads."""
    async with asyncio.timeout(PATIENCE_S * 6):
        while True:
            try:
                return await client.ask(request, kind)
            except Unavailable:
                await SystemClock().sleep(0.05)


# --- coordinators ---------------------------------------------------------------------------

SETTINGS = msgspec.structs.replace(
    make_settings(snapshot_records=3), journal_kept_days=5.0 / 86_400
)
"""Old is more than five records before the last: the fake counts a second for each."""


class CountedSnapshots(MemorySnapshots):
    """Remembers of which records there were snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[int] = []

    async def save(self, sequence: int, data: bytes) -> None:
        """Keep it."""
        await super().save(sequence, data)
        self.sequences.append(sequence)


async def test_a_restart_on_a_shortened_journal_knows_all() -> None:
    """What was dropped is in the snapshot: the same state, and nothing is started again."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead(settings=SETTINGS)
        job_id = await running(cell, coordinator)
        for number in range(8):
            await submit(cell, f"w{number}", workers=(2, 2))
        await cell.leaders[0].crash()
        before = coordinator.engine.encode_state()
        launched = cell.launch("two", SETTINGS)
        again = launched.coordinator
        await again.decider.rebuild()
        assert launched.journal.first_sequence > 1
        assert again.engine.encode_state() == before
        await cell.until(lambda: again.is_leading)
        await cell.clock.advance(30.0)
        assert job(again, job_id).attempt.number == 1
        assert len(again.engine.state.jobs) == 9


async def test_what_is_not_in_two_snapshots_is_never_dropped() -> None:
    """Also when it is old, and by whoever leads: were the newest spoilt, the other would do."""
    keeps_nothing = msgspec.structs.replace(SETTINGS, journal_kept_days=1e-12)
    async with Cell() as cell:
        cell.snapshots = snapshots = CountedSnapshots()
        for name in ("one", "two"):
            coordinator = await cell.lead(name, keeps_nothing)
            for number in range(6):
                await submit(cell, f"{name}-{number}")
                if len(snapshots.sequences) > 1 and coordinator.is_leading:
                    first = cell.leaders[-1].journal.first_sequence
                    assert first <= snapshots.sequences[-2] + 1
            assert cell.leaders[-1].journal.first_sequence == snapshots.sequences[-2] + 1
            await cell.leaders[-1].crash()


async def test_without_the_setting_nothing_is_dropped() -> None:
    """The default keeps the history of the cell."""
    async with Cell() as cell:
        await cell.lead(settings=make_settings(snapshot_records=3))
        for number in range(8):
            await submit(cell, f"w{number}")
        assert cell.snapshots.saved is not None
        assert cell.leaders[0].journal.first_sequence == 1


async def test_a_journal_that_nobody_can_begin_to_read_is_refused() -> None:
    """A whole snapshot of another version has what was dropped: to go on would lose jobs."""
    async with Cell() as cell:
        await cell.lead(settings=SETTINGS)
        for number in range(12):
            await submit(cell, f"w{number}")
        await cell.leaders[0].crash()
        cell.snapshots.saved = (12, b"of another version")
        again = cell.launch("two", SETTINGS)
        with pytest.raises(ProtocolError, match=r"records before \d+ were dropped.*backup"):
            await again.coordinator.decider.rebuild()


async def test_a_shortened_journal_without_any_snapshot_begins_and_names_what_is_lost() -> None:
    """Nothing can bring back what a damaged disk lost; running jobs go on, and one line says so."""
    async with Cell() as cell:
        coordinator = await cell.lead(settings=SETTINGS)
        job_id = await running(cell, coordinator)
        for number in range(12):
            await submit(cell, f"w{number}")
        await cell.leaders[0].crash()
        cell.snapshots.saved = None
        first = cell.leaders[0].journal.first_sequence
        again = await cell.lead("two", SETTINGS)
        told = [one.what for one in again.engine.state.stories if one.subject == "cell"]
        assert f"journal records 1 to {first - 1} lost" in told
        await cell.until(lambda: job_id in again.engine.state.jobs)
        assert job(again, job_id).state == JobState.RUNNING


async def test_a_journal_that_cannot_be_shortened_stops_nobody() -> None:
    """It is said, decisions go on, and the next snapshot tries again."""
    async with Cell() as cell:
        coordinator = await cell.lead(settings=SETTINGS)
        journal = cell.leaders[0].journal
        journal.cannot_shorten = True
        for number in range(12):
            await submit(cell, f"w{number}")
        assert coordinator.is_leading
        assert journal.first_sequence == 1
        journal.cannot_shorten = False
        for number in range(6):
            await submit(cell, f"v{number}")
        assert journal.first_sequence > 1
