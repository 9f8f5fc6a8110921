"""The demo's job speaks the contract: progress, saves, resumes, grows, leaves, fails."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.demo.worker import EXIT_OWN_FAULT, EXIT_TERMINATED, Pace
from tests.demo.processes import DEMO, LIMIT_S
from tests.harness.sockets import short_path

pytestmark = pytest.mark.slow

LONG = ("--work-s=3600", "--step-s=0.01", "--save-s=0", "--save-every-s=0")
SHORT = ("--work-s=0.2", "--step-s=0.01", "--save-s=0")


class Shim:
    """The node's end of the control socket."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Collect what the job says."""
        self._writer = writer
        while line := await reader.readline():
            await self.messages.put(json.loads(line))
        writer.close()

    async def say(self, **message: object) -> None:
        """One message to the job."""
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    async def until(self, **wanted: object) -> dict[str, object]:
        """The next message that has these fields."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                message = await self.messages.get()
                if wanted.items() <= message.items():
                    return message


class Gang:
    """The workers of one job, over one checkpoint directory."""

    def __init__(self, directory: Path, sockets: Path) -> None:
        self.sockets = sockets
        self.checkpoint = directory / "saved" / "checkpoint.json"
        self._started: list[asyncio.subprocess.Process] = []
        self._servers: list[asyncio.Server] = []

    async def start(
        self,
        *options: str,
        index: int = 0,
        count: int = 1,
        attempt: int = 1,
        is_flexible: bool = False,
        has_shim: bool = True,
        grace_s: float = 30.0,
    ) -> tuple[asyncio.subprocess.Process, Shim]:
        """One worker, isolated and without site-packages, as a node starts it."""
        shim = Shim()
        environment = {
            "ARYL_JOB_ID": "j1",
            "ARYL_ATTEMPT": str(attempt),
            "ARYL_WORKER_INDEX": str(index),
            "ARYL_WORKER_COUNT": str(count),
            "ARYL_WORKERS_MIN": "1",
            "ARYL_IS_FLEXIBLE": "1" if is_flexible else "0",
            "ARYL_GRACE_SECONDS": f"{grace_s:g}",
            "ARYL_CHECKPOINT_PATH": str(self.checkpoint.parent),
        }
        if has_shim:
            path = str(self.sockets / f"{len(self._started)}.sock")
            self._servers.append(await asyncio.start_unix_server(shim.serve, path))
            environment["ARYL_CONTROL_SOCKET"] = path
        command = (sys.executable, "-I", "-S", str(DEMO / "worker.py"), *options)
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
        self._started.append(process)
        if has_shim:
            await shim.until(type="hello")
        return process, shim

    async def close(self) -> None:
        """End what is left."""
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for server in self._servers:
            server.close()
            await server.wait_closed()


@asynccontextmanager
async def gang(directory: Path) -> AsyncIterator[Gang]:
    """A gang that is gone with the block."""
    with short_path(directory) as sockets:
        made = Gang(directory, sockets)
        try:
            yield made
        finally:
            await made.close()


async def status(process: asyncio.subprocess.Process) -> int:
    """The exit status."""
    async with asyncio.timeout(LIMIT_S):
        return await process.wait()


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 8)), max_size=8),
    st.integers(0, 1000),
    st.integers(1, 4),
)
def test_steps_are_the_integral_of_the_worker_count(
    spans: list[tuple[float, int]], first: int, workers_min: int
) -> None:
    """Work done is worker-seconds over (step time x minimum), and a pause adds nothing."""
    pace = Pace(step=first, step_s=0.5, workers_min=workers_min, now_s=0.0)
    now_s, worker_s = 0.0, 0.0
    for length_s, worker_count in spans:
        pace.set_workers(worker_count, now_s)
        now_s += length_s
        worker_s += length_s * worker_count
    assert abs(pace.step(now_s) - (first + worker_s / workers_min / 0.5)) <= 1 + 1e-6


def test_the_time_until_a_step_is_when_it_is_done() -> None:
    """Waiting just that long reaches the step; a pause never does."""
    pace = Pace(step=10, step_s=0.5, workers_min=2, now_s=100.0)
    pace.set_workers(4, 100.0)
    delay_s = pace.until_s(21, 100.0)
    assert delay_s == 2.75
    assert pace.step(100.0 + delay_s - 0.01) == 20
    assert pace.step(100.0 + delay_s) == 21
    pace.set_workers(0, 101.0)
    assert pace.until_s(21, 101.0) == float("inf")


async def test_a_job_reports_its_last_step_and_succeeds(tmp_path: Path) -> None:
    """Progress counts up to the total, with a loss, and the exit status is 0."""
    async with gang(tmp_path) as jobs:
        process, shim = await jobs.start(*SHORT)
        first = await shim.until(type="progress")
        last = await shim.until(type="progress", step=20, total_steps=20)
        assert await status(process) == 0
        assert isinstance(first["loss"], float)
        assert isinstance(last["loss"], float)
        assert last["loss"] < first["loss"]


async def test_a_job_runs_without_a_shim(tmp_path: Path) -> None:
    """No socket, no Aryl: the same command is a plain program."""
    async with gang(tmp_path) as jobs:
        process, _ = await jobs.start(*SHORT, has_shim=False)
        assert await status(process) == 0


async def test_a_preempted_job_saves_and_its_next_attempt_goes_on(tmp_path: Path) -> None:
    """Request, working, saved, released; the next attempt's first step is the saved one."""
    async with gang(tmp_path) as jobs:
        process, shim = await jobs.start(*LONG)
        await shim.until(type="progress")
        await shim.until(type="progress")
        await shim.say(type="checkpoint_request", reason="preempt", grace_s=5)
        working = await shim.until(type="checkpoint", stage="working")
        saved = await shim.until(type="checkpoint", stage="saved")
        await shim.until(type="checkpoint", stage="released")
        assert await status(process) == 0
        assert working["eta_s"] == 0.0
        assert saved["path"] == str(jobs.checkpoint)
        assert json.loads(jobs.checkpoint.read_text())["step"] == saved["step"]
        _, again = await jobs.start(*LONG, attempt=2)
        resumed = await again.until(type="progress")
        assert isinstance(saved["step"], int)
        assert isinstance(resumed["step"], int)
        assert saved["step"] > 0
        assert resumed["step"] >= saved["step"]


async def test_a_job_that_never_saves_leaves_without_a_checkpoint(tmp_path: Path) -> None:
    """With --no-checkpoint a request is answered by release alone."""
    async with gang(tmp_path) as jobs:
        process, shim = await jobs.start(*LONG, "--no-checkpoint")
        await shim.say(type="checkpoint_request", reason="preempt", grace_s=5)
        message = await shim.until(type="checkpoint")
        assert message["stage"] == "released"
        assert await status(process) == 0
        assert not jobs.checkpoint.exists()


async def test_more_workers_make_it_faster(tmp_path: Path) -> None:
    """An hour of work at one worker is over at once when the gang is said to be huge."""
    async with gang(tmp_path) as jobs:
        process, shim = await jobs.start(*LONG)
        await shim.until(type="progress")
        await shim.say(type="resize", worker_count=1_000_000)
        await shim.until(type="progress", step=360_000)
        assert await status(process) == 0


async def test_followers_end_with_their_leader(tmp_path: Path) -> None:
    """When the leader has finished, every follower exits 0 by itself."""
    async with gang(tmp_path) as jobs:
        leader, _ = await jobs.start(*SHORT, count=3)
        followers = [(await jobs.start(*SHORT, index=n, count=3))[0] for n in (1, 2)]
        assert await status(leader) == 0
        assert [await status(follower) for follower in followers] == [0, 0]


async def test_a_released_flexible_worker_leaves_alone(tmp_path: Path) -> None:
    """It says released and goes, saves nothing, and the leader trains on with fewer."""
    async with gang(tmp_path) as jobs:
        leader, shim = await jobs.start(*LONG, count=2)
        flexible, other = await jobs.start(*LONG, index=1, count=2, is_flexible=True)
        await other.say(type="checkpoint_request", reason="release", grace_s=5)
        await other.until(type="checkpoint", stage="released")
        assert await status(flexible) == 0
        await shim.say(type="resize", worker_count=1)
        await shim.until(type="progress")
        assert leader.returncode is None
        assert not jobs.checkpoint.exists()


async def test_a_preempted_gang_is_saved_by_its_leader(tmp_path: Path) -> None:
    """A base follower that is asked first waits for the leader's save, then lets go."""
    async with gang(tmp_path) as jobs:
        leader, shim = await jobs.start(*LONG, count=2)
        follower, other = await jobs.start(*LONG, index=1, count=2)
        await other.say(type="checkpoint_request", reason="preempt", grace_s=5)
        await other.until(type="checkpoint", stage="working")
        await shim.until(type="progress")
        assert follower.returncode is None
        await shim.say(type="checkpoint_request", reason="preempt", grace_s=5)
        await shim.until(type="checkpoint", stage="saved")
        await other.until(type="checkpoint", stage="released")
        assert (await status(leader), await status(follower)) == (0, 0)
        assert jobs.checkpoint.exists()


async def test_stop_ends_a_worker_without_a_save(tmp_path: Path) -> None:
    """`stop` means now: nothing is written, the exit status is 0."""
    async with gang(tmp_path) as jobs:
        leader, shim = await jobs.start(*LONG, count=2)
        follower, other = await jobs.start(*LONG, index=1, count=2)
        await other.say(type="stop")  # first: a follower leaves by itself once its leader has
        await shim.say(type="stop")
        assert (await status(leader), await status(follower)) == (0, 0)
        assert not jobs.checkpoint.exists()


async def test_a_failing_job_fails_whole_and_passes_when_resumed_beyond(tmp_path: Path) -> None:
    """At its step leader and followers exit 3; an attempt that resumes beyond it goes on."""
    async with gang(tmp_path) as jobs:
        leader, _ = await jobs.start(*SHORT, "--fail-at-step=5", count=2)
        follower, _ = await jobs.start(*SHORT, index=1, count=2)
        assert await status(leader) == EXIT_OWN_FAULT
        assert await status(follower) == EXIT_OWN_FAULT
        jobs.checkpoint.write_text(json.dumps({"step": 6, "total_steps": 20, "attempt": 1}))
        again, _ = await jobs.start(*SHORT, "--fail-at-step=5", attempt=2)
        assert await status(again) == 0


async def test_sigterm_saves_too(tmp_path: Path) -> None:
    """A supervisor without the socket asks by SIGTERM: saved, then the status of a terminated."""
    async with gang(tmp_path) as jobs:
        process, shim = await jobs.start(*LONG)
        await shim.until(type="progress")
        process.terminate()
        await shim.until(type="checkpoint", stage="saved")
        assert await status(process) == EXIT_TERMINATED
        assert jobs.checkpoint.exists()


async def test_a_request_during_a_save_is_answered_by_that_save(tmp_path: Path) -> None:
    """The save under way says working, and nothing is saved twice."""
    async with gang(tmp_path) as jobs:
        often = ("--work-s=3600", "--step-s=0.01", "--save-s=0.3", "--save-every-s=0.01")
        process, shim = await jobs.start(*often)
        first = await shim.until(type="checkpoint")
        assert first["stage"] == "saved"
        await shim.say(type="checkpoint_request", reason="preempt", grace_s=5)
        await shim.until(type="checkpoint", stage="working")
        stages = [(await shim.until(type="checkpoint"))["stage"] for _ in range(2)]
        assert stages == ["saved", "released"]
        assert await status(process) == 0


async def test_a_follower_whose_leader_never_saves_leaves_after_its_grace(tmp_path: Path) -> None:
    """A base follower waits for a save no longer than the job's own grace."""
    async with gang(tmp_path) as jobs:
        follower, other = await jobs.start(*LONG, index=1, count=2, grace_s=0.05)
        await other.say(type="checkpoint_request", reason="preempt", grace_s=5)
        await other.until(type="checkpoint", stage="released")
        assert await status(follower) == 0
