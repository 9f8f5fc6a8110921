"""What a worker's job left running apart: daemons without its session, parent and environment."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from agent.shim import files as shim_files
from agent.workers.process_marks import RLIMIT_LOCKS, mark_of, marked
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import StopReason, WorkerKey
from tests.harness.node.workers import WorkerHarness, is_alive, kill, make_order, make_workers

harness = pytest.fixture(make_workers)

DAEMON = (
    '(env -i OUT="$OUT" setsid sh -c '
    "'(setsid sh -c \"echo \\$\\$ >> $OUT/pids; exec sleep 600\" &)'"
    " </dev/null >/dev/null 2>&1 &); "
    'while [ "$(cat "$OUT/pids" 2>/dev/null | wc -l)" -lt 1 ]; do sleep 0.02; done; echo up; '
)
"""Forks twice, into sessions of their own, with nothing of the environment and no open file."""


async def daemon_of(
    harness: WorkerHarness, out: Path, then: str, index: int = 0
) -> tuple[WorkerKey, int]:
    """A worker that began a daemon and goes on with `then`; the daemon's process."""
    order = make_order(
        "sh",
        "-c",
        f'mkdir -p "$OUT"; {DAEMON}{then}',
        env={"OUT": str(out)},
        index=index,
        grace_s=1.0,
    )
    key = await harness.start(order)
    await harness.until_said(key, "up")
    return key, int((out / "pids").read_text())


HALF_ENDED = """
import ctypes, os, threading, time
daemon = os.fork()
if daemon == 0:
    os.setsid()
    threading.Thread(target=time.sleep, args=(600,)).start()
    with open(os.environ["OUT"] + "/pids", "w") as file:
        file.write(str(os.getpid()))
    ctypes.CDLL(None).pthread_exit(None)
while open(f"/proc/{daemon}/stat").read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.02)
print("up", flush=True)
"""
"""Leaves a daemon whose main thread has ended, while another thread goes on."""


async def half_ended_daemon_of(
    harness: WorkerHarness, out: Path, then: str
) -> tuple[WorkerKey, int]:
    """A worker with a daemon that /proc calls a zombie though it computes; the daemon's process."""
    program = f"{HALF_ENDED}\n{then}"
    order = make_order(sys.executable, "-I", "-S", "-c", program, env={"OUT": str(out)})
    key = await harness.start(order)
    await harness.until_said(key, "up")
    return key, int((out / "pids").read_text())


def shim_of(harness: WorkerHarness, key: WorkerKey) -> int:
    """The shim of a worker, as its status says."""
    pid = harness.raw(key)["shim_pid"]
    assert isinstance(pid, int)
    return pid


async def kill_shim(harness: WorkerHarness, key: WorkerKey) -> None:
    """kill -9 of a worker's shim: its daemon has no ancestor of the worker any more."""
    pid = shim_of(harness, key)
    kill(pid)
    await harness.until(lambda: not is_alive(pid), "the shim is dead")


async def test_a_daemon_ends_with_a_worker_that_leaves_by_itself(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The shim adopts whatever forks away, and does not end before it has no child."""
    key, daemon = await daemon_of(harness, tmp_path, "exit 3")
    assert (await harness.until_exited(key)).exit_code == 3
    assert not is_alive(daemon)


async def test_a_daemon_ends_with_a_worker_that_is_stopped(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Its grace is that of the worker's first process; what is left then is killed."""
    key, daemon = await daemon_of(harness, tmp_path, "exec sleep 600")
    await harness.runner.stop(key, StopReason.PREEMPT, 1.0)
    assert (await harness.until_exited(key)).exit_code == -15
    assert not is_alive(daemon)


@pytest.mark.parametrize("is_agent_new", [False, True])
async def test_a_daemon_ends_with_a_worker_whose_shim_was_killed(
    harness: WorkerHarness, tmp_path: Path, *, is_agent_new: bool
) -> None:
    """By the mark that it inherited, and also for an agent that starts after all others died.

    What belongs to another worker, or to nobody, goes on.
    """
    key, daemon = await daemon_of(harness, tmp_path / "a", "exec sleep 600")
    other, others_daemon = await daemon_of(harness, tmp_path / "b", "exec sleep 600", index=1)
    stranger = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        await kill_shim(harness, key)
        assert is_alive(daemon)
        if is_agent_new:
            harness.runner = harness.new_runner()
        assert (await harness.until_exited(key)).fault == Fault.SHIM_LOST
        assert not is_alive(daemon)
        assert is_alive(others_daemon)
        assert is_alive(shim_of(harness, other))
        assert is_alive(stranger.pid)
    finally:
        stranger.kill()
        await stranger.wait()


@pytest.mark.slow
async def test_a_daemon_whose_main_thread_has_ended_keeps_no_shim(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The kernel calls it a zombie, but it computes; the shim kills it, and then ends."""
    key, daemon = await half_ended_daemon_of(harness, tmp_path, "raise SystemExit(3)")
    assert (await harness.until_exited(key)).exit_code == 3
    assert not is_alive(daemon)


@pytest.mark.slow
@pytest.mark.parametrize("is_directory", [True, False])
async def test_a_daemon_whose_main_thread_has_ended_is_found_by_its_mark(
    harness: WorkerHarness, tmp_path: Path, *, is_directory: bool
) -> None:
    """Its worker is not over while it computes: it may hold the GPUs."""
    key, daemon = await half_ended_daemon_of(harness, tmp_path, "time.sleep(600)")
    directory = harness.directory(key)
    assert daemon in marked(directory, directory.stat().st_uid)
    await kill_shim(harness, key)
    if not is_directory:
        directory.rename(tmp_path / "away")
    while any(s.phase != WorkerPhase.EXITED for s in await harness.runner.statuses([key])):
        await harness.clock.sleep(0.02)
    assert not is_alive(daemon)


def test_a_mark_in_the_environment_outlives_the_main_thread(tmp_path: Path) -> None:
    """Where a lower limit forbids the other mark, the environment of the other threads has it."""
    program = (
        "import ctypes, threading, time; "
        "threading.Thread(target=time.sleep, args=(600,)).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    environment = {"ARYL_WORKER_DIRECTORY": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", program], env=environment)
    try:
        while Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
            os.sched_yield()
        assert marked(tmp_path, os.geteuid()) == {process.pid}
    finally:
        process.kill()
        process.wait()


async def test_a_daemon_of_a_worker_whose_directory_is_gone_is_found_by_its_mark(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The mark follows from the directory's name alone, so no file is needed to find it."""
    key, daemon = await daemon_of(harness, tmp_path, "exec sleep 600")
    directory = harness.directory(key)
    assert daemon in marked(directory, directory.stat().st_uid)
    await kill_shim(harness, key)
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    assert daemon in marked(directory, os.geteuid())
    while await harness.runner.statuses([key]):
        await harness.clock.sleep(0.02)
    assert not is_alive(daemon)


async def test_a_worker_inside_a_worker_has_its_own_mark(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The mark is a soft limit, which an agent that runs in a job can set anew for its own jobs."""
    key, _ = await daemon_of(harness, tmp_path, "exec sleep 600")
    pid = harness.raw(key)["pid"]
    assert isinstance(pid, int)
    mark = mark_of(harness.directory(key))
    assert resource.prlimit(pid, RLIMIT_LOCKS) == (mark, resource.RLIM_INFINITY)
    assert mark != mark_of(harness.directory(WorkerKey(key.job_id, key.attempt, 1)))
    assert shim_files.start_ticks(pid)
