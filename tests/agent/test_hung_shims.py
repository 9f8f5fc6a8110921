"""A shim that hangs keeps neither its worker nor its node: both are ended, by recorded identity."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agent import shim_files
from agent.hung_shims import HUNG_AFTER_S, HungShims
from agent.starters import DetachedStarter
from agent.worker_record import read_record
from agent.workers import ShimRunner
from common.clock import SystemClock
from common.messages import WorkerPhase
from common.model import NodeRole, StopReason
from tests.agent.bench import Bench, key, order
from tests.agent.worker_house import WorkerHouse, is_alive, make_order


class AheadClock(SystemClock):
    """The real clock, as much further on as a test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[WorkerHouse]:
    """Real shims; whatever runs at the end is killed."""
    house = WorkerHouse(tmp_path)
    yield house
    await house.close()


async def test_a_shim_that_hangs_is_killed_with_its_worker(house: WorkerHouse) -> None:
    """It hears no order; some time after the end of the grace it and its worker are gone."""
    clock = AheadClock()
    runner = house.runner = ShimRunner(
        house.run_dir, clock=clock, starter=DetachedStarter(house.clock), is_root_allowed=True
    )
    worker = await house.start(make_order("sleep", "600"))
    shim_pid, pid = house.raw(worker)["shim_pid"], (await house.status(worker)).pid
    assert isinstance(shim_pid, int)
    os.kill(shim_pid, signal.SIGSTOP)
    await runner.stop(worker, StopReason.PREEMPT, 30.0)
    clock.ahead_s = 30.0 + HUNG_AFTER_S / 2
    assert (await house.status(worker)).phase != WorkerPhase.EXITED
    assert is_alive(shim_pid)
    assert is_alive(pid)
    clock.ahead_s = 31.0 + HUNG_AFTER_S
    status = await house.until_exited(worker)
    assert status.error.startswith("shim lost")
    assert not is_alive(shim_pid)
    assert not is_alive(pid)


async def test_a_number_used_again_is_not_the_shim(house: WorkerHouse) -> None:
    """A process that has the recorded number but another start, or boot, is left alone."""
    worker = await house.start(make_order("true"))
    await house.until_exited(worker)
    record = read_record(house.directory(worker))
    assert record is not None
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        ticks = shim_files.start_ticks(bystander.pid)
        for changes in ({"shim_start_ticks": ticks + 1}, {"boot_id": "another"}):
            is_it = {"shim_pid": bystander.pid, "shim_start_ticks": ticks}
            forged = msgspec.structs.replace(record, **{**is_it, **changes})
            hung = HungShims(shim_files.boot_id())
            hung.told_to_stop(worker, 0.0, now_s=0.0)
            hung.end_if_hung(worker, house.directory(worker), forged, now_s=1e9)
            assert bystander.returncode is None
            assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


def test_a_worker_that_nothing_ends_puts_its_node_into_quarantine() -> None:
    """A node that cannot be vacated says which worker it waits for and is no longer waited for;
    it comes home once the worker is gone."""
    bench = Bench(vacate_grace_s=10.0, device_free_timeout_s=5.0, quarantine_s=10.0)
    bench.is_healthy = True
    bench.serve()
    bench.lend()
    bench.want(NodeRole.ON_LOAN, order())
    bench.runs(key())
    bench.steps(2)
    bench.want(NodeRole.SERVING)
    bench.steps(14)
    assert bench.role() == NodeRole.VACATING
    bench.steps(4)
    assert bench.role() == NodeRole.QUARANTINED
    assert str(key()) in bench.life.detail
    bench.steps(30)
    assert bench.role() == NodeRole.QUARANTINED
    bench.ends(key())
    bench.steps(30)
    assert bench.role() == NodeRole.SERVING
