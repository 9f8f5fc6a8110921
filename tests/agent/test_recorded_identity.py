"""What a worker's record says of processes, and of its end: whom it may name, and who is heard."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from agent.shim import files as shim_files
from agent.workers.lost import HungShims, LostWorkers
from agent.workers.process_marks import kill_marked
from agent.workers.record import WorkerRecord, bury, kill_leftovers, read_record
from common.clock import SystemClock
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import JobId, WorkerKey

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
