"""A shim that hangs keeps neither its worker nor its node: both are ended, by recorded identity."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from agent.shim import files as shim_files
from agent.workers.lost import HUNG_AFTER_S, HungShims
from agent.workers.record import WorkerRecord, read_record
from agent.workers.shim_runner import ShimRunner
from agent.workers.starters import DetachedStarter
from common.clock import SystemClock
from common.messages import WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from tests.harness.node.life import LifeHarness, key, order
from tests.harness.node.workers import WorkerHarness, is_alive, make_order


@dataclass
class Shim:
    """Who ends shims that hang, and a shim that does."""

    hung: HungShims
    worker: WorkerKey
    directory: Path
    record: WorkerRecord
    process: asyncio.subprocess.Process

    async def ended_by(self, *, now_s: float) -> int:
        """By which signal it ends that is looked at, at an instant, and then asked to end.

        Nothing comes before a SIGKILL that was sent. Asked by number: `Process.terminate` looks
        whether it has ended, and takes the exit status from the loop, which is told 255 then.
        """
        self.hung.end_if_hung(self.worker, self.directory, self.record, now_s=now_s)
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        return -await self.process.wait()


class AheadClock(SystemClock):
    """The real clock, as much further on as a test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[WorkerHarness]:
    """Real shims; whatever runs at the end is killed."""
    harness = WorkerHarness(tmp_path)
    yield harness
    await harness.close()


async def test_a_shim_that_hangs_is_killed_with_its_worker(harness: WorkerHarness) -> None:
    """It hears no order; some time after the end of the grace it and its worker are gone."""
    clock = AheadClock()
    runner = harness.runner = ShimRunner(
        harness.run_dir, clock=clock, starter=DetachedStarter(harness.clock), is_root_allowed=True
    )
    worker = await harness.start(make_order("sleep", "600"))
    shim_pid, pid = harness.raw(worker)["shim_pid"], (await harness.status(worker)).pid
    assert isinstance(shim_pid, int)
    os.kill(shim_pid, signal.SIGSTOP)
    await runner.stop(worker, StopReason.PREEMPT, 30.0)
    clock.ahead_s = 30.0 + HUNG_AFTER_S / 2
    assert (await harness.status(worker)).phase != WorkerPhase.EXITED
    assert is_alive(shim_pid)
    assert is_alive(pid)
    clock.ahead_s = 31.0 + HUNG_AFTER_S
    status = await harness.until_exited(worker)
    assert status.error.startswith("shim lost")
    assert not is_alive(shim_pid)
    assert not is_alive(pid)


async def test_a_number_used_again_is_not_the_shim(harness: WorkerHarness) -> None:
    """A process that has the recorded number but another start, or boot, is left alone."""
    worker = await harness.start(make_order("true"))
    await harness.until_exited(worker)
    lock = str(harness.directory(worker) / shim_files.LOCK_FILE)
    await harness.until(lambda: not shim_files.is_locked(lock), "its own shim has ended")
    record = read_record(harness.directory(worker))
    assert record is not None
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        ticks = shim_files.start_ticks(bystander.pid)
        for changes in ({"shim_start_ticks": ticks + 1}, {"boot_id": "another"}):
            is_it = {"shim_pid": bystander.pid, "shim_start_ticks": ticks}
            forged = msgspec.structs.replace(record, **{**is_it, **changes})
            hung = HungShims(shim_files.boot_id())
            hung.told_to_stop(worker, 0.0, now_s=0.0)
            hung.end_if_hung(worker, harness.directory(worker), forged, now_s=1e9)
            assert bystander.returncode is None
            assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


@pytest.fixture
async def shim(harness: WorkerHarness) -> AsyncIterator[Shim]:
    """A process that a worker's record names as its shim."""
    worker = await harness.start(make_order("true"))
    await harness.until_exited(worker)
    record = read_record(harness.directory(worker))
    assert record is not None
    process = await asyncio.create_subprocess_exec("sleep", "600")
    ticks = shim_files.start_ticks(process.pid)
    record = msgspec.structs.replace(
        record, shim_pid=process.pid, shim_start_ticks=ticks, boot_id=shim_files.boot_id()
    )
    yield Shim(HungShims(shim_files.boot_id()), worker, harness.directory(worker), record, process)
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_the_shim_of_a_worker_that_nobody_stopped_is_left_alone(
    shim: Shim, *, is_forgotten: bool
) -> None:
    """It may run for ever; so may one of a worker that was forgotten, whose key may come again."""
    if is_forgotten:
        shim.hung.told_to_stop(shim.worker, 10.0, now_s=0.0)
        shim.hung.forget(shim.worker)
    assert await shim.ended_by(now_s=1e9) == signal.SIGTERM


@pytest.mark.parametrize(("early_s", "by"), [(0.1, signal.SIGTERM), (0.0, signal.SIGKILL)])
async def test_of_several_orders_to_stop_the_earliest_end_holds(
    shim: Shim, early_s: float, by: signal.Signals
) -> None:
    """A shorter grace brings it forward, a longer one or the same order again later changes
    nothing, and the shim has until that end and not less."""
    for grace_s, at_s in ((100.0, 0.0), (10.0, 20.0), (100.0, 25.0), (10.0, 29.0)):
        shim.hung.told_to_stop(shim.worker, grace_s, now_s=at_s)
    assert await shim.ended_by(now_s=30.0 + HUNG_AFTER_S - early_s) == by


def test_a_worker_that_nothing_ends_puts_its_node_into_quarantine() -> None:
    """A node that cannot be vacated says which worker it waits for and is no longer waited for;
    it comes home once the worker is gone."""
    life_harness = LifeHarness(vacate_grace_s=10.0, device_free_timeout_s=5.0, quarantine_s=10.0)
    life_harness.is_healthy = True
    life_harness.serve()
    life_harness.lend()
    life_harness.want(NodeRole.ON_LOAN, order())
    life_harness.runs(key())
    life_harness.steps(2)
    life_harness.want(NodeRole.SERVING)
    life_harness.steps(14)
    assert life_harness.role() == NodeRole.VACATING
    life_harness.steps(4)
    assert life_harness.role() == NodeRole.QUARANTINED
    assert str(key()) in life_harness.life.detail
    life_harness.steps(30)
    assert life_harness.role() == NodeRole.QUARANTINED
    life_harness.ends(key())
    life_harness.steps(30)
    assert life_harness.role() == NodeRole.SERVING
