"""Whether the kernel says that a worker was ended for want of memory."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from agent.shim.out_of_memory import oom_kills, why_killed
from agent.workers.shim_runner import ShimRunner
from agent.workers.starters import DetachedStarter, detached_argv, run_command, unit_name
from common.clock import SystemClock
from common.failure_rules import read_rules
from common.failures import RetryClass
from common.messages import WorkerOrder
from common.model import JobId, WorkerKey
from tests.harness.node.workers import PATIENCE_S, WorkerHarness, make_harness, make_order
from tests.tables import each_row

UNIT = unit_name(WorkerKey(JobId("job-1"), 2, 0))
SLICE = "/aryl.slice/aryl-jobs.slice"


@each_row(
    ("line", "place", "file"),
    [
        ("0::{}", "", "memory.events"),
        ("9:memory:{}", "memory", "memory.oom_control"),
    ],
)
@each_row(("unit", "expected"), [(UNIT, (3, 4)), ("aryl-agent.service", None)])
def test_the_kernel_s_count_is_that_of_the_worker_s_own_unit(
    tmp_path: Path, line: str, place: str, file: str, unit: str, expected: tuple[int, int] | None
) -> None:
    """By both versions of control groups; a group that others share tells nothing."""
    group = f"{SLICE}/{unit}"
    groups = tmp_path / "cgroup"
    groups.write_text(f"1:name=systemd:{group}\n{line.format(group)}\n")
    counts = tmp_path / "fs" / place / group.lstrip("/")
    counts.mkdir(parents=True)
    (counts / file).write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    (counts / "memory.failcnt").write_text("4\n")
    assert oom_kills(str(groups), str(tmp_path / "fs")) == expected
    (counts / file).unlink()
    assert oom_kills(str(groups), str(tmp_path / "fs")) is None


@each_row(
    ("exit_code", "before", "now", "reason"),
    [
        (-9, (0, 0), (1, 1), "cpu_out_of_memory"),
        (137, (2, 5), (3, 6), "cpu_out_of_memory"),
        (-9, (0, 0), (1, 0), "no_signature"),
        (137, (0, 3), (1, 3), "no_signature"),
        (1, (0, 0), (1, 1), ""),
        (-9, (1, 1), (1, 1), ""),
        (-9, None, (1, 1), ""),
        (-9, (0, 0), None, ""),
    ],
)
def test_a_kill_is_for_want_of_memory_only_where_the_count_has_grown(
    exit_code: int, before: tuple[int, int] | None, now: tuple[int, int] | None, reason: str
) -> None:
    """What the shim then says is read as out of memory where the worker came to its own limit, and
    has it tried on another node where its node had no memory left; a person's SIGKILL is neither.
    """
    said = why_killed(exit_code, before, now)
    assert bool(said) == bool(reason)
    if reason:
        found = read_rules().classify(b"step 1\n", exit_code=exit_code, error=said)
        assert found.reason == reason
        retry = RetryClass.NEVER if reason == "cpu_out_of_memory" else RetryClass.ELSEWHERE
        assert found.retry == retry


# --- a real kill ---------------------------------------------------------------------------------

LIMIT_BYTES = 100_000_000
EATER = "eaten = []\nwhile True: eaten.append(bytearray(10_000_000))"
LAUNCHER = f"""
import subprocess, sys
rank = subprocess.run([sys.executable, "-c", {EATER!r}])
sys.exit(128 - rank.returncode)
"""


def make_groups(parent: str, unit: str, *, is_own_limit: bool) -> Path | None:
    """The control group of a unit in a slice, of which one has little memory, by whichever version
    has that controller; None where this account may not make any."""
    for root, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        outer = Path(root, parent)
        group = outer / unit
        if not Path(root, "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            outer.mkdir()
            if (outer / "cgroup.subtree_control").exists():
                (outer / "cgroup.subtree_control").write_text("+memory")
            group.mkdir()
            if (group / limit).exists():
                ((group if is_own_limit else outer) / limit).write_text(str(LIMIT_BYTES))
                return group
        remove(group)
    return None


def remove(group: Path) -> None:
    """A unit's group and its slice."""
    for made in (group, group.parent):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            made.rmdir()


class UnitStarter(DetachedStarter):
    """Starts a shim in a control group that is there, as systemd does in that of its unit."""

    def __init__(self, group: Path) -> None:
        super().__init__(SystemClock())
        self._enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        argv = ("/bin/sh", "-c", self._enter, "sh", *detached_argv(directory))
        log = directory / "shim.log"
        await run_command(argv, log=log, clock=SystemClock(), timeout_s=PATIENCE_S)


JOB = f"job-{os.getpid()}"
"""Groups are the machine's, and tests run side by side."""


@pytest.fixture(params=[True])
def unit_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The group of the unit of a worker; its parameter: whether the limit is its own."""
    unit = unit_name(make_order(job_id=JOB).key)
    group = make_groups(f"aryl-test-{JOB}", unit, is_own_limit=request.param)
    if group is None:
        pytest.skip("no control group with a limit of memory can be made here")
    yield group
    remove(group)


@pytest.fixture
async def harness(tmp_path: Path, unit_group: Path) -> AsyncGenerator[WorkerHarness, None]:
    """A run directory whose shims are in the group of that unit."""
    async for made in make_harness(tmp_path / "workers"):
        made.runner = ShimRunner(
            made.run_dir, clock=made.clock, starter=UnitStarter(unit_group), is_root_allowed=True
        )
        yield made
        await made.until(lambda: not (unit_group / "cgroup.procs").read_text(), "all have left")


@pytest.mark.slow
@pytest.mark.parametrize(("program", "exit_code"), [(EATER, -9), (LAUNCHER, 137)])
@pytest.mark.parametrize(
    ("unit_group", "said", "retry"),
    [
        (True, "out of memory: the kernel killed a process of it (oom_kill ", RetryClass.NEVER),
        (False, "the node had no memory left, and the kernel killed", RetryClass.ELSEWHERE),
    ],
    indirect=["unit_group"],
)
async def test_a_worker_that_the_kernel_ends_for_its_memory_says_so(
    harness: WorkerHarness, program: str, exit_code: int, said: str, retry: RetryClass
) -> None:
    """A real kill of the worker, or of a rank below its launcher, at its own limit or at one of
    all around it; the shim lives to tell it."""
    key = await harness.start(make_order(sys.executable, "-c", program, job_id=JOB))
    status = await harness.until_exited(key)
    assert status.exit_code == exit_code
    assert status.error.startswith(said)
    found = read_rules().classify(b"", exit_code=exit_code, error=status.error)
    assert found.retry == retry


@pytest.mark.slow
async def test_a_worker_that_somebody_kills_is_not_told_as_out_of_memory(
    harness: WorkerHarness,
) -> None:
    """The same signal in the same group, and the kernel has nothing to do with it."""
    key = await harness.start(make_order("/bin/sh", "-c", "kill -9 $$", job_id=JOB))
    status = await harness.until_exited(key)
    assert (status.exit_code, status.error) == (-9, "")
