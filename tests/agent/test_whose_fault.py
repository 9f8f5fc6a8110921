"""Whose fault it is that a worker cannot start: its job names what is not there, or its node is not
well, which no job is charged for."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent import reserve, shim_paths
from agent.runner import WorkerStatus
from agent.shim_worker import Worker
from agent.starters import DetachedStarter
from agent.worker_spec import Account
from agent.workers import ShimRunner
from common.clock import SystemClock
from common.faults import NODE_FAULT
from common.messages import WorkerPhase
from tests.agent.bench import key
from tests.agent.node_house import House
from tests.agent.worker_house import make_order

pytestmark = pytest.mark.slow

ROOT = Account(name="root", uid=0, gid=0, home="/root")
STALE = """
import errno, os, runpy, sys
real, broken = os.stat, os.path.realpath({broken!r})
def stat(path, *args, **kwargs):
    if os.path.realpath(path).startswith(broken):
        raise OSError({number}, os.strerror({number}), path)
    return real(path, *args, **kwargs)
os.stat = stat
runpy.run_path({checker!r}, run_name="__main__")
"""
"""A machine on which one mount answers everything with an error."""


def question(directory: Path, **changes: str) -> dict[str, str]:
    """About a worker that can start; `changes` replace what it names."""
    asked = {
        "workdir": str(directory),
        "checkpoint_path": "",
        "command": Path(sys.executable).name,
        "search_path": str(Path(sys.executable).parent),
    }
    return asked | changes


async def said(asked: dict[str, str], checker: Path = reserve.CHECKER) -> str:
    """The answer of a real process."""
    return await reserve.refusal(asked, account=None, clock=SystemClock(), checker=checker)


@contextmanager
def files_left(count: int) -> Generator[None]:
    """This process can open so many files and no more."""
    spare = [os.dup(0) for _ in range(count + 1)]
    for number in spare:
        os.close(number)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "changes",
    [
        {"workdir": "/nowhere/at/all"},
        {"workdir": "/dev/null/below-a-file"},
        {"workdir": "/" + "x" * 300},
        {"checkpoint_path": "/nowhere/at/all/ckpt"},
        {"command": "no-such-command"},
        {"command": "/dev/null"},
    ],
)
async def test_what_is_not_there_is_the_jobs_own_fault(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    """It would be refused on every node."""
    answer = await said(question(tmp_path, **changes))
    assert answer
    assert not answer.startswith(NODE_FAULT)


async def test_a_question_that_no_process_could_be_asked_is_the_jobs_own_fault(
    tmp_path: Path,
) -> None:
    """Its own process could not be given that either."""
    answer = await said(question(tmp_path, command="x" * 200_000))
    assert "Argument list too long" in answer
    assert not answer.startswith(NODE_FAULT)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOTCONN])
@pytest.mark.parametrize("field", ["workdir", "checkpoint_path", "command"])
async def test_storage_that_answers_with_an_error_is_its_nodes_fault(
    tmp_path: Path, field: str, number: int
) -> None:
    """A stale mount is not the same as a directory that is not there; the path is told."""
    broken = tmp_path / "mount"
    checker = tmp_path / "checker.py"
    real = str(reserve.CHECKER)
    checker.write_text(STALE.format(broken=str(broken), number=number, checker=real))
    answer = await said(question(tmp_path, **{field: str(broken / "x")}), checker)
    assert answer.startswith(NODE_FAULT)
    assert str(broken) in answer
    assert errno.errorcode[number] in answer
    assert await said(question(tmp_path), checker) == ""


async def test_a_command_is_looked_for_behind_a_folder_that_is_not_well(tmp_path: Path) -> None:
    """As execvpe does; what is found there can start."""
    broken = tmp_path / "mount"
    checker = tmp_path / "checker.py"
    real = str(reserve.CHECKER)
    checker.write_text(STALE.format(broken=str(broken), number=errno.ESTALE, checker=real))
    path = f"{broken}:{Path(sys.executable).parent}"
    assert await said(question(tmp_path, search_path=path), checker) == ""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise MemoryError"])
async def test_a_look_that_is_ended_is_its_nodes_fault(tmp_path: Path, end: str) -> None:
    """By who kills for memory, or for want of it."""
    checker = tmp_path / "checker.py"
    checker.write_text(f"import os\n{end}\n")
    answer = await said(question(tmp_path), checker)
    assert answer.startswith(f"{NODE_FAULT}: cannot look as the job's user: exit code")


async def test_a_look_that_cannot_begin_is_its_nodes_fault(tmp_path: Path) -> None:
    """Nothing is known of the job's paths then."""
    with files_left(0):
        answer = await said(question(tmp_path))
    assert answer.startswith(f"{NODE_FAULT}: cannot look as the job's user")
    assert "Too many open files" in answer


async def test_an_agent_whose_workers_would_be_root_is_to_blame_itself(tmp_path: Path) -> None:
    """It would refuse every job, one after the other."""
    clock = SystemClock()
    runner = ShimRunner(tmp_path, clock=clock, starter=DetachedStarter(clock), account=ROOT)
    answer = await runner.check_reserve(make_order("true", workdir=str(tmp_path)))
    assert answer.startswith(f"{NODE_FAULT}: job_user:")


def test_a_shim_tells_a_node_that_cannot_start_it_from_a_command_that_cannot_start(
    tmp_path: Path,
) -> None:
    """Want of files or memory is not in what the job names."""
    env = {"PATH": os.defpath}
    log_fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    try:
        with files_left(2):  # its pipe takes them
            worker = Worker(["true"], env, str(tmp_path), log_fd)
        os.waitpid(worker.pid, 0)
        assert worker.error.startswith(shim_paths.NODE_ERROR)
        for command in ("no-such-command", "/dev", "/dev/null"):
            worker = Worker([command], env, str(tmp_path), log_fd)
            os.waitpid(worker.pid, 0)
            assert worker.error.startswith("cannot start")
    finally:
        os.close(log_fd)


@pytest.mark.parametrize(
    ("error", "is_nodes"),
    [(f"{shim_paths.NODE_ERROR}: 'x': ENOMEM", True), ("cannot start 'x': ENOENT", False)],
)
async def test_what_a_shim_says_of_its_node_is_reported_as_the_nodes_fault(
    error: str, *, is_nodes: bool
) -> None:
    """So that the coordinator charges the right budget."""
    house = House()
    await house.run_one()
    house.runner.known[key()] = WorkerStatus(
        key=key(), phase=WorkerPhase.EXITED, pid=0, exit_code=126, error=error
    )
    await house.turn(2)
    assert error in house.said().error
    assert house.said().error.startswith(NODE_FAULT) == is_nodes
