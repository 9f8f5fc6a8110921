"""Workers that are told to stop while their shim is on its way, with real shims and files."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agent.proc.process_tree import thread_states
from agent.shim import files as shim_files
from agent.shim import sockets as shim_sockets
from agent.workers.lost import ASK_S, HUNG_AFTER_S, is_shim_silent
from agent.workers.runner import StorageSilentError
from agent.workers.shim_runner import ShimRunner
from agent.workers.starters import START_TIMEOUT_S, shim_argv
from common.errors import Unavailable
from common.faults import STORAGE_SILENT, Fault
from common.messages import WorkerOrder, WorkerPhase
from common.model import StopReason, WorkerKey
from tests.harness.fakes import FakeClock
from tests.harness.node.workers import (
    PATIENCE_S,
    HangingDiskStarter,
    WorkerHarness,
    is_alive,
    kill,
    make_order,
    make_workers,
)
from tests.harness.sockets import short_path

pytestmark = pytest.mark.slow
P = WorkerPhase


class SlowStarter:
    """Starts a shim when a test lets it, as a busy manager of units does, and sees it end.

    Args:
        starts_nothing: the shim gets nowhere.
    """

    def __init__(self, *, starts_nothing: bool = False) -> None:
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.exit_code: int | None = None
        self._starts_nothing = starts_nothing

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        self.asked.set()
        await self.gate.wait()
        if not self._starts_nothing:
            shim = await asyncio.create_subprocess_exec(*shim_argv(directory))
            self.exit_code = await shim.wait()


harness = pytest.fixture(make_workers)


def silent_shim(harness: WorkerHarness, key: WorkerKey) -> int:
    """What a shim holds that waits for its worker's storage; the descriptor of its lock."""
    directory = harness.directory(key)
    directory.mkdir(parents=True)
    lock_fd = shim_files.take_lock(str(directory / shim_files.LOCK_FILE))
    assert lock_fd is not None
    return lock_fd


async def test_a_worker_that_is_stopped_before_its_shim_is_there_never_begins(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The shim comes late, finds that it is over, and leaves; so does any start after it."""
    starter, mark = SlowStarter(), tmp_path / "ran"
    runner = ShimRunner(harness.run_dir, clock=harness.clock, starter=starter, is_root_allowed=True)
    order = make_order("touch", str(mark))
    starting = asyncio.create_task(runner.start(order, endpoint="node-1:29400"))
    await starter.asked.wait()
    await runner.stop(order.key, StopReason.PREEMPT, 0.0)
    status = await harness.status(order.key)
    assert (status.phase, status.stop_reason, status.error) == (P.EXITED, StopReason.PREEMPT, "")
    starter.gate.set()
    await starting
    assert starter.exit_code == 0
    await harness.start(order)
    assert (await harness.status(order.key)).exit_code is None
    assert not mark.exists()
    await runner.forget(order.key)
    assert await runner.statuses() == ()
    assert not harness.directory(order.key).exists()


async def test_a_stop_waits_in_the_socket_of_a_shim_that_has_not_spoken(
    harness: WorkerHarness,
) -> None:
    """What it is about to run is its own to end: nobody says for it that it never began."""
    key = make_order().key
    lock_fd = silent_shim(harness, key)
    try:
        with short_path(harness.directory(key)) as directory:
            control = shim_sockets.bind_control(str(directory / shim_files.CONTROL_SOCKET))
        with control:
            await harness.runner.stop(key, StopReason.PREEMPT, 0.0)
            orders = [shim_sockets.parse(said) for said in shim_sockets.receive_all(control)]
        assert orders == [{"op": "stop", "reason": "preempt", "grace_s": 0.0}]
        assert await harness.runner.statuses() == ()
        assert is_shim_silent(harness.directory(key))
    finally:
        os.close(lock_fd)


async def test_a_shim_whose_start_was_given_up_finds_its_stop_when_it_gets_on(
    tmp_path: Path,
) -> None:
    """Its job runs elsewhere by then, and no agent may be there to see it."""
    clock, starter = FakeClock(), SlowStarter(starts_nothing=True)
    runner = ShimRunner(tmp_path, clock=clock, starter=starter, is_root_allowed=True)
    order = make_order("sleep", "600")
    starting = asyncio.create_task(runner.start(order, endpoint="node-1:29400"))
    await starter.asked.wait()
    with short_path(tmp_path / str(order.key)) as directory:
        control = shim_sockets.bind_control(str(directory / shim_files.CONTROL_SOCKET))
    with control:
        starter.gate.set()
        await clock.advance(START_TIMEOUT_S)
        with pytest.raises(Unavailable, match="its shim did not start"):
            await starting
        orders = [shim_sockets.parse(said) for said in shim_sockets.receive_all(control)]
    assert orders == [{"op": "stop", "reason": "stale", "grace_s": 0.0}]


def hanging_job(out: Path) -> WorkerOrder:
    """A worker that computes, and halts its shim before that."""
    hangs = 'kill -STOP $PPID; echo $$ $PPID > "$OUT/new"; mv "$OUT/new" "$OUT/pids"; '
    return make_order("sh", "-c", f"{hangs}exec sleep 600", env={"OUT": str(out)})


async def until_it_hangs(harness: WorkerHarness, out: Path) -> tuple[int, int]:
    """Return when a hanging job computes; its worker, and its shim, which hangs."""
    await harness.until((out / "pids").exists, "the worker computes")
    worker, shim = (int(pid) for pid in (out / "pids").read_text().split())
    await harness.until(lambda: "T" in thread_states(shim), "its shim hangs")
    return worker, shim


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_start_has_begun_where_the_worker_computes_and_its_shim_hangs(
    harness: WorkerHarness, tmp_path: Path, *, goes_on: bool
) -> None:
    """Its job would run twice if that start had failed: the worker stays known to a shim that goes
    on, and where none does it is over only when nobody of it is left."""
    clock, order = FakeClock(), hanging_job(tmp_path)
    starter = HangingDiskStarter(harness.clock)
    runner = ShimRunner(harness.run_dir, clock=clock, starter=starter, is_root_allowed=True)
    starting = asyncio.create_task(runner.start(order, endpoint="node-1:29400"))
    worker, shim = await until_it_hangs(harness, tmp_path)
    try:
        await harness.until(lambda: clock.next_deadline_s is not None, "it is waited for")
        await clock.advance(START_TIMEOUT_S)
        await harness.until(lambda: clock.next_deadline_s is not None, "the shim is asked")
        await clock.advance(ASK_S)
        await starting
        assert is_alive(worker)
        if goes_on:
            directory = harness.directory(order.key)
            (directory / f"{shim_files.STATUS_FILE}.new").rmdir()
            os.kill(shim, signal.SIGCONT)
            await harness.until((directory / shim_files.STATUS_FILE).exists, "the shim speaks")
            [status] = await runner.statuses((order.key,))
            assert (status.phase, status.pid, status.stop_reason) == (P.RUNNING, worker, None)
        else:
            [status] = await runner.statuses((order.key,))
            assert (status.phase, status.fault) == (P.STOPPING, Fault.SHIM_LOST)
            async with harness.clock.timeout(PATIENCE_S):
                while await runner.statuses((order.key,)):
                    await harness.clock.sleep(0.02)
        assert is_alive(worker) is is_alive(shim) is goes_on
    finally:
        for pid in (worker, shim):
            kill(pid)


async def test_what_an_agent_began_before_it_died_is_ended_where_it_computes_under_a_hung_shim(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """No status ever spoke of it, and its stop comes with the next agent: the shim has its time to
    hear of it, and after that nobody of it may compute."""
    order, starter = hanging_job(tmp_path), HangingDiskStarter(harness.clock)
    first = ShimRunner(harness.run_dir, clock=FakeClock(), starter=starter, is_root_allowed=True)
    starting = asyncio.create_task(first.start(order, endpoint="node-1:29400"))
    pids = await until_it_hangs(harness, tmp_path)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    clock, key = FakeClock(), order.key
    runner = ShimRunner(harness.run_dir, clock=clock, starter=starter, is_root_allowed=True)
    try:
        assert await runner.adopt() == ()
        assert await runner.leaving([key]) == {key}
        await runner.stop(key, StopReason.PREEMPT, 0.0)
        await clock.advance(HUNG_AFTER_S - 0.1)
        for _ in range(3):
            assert await runner.leaving([key]) == {key}
        assert all(is_alive(pid) for pid in pids)
        await clock.advance(0.1)
        async with harness.clock.timeout(PATIENCE_S):
            while await runner.leaving([key]):
                await harness.clock.sleep(0.02)
        assert not any(is_alive(pid) for pid in pids)
        assert await runner.leaving([key]) == frozenset()
    finally:
        for pid in pids:
            kill(pid)


async def test_a_withdrawn_worker_without_a_lock_is_not_over_while_it_computes(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Its job removed all that tells of its shim, before any agent that lives saw it."""
    status = await harness.status(await harness.start(make_order("sleep", "600")))
    harness.directory(status.key).rename(tmp_path / "removed")
    runner = harness.new_runner()
    try:
        assert await runner.leaving([status.key]) == {status.key}
        await runner.stop(status.key, StopReason.PREEMPT, 0.0)
        assert not is_alive(status.pid)
        assert await runner.leaving([status.key]) == frozenset()
    finally:
        for pid in (status.pid, status.shim_pid):
            kill(pid)


async def test_a_shim_that_waits_for_its_storage_keeps_a_withdrawn_worker_for_a_while_only(
    tmp_path: Path,
) -> None:
    """Nobody computes, and the stop is waiting for it: the node goes on without it."""
    clock = FakeClock()
    harness = WorkerHarness(tmp_path)
    runner = ShimRunner(tmp_path, clock=clock, starter=SlowStarter(), is_root_allowed=True)
    key = make_order().key
    lock_fd = silent_shim(harness, key)
    try:
        await runner.stop(key, StopReason.PREEMPT, 0.0)
        await clock.advance(HUNG_AFTER_S - 0.1)
        assert await runner.leaving([key]) == {key}
        await clock.advance(0.1)
        assert await runner.leaving([key]) == frozenset()
    finally:
        os.close(lock_fd)


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_start_that_hangs_in_storage_is_told_from_one_that_did_not_begin(
    tmp_path: Path, *, is_there: bool
) -> None:
    """Where the shim lives and says nothing, its worker hangs on the way to its directory."""
    clock, starter = FakeClock(), SlowStarter(starts_nothing=True)
    runner = ShimRunner(tmp_path, clock=clock, starter=starter, is_root_allowed=True)
    order = make_order("sleep", "600")
    starting = asyncio.create_task(runner.start(order, endpoint="node-1:29400"))
    await starter.asked.wait()
    directory = tmp_path / str(order.key)
    lock_fd = shim_files.take_lock(str(directory / shim_files.LOCK_FILE)) if is_there else None
    try:
        starter.gate.set()
        await clock.advance(START_TIMEOUT_S)
        with pytest.raises(Unavailable) as refused:
            await starting
    finally:
        if lock_fd is not None:
            os.close(lock_fd)
    assert (STORAGE_SILENT in str(refused.value)) is is_there
    assert isinstance(refused.value, StorageSilentError) is is_there


async def test_a_worker_whose_start_was_given_up_before_its_shim_was_there_never_begins(
    tmp_path: Path,
) -> None:
    """It runs elsewhere by then: a machine that was too busy for its shim may not be later."""
    clock, starter, mark = FakeClock(), SlowStarter(starts_nothing=True), tmp_path / "ran"
    run_dir = tmp_path / "workers"
    runner = ShimRunner(run_dir, clock=clock, starter=starter, is_root_allowed=True)
    order = make_order("touch", str(mark))
    starting = asyncio.create_task(runner.start(order, endpoint="node-1:29400"))
    await starter.asked.wait()
    starter.gate.set()
    await clock.advance(START_TIMEOUT_S)
    with pytest.raises(Unavailable, match="its shim did not start"):
        await starting
    shim = await asyncio.create_subprocess_exec(*shim_argv(run_dir / str(order.key)))
    assert await shim.wait() == 0
    assert not mark.exists()
    [status] = await runner.statuses()
    assert (status.phase, status.stop_reason) == (P.EXITED, StopReason.STALE)


class FailingStarter:
    """Whose manager of units does not answer in time, though it may have heard."""

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        raise Unavailable("systemd-run: no end in 10 s")


async def test_a_worker_whose_unit_was_given_up_never_begins(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The unit may come all the same."""
    mark = tmp_path / "ran"
    runner = ShimRunner(
        harness.run_dir, clock=harness.clock, starter=FailingStarter(), is_root_allowed=True
    )
    order = make_order("touch", str(mark))
    with pytest.raises(Unavailable, match="no end in 10 s"):
        await runner.start(order, endpoint="node-1:29400")
    shim = await asyncio.create_subprocess_exec(*shim_argv(harness.directory(order.key)))
    assert await shim.wait() == 0
    assert not mark.exists()


async def test_the_files_of_a_shim_that_has_not_spoken_stay(harness: WorkerHarness) -> None:
    """Without its directory it could tell nobody of its worker, which would be nobody's."""
    key = make_order().key
    lock_fd = silent_shim(harness, key)
    with pytest.raises(Unavailable, match="its shim lives"):
        await harness.runner.forget(key)
    assert harness.directory(key).is_dir()
    os.close(lock_fd)
    await harness.runner.forget(key)
    assert not harness.directory(key).exists()


async def test_a_link_in_place_of_the_lock_leads_nowhere(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The directory is its job's and the agent may be root: no file is made through it."""
    key = make_order().key
    harness.directory(key).mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    (harness.directory(key) / shim_files.LOCK_FILE).symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        await harness.runner.stop(key, StopReason.PREEMPT, 0.0)
    await harness.runner.forget(key)
    assert not elsewhere.exists()
    assert not harness.directory(key).exists()


async def test_a_stop_of_a_worker_that_was_never_begun_leaves_no_trace(
    harness: WorkerHarness,
) -> None:
    """An agent may not know whether the one before it came so far."""
    await harness.runner.stop(make_order().key, StopReason.PREEMPT, 0.0)
    assert await harness.runner.statuses() == ()
