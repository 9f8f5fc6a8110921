"""Whose a GPU process is: real shims and real processes, seen by a node's driver."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from agent.shim import files as shim_files
from agent.workers.runner import WorkerStatus
from common.messages import OrderPhase, WorkerPhase
from common.model import NodeRole
from tests.harness.node.agent import NodeHarness
from tests.harness.node.life import key, order
from tests.harness.node.workers import WorkerHarness, is_alive, kill, make_order, make_workers

pytestmark = pytest.mark.slow

DAEMONIZES = "(setsid sh -c 'echo $$ >> pids; exec sleep 600' &); exec sleep 600"
"""The process in `pids` is no child of the worker, nor of its session or group."""


workers = pytest.fixture(make_workers)


async def test_a_process_that_leaves_its_worker_is_still_the_workers(
    workers: WorkerHarness, tmp_path: Path
) -> None:
    """It comes to the worker's shim, which ends it; nobody has to look for its owner."""
    harness = NodeHarness()
    await harness.run_one()
    order = make_order("sh", "-c", DAEMONIZES, workdir=tmp_path, job_id=key().job_id)
    assert await workers.start(order) == key()
    pids = tmp_path / "pids"
    await workers.until(lambda: pids.exists() and pids.read_text().endswith("\n"), "it is up")
    daemon_pid = int(pids.read_text())
    harness.runner.known[key()] = status = await workers.status(key())
    harness.machine.pids[0] = daemon_pid
    await harness.turn()
    assert list(harness.life.trespasses) == []
    harness.runner.known[key()] = msgspec.structs.replace(status, shim_pid=0)
    await harness.turn()
    assert [found.pid for found in harness.life.trespasses] == [daemon_pid]  # no other kin of it
    kill(status.pid)
    assert (await workers.until_exited(key())).shim_pid == 0
    assert not is_alive(daemon_pid)


async def test_a_worker_whose_disk_is_slow_is_no_stranger(
    workers: WorkerHarness, tmp_path: Path
) -> None:
    """It may have its GPU before its shim has written down which process it is. Whoever is on a
    GPU of nobody's is one all the same, and the worker itself where it is none of the named."""
    harness = NodeHarness()
    harness.stall.begin("start")
    harness.accept(NodeRole.TRAINING, order())
    await harness.turn(3)
    directory = workers.directory(key())
    in_the_way = directory / f"{shim_files.STATUS_FILE}.new"
    in_the_way.mkdir(parents=True)
    job = make_order("sh", "-c", "echo $$ > pid; exec sleep 600", workdir=tmp_path)
    job = msgspec.structs.replace(job, key=key())
    start = asyncio.create_task(workers.start(job))
    file = tmp_path / "pid"
    try:
        await workers.until(lambda: file.exists() and file.read_text().endswith("\n"), "it is up")
        assert await workers.runner.statuses() == ()
        assert workers.runner.has_shim(key())
        harness.machine.pids = {0: int(file.read_text()), 1: os.getpid()}
        await harness.turn(2)
        assert [found.pid for found in harness.life.trespasses] == [os.getpid()]
    finally:
        in_the_way.rmdir()
        await start
    harness.runner.known[key()] = status = await workers.status(key())
    harness.stall.end()
    await harness.turn(2)
    assert harness.said(key()).phase == WorkerPhase.RUNNING
    assert [found.pid for found in harness.life.trespasses] == [os.getpid()]
    harness.runner.known[key()] = msgspec.structs.replace(status, pid=os.getpid(), shim_pid=0)
    await harness.turn()
    assert [found.pid for found in harness.life.trespasses] == [status.pid]
    kill(status.pid)
    await workers.until_exited(key())
    await workers.until(lambda: not workers.runner.has_shim(key()), "its shim has gone")


@pytest.mark.parametrize("has_shim", [False, True])
async def test_a_start_that_came_to_nothing_hides_no_stranger(*, has_shim: bool) -> None:
    """The disk was full at that step, so nobody is on its way to the GPU. Of an order that an
    earlier agent began, a shim may be, and its worker is not known yet."""
    harness = NodeHarness()
    harness.accept(NodeRole.TRAINING, order(phase=OrderPhase.RESERVE))
    await harness.turn(3)
    harness.accept(NodeRole.TRAINING, order())
    harness.ledger.is_full = True
    await harness.turn()
    [held] = harness.life.workers.live()
    assert held.is_begun and not harness.runner.known
    if has_shim:
        harness.runner.shims.add(key())
    harness.machine.pids = {0: os.getpid(), 1: os.getppid()}
    await harness.turn(2)
    told = {os.getppid()} if has_shim else {os.getpid(), os.getppid()}
    assert {found.pid for found in harness.life.trespasses} == told


async def test_what_is_left_of_a_worker_without_a_status_is_no_strangers() -> None:
    """Its file is gone or cannot be read, so that it is being killed: nobody has to find its
    owner."""
    harness = NodeHarness()
    await harness.run_one()
    harness.runner.known[key()] = WorkerStatus(key=key(), phase=WorkerPhase.STOPPING, pid=0)
    harness.machine.pids[0] = os.getpid()
    await harness.turn(2)
    assert list(harness.life.trespasses) == []
    harness.runner.end(key())
    await harness.turn(2)
    assert [found.pid for found in harness.life.trespasses] == [os.getpid()]


async def test_the_shim_of_a_worker_that_ended_owns_nothing(workers: WorkerHarness) -> None:
    """Its number may be anybody's by now."""
    order = make_order("true")
    await workers.start(order)
    status = await workers.until_exited(order.key)
    assert (status.phase, status.shim_pid) == (WorkerPhase.EXITED, 0)
