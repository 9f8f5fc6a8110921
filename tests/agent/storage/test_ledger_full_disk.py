"""The agent's ledger on a full or hanging disk: what was written before is never lost."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from agent.core.state import (
    Memory,
    WorkerState,
    first_memory,
)
from agent.storage.ledger import COMPACT_BYTES, Ledger, peek
from common.clock import SystemClock
from common.errors import Unavailable
from tests.harness.node.full_disk import Writes
from tests.harness.node.life import key, order, settings
from tests.harness.node.workers import PATIENCE_S
from tests.tables import each_row


def memory(generation: int) -> Memory:
    """A node's memory at a generation, with one worker."""
    found = first_memory(settings(), "boot-1")
    found.generation = generation
    found.workers["j1.1.0"] = WorkerState(order=order())
    return found


@each_row("room_bytes", [0, 1, 7, 8, 9, 100])
async def test_a_save_that_failed_costs_neither_the_one_before_nor_the_one_after(
    tmp_path: Path, room_bytes: int
) -> None:
    """However much of it the disk took: the record before counts until the next whole one."""
    writes = Writes()
    ledger = Ledger(tmp_path, write=writes)
    await ledger.save(memory(1))
    writes.room_bytes = room_bytes
    for _ in range(2):
        with pytest.raises(Unavailable, match="No space left"):
            await ledger.save(memory(2))
    assert Ledger(tmp_path).load() == memory(1)
    writes.room_bytes = None
    again = Ledger(tmp_path, write=writes)
    assert again.load() == memory(1)
    await again.save(memory(3))
    await again.save(memory(4))
    assert Ledger(tmp_path).load() == memory(4)


async def test_a_save_that_failed_costs_none_of_the_same_process(tmp_path: Path) -> None:
    """What it left in the file is cut off before the next record."""
    writes = Writes()
    ledger = Ledger(tmp_path, write=writes)
    await ledger.save(memory(1))
    one = (tmp_path / "ledger").stat().st_size
    longer = memory(2)
    longer.workers["j1.1.1"] = WorkerState(order=order(key(1)))
    writes.room_bytes = one + 20
    with pytest.raises(Unavailable):
        await ledger.save(longer)
    writes.room_bytes = None
    await ledger.save(memory(3))
    ledger.close()
    assert Ledger(tmp_path).load() == memory(3)
    assert not (tmp_path / "ledger.torn").exists()


@pytest.mark.parametrize("failing_sync", [1, 2], ids=["file", "directory"])
async def test_what_no_sync_vouches_for_is_cut_off_before_the_next_record(
    tmp_path: Path, failing_sync: int
) -> None:
    """The kernel may drop what it could not write back, and then what follows it would be lost."""
    left = [failing_sync]

    def sync(fd: int) -> None:
        """As `os.fsync`; one of them fails."""
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(fd)

    path = tmp_path / "ledger"
    ledger = Ledger(tmp_path, sync=sync)
    with pytest.raises(Unavailable, match="ledger"):
        await ledger.save(memory(1))
    path.write_bytes(bytes(path.stat().st_size))
    await ledger.save(memory(2))
    ledger.close()
    assert Ledger(tmp_path).load() == memory(2)


async def test_a_fresh_ledger_that_cannot_take_the_place_of_the_old_costs_none_of_it(
    tmp_path: Path,
) -> None:
    """What is appended next follows the last whole record of the file that is still there."""
    path, fresh = tmp_path / "ledger", tmp_path / "ledger.new"
    ledger = Ledger(tmp_path)
    for generation in (1, 2):
        await ledger.save(memory(generation))
    ledger.close()

    def sync(fd: int) -> None:
        """As `os.fsync`; meanwhile somebody takes the fresh file away."""
        os.fsync(fd)
        fresh.unlink(missing_ok=True)

    again, before = Ledger(tmp_path, sync=sync), path.read_bytes()
    assert again.load() == memory(2)
    assert path.read_bytes() == before
    longer = memory(3)
    longer.workers["j1.1.1"] = WorkerState(order=order(key(1)))
    await again.save(longer)
    again.close()
    assert path.read_bytes().startswith(before)
    assert Ledger(tmp_path).load() == longer


async def test_what_was_on_disk_before_is_not_taken_for_written_after_a_failure(
    tmp_path: Path,
) -> None:
    """A memory that went back to what it was is a write again, so that the answer is true."""
    writes = Writes()
    ledger = Ledger(tmp_path, write=writes)
    await ledger.save(memory(1))
    writes.room_bytes = 0
    for generation in (2, 1):
        with pytest.raises(Unavailable):
            await ledger.save(memory(generation))


@each_row("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
async def test_a_ledger_that_cannot_be_written_is_read_and_says_so_with_the_first_save(
    tmp_path: Path, error: int
) -> None:
    """Also when nothing has changed since: whoever asks wants to know before it begins anything."""
    ledger = Ledger(tmp_path)
    await ledger.save(memory(1))
    ledger.close()
    writes = Writes()
    writes.room_bytes, writes.error = 0, error
    again = Ledger(tmp_path, write=writes)
    assert again.load() == memory(1)
    with pytest.raises(Unavailable, match="ledger"):
        await again.save(memory(1))
    writes.room_bytes = None
    await again.save(memory(1))
    again.close()
    assert Ledger(tmp_path).load() == memory(1)


async def test_a_long_ledger_on_a_full_disk_keeps_its_last_record(tmp_path: Path) -> None:
    """It cannot be made short there, and is not made empty either."""
    writes = Writes()
    ledger = Ledger(tmp_path, write=writes)
    generation, path = 0, tmp_path / "ledger"
    await ledger.save(memory(generation))
    while path.stat().st_size <= COMPACT_BYTES:
        generation += 1
        await ledger.save(memory(generation))
    long_bytes = path.stat().st_size
    writes.room_bytes = 10
    with pytest.raises(Unavailable):
        await ledger.save(memory(generation + 1))
    assert not (tmp_path / "ledger.new").exists()
    assert path.stat().st_size == long_bytes
    assert peek(tmp_path) == memory(generation)
    writes.room_bytes = None
    await ledger.save(memory(generation + 2))
    assert path.stat().st_size < long_bytes
    ledger.close()
    assert Ledger(tmp_path).load() == memory(generation + 2)


async def test_a_ledger_says_that_the_process_before_acted_on_what_no_disk_took(
    tmp_path: Path,
) -> None:
    """The mark is emptied without room, and filled with the next whole record."""
    writes = Writes()
    ledger = Ledger(tmp_path, write=writes)
    await ledger.save(memory(1))
    assert not Ledger(tmp_path).is_behind
    writes.room_bytes = 0
    with pytest.raises(Unavailable):
        await ledger.save(memory(2))
    again = Ledger(tmp_path)
    assert again.is_behind
    assert again.load() == memory(1)
    await again.save(memory(3))
    assert not Ledger(tmp_path).is_behind


async def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    """A save fails after its limit, the next ones at once; the record of the first is not lost when
    the disk gets on."""
    is_free = threading.Event()
    is_free.set()

    def sync(fd: int) -> None:
        """As `os.fsync` of a disk that a test holds up."""
        assert is_free.wait(PATIENCE_S)
        os.fsync(fd)

    ledger = Ledger(tmp_path, sync=sync, limit_s=0.05)
    with contextlib.suppress(Unavailable):  # a busy machine
        await ledger.save(memory(1))
    is_free.clear()
    for _ in range(3):
        with pytest.raises(Unavailable, match="does not answer"):
            await ledger.save(memory(2))
    ledger.close()
    is_free.set()
    async with SystemClock().timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(Unavailable):
                await ledger.save(memory(3))
                break
    ledger.close()
    assert Ledger(tmp_path).load() == memory(3)


@pytest.mark.parametrize("is_freed", [False, True])
async def test_a_ledger_whose_disk_hangs_is_behind_until_a_later_save(
    tmp_path: Path, is_freed: bool
) -> None:
    """The agent acts on a memory that the hung record lacks, also when that record ends late; the
    mark waits for no record."""
    is_free = threading.Event()
    is_free.set()

    def write(fd: int, data: bytes) -> int:
        """As `os.write` of a disk that a test holds up."""
        assert is_free.wait(PATIENCE_S)
        return os.write(fd, data)

    async def until(is_behind: bool) -> None:
        async with SystemClock().timeout(PATIENCE_S):
            while Ledger(tmp_path).is_behind is not is_behind:
                await SystemClock().sleep(0.01)

    ledger = Ledger(tmp_path, write=write, limit_s=0.05)
    await saved(ledger, memory(1))
    assert not Ledger(tmp_path).is_behind
    is_free.clear()
    try:
        for generation in (2, 3, 4):
            with pytest.raises(Unavailable, match="does not answer"):
                await ledger.save(memory(generation))
        if is_freed:
            is_free.set()
            async with SystemClock().timeout(PATIENCE_S):
                while peek(tmp_path) != memory(2):
                    await SystemClock().sleep(0.01)
        await until(is_behind=True)
    finally:
        is_free.set()
    await saved(ledger, memory(5))
    await until(is_behind=False)
    ledger.close()


async def saved(ledger: Ledger, wanted: Memory) -> None:
    """Save until the disk takes it, however busy the machine is."""
    async with SystemClock().timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(Unavailable):
                await ledger.save(wanted)
                return
