"""Real workers under real shims, for tests. Waiting is polling with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from agent.shim import files as shim_files
from agent.workers.runner import WorkerStatus
from agent.workers.shim_runner import ShimRunner
from agent.workers.spec import LOG_MAX_BYTES
from agent.workers.starters import DetachedStarter
from common.clock import SystemClock
from common.messages import OrderPhase, WorkerOrder, WorkerPhase
from common.model import (
    CheckpointSpec,
    GpuUuid,
    JobId,
    Launcher,
    StopReason,
    WorkerKey,
)
from tests.harness.builders import make_spec

PATIENCE_S = 20.0

TALKER = """
import json, os, socket, sys, threading, time
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["ARYL_CONTROL_SOCKET"])
hear = link.makefile("r")
def say(**message):
    link.sendall(json.dumps(message).encode() + b"\\n")
def log(*words):
    print(*words, flush=True)
say(type="hello")
"""
"""The opening of a worker that speaks the protocol of docs/job-contract.md."""


def talker(body: str) -> tuple[str, ...]:
    """The command of a worker that has said hello and goes on with `body`."""
    return (sys.executable, "-I", "-S", "-c", TALKER + body)


def make_order(
    *command: str,
    workdir: Path | str = "/",
    checkpoint: Path | str | None = None,
    grace_s: float = 10.0,
    signal_name: str = "SIGTERM",
    workers: tuple[int, int] = (1, 1),
    launcher: Launcher = Launcher.NONE,
    env: dict[str, str] | None = None,
    index: int = 0,
    job_id: str = "job-1",
    is_flexible: bool = False,
    gpus_per_worker: int = 1,
    stop_after_s: float | None = None,
) -> WorkerOrder:
    """An order to run a command on pretend GPUs."""
    spec = make_spec(
        "test",
        command=command or ("true",),
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        workdir=str(workdir),
        env=env or {},
        launcher=launcher,
        stop_after_s=stop_after_s,
        checkpoint=CheckpointSpec(
            path=None if checkpoint is None else str(checkpoint),
            grace_s=grace_s,
            signal=signal_name,
        ),
    )
    return WorkerOrder(
        key=WorkerKey(JobId(job_id), 1, index),
        spec=spec,
        tenant="t",
        user="u",
        submitted_at_s=0.0,
        gpu_uuids=tuple(GpuUuid(f"GPU-{at + 1}") for at in range(gpus_per_worker)),
        gpu_type="V100",
        is_flexible=is_flexible,
        phase=OrderPhase.RUN,
        worker_count=workers[0],
    )


class WorkerHarness:
    """A run directory and a runner on it; whatever runs at the end of a test is killed."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = SystemClock()
        self.log_max_bytes = LOG_MAX_BYTES
        self.runner = self.new_runner()

    def new_runner(self) -> ShimRunner:
        """A runner as an agent that starts anew would make it."""
        return ShimRunner(
            self.run_dir,
            clock=self.clock,
            starter=DetachedStarter(self.clock),
            is_root_allowed=True,  # the tests may run as anybody
            log_max_bytes=self.log_max_bytes,
        )

    async def start(self, order: WorkerOrder) -> WorkerKey:
        """Start a worker; its key."""
        await self.runner.start(order, endpoint="node-1:29400")
        return order.key

    def directory(self, key: WorkerKey) -> Path:
        """Where a worker's files are."""
        return self.run_dir / str(key)

    def log(self, key: WorkerKey) -> str:
        """All that the worker wrote."""
        return (self.directory(key) / shim_files.LOG_FILE).read_text()

    def raw(self, key: WorkerKey) -> dict[str, object]:
        """status.json as it is."""
        return shim_files.read_json(str(self.directory(key) / shim_files.STATUS_FILE)) or {}

    async def status(self, key: WorkerKey) -> WorkerStatus:
        """What the runner says of a worker."""
        [status] = [status for status in await self.runner.statuses() if status.key == key]
        return status

    async def until(self, fact: Callable[[], bool], what: str) -> None:
        """Return when a fact holds."""
        try:
            async with self.clock.timeout(PATIENCE_S):
                while not fact():
                    await self.clock.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not in {PATIENCE_S:g} s: {what}") from None

    async def until_said(self, key: WorkerKey, words: str) -> None:
        """Return when the worker has written these words."""
        await self.until(lambda: words in self.log(key), f"{key} says {words!r}")

    async def until_status(
        self, key: WorkerKey, fact: Callable[[WorkerStatus], bool], what: str
    ) -> WorkerStatus:
        """Return when the status of a worker is as it should be."""
        status = await self.status(key)
        try:
            async with self.clock.timeout(PATIENCE_S):
                while not fact(status):
                    await self.clock.sleep(0.02)
                    status = await self.status(key)
        except TimeoutError:
            raise AssertionError(f"not in {PATIENCE_S:g} s: {what}: {status}") from None
        return status

    async def until_exited(self, key: WorkerKey) -> WorkerStatus:
        """Return when the worker has ended."""
        return await self.until_status(key, lambda s: s.phase == WorkerPhase.EXITED, "exited")

    async def close(self) -> None:
        """Leave no process behind."""
        for status in await self.runner.statuses():
            if status.phase != WorkerPhase.EXITED:
                await self.runner.stop(status.key, StopReason.CANCEL, 0.0)
        for status in await self.runner.statuses():
            await self.until_exited(status.key)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return shim_files.start_ticks(pid) > 0


def kill(pid: int) -> None:
    """kill -9 of one process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def rss_bytes(pid: object) -> int:
    """Resident memory of a process."""
    [rss_kib] = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(rss_kib) * 1024


async def make_workers(tmp_path: Path) -> AsyncGenerator[WorkerHarness, None]:
    """A fixture: a run directory with a runner."""
    async for harness in make_harness(tmp_path / "workers"):
        yield harness


async def make_harness(run_dir: Path) -> AsyncGenerator[WorkerHarness, None]:
    """The body of a fixture."""
    harness = WorkerHarness(run_dir)
    try:
        yield harness
    finally:
        await asyncio.shield(harness.close())


class HangingDiskStarter(DetachedStarter):
    """Of a shim whose disk takes no status: something stands where that is written first."""

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        (directory / f"{shim_files.STATUS_FILE}.new").mkdir()
        await super().start(directory, order)
