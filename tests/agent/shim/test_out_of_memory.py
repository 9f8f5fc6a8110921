"""Whether the kernel says that a worker was ended for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.shim.out_of_memory import oom_kills, why_killed
from agent.workers.starters import unit_name
from common.failure_rules import read_rules
from common.model import JobId, WorkerKey

UNIT = unit_name(WorkerKey(JobId("job-1"), 2, 0))
SLICE = "/aryl.slice/aryl-jobs.slice"


@pytest.mark.parametrize(
    ("line", "place", "file"),
    [
        ("0::{}", "", "memory.events"),
        ("9:memory:{}", "memory", "memory.oom_control"),
    ],
)
@pytest.mark.parametrize(("unit", "expected"), [(UNIT, 3), ("aryl-agent.service", None)])
def test_the_kernel_s_count_is_that_of_the_worker_s_own_unit(
    tmp_path: Path, line: str, place: str, file: str, unit: str, expected: int | None
) -> None:
    """By both versions of control groups; a group that others share tells nothing."""
    group = f"{SLICE}/{unit}"
    groups = tmp_path / "cgroup"
    groups.write_text(f"1:name=systemd:{group}\n{line.format(group)}\n")
    counts = tmp_path / "fs" / place / group.lstrip("/")
    counts.mkdir(parents=True)
    (counts / file).write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(str(groups), str(tmp_path / "fs")) == expected
    (counts / file).unlink()
    assert oom_kills(str(groups), str(tmp_path / "fs")) is None


@pytest.mark.parametrize(
    ("exit_code", "before", "now", "is_told"),
    [
        (-9, 0, 1, True),
        (137, 2, 3, True),
        (1, 0, 1, False),
        (-9, 1, 1, False),
        (-9, None, 1, False),
        (-9, 0, None, False),
    ],
)
def test_a_kill_is_for_want_of_memory_only_where_the_count_has_grown(
    exit_code: int, before: int | None, now: int | None, *, is_told: bool
) -> None:
    """What the shim then says is read as out of memory; a person's SIGKILL is not."""
    said = why_killed(exit_code, before, now)
    assert bool(said) == is_told
    found = read_rules().classify(b"step 1\n", exit_code=exit_code, error=said)
    assert (found.reason == "cpu_out_of_memory") == is_told
