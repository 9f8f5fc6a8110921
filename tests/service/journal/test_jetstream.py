"""Journal and snapshots: one contract, for JetStream and for the fakes in memory."""

from __future__ import annotations

import binascii
import resource
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from common import subjects
from common.errors import ConfigError, Fenced, Unavailable
from coordinator.service.journal import jetstream as store
from coordinator.service.journal import snapshot_chunks
from tests.harness.fakes import FakeClock
from tests.harness.inbox import PATIENCE_S
from tests.harness.servers import running_nats
from tests.service.places import (
    CELL,
    JetStream,
    Place,
    opened,
    records,
    written,
)

# --- journal ---------------------------------------------------------------------------------


async def test_records_come_back_in_the_order_of_their_appends(place: Place) -> None:
    """An append returns its sequence, from 1 without gaps, and a read gives the bytes back."""
    journal = await opened(place)
    wrote = [b"first", b"", b"\x00\xff" * 5000]
    assert [await journal.append(record) for record in wrote] == [1, 2, 3]
    assert journal.last_sequence == 3
    assert await records(journal) == list(enumerate(wrote, start=1))
    assert await records(journal, 3) == [(3, wrote[2])]
    assert await records(journal, 4) == []


async def test_an_empty_journal_is_no_error(place: Place) -> None:
    """Nothing was written: the end is 0 and there is nothing to read."""
    journal = await opened(place)
    assert journal.last_sequence == 0
    assert await records(journal) == []


async def test_a_journal_keeps_its_identity(place: Place) -> None:
    """Whoever opens it, before and after it has records, sees the same."""
    first = await opened(place)
    before = first.identity
    await first.append(b"one")
    second = await opened(place)
    assert before
    assert {first.identity, second.identity} == {before}


async def test_more_records_than_one_fetch_brings(place: Place) -> None:
    """A long journal is read whole and in order."""
    journal = await opened(place)
    count = store.FETCH_COUNT + 20
    for number in range(count):
        await journal.append(b"%d" % number)
    assert [data for _, data in await records(journal)] == [b"%d" % n for n in range(count)]


async def test_a_restarted_writer_goes_on_where_the_journal_ends(place: Place) -> None:
    """What was appended before is found by whoever opens the journal next."""
    first = await opened(place)
    await first.append(b"one")
    second = await opened(place)
    assert second.last_sequence == 1
    assert await second.append(b"two") == 2
    assert await records(second) == [(1, b"one"), (2, b"two")]


async def test_a_writer_that_was_overtaken_is_fenced(place: Place) -> None:
    """Two writers open at the same end: the second to write is refused, again and again."""
    old, new = await opened(place), await opened(place)
    await new.append(b"new")
    for _ in range(2):
        with pytest.raises(Fenced, match="record 1"):
            await old.append(b"old")
    assert await records(new) == [(1, b"new")]
    assert await new.append(b"on") == 2


async def test_a_writer_is_fenced_in_the_middle_too(place: Place) -> None:
    """A takeover after some records stops the writer that did not notice."""
    old = await opened(place)
    await old.append(b"1")
    new = await opened(place)
    await new.append(b"2")
    with pytest.raises(Fenced):
        await old.append(b"2 of another")
    assert await records(new) == [(1, b"1"), (2, b"2")]


async def test_a_write_whose_answer_was_lost_counts_once(place: Place) -> None:
    """The same bytes at the same place are the same append: a retry neither fences nor doubles."""
    journal, again = await opened(place), await opened(place)
    await journal.append(b"written, and the answer is lost")
    assert await again.append(b"written, and the answer is lost") == 1
    assert await again.append(b"next") == 2
    assert len(await records(again)) == 2


async def test_a_foreign_message_is_passed_over(place: Place) -> None:
    """It is counted, and neither read as a record nor in the way of the next one."""
    journal = await opened(place)
    await journal.append(b"1")
    for garbage in (b"garbage", b""):
        await place.stray(garbage)
    assert await written(journal, b"4") == 4
    assert await records(journal) == [(1, b"1"), (4, b"4")]
    assert await records(journal, 2) == [(4, b"4")]
    assert journal.foreign_count == 2
    await place.stray(b"at the end")
    again = await opened(place)
    assert await records(again) == [(1, b"1"), (4, b"4")]
    assert (again.last_sequence, again.foreign_count) == (5, 3)
    assert await again.append(b"6") == 6


async def test_a_foreign_message_hides_no_other_writer(place: Place) -> None:
    """A coordinator's record behind what a stranger wrote fences the one that was overtaken."""
    old, new = await opened(place), await opened(place)
    await place.stray(b"garbage")
    await written(new, b"new")
    with pytest.raises(Fenced, match="record 2"):
        await written(old, b"old")
    assert await records(new) == [(2, b"new")]


# --- snapshots -------------------------------------------------------------------------------


async def test_the_newest_snapshot_is_loaded(place: Place) -> None:
    """Each save replaces the one before; another coordinator finds it."""
    snapshots = await place.snapshots()
    assert await snapshots.load() is None
    await snapshots.save(3, b"old")
    await snapshots.save(7, b"new")
    assert await (await place.snapshots()).load() == (7, b"new")


@pytest.mark.parametrize(
    "size", [0, 1, snapshot_chunks.MAX_CHUNK_BYTES, 2 * snapshot_chunks.MAX_CHUNK_BYTES + 1]
)
async def test_a_snapshot_of_any_size_comes_back_whole(place: Place, size: int) -> None:
    """Empty, one byte, and what does not fit one message."""
    snapshots = await place.snapshots()
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    await snapshots.save(1, data)
    assert await snapshots.load() == (1, data)


# --- what only JetStream has -----------------------------------------------------------------


@pytest.mark.nats
async def test_a_journal_that_is_made_anew_is_another_one(jetstream: JetStream) -> None:
    """A stream that somebody deleted comes back under its name, empty, and can be told apart."""
    journal = await opened(jetstream)
    await journal.append(b"lost")
    before = journal.identity
    by_hand = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    await by_hand.delete_stream(f"ARYL_JOURNAL_{CELL}")
    again = await opened(jetstream)
    assert again.last_sequence == 0
    assert again.identity not in ("", before)


@pytest.mark.nats
async def test_what_names_its_writer_is_a_record_whatever_it_holds(jetstream: JetStream) -> None:
    """Bytes with a coordinator's header fence and are read back: only their reader may judge."""
    journal = await opened(jetstream)
    await journal.append(b"mine")
    other = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    checksum = f"{binascii.crc32(b'theirs'):08x}"
    headers = {store.WRITER_HEADER: "w", store.CHECKSUM_HEADER: checksum}
    await other.publish(subjects.journal(CELL), b"theirs", headers=headers)
    with pytest.raises(Fenced, match="record 2"):
        await journal.append(b"mine too")
    assert await records(journal) == [(1, b"mine"), (2, b"theirs")]
    assert journal.foreign_count == 0


@pytest.mark.nats
async def test_a_foreign_message_is_logged_once_with_its_sequence(
    jetstream: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    """However often the journal is read; the next one is another line."""
    journal = await opened(jetstream)
    await journal.append(b"mine")
    for number in (2, 3):
        await jetstream.stray(b"garbage")
        for _ in range(2):
            await records(journal)
        said = [line for line in caplog.messages if "foreign messages on" in line]
        assert len(said) == number - 1
        assert f"sequences {number} to {number}" in said[-1]
        assert subjects.journal(CELL) in said[-1]


@pytest.mark.nats
async def test_nothing_can_be_taken_out_of_the_journal(jetstream: JetStream) -> None:
    """Not even by somebody who may manage streams: neither one record nor all."""
    journal = await opened(jetstream)
    await journal.append(b"kept")
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    for attempt in (
        stream.purge_stream(f"ARYL_JOURNAL_{CELL}"),
        stream.delete_msg(f"ARYL_JOURNAL_{CELL}", 1),
    ):
        with pytest.raises(Exception, match="not permitted"):
            await attempt
    assert await records(journal) == [(1, b"kept")]


@pytest.mark.nats
async def test_a_stream_that_would_forget_is_refused(jetstream: JetStream) -> None:
    """A journal on a stream with an age limit loses jobs one day: the error names the limit."""
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    await stream.add_stream(
        name=f"ARYL_JOURNAL_{CELL}", subjects=[subjects.journal(CELL)], max_age=3600
    )
    with pytest.raises(ConfigError, match="max_age"):
        await opened(jetstream)


@pytest.mark.nats
async def test_a_torn_snapshot_is_as_if_never_begun(jetstream: JetStream) -> None:
    """A save that ended between two chunks, and garbage, leave the snapshot before them valid."""
    snapshots = await jetstream.snapshots()
    await snapshots.save(3, b"whole")
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    torn = snapshot_chunks.split(9, b"x" * (snapshot_chunks.MAX_CHUNK_BYTES + 1), name="torn")
    await stream.publish(subjects.snapshots(CELL), msgspec.msgpack.encode(torn[0]))
    await stream.publish(subjects.snapshots(CELL), b"\xc1 garbage")
    assert await snapshots.load() == (3, b"whole")


@pytest.mark.nats
async def test_older_snapshots_do_not_pile_up(jetstream: JetStream) -> None:
    """After a save the stream holds that snapshot and the one before, whoever saved that."""
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    for sequence in range(1, 6):
        snapshots = await jetstream.snapshots()
        await snapshots.load()
        for again in (0, 100):
            await snapshots.save(sequence + again, b"x" * (snapshot_chunks.MAX_CHUNK_BYTES + 1))
        assert (await stream.stream_info(f"ARYL_SNAPSHOT_{CELL}")).state.messages == 4


@pytest.mark.nats
async def test_where_the_newest_snapshot_is_spoilt_the_one_before_is_loaded(
    jetstream: JetStream,
) -> None:
    """A disk that lost a part of it costs the records in between, not the state."""
    await (await jetstream.snapshots()).save(3, b"before")
    snapshots = await jetstream.snapshots()
    assert await snapshots.load() == (3, b"before")
    await snapshots.save(7, b"x" * (snapshot_chunks.MAX_CHUNK_BYTES + 1))
    stream = (await jetstream.bus()).jetstream(timeout_s=PATIENCE_S)
    state = (await stream.stream_info(f"ARYL_SNAPSHOT_{CELL}")).state
    await stream.delete_msg(f"ARYL_SNAPSHOT_{CELL}", state.last_seq - 1)
    assert await snapshots.load() == (3, b"before")


def test_chunks_of_two_saves_at_once_do_not_mix() -> None:
    """Around a takeover two coordinators may save: each set is put together by its own name."""
    one = snapshot_chunks.split(1, b"a" * (snapshot_chunks.MAX_CHUNK_BYTES + 1), name="one")
    two = snapshot_chunks.split(2, b"b" * (snapshot_chunks.MAX_CHUNK_BYTES + 1), name="two")
    found = snapshot_chunks.join([one[0], two[0], two[1], one[1]])
    assert found == snapshot_chunks.Whole("one", 1, one[0].data + one[1].data)
    assert snapshot_chunks.join([one[0], two[1]]) is None


def test_a_chunk_that_was_changed_does_not_count() -> None:
    """A set whose checksum is wrong is not a snapshot; the one before it is."""
    good, bad = (
        snapshot_chunks.split(1, b"good", name="good"),
        snapshot_chunks.split(2, b"bad", name="bad"),
    )
    changed = snapshot_chunks.Chunk(
        snapshot=bad[0].snapshot,
        sequence=2,
        index=0,
        count=1,
        checksum=bad[0].checksum,
        data=b"bag",
    )
    assert snapshot_chunks.join([*good, changed]) == snapshot_chunks.Whole("good", 1, b"good")


@pytest.mark.nats
async def test_everything_survives_a_kill_of_the_server(tmp_path: Path) -> None:
    """SIGKILL of nats-server loses no record, no snapshot and no epoch."""
    clock = FakeClock()
    async with running_nats(tmp_path / "nats") as server:
        async with AsyncExitStack() as stack:
            before = JetStream(server, stack)
            journal, snapshots = await opened(before), await before.snapshots()
            await journal.append(b"record")
            await snapshots.save(1, b"state")
            lease = await before.lease(clock)
            assert await lease.acquire("a", lambda: 4) == 5
            await lease.release()
            await server.kill()
        await server.start()
        async with AsyncExitStack() as stack:
            after = JetStream(server, stack)
            assert await records(await opened(after)) == [(1, b"record")]
            assert await (await after.snapshots()).load() == (1, b"state")
            assert await (await after.lease(clock)).acquire("b", lambda: 0) == 6


@pytest.mark.nats
@pytest.mark.slow
async def test_a_full_disk_is_named_and_a_restart_of_the_server_cures_it(tmp_path: Path) -> None:
    """A nats-server that could not write takes nothing when it could again: the error says what
    to do, and after that the same record is written once."""
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        journal = await opened(JetStream(server, stack))
        assert await journal.append(b"one") == 1
        assert server.pid is not None
        before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, before[1]))
        with pytest.raises(Unavailable, match=r"stores nothing.*restart nats-server"):
            await journal.append(b"two")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)
        await server.restart()
        assert await written(journal, b"two") == 2
        assert await records(journal) == [(1, b"one"), (2, b"two")]
