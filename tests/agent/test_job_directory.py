"""A worker's directory is its job's: whatever stands there, its agent reads it and lives."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from agent.shim import files as shim_files
from agent.workers import boot_check
from agent.workers.directory import remove_directory
from agent.workers.record import MAX_RECORD_BYTES, MAX_TEXT_CHARS, read_record
from common.errors import Unavailable
from common.faults import Fault
from common.messages import WorkerPhase
from tests.agent.worker_house import (
    PATIENCE_S,
    WorkerHouse,
    is_alive,
    make_order,
    make_workers,
)
from tests.sockets import short_path

WAIT = ("sleep", "600")
DEEP = 3000
HUGE = 10**30


house = pytest.fixture(make_workers)


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


def spoilt(raw: dict[str, object]) -> dict[str, bytes]:
    """What a job may make of a status, by what is wrong with it."""
    fields: dict[str, dict[str, object]] = {
        "exit code": {"exit_code": HUGE},
        "pid": {"pid": int("9" * 300)},
        "shim's pid": {"shim_pid": HUGE},
        "shim's start": {"shim_start_ticks": HUGE},
        "garbage": {"garbage_count": HUGE},
        "step": {"progress": {"step": HUGE}},
        "half a step": {"progress": {"step": -1}},
        "steps in all": {"progress": {"step": 1, "total_steps": HUGE}},
        "loss": {"progress": {"step": 1, "loss": 1e300}},
        "saved step": {"checkpoint": {"step": HUGE, "path": "/save"}},
        "saved path": {"checkpoint": {"step": 1, "path": "x" * 5000}},
        "running time": {"started_boot_s": -1.7e308},
        "end": {"ended_boot_s": 1.7e308},
        "stages": {"stop_boot_s": 1.0, "stop_stages_s": {"saved": 1e308}},
        "long error": {"error": "x" * 1_000_000},
    }
    return {
        "no UTF-8": b'{"error":"\xff"}',
        "nested": b'{"x":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "nested and cut": b"[" * DEEP,
        "digits": b'{"pid":' + b"9" * 5000 + b"}",
        "one too long": b" " * (MAX_RECORD_BYTES + 1),
    } | {name: msgspec.json.encode(raw | field) for name, field in fields.items()}


@pytest.mark.parametrize("what", sorted(spoilt({})))
async def test_what_no_shim_writes_is_no_status(house: WorkerHouse, what: str) -> None:
    """The agent lives, as does one that starts beside it, and what it says of it can be sent."""
    key = await house.start(make_order("true"))
    await house.until_exited(key)
    path = house.directory(key) / shim_files.STATUS_FILE
    path.write_bytes(spoilt(house.raw(key))[what])
    status = await house.status(key)
    assert (status.phase, status.fault) == (WorkerPhase.EXITED, Fault.SHIM_LOST)
    assert "cannot be read" in status.error
    assert len(msgspec.msgpack.encode(status)) < 2 * MAX_TEXT_CHARS
    assert await house.new_runner().adopt() == ()
    assert boot_check.this_boot(house.run_dir, known="known", seen="seen") == "seen"


async def test_the_texts_of_a_status_are_as_long_as_a_shim_s(house: WorkerHouse) -> None:
    """All workers of a node share one report."""
    key = await house.start(make_order("true"))
    await house.until_exited(key)
    path = str(house.directory(key) / shim_files.STATUS_FILE)
    told = house.raw(key) | {"error": "e" * 20_000, "detail": "d" * 20_000}
    shim_files.write_json(path, told, is_durable=False)
    status = await house.status(key)
    assert (status.error, status.detail) == ("e" * MAX_TEXT_CHARS, "d" * MAX_TEXT_CHARS)


async def test_a_shim_s_own_error_is_as_short(house: WorkerHouse) -> None:
    """A command may be longer than any message."""
    key = await house.start(make_order("/" + "x" * 100_000))
    status = await house.until_exited(key)
    assert status.error.startswith("cannot start '/xxx")
    assert len(status.error) == MAX_TEXT_CHARS


async def test_a_file_with_a_workers_name_is_no_worker(house: WorkerHouse) -> None:
    """As half a restored backup leaves it."""
    house.run_dir.mkdir()
    (house.run_dir / "job-9.1.0").write_text("")
    assert await house.runner.statuses() == ()
    assert boot_check.this_boot(house.run_dir, known="known", seen="seen") == "seen"


def test_an_agent_that_has_no_descriptor_left_blames_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end all of them; an agent that is started anew has descriptors again."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="too many"):
        read_record(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_status_that_the_disk_does_not_give_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is one worker's loss, and not its agent's."""

    def refuse(*_: object) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(msgspec.DecodeError, match="refused"):
        read_record(tmp_path)


async def test_what_stands_in_place_of_a_control_socket_gets_no_order(house: WorkerHouse) -> None:
    """Its agent hears that the shim takes none, and looks at its workers all the same."""
    key = await house.start(make_order(*WAIT))
    path = house.directory(key) / shim_files.CONTROL_SOCKET
    path.unlink()
    with (
        short_path(path.parent) as directory,
        contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as it,
    ):
        it.bind(str(directory / path.name))
        house.runner.contacted(1.0)
        assert (await house.status(key)).phase == WorkerPhase.RUNNING
        with pytest.raises(Unavailable, match="does not take orders"):
            await house.runner.resize(key, 2)
    shim_pid = house.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    os.kill(shim_pid, signal.SIGTERM)  # no order reaches it, so it is told as by the machine
    await house.until_exited(key)


async def test_a_directory_is_removed_however_deep_it_is(house: WorkerHouse) -> None:
    """A job may nest directories without end, and its agent forgets it all the same."""
    key = await house.start(make_order("true"))
    await house.until_exited(key)
    with contextlib.chdir(house.directory(key)):
        nest()
    await house.runner.forget(key)
    assert not house.directory(key).exists()


def nest(link: Path = Path("nowhere")) -> None:
    """Directories in directories from here on, with a link in each, deeper than Python recurses."""
    for _ in range(1200):
        Path("d").mkdir()
        Path("link").symlink_to(link)
        os.chdir("d")


def test_a_link_in_a_deep_directory_is_not_followed(tmp_path: Path) -> None:
    """What it names is nobody's to remove."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    deep = tmp_path / "worker"
    deep.mkdir()
    with contextlib.chdir(deep):
        nest(link=tmp_path / "kept")
    remove_directory(deep)
    assert not deep.exists()
    assert (tmp_path / "kept" / "file").exists()
