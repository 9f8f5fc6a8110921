"""Where an agent of root starts shims: nothing of root begins where a job was let in before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from agent.shim import files as shim_files
from agent.workers.directory import make_directory, remove_directory
from agent.workers.shim_runner import ShimRunner
from agent.workers.spec import Account
from agent.workers.starters import SHIM_LOG, shim_argv
from common.clock import SystemClock
from common.messages import WorkerOrder
from tests.harness.node.workers import PATIENCE_S, WorkerHarness, make_order, make_workers

JOBS = Account(name="nobody", uid=65534, gid=65534, home="/nonexistent")
ORDER = make_order("true")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
harness = pytest.fixture(make_workers)


class Starter:
    """A starter that sees where it would start a shim, and says a word for it."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[str]]] = []

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        del order
        self._begin(directory)

    def _begin(self, directory: Path) -> None:
        names = sorted(path.name for path in directory.iterdir())
        self.found.append((directory.stat().st_uid, names))
        (directory / shim_files.STATUS_FILE).touch()


async def started(run_dir: Path, account: Account | None) -> list[tuple[int, list[str]]]:
    """Owner and files of the directory in which a shim was started for `ORDER`."""
    starter = Starter()
    runner = ShimRunner(
        run_dir, clock=SystemClock(), starter=starter, account=account, is_root_allowed=True
    )
    await runner.start(ORDER, endpoint="")
    return starter.found


@pytest.fixture
def closed_umask() -> Generator[None, None, None]:
    """That of the agent's unit."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("closed_umask")
@pytest.mark.parametrize(("account", "mode"), [(JOBS, 0o711), (None, 0o700)])
async def test_a_job_s_user_comes_to_its_directory_whatever_the_umask(
    tmp_path: Path, account: Account | None, mode: int
) -> None:
    """And does not see which others there are; an agent that is nobody else lets nobody in."""
    run_dir = tmp_path / "state" / "workers"
    assert await started(run_dir, account) == [(os.geteuid(), [shim_files.SPEC_FILE])]
    assert run_dir.stat().st_mode & 0o777 == mode
    assert (run_dir / str(ORDER.key)).stat().st_mode & 0o777 == 0o700


async def test_a_start_that_was_cut_short_goes_on_in_its_directory(tmp_path: Path) -> None:
    """It was nobody's but the agent's."""
    directory = tmp_path / str(ORDER.key)
    directory.mkdir()
    (directory / "kept").touch()
    assert await started(tmp_path, JOBS) == [(os.geteuid(), ["kept", shim_files.SPEC_FILE])]


def given_away(directory: Path) -> Path:
    """The directory of a job that leads whoever writes its shim's log to another file; that one."""
    directory.mkdir()
    target = directory.parent / "target"
    target.write_text("as it was")
    (directory / SHIM_LOG).symlink_to(target)
    os.chown(directory, JOBS.uid, JOBS.gid)
    return target


@needs_root
async def test_a_directory_that_a_job_had_is_made_anew(tmp_path: Path) -> None:
    """PID 1 opens the shim's log there as root, and follows whatever link a job left."""
    target = given_away(tmp_path / str(ORDER.key))
    assert await started(tmp_path, JOBS) == [(0, [shim_files.SPEC_FILE])]
    assert target.read_text() == "as it was"
    assert (tmp_path / str(ORDER.key)).stat().st_mode & 0o777 == 0o700


def has_called_exec(pid: int) -> bool:
    """Whether a process has its environment; whoever started it may go on shortly before that."""
    return bool(Path(f"/proc/{pid}/environ").read_bytes())


@needs_root
async def test_what_a_dead_shim_left_running_is_killed_before_its_directory_is_made_anew(
    tmp_path: Path,
) -> None:
    """Its job would run twice: nobody knows of the first one when the directory is gone."""
    directory = tmp_path / str(ORDER.key)
    given_away(directory)
    left = await asyncio.create_subprocess_exec(
        *("sleep", "1000"),
        env={"ARYL_WORKER_DIRECTORY": str(directory), "PATH": os.environ["PATH"]},
        user=JOBS.uid,
        group=JOBS.gid,
        extra_groups=[],
        cwd="/",
    )
    try:
        clock = SystemClock()
        async with clock.timeout(PATIENCE_S):
            while not has_called_exec(left.pid):
                await clock.sleep(0.02)
        assert make_directory(directory, JOBS)
        async with clock.timeout(PATIENCE_S):
            assert await left.wait() == -signal.SIGKILL
    finally:
        if left.returncode is None:
            left.kill()
            await left.wait()


@needs_root
def test_no_second_shim_is_started_beside_one_that_has_its_directory(tmp_path: Path) -> None:
    """It may be about to start its worker: its first word is waited for."""
    directory = tmp_path / str(ORDER.key)
    given_away(directory)
    (directory / shim_files.LOCK_FILE).touch()
    lock_fd = shim_files.take_lock(str(directory / shim_files.LOCK_FILE))
    assert lock_fd is not None
    try:
        assert not make_directory(directory, JOBS)
    finally:
        os.close(lock_fd)
    assert make_directory(directory, JOBS)


@needs_root
def test_a_shim_of_root_gives_nothing_away_for_a_job(tmp_path: Path) -> None:
    """Its order may be the job's own by then, and be a link to any file of the machine."""
    directory = tmp_path / str(ORDER.key)
    target = given_away(directory)
    account = {"name": "nobody", "uid": JOBS.uid, "gid": JOBS.gid}
    target.write_text(json.dumps({"account": account}))
    (directory / shim_files.SPEC_FILE).symlink_to(target)
    done = subprocess.run(
        shim_argv(directory), capture_output=True, text=True, check=False, timeout=30
    )
    assert target.stat().st_uid == 0
    assert "a job has had access already" in done.stderr


async def test_a_directory_is_removed_however_deep_it_is(harness: WorkerHarness) -> None:
    """A job may nest directories without end, and its agent forgets it all the same."""
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    with contextlib.chdir(harness.directory(key)):
        nest()
    await harness.runner.forget(key)
    assert not harness.directory(key).exists()


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
