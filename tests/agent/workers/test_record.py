"""A worker's record: what a job may put in its place, whom it may name, and who is heard."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from agent.shim import files as shim_files
from agent.workers import boot_check
from agent.workers.lost import HungShims, LostWorkers
from agent.workers.process_marks import kill_marked
from agent.workers.record import (
    MAX_RECORD_BYTES,
    MAX_TEXT_CHARS,
    WorkerRecord,
    bury,
    kill_leftovers,
    read_record,
)
from common.clock import SystemClock
from common.errors import Unavailable
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import JobId, WorkerKey
from tests.harness.node.workers import (
    PATIENCE_S,
    WorkerHarness,
    is_alive,
    make_order,
    make_workers,
)
from tests.harness.sockets import short_path

WAIT = ("sleep", "600")
DEEP = 3000
HUGE = 10**30


harness = pytest.fixture(make_workers)


async def test_a_worker_whose_status_cannot_be_read_is_over_when_it_has_been_ended(
    harness: WorkerHarness,
) -> None:
    """It may live, and compute: while it is not dead nobody may take its GPUs for free."""
    key = await harness.start(make_order(*WAIT))
    pid = (await harness.status(key)).pid
    path = harness.directory(key) / shim_files.STATUS_FILE
    path.write_text('{"phase": "running"')
    status = await harness.status(key)
    assert status.phase == WorkerPhase.STOPPING
    assert "cannot be read" in status.error
    assert status.fault == Fault.SHIM_LOST
    await harness.until_exited(key)
    assert not is_alive(pid)


@pytest.mark.parametrize("name", [shim_files.STATUS_FILE, shim_files.LOG_FILE])
@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "socket"])
async def test_what_a_job_puts_in_place_of_a_file_is_neither_waited_for_nor_followed(
    harness: WorkerHarness, tmp_path: Path, name: str, kind: str
) -> None:
    """The directory is the job's: it could hang its agent, or have it read any file to it."""
    secret = tmp_path / "secret"
    secret.write_text("nobody's business")
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    path = harness.directory(key) / name
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
    async with harness.clock.timeout(PATIENCE_S):
        status = await harness.status(key)
        data = await harness.runner.log_tail(key, 100)
    assert status.phase == WorkerPhase.EXITED
    is_lost = name == shim_files.STATUS_FILE
    assert ("cannot be read" in status.error) == is_lost
    assert status.fault == (Fault.SHIM_LOST if is_lost else Fault.NONE)
    assert data == b""


async def test_a_record_of_the_agents_goes_through_no_link(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """It may be root's, who could write anywhere."""
    target = tmp_path / "target"
    target.write_text("as it was")
    key = await harness.start(make_order(*WAIT))
    pid, shim_pid = (await harness.status(key)).pid, harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    path = harness.directory(key) / shim_files.STATUS_FILE
    os.kill(shim_pid, signal.SIGKILL)
    path.with_name(f"{path.name}.new").symlink_to(target)
    assert (await harness.until_exited(key)).error == "shim lost"
    assert not is_alive(pid)
    assert target.read_text() == "as it was"
    assert not path.is_symlink()


async def test_a_status_can_be_read_whatever_texts_are_in_it(harness: WorkerHarness) -> None:
    """A path that is not UTF-8 comes as half surrogate pairs, which no JSON may hold."""
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    path = harness.directory(key) / shim_files.STATUS_FILE
    told = harness.raw(key) | {"error": "no file /tmp/\udcff, nor /tmp/\xe9"}
    shim_files.write_json(str(path), told, is_durable=False)
    assert (await harness.status(key)).error == "no file /tmp/?, nor /tmp/\xe9"


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


async def test_what_no_shim_writes_is_no_status(harness: WorkerHarness) -> None:
    """The agent lives, as does one that starts beside it, and what it says of it can be sent."""
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    path = harness.directory(key) / shim_files.STATUS_FILE
    wrong: list[str] = []
    for what, data in spoilt(harness.raw(key)).items():
        path.write_bytes(data)
        [status] = await harness.new_runner().statuses()
        is_told = (
            (status.phase, status.fault) == (WorkerPhase.EXITED, Fault.SHIM_LOST)
            and "cannot be read" in status.error
            and len(msgspec.msgpack.encode(status)) < 2 * MAX_TEXT_CHARS
        )
        has_boot = boot_check.this_boot(harness.run_dir, known="known", seen="seen") == "seen"
        if not is_told or not has_boot or await harness.new_runner().adopt() != ():
            wrong.append(what)
    assert wrong == []


async def test_the_texts_of_a_status_are_as_long_as_a_shim_s(harness: WorkerHarness) -> None:
    """All workers of a node share one report."""
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    path = str(harness.directory(key) / shim_files.STATUS_FILE)
    told = harness.raw(key) | {"error": "e" * 20_000, "detail": "d" * 20_000}
    shim_files.write_json(path, told, is_durable=False)
    status = await harness.status(key)
    assert (status.error, status.detail) == ("e" * MAX_TEXT_CHARS, "d" * MAX_TEXT_CHARS)


async def test_a_shim_s_own_error_is_as_short(harness: WorkerHarness) -> None:
    """A command may be longer than any message."""
    key = await harness.start(make_order("/" + "x" * 100_000))
    status = await harness.until_exited(key)
    assert status.error.startswith("cannot start '/xxx")
    assert len(status.error) == MAX_TEXT_CHARS


async def test_a_file_with_a_workers_name_is_no_worker(harness: WorkerHarness) -> None:
    """As half a restored backup leaves it."""
    harness.run_dir.mkdir()
    (harness.run_dir / "job-9.1.0").write_text("")
    assert await harness.runner.statuses() == ()
    assert boot_check.this_boot(harness.run_dir, known="known", seen="seen") == "seen"


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


async def test_what_stands_in_place_of_a_control_socket_gets_no_order(
    harness: WorkerHarness,
) -> None:
    """Its agent hears that the shim takes none, and looks at its workers all the same."""
    key = await harness.start(make_order(*WAIT))
    path = harness.directory(key) / shim_files.CONTROL_SOCKET
    path.unlink()
    with (
        short_path(path.parent) as directory,
        contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as it,
    ):
        it.bind(str(directory / path.name))
        harness.runner.contacted(1.0)
        assert (await harness.status(key)).phase == WorkerPhase.RUNNING
        with pytest.raises(Unavailable, match="does not take orders"):
            await harness.runner.resize(key, 2)
    shim_pid = harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    os.kill(shim_pid, signal.SIGTERM)  # no order reaches it, so it is told as by the machine
    await harness.until_exited(key)


KEY = WorkerKey(JobId("job-1"), 1, 0)


NOBODY = 65534


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A worker's directory; of the tests' own account."""
    path = tmp_path / str(KEY)
    path.mkdir()
    return path


@pytest.fixture
async def bystander(directory: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process of the tests' own account that looks as if it were the worker's and its shim's."""
    mark = {"ARYL_WORKER_DIRECTORY": str(directory)}
    name = ("sh", "-c", "read line", "--ready", str(directory))
    process = await asyncio.create_subprocess_exec(
        *name, stdin=asyncio.subprocess.PIPE, env=os.environ | mark
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def naming(pid: int, **changes: object) -> WorkerRecord:
    """A record of a running worker that names a process as its main process and as its shim."""
    ticks = shim_files.start_ticks(pid)
    record = WorkerRecord(
        phase=WorkerPhase.RUNNING,
        pid=pid,
        start_ticks=ticks,
        shim_pid=pid,
        shim_start_ticks=ticks,
        boot_id=shim_files.boot_id(),
        started_boot_s=1.0,
        updated_boot_s=1.0,
    )
    return msgspec.structs.replace(record, **changes)


async def is_ended(process: asyncio.subprocess.Process) -> bool:
    """Whether it was killed; else it ends by itself, as nothing comes before a SIGKILL."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(b"\n")
        await process.stdin.drain()
    return await process.wait() == -9


def as_leftover(directory: Path, pid: int) -> None:
    """As a worker whose shim died."""
    kill_leftovers(directory, naming(pid))


def as_main_process(directory: Path, pid: int) -> None:
    """As one that has no mark."""
    away = directory.rename(directory.with_name("job-2.1.0"))
    kill_leftovers(away, naming(pid))


def as_marked(directory: Path, pid: int) -> None:
    """As a worker whose record cannot be read."""
    del pid
    kill_marked(directory)


def as_hung(directory: Path, pid: int) -> None:
    """As a shim that should have ended."""
    hung = HungShims(shim_files.boot_id())
    hung.told_to_stop(KEY, 0.0, now_s=0.0)
    hung.end_if_hung(KEY, directory, naming(pid), now_s=1e9)


def as_lost(directory: Path, pid: int) -> None:
    """As a worker, and a shim, whose status is gone."""
    del pid
    lost, uid = LostWorkers(SystemClock()), directory.stat().st_uid
    for _ in range(2):
        lost.end(KEY, directory, uid)


WAYS = [as_leftover, as_main_process, as_marked, as_hung, as_lost]


@pytest.mark.parametrize("end", WAYS)
async def test_a_process_that_is_named_is_ended_where_its_account_has_the_directory(
    directory: Path, bystander: asyncio.subprocess.Process, end: object
) -> None:
    """A job may do that to itself."""
    assert callable(end)
    end(directory, bystander.pid)
    assert await is_ended(bystander)


@needs_root
@pytest.mark.parametrize("end", WAYS)
async def test_a_record_aims_nobody_at_another_account_s_process(
    directory: Path, bystander: asyncio.subprocess.Process, end: object
) -> None:
    """Its agent may be root, and would end whatever a job names."""
    os.chown(directory, NOBODY, NOBODY)
    assert callable(end)
    end(directory, bystander.pid)
    assert not await is_ended(bystander)


def test_the_last_word_of_a_shim_counts_though_it_is_found_dead(directory: Path) -> None:
    """It said it between the first look and its end; its success would be done again."""
    seen = naming(0, shim_pid=1, shim_start_ticks=1)
    end = {"phase": WorkerPhase.EXITED, "exit_code": 0, "ended_boot_s": 3.0}
    told = msgspec.structs.replace(seen, **end)
    path = str(directory / shim_files.STATUS_FILE)
    shim_files.write_json(path, msgspec.to_builtins(told), is_durable=False)
    buried = bury(directory, seen, boot_id=seen.boot_id, now_s=9.0)
    assert (buried.phase, buried.exit_code, buried.ended_boot_s) == (WorkerPhase.EXITED, 0, 3.0)
    assert (buried.error, buried.fault) == ("", Fault.NONE)
    assert read_record(directory) == told
