"""Whose fault it is that a worker cannot start: its job names what is not there, or its node is not
well, which no job is charged for."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.state import Refusal
from agent.shim import files as shim_files
from agent.shim import paths as shim_paths
from agent.shim.worker_process import Worker
from agent.workers import reserve_check
from agent.workers.record import bury, read_record
from agent.workers.runner import WorkerStatus
from agent.workers.shim_runner import ShimRunner
from agent.workers.spec import Account
from agent.workers.starters import DetachedStarter
from common.clock import SystemClock
from common.faults import Fault
from common.messages import WorkerPhase
from tests.harness.node.agent import NodeHarness
from tests.harness.node.life import key
from tests.harness.node.workers import make_order

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


async def said(asked: dict[str, str], checker: Path = reserve_check.CHECKER) -> Refusal | None:
    """The answer of a real process."""
    return await reserve_check.refusal(asked, account=None, clock=SystemClock(), checker=checker)


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
    assert answer is not None
    assert answer.error
    named = next(iter(changes)).replace("checkpoint_path", "checkpoint.path")
    assert (answer.fault, answer.refused_for) == (Fault.JOB, named)


async def test_a_question_that_no_process_could_be_asked_is_the_jobs_own_fault(
    tmp_path: Path,
) -> None:
    """Its own process could not be given that either."""
    answer = await said(question(tmp_path, command="x" * 200_000))
    assert answer is not None
    assert "Argument list too long" in answer.error
    assert (answer.fault, answer.refused_for) == (Fault.JOB, "command")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOTCONN])
@pytest.mark.parametrize("field", ["workdir", "checkpoint_path", "command"])
async def test_storage_that_answers_with_an_error_is_its_nodes_fault(
    tmp_path: Path, field: str, number: int
) -> None:
    """A stale mount is not the same as a directory that is not there; the path is told."""
    broken = tmp_path / "mount"
    checker = tmp_path / "checker.py"
    real = str(reserve_check.CHECKER)
    checker.write_text(STALE.format(broken=str(broken), number=number, checker=real))
    answer = await said(question(tmp_path, **{field: str(broken / "x")}), checker)
    assert answer is not None
    assert (answer.fault, answer.refused_for) == (Fault.NODE, "")
    assert str(broken) in answer.error
    assert errno.errorcode[number] in answer.error
    assert await said(question(tmp_path), checker) is None


async def test_a_command_is_looked_for_behind_a_folder_that_is_not_well(tmp_path: Path) -> None:
    """As execvpe does; what is found there can start."""
    broken = tmp_path / "mount"
    checker = tmp_path / "checker.py"
    real = str(reserve_check.CHECKER)
    checker.write_text(STALE.format(broken=str(broken), number=errno.ESTALE, checker=real))
    path = f"{broken}:{Path(sys.executable).parent}"
    assert await said(question(tmp_path, search_path=path), checker) is None


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise MemoryError"])
async def test_a_look_that_is_ended_is_its_nodes_fault(tmp_path: Path, end: str) -> None:
    """By who kills for memory, or for want of it."""
    checker = tmp_path / "checker.py"
    checker.write_text(f"import os\n{end}\n")
    answer = await said(question(tmp_path), checker)
    assert answer is not None
    assert answer.error.startswith("cannot look as the job's user: exit code")
    assert answer.fault == Fault.NODE


async def test_a_look_that_cannot_begin_is_its_nodes_fault(tmp_path: Path) -> None:
    """Nothing is known of the job's paths then."""
    with files_left(0):
        answer = await said(question(tmp_path))
    assert answer is not None
    assert answer.error.startswith("cannot look as the job's user")
    assert "Too many open files" in answer.error
    assert answer.fault == Fault.NODE


async def test_an_agent_whose_workers_would_be_root_is_to_blame_itself(tmp_path: Path) -> None:
    """It would refuse every job, one after the other."""
    clock = SystemClock()
    runner = ShimRunner(tmp_path, clock=clock, starter=DetachedStarter(clock), account=ROOT)
    answer = await runner.check_reserve(make_order("true", workdir=str(tmp_path)))
    assert answer is not None
    assert answer.error.startswith("job_user:")
    assert answer.fault == Fault.NODE


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


@pytest.mark.parametrize("fault", [Fault.NODE, Fault.NONE])
async def test_what_a_shim_says_of_its_node_is_reported_as_the_nodes_fault(fault: Fault) -> None:
    """So that the coordinator charges the right budget."""
    harness = NodeHarness()
    await harness.run_one()
    harness.runner.known[key()] = WorkerStatus(
        key=key(), phase=WorkerPhase.EXITED, pid=0, exit_code=126, error="ENOMEM", fault=fault
    )
    await harness.turn(2)
    assert (harness.said().error, harness.said().fault) == ("ENOMEM", fault)


def write_record(directory: Path, *, phase: str, error: str) -> None:
    """The status of a shim that no process is."""
    record = {
        "phase": phase, "pid": 1, "start_ticks": 1, "shim_pid": 1, "shim_start_ticks": 1,
        "boot_id": "b", "started_boot_s": 1.0, "updated_boot_s": 1.0, "error": error,
    }  # fmt: skip
    (directory / shim_files.STATUS_FILE).write_text(json.dumps(record))


@pytest.mark.parametrize("boot_id", ["b", "another"])
def test_who_buries_a_worker_says_at_once_that_its_shim_was_lost(
    tmp_path: Path, boot_id: str
) -> None:
    """What this look says is reported before the next one reads the record."""
    write_record(tmp_path, phase="running", error="")
    record = read_record(tmp_path)
    assert record is not None
    buried = bury(tmp_path, record, boot_id=boot_id, now_s=5.0)
    assert (buried.phase, buried.fault) == (WorkerPhase.EXITED, Fault.SHIM_LOST)
    assert read_record(tmp_path) == buried


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (f"{shim_paths.NODE_ERROR}: 'x': ENOMEM", Fault.NODE),
        ("cannot start 'x': ENOENT", Fault.NONE),
        ("shim lost: the node has booted since", Fault.SHIM_LOST),
        ("", Fault.NONE),
    ],
)
def test_whose_fault_it_is_is_read_from_a_record(tmp_path: Path, error: str, fault: Fault) -> None:
    """A shim says it in words alone."""
    write_record(tmp_path, phase="exited", error=error)
    found = read_record(tmp_path)
    assert found is not None
    assert (found.fault, found.error) == (fault, error)
