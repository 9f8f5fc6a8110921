"""Logs of ended workers on their node: kept within limits, and found by the agent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from agent.settings import Starter
from agent.shim import files as shim_files
from agent.workers.kept_logs import KeptLogs
from agent.workers.shim_runner import ShimRunner, make_runner
from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from common.messages import WorkerPhase
from common.model import JobId, StopReason, WorkerKey
from tests.harness.fake_clock import FakeClock
from tests.harness.node.life import key, settings
from tests.harness.node.workers import PATIENCE_S, make_order

# --- the directory of kept logs ---------------------------------------------------------------


Scan = Callable[[Path], Iterable[os.DirEntry[str]]]


class Shelf:
    """Kept logs in a directory, and workers that ended one after another."""

    def __init__(
        self,
        directory: Path,
        *,
        max_count: int = 100,
        max_bytes: int = 10_000,
        scan: Scan = os.scandir,
    ) -> None:
        self.directory = directory
        self.clock = FakeClock()
        logs, clock = directory / "logs", self.clock
        self.logs = KeptLogs(logs, clock=clock, max_count=max_count, max_bytes=max_bytes, scan=scan)

    async def end(self, index: int, log: bytes, *, older: bytes | None = None) -> WorkerKey:
        """A worker ends, an hour after the one before, and is forgotten."""
        await self.clock.advance(3600.0)
        worker = key(index)
        home = self.directory / "workers" / str(worker)
        home.mkdir(parents=True, exist_ok=True)
        (home / shim_files.LOG_FILE).write_bytes(log)
        if older is not None:
            (home / shim_files.OLD_LOG_FILE).write_bytes(older)
        for path in home.iterdir():  # what was written when says nothing about the end
            os.utime(path, (index, index))
        self.logs.keep(worker, home)
        return worker

    def kept(self, count: int = 10) -> list[int]:
        """Which of the first workers still have a log."""
        return [index for index in range(count) if self.logs.tail(key(index), 1) is not None]


async def test_a_kept_log_is_the_worker_s_own_with_the_part_that_was_moved_aside(
    tmp_path: Path,
) -> None:
    """The end of it, however much is asked for."""
    shelf = Shelf(tmp_path)
    worker = await shelf.end(0, b"new\n", older=b"old\n")
    assert shelf.logs.tail(worker, 1000) == b"old\nnew\n"
    assert shelf.logs.tail(worker, 6) == b"d\nnew\n"
    assert shelf.logs.tail(worker, 2) == b"w\n"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "j1.1.0.log", "j1.1.0.log.1",
    ]  # fmt: skip


async def test_more_logs_than_allowed_push_out_the_oldest(tmp_path: Path) -> None:
    """By when their workers ended, both parts of a log together."""
    shelf = Shelf(tmp_path, max_count=2)
    for index in (3, 1, 2, 0):
        await shelf.end(index, b"x", older=b"y")
    assert shelf.kept() == [0, 2]
    assert len(list((tmp_path / "logs").iterdir())) == 4


async def test_more_bytes_than_allowed_push_out_the_oldest(tmp_path: Path) -> None:
    """Both parts of a log count."""
    shelf = Shelf(tmp_path, max_bytes=1000)
    for index in range(4):
        await shelf.end(index, bytes(200), older=bytes(200))
    assert shelf.kept() == [2, 3]


async def test_a_log_that_another_removes_meanwhile_is_only_gone(tmp_path: Path) -> None:
    """Workers are forgotten side by side: each of them prunes, and none fails for what the other
    removed between its look at the directory and its look at the file."""
    gone: list[str] = []

    def scan(directory: Path) -> Iterable[os.DirEntry[str]]:
        entries = list(os.scandir(directory))
        for name in gone:
            (directory / name).unlink()
        gone.clear()
        return entries

    shelf = Shelf(tmp_path, max_count=2, scan=scan)
    await shelf.end(0, b"a", older=b"b")
    await shelf.end(1, b"c")
    gone += ["j1.1.0.log", "j1.1.0.log.1"]
    await shelf.end(2, b"d")
    assert shelf.kept() == [1, 2]
    await shelf.end(3, b"e")
    assert shelf.kept() == [2, 3]


async def test_a_directory_of_logs_that_vanishes_is_made_again(tmp_path: Path) -> None:
    """Somebody cleans up, at any moment: that log is lost, and the next worker's is kept."""
    is_cleaned = False

    def scan(directory: Path) -> Iterable[os.DirEntry[str]]:
        if is_cleaned:
            shutil.rmtree(directory)
        return os.scandir(directory)

    shelf = Shelf(tmp_path, scan=scan)
    await shelf.end(0, b"a")
    is_cleaned = True
    await shelf.end(1, b"b")
    assert shelf.kept() == []
    is_cleaned = False
    await shelf.end(2, b"c")
    assert shelf.kept() == [2]


async def test_a_log_larger_than_all_that_is_allowed_pushes_out_nobody(tmp_path: Path) -> None:
    """One talkative worker must not cost everybody else's log."""
    shelf = Shelf(tmp_path, max_bytes=1000)
    await shelf.end(0, bytes(400))
    await shelf.end(1, bytes(5000))
    await shelf.end(2, bytes(400))
    assert shelf.kept() == [0, 2]


@pytest.mark.parametrize(("max_count", "max_bytes"), [(0, 10_000), (100, 0)])
async def test_a_limit_of_nothing_keeps_nothing(
    tmp_path: Path, max_count: int, max_bytes: int
) -> None:
    """A site may not want logs on its nodes at all."""
    shelf = Shelf(tmp_path, max_count=max_count, max_bytes=max_bytes)
    await shelf.end(0, b"secret")
    assert shelf.kept() == []
    assert list((tmp_path / "logs").iterdir()) == []


async def test_keeping_again_after_a_crash_in_between_loses_nothing(tmp_path: Path) -> None:
    """The log was moved, the directory was not yet removed."""
    shelf = Shelf(tmp_path)
    worker = await shelf.end(0, b"said\n")
    shelf.logs.keep(worker, tmp_path / "workers" / str(worker))
    assert shelf.logs.tail(worker, 100) == b"said\n"


async def test_a_link_in_place_of_a_log_is_not_followed_and_not_kept(tmp_path: Path) -> None:
    """A job owns its directory; it must not make the agent show it somebody else's file."""
    secret = tmp_path / "secret"
    secret.write_text("password")
    home = tmp_path / "workers" / "j1.1.0"
    home.mkdir(parents=True)
    (home / shim_files.LOG_FILE).symlink_to(secret)
    shelf = Shelf(tmp_path)
    shelf.logs.keep(key(0), home)
    assert shelf.kept() == []
    assert secret.read_text() == "password"


def test_what_was_never_kept_is_none_and_a_key_that_is_a_path_is_an_error(tmp_path: Path) -> None:
    """Nothing outside the directory can be asked for."""
    shelf = Shelf(tmp_path)
    assert shelf.logs.tail(key(), 10) is None
    with pytest.raises(ConfigError, match="token"):
        shelf.logs.tail(WorkerKey(JobId("../x"), 1, 0), 10)


async def test_a_file_of_somebody_else_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    """Only what is named as a log is counted and removed."""
    shelf = Shelf(tmp_path, max_count=1)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "README").write_text("hands off")
    os.utime(tmp_path / "logs" / "README", (4e9, 4e9))  # newer than any log
    await shelf.end(0, b"a")
    await shelf.end(1, b"b")
    assert shelf.kept() == [1]
    assert (tmp_path / "logs" / "README").exists()


# --- the agent's runner, with real workers ----------------------------------------------------


def _runner(tmp_path: Path, **changes: object) -> ShimRunner:
    found = settings(
        inference=False, state_dir=str(tmp_path), worker_starter=Starter.DETACHED,
        is_root_allowed=True, **changes,
    )  # fmt: skip
    return make_runner(found, clock=SystemClock())


async def _run_to_the_end(runner: ShimRunner, worker: WorkerKey, script: str) -> None:
    order = make_order("sh", "-c", script, job_id=worker.job_id, index=worker.worker_index)
    clock = SystemClock()
    await runner.start(order, endpoint="n1:1")
    async with clock.timeout(PATIENCE_S):
        while [s.phase for s in await runner.statuses() if s.key == worker] != [WorkerPhase.EXITED]:
            await clock.sleep(0.02)


async def test_the_log_of_a_forgotten_worker_is_still_there_and_nothing_else(
    tmp_path: Path,
) -> None:
    """For another agent on the same disk too; its directory is gone."""
    runner = _runner(tmp_path)
    await _run_to_the_end(runner, key(), "echo said; echo oops >&2")
    await runner.forget(key())
    await runner.forget(key())
    assert await _runner(tmp_path).log_tail(key(), 1000) == b"said\noops\n"
    assert list((tmp_path / "workers").iterdir()) == []
    assert await runner.statuses() == ()


async def test_the_settings_limit_what_is_kept(tmp_path: Path) -> None:
    """`kept_logs_count` is what an operator sets."""
    runner = _runner(tmp_path, kept_logs_count=1)
    for index in (0, 1):
        await _run_to_the_end(runner, key(index), f"echo {index}")
        await runner.forget(key(index))
    assert await runner.log_tail(key(1), 10) == b"1\n"
    with pytest.raises(Unavailable, match="kept_logs_count"):
        await runner.log_tail(key(0), 10)


async def test_the_log_of_a_worker_that_has_said_nothing_yet_is_empty(tmp_path: Path) -> None:
    """That is no error: somebody follows it."""
    runner = _runner(tmp_path)
    await runner.start(make_order("sleep", "60", job_id="j1"), endpoint="n1:1")
    try:
        assert await runner.log_tail(key(), 10) == b""
    finally:
        await runner.stop(key(), StopReason.CANCEL, 0.0)
        async with SystemClock().timeout(PATIENCE_S):
            while any(s.phase != WorkerPhase.EXITED for s in await runner.statuses()):
                await SystemClock().sleep(0.02)
