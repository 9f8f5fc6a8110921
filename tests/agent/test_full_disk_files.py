"""The files around a ledger on a full disk: lock, heartbeat, logs, a worker's status."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agent.hooks.runner import SystemCommands
from agent.shim import files as shim_files
from agent.storage import node_lock
from agent.storage.ledger import exclusive
from agent.storage.node_lock import Heartbeat, end_if_hung
from agent.workers.record import SHIM_LOST
from agent.workers.shim_runner import ShimRunner
from agent.workers.starters import DetachedStarter, ShimStarter, run_command, shim_argv
from common.clock import SystemClock
from common.errors import Unavailable
from common.faults import Fault
from common.messages import WorkerOrder, WorkerPhase
from common.model import StopReason, WorkerKey
from tests.harness.node.full_disk import SmallDisk, small_disk
from tests.harness.node.workers import WorkerHarness, kill, make_harness, make_order

P = WorkerPhase
pytestmark = pytest.mark.slow
WAITING = "echo begun; while [ ! -e $OUT/go ]; do sleep 0.05; done; echo bye; exit 5"


@pytest.fixture
def disk() -> Generator[SmallDisk]:
    """A disk that a test fills, at a short path.

    Where a job's socket does not fit into the worker's directory, a shim begins by one more file.
    """
    with (
        TemporaryDirectory(prefix="aryl-test-", dir="/tmp") as place,
        small_disk(Path(place) / "disk") as disk,
    ):
        yield disk


async def test_a_holder_beats_on_a_full_disk_where_one_before_it_beat(disk: SmallDisk) -> None:
    """It writes over what is there, so that it is never taken for one that hangs."""
    before = Heartbeat(disk.path)
    assert before.is_needed()
    disk.fill()
    found = Heartbeat(disk.path)
    said = node_lock.read(disk.path)
    assert said is not None
    assert said.pid == os.getpid()
    found.close()
    before.close()


async def test_a_holder_whose_beats_no_disk_takes_holds_all_the_same(disk: SmallDisk) -> None:
    """The node is not left alone for want of a few bytes."""
    disk.fill()
    heartbeat = Heartbeat(disk.path)
    assert node_lock.read(disk.path) is None
    heartbeat.close()


async def test_nobody_is_ended_for_silence_on_a_read_only_disk(disk: SmallDisk) -> None:
    """Whoever is alive there cannot show it."""
    line = f"{shim_files.boot_id()} {os.getpid()} {shim_files.start_ticks(os.getpid())} 1 0.0\n"
    node_lock.path_in(disk.path).write_text(line)
    assert disk.freeze()
    with pytest.raises(Unavailable, match="read-only"):
        await end_if_hung(disk.path, patience_s=0.0, clock=SystemClock())


async def test_a_node_on_a_read_only_disk_is_held_by_one_process(disk: SmallDisk) -> None:
    """The lock's file is there since the node's first agent, and can be locked as it is."""
    with exclusive(disk.path):
        pass
    assert disk.freeze()
    with exclusive(disk.path), pytest.raises(Unavailable, match="another agent"):  # noqa: SIM117 - shows which of the two fails
        with exclusive(disk.path):
            pass


# --- workers ----------------------------------------------------------------------------------


@pytest.fixture
async def harness(disk: SmallDisk) -> AsyncGenerator[WorkerHarness]:
    """Workers whose files are on that disk."""
    async for harness in make_harness(disk.path / "workers"):
        try:
            yield harness
        finally:
            disk.empty()


async def begin(harness: WorkerHarness, out: Path) -> WorkerKey:
    """A worker that runs until it is told to go, and says something then."""
    key = await harness.start(make_order("sh", "-c", WAITING, env={"OUT": str(out)}, grace_s=1.0))
    await harness.until_said(key, "begun")
    return key


async def test_a_worker_ends_with_its_exit_code_on_a_full_disk(
    harness: WorkerHarness, disk: SmallDisk, tmp_path: Path
) -> None:
    """Its shim keeps room for the last word, and its own log, which cannot grow, is no reason to
    die."""
    key = await begin(harness, tmp_path)
    disk.fill()
    (tmp_path / "go").touch()
    status = await harness.until_exited(key)
    assert status.exit_code is not None
    assert status.error == ""
    assert status.stop_reason is None
    assert not (harness.directory(key) / shim_files.SPARE_FILE).exists()


async def test_a_worker_is_stopped_on_a_full_disk(harness: WorkerHarness, disk: SmallDisk) -> None:
    """The order needs no disk, and its end is told with its reason."""
    key = await harness.start(make_order("sleep", "600", grace_s=1.0))
    disk.fill()
    await harness.runner.stop(key, StopReason.PREEMPT, 1.0)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.PREEMPT)


async def test_a_worker_whose_shim_died_is_over_on_a_full_disk(
    harness: WorkerHarness, disk: SmallDisk, tmp_path: Path
) -> None:
    """Nobody waits for its end to be written before its GPUs are free."""
    key = await begin(harness, tmp_path)
    shim_pid = harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    disk.fill()
    kill(shim_pid)
    status = await harness.until_exited(key)
    assert status.error == SHIM_LOST


class Gated:
    """Starts a shim when a test lets it, and sees it end."""

    def __init__(self) -> None:
        self.asked, self.gate = asyncio.Event(), asyncio.Event()
        self.exit_code: int | None = None

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        self.asked.set()
        await self.gate.wait()
        shim = await asyncio.create_subprocess_exec(*shim_argv(directory))
        self.exit_code = await shim.wait()


def runner_of(harness: WorkerHarness, starter: ShimStarter) -> ShimRunner:
    """A runner whose shims come to life by a test's starter."""
    return ShimRunner(harness.run_dir, clock=harness.clock, starter=starter, is_root_allowed=True)


async def test_a_worker_that_begins_on_a_full_disk_goes_on_and_tells_its_end(
    harness: WorkerHarness, disk: SmallDisk, tmp_path: Path
) -> None:
    """Its shim has the room of its order for the first word, and that of the first word for the
    last."""

    class Filling(DetachedStarter):
        async def start(self, directory: Path, order: WorkerOrder) -> None:
            disk.fill()
            await super().start(directory, order)

    runner = runner_of(harness, Filling(harness.clock))
    order = make_order("sh", "-c", WAITING, env={"OUT": str(tmp_path)})
    await runner.start(order, endpoint="n1:1")
    [status] = await runner.statuses([order.key])
    assert (status.phase, status.error) == (P.RUNNING, "")
    assert not (harness.directory(order.key) / shim_files.SPEC_FILE).exists()
    (tmp_path / "go").touch()
    status = await harness.until_exited(order.key)
    assert status.exit_code is not None
    assert (status.error, status.fault) == ("", Fault.NONE)


@pytest.mark.parametrize("has_room", [True, False], ids=["in its order", "nowhere"])
async def test_a_worker_withdrawn_on_a_full_disk_is_over_and_never_begins(
    harness: WorkerHarness, disk: SmallDisk, tmp_path: Path, *, has_room: bool
) -> None:
    """Its end takes the room of its order; where that has none, the agent keeps the shim out until
    there is room again."""
    starter, mark = Gated(), tmp_path / "ran"
    runner, order = runner_of(harness, starter), make_order("touch", str(mark))
    starting = asyncio.create_task(runner.start(order, endpoint="n1:1"))
    await starter.asked.wait()
    directory = harness.directory(order.key)
    if not has_room:
        (directory / "second-name").hardlink_to(directory / shim_files.SPEC_FILE)
    disk.fill()
    await runner.stop(order.key, StopReason.PREEMPT, 0.0)
    assert await runner.leaving([order.key]) == frozenset()
    assert not runner.has_shim(order.key)
    assert (directory / shim_files.STATUS_FILE).exists() == has_room
    starter.gate.set()
    await harness.until(lambda: starter.exit_code is not None, "the shim has left")
    assert starter.exit_code == 0
    disk.empty()
    [status] = await runner.statuses()
    assert (status.phase, status.stop_reason) == (P.EXITED, StopReason.PREEMPT)
    await starting
    assert not mark.exists()
    await runner.forget(order.key)
    assert not directory.exists()


def test_a_log_that_cannot_be_moved_aside_stays_as_it_is(disk: SmallDisk) -> None:
    """And the room that the attempt took is given back."""
    log, old = disk.path / "log", disk.path / "log.1"
    log.write_bytes(b"a line\n" * 400_000)
    log_fd = shim_files.open_log(str(log))
    little = disk.path / "little"
    little.write_bytes(b"x" * 200_000)
    disk.fill()
    little.unlink()
    with pytest.raises(OSError, match="No space") as caught:
        shim_files.cap_log(log_fd, str(log), str(old), 1_000_000)
    os.close(log_fd)
    assert caught.value.errno == errno.ENOSPC
    assert log.stat().st_size == 7 * 400_000
    assert old.stat().st_size == 0


def test_the_log_of_a_worker_that_ended_is_cut_on_the_disk_that_it_filled(disk: SmallDisk) -> None:
    """Nobody writes it any more, so its end takes the place of its beginning."""
    log = disk.path / "log"
    log.write_bytes(b"".join(b"line %07d\n" % number for number in range(300_000)))
    disk.fill()
    assert shim_files.cut_log(str(log), 1_000_000)
    assert not shim_files.cut_log(str(log), 1_000_000)
    said = log.read_bytes()
    assert len(said) == 1_000_000
    assert said.startswith(b"[aryl: log cut at 1000000 bytes]\n")
    lines = said.split(b"\n")[2:-1]
    assert lines == [b"line %07d" % number for number in range(300_000 - len(lines), 300_000)]
    assert len(lines) > 76_000


# --- commands ---------------------------------------------------------------------------------


async def test_a_command_says_what_it_does_where_no_disk_takes_it(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails for want of room for its words would keep the node from serving."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk.path))
    disk.fill()
    commands = SystemCommands(SystemClock())
    told = ("sh", "-c", "echo one && echo two && exit 3")
    assert await commands.run(told, timeout_s=10.0, variables={}) == "sh exited with 3: two"
    told = ("sh", "-c", "echo one && exit 0")
    assert await commands.run(told, timeout_s=10.0, variables={}) == ""


async def test_a_command_is_run_whose_log_cannot_be_opened(disk: SmallDisk) -> None:
    """What it says is worth less than what it does; that it failed is still told."""
    assert disk.freeze()
    log, clock = disk.path / "log", SystemClock()
    await run_command(("true",), log=log, clock=clock, timeout_s=10.0)
    with pytest.raises(Unavailable, match="exit code 1: its output was not kept"):
        await run_command(("false",), log=log, clock=clock, timeout_s=10.0)
