"""The table of GPU processes that the fake NVML shows: real ones, found in /proc."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.gpu.fake.fleet import fake_uuid
from agent.gpu.fake.processes import (
    BUSY_ENV,
    MEMORY_ENV,
    USAGE_FILE_ENV,
    VISIBLE_ENV,
    Holder,
    ProcessTable,
    Usage,
)
from agent.proc.process_tree import thread_states
from common.clock import SystemClock

PATIENCE_S = 10.0
UUID = fake_uuid(f"n{os.getpid()}", 0)
"""Of a node that no other test has, as every table sees the processes of the whole machine."""
HOLD = "import sys; print('up', flush=True); sys.stdin.read()"


HALF_ENDED = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print('up', flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


async def spawn(program: str = HOLD, **variables: str) -> asyncio.subprocess.Process:
    """A real process with these variables, that has called exec and lives until killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", "-c", program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=variables,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # the test may have ended it itself
        process.kill()
    await process.communicate()


async def test_a_process_holds_the_gpus_that_it_was_given_until_it_ends() -> None:
    """Found by CUDA_VISIBLE_DEVICES in its environment; gone with the process, zombie or not."""
    clock = SystemClock()
    table = ProcessTable([UUID])
    process = await spawn(**{VISIBLE_ENV: f"GPU-other,{UUID}", BUSY_ENV: "0.5", MEMORY_ENV: "7"})
    try:
        usage = Usage(busy_ratio=0.5, memory_bytes=7)
        assert table.scan() == [Holder(pid=process.pid, uuids=(UUID,), usage=usage)]
        os.kill(process.pid, signal.SIGKILL)
        async with clock.timeout(PATIENCE_S):
            while table.scan():
                await clock.sleep(0.01)
    finally:
        await end(process)


async def test_a_usage_that_does_not_fit_is_as_if_it_were_not_said() -> None:
    """A job's typing error in one variable leaves the other one in force."""
    process = await spawn(**{VISIBLE_ENV: UUID, BUSY_ENV: "very", MEMORY_ENV: "7"})
    try:
        [holder] = ProcessTable([UUID]).scan()
        assert holder.usage == Usage(memory_bytes=7)
    finally:
        await end(process)


async def test_a_usage_file_is_followed_and_survives_a_bad_write(tmp_path: Path) -> None:
    """The latest whole file counts; a half written or missing one leaves the last usage."""
    file = tmp_path / "usage.json"
    process = await spawn(**{VISIBLE_ENV: UUID, USAGE_FILE_ENV: str(file)})
    try:
        table = ProcessTable([UUID])
        assert table.scan()[0].usage == Usage()
        wanted = Usage(busy_ratio=0.5, memory_bytes=3)
        file.write_bytes(msgspec.json.encode(wanted))
        assert table.scan()[0].usage == wanted
        file.write_text('{"busy_ratio": 0.')
        os.utime(file, ns=(1, 1))
        assert table.scan()[0].usage == wanted
        file.unlink()
        assert table.scan()[0].usage == wanted
    finally:
        await end(process)


async def test_a_process_whose_main_thread_has_ended_still_holds_its_gpus() -> None:
    """Its other threads have its device memory, whatever state /proc shows."""
    clock = SystemClock()
    process = await spawn(HALF_ENDED, **{VISIBLE_ENV: UUID})
    try:
        async with clock.timeout(PATIENCE_S):
            while "Z" not in thread_states(process.pid):
                await clock.sleep(0.01)
        assert [holder.pid for holder in ProcessTable([UUID]).scan()] == [process.pid]
    finally:
        await end(process)


class Proc(Struct):
    """A /proc of the test's own making."""

    root: Path

    def add(self, pid: int, *, ticks: int, state: str = "S", **variables: str) -> None:
        directory = self.root / str(pid)
        directory.mkdir(exist_ok=True)
        middle = " ".join(["0"] * 18)
        (directory / "stat").write_text(f"{pid} (a ) b) {state} {middle} {ticks} 0\n")
        environ = "".join(f"{name}={value}\0" for name, value in variables.items())
        (directory / "environ").write_text(environ)


def test_a_recycled_pid_is_another_process(tmp_path: Path) -> None:
    """The start time tells: what the old process held, the new one does not."""
    proc = Proc(tmp_path)
    proc.add(7, ticks=100, **{VISIBLE_ENV: UUID})
    table = ProcessTable([UUID], tmp_path)
    for _ in range(10):
        assert [holder.pid for holder in table.scan()] == [7]
    proc.add(7, ticks=101)
    assert table.scan() == []


def test_a_zombie_holds_nothing_and_odd_entries_are_no_processes(tmp_path: Path) -> None:
    """A zombie's device memory is gone; a pid without files, or a file, does not stop the scan."""
    proc = Proc(tmp_path)
    proc.add(7, ticks=100, state="Z", **{VISIBLE_ENV: UUID})
    proc.add(8, ticks=100, **{VISIBLE_ENV: UUID})
    (tmp_path / "9").mkdir()
    (tmp_path / "uptime").write_text("1 1")
    assert [holder.pid for holder in ProcessTable([UUID], tmp_path).scan()] == [8]


def test_a_process_that_calls_exec_late_is_found(tmp_path: Path) -> None:
    """A long-lived process that got its GPUs by exec is seen after some scans at the latest."""
    proc = Proc(tmp_path)
    proc.add(7, ticks=100)
    table = ProcessTable([UUID], tmp_path)
    for _ in range(6):
        assert table.scan() == []
    proc.add(7, ticks=100, **{VISIBLE_ENV: UUID})
    found = [bool(table.scan()) for _ in range(15)]
    assert found[-1]
