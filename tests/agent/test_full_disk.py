"""A state disk that is full or read-only: what was begun goes on or home, nothing new begins, and
what was written before is never lost."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from agent.core.node_lifecycle import Life
from agent.core.state import (
    CheckReserve,
    Memory,
    StartWorker,
    StopWorker,
    WorkerState,
    first_memory,
)
from agent.storage.ledger import COMPACT_BYTES, Ledger, peek
from common.clock import SystemClock
from common.errors import Unavailable
from common.faults import Fault
from common.messages import OrderPhase, WorkerPhase
from common.model import LeaseId, NodeRole, StopReason
from tests.agent.agent_house import AgentHouse
from tests.agent.bench import Bench, key, lease, order, settings
from tests.agent.full_disk import Writes
from tests.agent.node_house import House
from tests.agent.worker_house import PATIENCE_S
from tests.tables import each_row

R, P = NodeRole, WorkerPhase
FULL = "no space left"


def memory(generation: int) -> Memory:
    """A node's memory at a generation, with one worker."""
    found = first_memory(settings(), "boot-1")
    found.generation = generation
    found.workers["j1.1.0"] = WorkerState(order=order())
    return found


# --- the ledger -------------------------------------------------------------------------------


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


def test_a_worker_of_a_ledger_that_is_behind_does_not_begin() -> None:
    """It may be over and run elsewhere. One that is seen to run goes on."""
    bench = Bench(inference=False)
    bench.want(R.TRAINING, order(), order(key(1), gpus=(1,)), order(key(2), gpus=(1,)))
    held = bench.memory.workers
    held[str(key(1))].is_begun = held[str(key(2))].is_begun = True
    life = Life(bench.settings, bench.memory, boot_id="boot-1", now_s=0.0, is_behind=True)
    bench.life = life
    bench.runs(key(2))
    actions = bench.steps(3)
    assert not any(isinstance(action, StartWorker | CheckReserve) for action in actions)
    assert [action.key for action in actions if isinstance(action, StopWorker)] == [key(1)]
    said = {report.key: report for report in life.workers.reports()}
    assert (said[key()].phase, said[key()].fault) == (P.REFUSED, Fault.NODE)
    assert (said[key(1)].phase, said[key(1)].stop_reason) == (P.EXITED, StopReason.PREEMPT)
    assert said[key(2)].phase == P.RUNNING


# --- the node ---------------------------------------------------------------------------------


async def test_a_worker_waits_with_the_reason_until_the_ledger_can_be_written() -> None:
    """No process begins that an agent which starts anew would know nothing of."""
    house = House()
    await house.turn()
    house.accept(R.TRAINING, order())
    house.ledger.is_full = True
    await house.turn(3)
    assert house.runner.calls == []
    assert house.said().phase == P.RESERVING
    assert FULL in house.said().error
    assert FULL in house.life.detail
    house.ledger.is_full = False
    await house.turn(4)
    assert house.said().phase == P.RUNNING
    assert FULL not in house.life.detail


async def test_a_worker_that_is_ready_is_not_started_on_a_disk_that_has_just_filled_up() -> None:
    """It begins once, as soon as its start can be written down."""
    house = House()
    house.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await house.turn(3)
    assert house.said().phase == P.READY
    house.accept(R.TRAINING, order())
    house.ledger.is_full = True
    await house.turn(2)
    assert [name for name, _ in house.runner.calls] == ["check"]
    house.ledger.is_full = False
    await house.turn(3)
    assert [name for name, _ in house.runner.calls].count("start") == 1


async def test_a_worker_is_stopped_and_its_end_told_on_a_full_disk() -> None:
    """What gives back needs no disk."""
    house = House()
    await house.run_one()
    house.ledger.is_full = True
    house.stop_one(grace_s=9.0)
    await house.turn(2)
    assert house.runner.stops == [(key(), StopReason.CANCEL, 9.0)]
    assert house.said().phase == P.EXITED


async def test_files_of_a_worker_stay_until_its_end_is_written_down() -> None:
    """They are what keeps an agent with an older ledger from starting it a second time."""
    house = House()
    await house.run_one()
    house.ledger.is_full = True
    house.runner.end(key())
    await house.turn()
    house.accept(R.TRAINING, acknowledged=(key(),))
    await house.turn(2)
    assert key() in house.runner.known
    house.ledger.is_full = False
    await house.turn(2)
    assert key() not in house.runner.known


async def test_a_loan_is_not_begun_on_a_full_disk() -> None:
    """The node serves on, holds no lease, and its server was not touched."""
    house = House(inference=True)
    await house.turn(5)
    commands = list(house.machine.commands)
    house.ledger.is_full = True
    house.accept(R.ON_LOAN, is_lent=True)
    await house.turn(5)
    assert house.role() == R.SERVING
    assert house.life.memory.lease is None
    assert FULL in house.life.detail
    assert "stop" not in house.machine.commands[len(commands) :]
    assert "unroute" not in house.machine.commands[len(commands) :]


@each_row("turns", [1, 2, 3, 4, 5])
async def test_a_drain_turns_back_when_the_disk_fills_up(turns: int) -> None:
    """Wherever it was: the node ends up serving, with its server up and routed."""
    house = House(inference=True)
    await house.turn(5)
    house.accept(R.ON_LOAN, is_lent=True)
    await house.turn(turns)
    assert house.role() == R.DRAINING
    house.ledger.is_full = True
    await house.turn(12)
    assert house.role() == R.SERVING
    assert house.machine.is_healthy
    assert house.machine.commands[-1] in ("route", "start")
    assert house.life.memory.lease is None


async def test_a_loan_goes_on_and_comes_home_on_a_full_disk() -> None:
    """Its jobs are not ended for it, and its service does not wait for room on a disk."""
    house = House(inference=True)
    await house.lend_with(order(), until_s=house.clock.now_s() + 60.0)
    house.ledger.is_full = True
    await house.turn(3)
    assert (house.role(), house.said().phase) == (R.ON_LOAN, P.RUNNING)
    house.life.renewed(LeaseId("l1-1"), house.clock.now_s() + 20.0)
    await house.turn(10)
    assert house.role() == R.ON_LOAN
    await house.turn(25)
    assert house.role() == R.SERVING
    assert house.runner.stops == [(key(), StopReason.PREEMPT, 30.0)]
    assert house.machine.commands[-2:] == ["start", "route"]


async def test_an_agent_with_an_older_ledger_does_not_wait_for_the_gpus_of_its_own_server() -> None:
    """The node came home on a full disk and its agent died: the next one reads of a loan, finds the
    server that answers, and serves on at once."""
    house = House(inference=True)
    await house.lend_with(order(), until_s=house.clock.now_s() + 25.0)
    house.ledger.is_full = True
    await house.turn(30)
    assert house.role() == R.SERVING
    house.machine.pids[0] = os.getpid()
    seen = len(house.machine.commands)
    again = House(inference=True, before=house)
    assert again.role() == R.ON_LOAN
    await again.turn(6)
    assert again.role() == R.SERVING
    assert "stop" not in again.machine.commands[seen:]
    assert [name for name, _ in again.runner.calls].count("start") == 1


async def test_a_desired_state_that_is_not_on_disk_is_refused_and_what_it_takes_back_is_done() -> (
    None
):
    """The answer is what it says: written down, or the reason; the report shows what is done."""
    house = AgentHouse(inference=True)
    async with house:
        await house.lend()
        house.ledger.is_full = True
        reply = await house.want(R.SERVING)
        assert not reply.is_accepted
        assert FULL in reply.error
        await house.until_role(R.SERVING)
        assert house.report.generation == house.generation
        assert FULL in house.report.detail
        assert house.agent.bad_messages == 0


async def test_a_loan_that_a_full_disk_refuses_is_told_to_the_coordinator() -> None:
    """A report of the order's own generation without a lease is what ends the loan there."""
    house = AgentHouse(inference=True)
    async with house:
        await house.until_role(R.SERVING)
        house.ledger.is_full = True
        reply = await house.want(R.ON_LOAN, lease=lease())
        assert not reply.is_accepted
        await house.until(lambda: house.report.generation == house.generation)
        await house.until(lambda: house.report.lease is None)
        assert house.report.role == R.SERVING
        assert R.DRAINING not in {report.role for report in house.reports}


async def test_a_report_says_that_the_disk_is_full_until_it_is_not() -> None:
    """Whoever places workers and lends nodes need not find out by trying."""
    async with AgentHouse() as house:
        await house.until(lambda: bool(house.reports))
        assert house.report.ledger_error == ""
        house.ledger.is_full = True
        refused = await house.want(R.TRAINING, order())
        assert not refused.is_accepted
        await house.until(lambda: "no space left" in house.report.ledger_error)
        house.ledger.is_full = False
        await house.until(lambda: house.report.ledger_error == "")
