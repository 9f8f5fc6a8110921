"""A worker's directory is its job's: whatever stands there, its agent reads it and lives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from agent import shim_files
from common.faults import Fault
from common.messages import WorkerPhase
from tests.agent.worker_house import PATIENCE_S, WorkerHouse, is_alive, make_house, make_order
from tests.sockets import short_path

WAIT = ("sleep", "600")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncGenerator[WorkerHouse, None]:
    """A run directory with a runner."""
    async for house in make_house(tmp_path / "workers"):
        yield house


async def test_a_worker_whose_status_cannot_be_read_is_over_when_it_has_been_ended(
    house: WorkerHouse,
) -> None:
    """It may live, and compute: while it is not dead nobody may take its GPUs for free."""
    key = await house.start(make_order(*WAIT))
    pid = (await house.status(key)).pid
    path = house.directory(key) / shim_files.STATUS_FILE
    path.write_text('{"phase": "running"')
    status = await house.status(key)
    assert status.phase == WorkerPhase.STOPPING
    assert "cannot be read" in status.error
    assert status.fault == Fault.SHIM_LOST
    await house.until_exited(key)
    assert not is_alive(pid)


@pytest.mark.parametrize("name", [shim_files.STATUS_FILE, shim_files.LOG_FILE])
@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "socket"])
async def test_what_a_job_puts_in_place_of_a_file_is_neither_waited_for_nor_followed(
    house: WorkerHouse, tmp_path: Path, name: str, kind: str
) -> None:
    """The directory is the job's: it could hang its agent, or have it read any file to it."""
    secret = tmp_path / "secret"
    secret.write_text("nobody's business")
    key = await house.start(make_order("true"))
    await house.until_exited(key)
    path = house.directory(key) / name
    path.unlink()
    with (
        short_path(path.parent) as directory,
        contextlib.closing(socket.socket(socket.AF_UNIX)) as it,
    ):
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "link":
                path.symlink_to(secret)
            case "directory":
                path.mkdir()
            case _:
                it.bind(str(directory / name))
    async with house.clock.timeout(PATIENCE_S):
        status = await house.status(key)
        data = await house.runner.log_tail(key, 100)
    assert status.phase == WorkerPhase.EXITED
    is_lost = name == shim_files.STATUS_FILE
    assert ("cannot be read" in status.error) == is_lost
    assert status.fault == (Fault.SHIM_LOST if is_lost else Fault.NONE)
    assert data == b""


async def test_a_record_of_the_agents_goes_through_no_link(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """It may be root's, who could write anywhere."""
    target = tmp_path / "target"
    target.write_text("as it was")
    key = await house.start(make_order(*WAIT))
    pid, shim_pid = (await house.status(key)).pid, house.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    path = house.directory(key) / shim_files.STATUS_FILE
    os.kill(shim_pid, signal.SIGKILL)
    path.with_name(f"{path.name}.new").symlink_to(target)
    assert (await house.until_exited(key)).error == "shim lost"
    assert not is_alive(pid)
    assert target.read_text() == "as it was"
    assert not path.is_symlink()


async def test_a_status_can_be_read_whatever_texts_are_in_it(house: WorkerHouse) -> None:
    """A path that is not UTF-8 comes as half surrogate pairs, which no JSON may hold."""
    key = await house.start(make_order("true"))
    await house.until_exited(key)
    path = house.directory(key) / shim_files.STATUS_FILE
    told = house.raw(key) | {"error": "no file /tmp/\udcff, nor /tmp/\xe9"}
    shim_files.write_json(str(path), told, is_durable=False)
    assert (await house.status(key)).error == "no file /tmp/?, nor /tmp/\xe9"
