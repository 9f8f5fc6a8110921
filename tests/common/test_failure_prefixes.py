"""A failure is the same whatever launchers and terminals put before its program's lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.failure_rules import read_rules
from common.log_prefixes import bare_lines
from tests.common.failure_logs import LOGS, NCCL, PASSING, STEPS, TRACEBACK
from tests.common.test_failures import SEEN

RULES = read_rules()

PREFIXES = {
    "torchrun": "[default{rank}]:",
    "torchrun of a role": "[trainer{rank}]:[rank{rank}]: ",
    "mpirun --tag-output": "[1,{rank}]<stderr>:",
    "mpirun --tag-output of Open MPI 5": "[1,{rank}]<stderr>: ",
    "horovodrun": "[{rank}]<stderr>:",
    "srun -l": "{rank}: ",
    "srun -l of many": "0{rank}: ",
    "srun -l of ten and more": " {rank}: ",
    "pdsh": "gpu-n{rank}: ",
    "pdsh of a domain": "n{rank}.lan: ",
    "pdsh of an address": "10.0.0.{rank}: ",
    "ray": "(pid=123{rank}) ",
    "ray of an actor": "(RayTrainWorker pid=4{rank}, ip=10.0.0.{rank}) ",
    "docker compose": "trainer-{rank}  | ",
    "a log driver's time": "2026-03-01T12:00:0{rank}.123Z ",
    "colour": "\x1b[3{rank}m",
    "a time and a launcher": "2026-03-01 12:00:0{rank},123 [1,{rank}]<stderr>:",
}

TOLD = [
    *((expected, f"step 1 loss 2.3\n{log}\nexiting\n") for expected, log in SEEN),
    *(row[1:] for row in LOGS if "[rank" not in row[2]),
    *((expected, f"{TRACEBACK}{line}\n") for expected, line in PASSING),
]


def named(prefix: str, rank: int, log: str) -> str:
    """The same lines as a launcher prints them."""
    return "".join(f"{prefix.format(rank=rank)}{line}\n" for line in log.splitlines())


@pytest.mark.parametrize("name", PREFIXES)
def test_no_launcher_changes_a_reason_or_its_class(name: str) -> None:
    """With its prefix before each line every log has the reason and the class of the bare log."""
    for expected, log in TOLD:
        bare = RULES.classify(log.encode(), exit_code=1)
        told = RULES.classify(named(PREFIXES[name], 3, log).encode(), exit_code=1)
        assert (bare.reason, told.reason, told.retry) == (expected, expected, bare.retry), log


@pytest.mark.parametrize("name", PREFIXES)
def test_of_ranks_that_write_by_turns_the_one_with_the_fault_decides(name: str) -> None:
    """Its peers' broken collectives do not hide it, though their lines stand between its own."""
    own, peers = (
        named(PREFIXES[name], rank, STEPS + TRACEBACK + words).splitlines()
        for rank, words in ((3, "KeyError: 'label'\n"), (2, NCCL.splitlines()[0] + "\n"))
    )
    log = "\n".join(line for pair in zip(own, peers, strict=True) for line in pair)
    if name not in ("a log driver's time", "colour"):  # these do not say whose a line is
        assert RULES.classify(log.encode(), exit_code=1).reason == "semantic_error"
    after = "\n".join([*own, *peers])
    assert RULES.classify(after.encode(), exit_code=1).reason == "semantic_error"


def test_what_stands_before_a_traceback_and_its_frames_is_a_prefix() -> None:
    """Of a launcher that nobody here knows too; it is taken off its other lines as well."""
    script = "/w/run.sh: line 3: module: command not found\n"
    log = named("pod-0 main ", 0, script + TRACEBACK + NCCL)
    assert RULES.classify(log.encode(), exit_code=1).reason == "mpi_error"


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: bad",
        "srun: error: n7: task 3: Exited with exit code 1",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.",
        "/w/run.sh: line 3: module: command not found",
        "run1.sh: line 3: module: command not found",
        "rm: cannot remove 'a': No such file or directory",
        "libcudart.so.11: cannot open shared object file",
        "WARNING: apex not used",
        "WARNING | apex not used",
        "[WARNING]: apex not used",
        "step: 5 loss: 2.3",
        "[INFO] saved",
        "[2026-03-01 12:00:00,100] [INFO] killing",
        "[E301 12:40:00.123 ProcessGroupNCCL.cpp:616] timeout",
        "Original Traceback (most recent call last):",
        "(see pid 12) over",
        "    indented",
    ],
)
def test_words_of_a_program_are_no_prefix(line: str) -> None:
    """Neither an exception's kind, a command's name or a level, nor what is only like a prefix."""
    assert [told.text for told in bare_lines([line])] == [line]


def test_a_name_that_may_be_a_command_s_counts_only_where_most_lines_have_it() -> None:
    """One line of a host or a number among others is the program's own."""
    lines = ["starting", "gcc11: bad", "3: third", "going on", "done"]
    assert [told.text for told in bare_lines(lines)] == lines


@given(st.lists(st.text(alphabet="[]()<>|: 1an,-.\x1b[31mTZ", max_size=40), max_size=8))
def test_what_is_left_is_the_end_of_the_line(lines: list[str]) -> None:
    """Of a line without a terminal's codes only its beginning is taken off, and no line is lost."""
    told = bare_lines(lines)
    assert len(told) == len(lines)
    for line, bare in zip(lines, told, strict=True):
        assert "\x1b" in line or line.endswith(bare.text)


@pytest.mark.parametrize("name", PREFIXES)
def test_a_site_s_rule_needs_no_prefix(tmp_path: Path, name: str) -> None:
    """A pattern that begins with ^ is that of the program's line."""
    path = tmp_path / "site.toml"
    path.write_text(
        "[[signature]]\nreason = 'incorrect_inputs'\npatterns = ['^shard \\d+: checksum differs']\n"
    )
    log = named(PREFIXES[name], 3, "step 1\nshard 12: checksum differs\n")
    assert read_rules(str(path)).classify(log.encode(), exit_code=1).reason == "incorrect_inputs"


@pytest.mark.parametrize("level", ["[WARNING]: ", "[WARN]: ", "2026-03-01 12:00:00,100 [DEBUG]: "])
def test_a_level_in_brackets_is_no_rank(level: str) -> None:
    """What stands behind it is said in passing: no gang is given up for it."""
    few, many = ("".join(f"shard {at} is read\n" for at in range(count)) for count in (5, 60))
    said = f"{level}cannot read /root/.cache/x: Permission denied\n{few}"
    lost = RULES.classify((said + TRACEBACK + NCCL).encode(), exit_code=1)
    assert lost.reason == "mpi_error"
    missing = f"{level}No module named 'apex': the slow path is taken\n{many}"
    assert RULES.classify(missing.encode(), exit_code=139).reason == "invalid_memory_access"
