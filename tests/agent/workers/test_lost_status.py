"""A worker whose status is gone: its shim writes it again, or it is ended before it is over."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.shim import files as shim_files
from agent.workers.runner import WorkerStatus
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from tests.harness.node.workers import (
    PATIENCE_S,
    WorkerHarness,
    is_alive,
    kill,
    make_order,
    make_workers,
)

P, R = WorkerPhase, NodeRole

LEAVES = "echo $$ >> pids; setsid env -i sh -c 'echo $$ >> pids; exec sleep 600' & exec sleep 600"
"""The second process of `pids` is of no group, session or environment of its worker."""


harness = pytest.fixture(make_workers)


async def begun(harness: WorkerHarness, workdir: Path) -> tuple[WorkerKey, list[int]]:
    """A worker with a child that left it, and all of its processes, its shim last."""
    key = await harness.start(make_order("sh", "-c", LEAVES, workdir=workdir))
    noted = workdir / "pids"
    await harness.until(lambda: noted.exists() and len(noted.read_text().split()) == 2, "both run")
    shim_pid = harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    return key, [*map(int, noted.read_text().split()), shim_pid]


async def looked(harness: WorkerHarness, key: WorkerKey) -> WorkerStatus | None:
    """What is said of a worker that was seen to run."""
    statuses = await harness.runner.statuses((key,))
    return next((status for status in statuses if status.key == key), None)


async def until_over(harness: WorkerHarness, key: WorkerKey, pids: list[int]) -> list[WorkerStatus]:
    """What each look says until nothing is said; nobody of the worker is left then."""
    said: list[WorkerStatus] = []
    async with harness.clock.timeout(PATIENCE_S):
        while (status := await looked(harness, key)) is not None:
            said.append(status)
            await harness.clock.sleep(0.02)
    assert [pid for pid in pids if is_alive(pid)] == []
    return said


def remove_all(directory: Path) -> None:
    """Its directory with everything in it, and what its shim writes meanwhile."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


def clean(directory: Path) -> None:
    """What is in it, as `rm -rf $ARYL_WORKER_DIRECTORY/*` does."""
    for path in directory.iterdir():
        path.unlink(missing_ok=True)


def put_a_file(directory: Path) -> None:
    """A file is there in its place."""
    remove_all(directory)
    directory.write_text("")


async def test_a_job_that_loses_its_status_goes_on(harness: WorkerHarness, tmp_path: Path) -> None:
    """Its shim lives, and knows all that stood there."""
    key, pids = await begun(harness, tmp_path)
    before = await harness.status(key)
    for _ in range(2):
        (harness.directory(key) / shim_files.STATUS_FILE).unlink()
        status = await looked(harness, key)
        assert status is not None
        assert (status.phase, status.pid, status.shim_pid) == (P.RUNNING, before.pid, pids[-1])
        assert all(map(is_alive, pids))
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    assert (await harness.until_exited(key)).stop_reason == StopReason.CANCEL


@pytest.mark.parametrize("lose", [remove_all, clean, put_a_file])
async def test_a_worker_whose_shim_cannot_be_asked_is_ended_before_it_is_over(
    harness: WorkerHarness, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """No order reaches it any more; its job would run twice, and its node be lent meanwhile."""
    key, pids = await begun(harness, tmp_path)
    lose(harness.directory(key))
    said = await until_over(harness, key, pids)
    assert said
    assert {(status.phase, status.fault) for status in said} == {(P.STOPPING, Fault.SHIM_LOST)}
    assert "its status is gone" in said[0].error


async def test_a_shim_that_does_not_answer_for_its_status_is_ended(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """It hangs; what only it knew of is ended before it, as nobody could find that later."""
    key, pids = await begun(harness, tmp_path)
    os.kill(pids[-1], signal.SIGSTOP)
    (harness.directory(key) / shim_files.STATUS_FILE).unlink()
    assert {status.phase for status in await until_over(harness, key, pids)} == {P.STOPPING}


async def test_what_stands_in_the_way_of_a_status_keeps_no_shim(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """It would try for ever to say its last word."""
    key, pids = await begun(harness, tmp_path)
    path = harness.directory(key) / shim_files.STATUS_FILE
    path.unlink()
    (path / "kept").mkdir(parents=True)
    assert "cannot be read" in (await harness.until_exited(key)).error
    assert not any(map(is_alive, pids[:-1]))
    async with harness.clock.timeout(PATIENCE_S):
        while is_alive(pids[-1]):
            await harness.status(key)
            await harness.clock.sleep(0.02)


async def test_a_shim_whose_status_can_be_read_again_is_left_halted_by_nobody(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """It may have written its last word just before it was halted, and could never leave."""
    key, pids = await begun(harness, tmp_path)
    path = harness.directory(key) / shim_files.STATUS_FILE
    told = path.read_bytes()
    path.write_bytes(b"no status")
    assert (await harness.status(key)).phase == P.STOPPING
    assert is_alive(pids[-1])
    path.write_bytes(told)
    for pid in pids[:-1]:
        kill(pid)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.error) == (-9, "")
    await harness.until(lambda: not is_alive(pids[-1]), "its shim has left")


async def test_a_worker_that_lost_shim_and_status_is_not_called_one_that_never_began(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """A stop finds no shim to tell; the worker is over when it is dead, and no earlier."""
    key = await harness.start(
        make_order("sh", "-c", "echo $$ > pid; exec sleep 600", workdir=tmp_path)
    )
    await harness.until(lambda: (tmp_path / "pid").exists(), "it runs")
    status, shim_pid = await harness.status(key), harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    kill(shim_pid)
    (harness.directory(key) / shim_files.STATUS_FILE).unlink()
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    assert not (harness.directory(key) / shim_files.STATUS_FILE).exists()
    await until_over(harness, key, [status.pid, shim_pid])


async def test_nobody_else_s_processes_are_ended_for_a_status_that_is_gone(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Another worker beside it goes on, and so does one of whom nothing was said yet."""
    key, pids = await begun(harness, tmp_path)
    other = await harness.start(make_order("sleep", "600", index=1))
    remove_all(harness.directory(key))
    await until_over(harness, key, pids)
    assert (await harness.status(other)).phase == P.RUNNING
    (harness.directory(other) / shim_files.STATUS_FILE).unlink()
    assert await harness.runner.statuses() == ()
    status = await looked(harness, other)
    assert status is not None
    assert status.phase == P.RUNNING
