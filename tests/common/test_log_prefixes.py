"""A failure is the same whatever launchers and terminals put before its program's lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.failure_rules import read_rules
from common.log_prefixes import MOST_PREFIX_CHARS, Line, bare_lines
from tests.common.failure_logs import LOGS, NCCL, PASSING, STEPS, TRACEBACK
from tests.common.test_failure_rules import SEEN
from tests.tables import each_row

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


@each_row("name", PREFIXES)
def test_no_launcher_changes_a_reason_or_its_class(name: str) -> None:
    """With its prefix before each line every log has the reason and the class of the bare log."""
    for expected, log in TOLD:
        bare = RULES.classify(log.encode(), exit_code=1)
        told = RULES.classify(named(PREFIXES[name], 3, log).encode(), exit_code=1)
        assert (bare.reason, told.reason, told.retry) == (expected, expected, bare.retry), log


@each_row("name", PREFIXES)
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


@each_row(
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
        "warning | apex not used",
        "2026-03-01 12:00:00: bad",
        "train2.py: error: bad",
        "[rank]: bad",
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


@pytest.mark.parametrize(
    ("lines", "is_named"),
    [
        (["starting", "gcc11: bad", "3: third", "going on", "done"], False),
        (["starting", "gcc11: bad", "3: third", "going on"], True),
        (["starting", "gcc11: bad", "", "  ", ""], True),
    ],
    ids=["two of five", "two of four", "one of two and blank ones"],
)
def test_a_name_that_may_be_a_command_s_counts_only_where_half_of_the_lines_have_it(
    lines: list[str], *, is_named: bool
) -> None:
    """One line of a host or a number among others is the program's own; blank ones say nothing."""
    assert ([told.text for told in bare_lines(lines)] != lines) == is_named


@each_row(
    "code",
    [
        "\x1b[31m",
        "\x1b[1;31m",
        "\x1b[38:5:1m",
        "\x1b[m",
        "\x1b[2K",
        "\x1b[A",
        "\x1b[?25l",
        "\x1b]0;n7: train\x07",
        "\x1b(B",
    ],
)
def test_what_a_terminal_is_told_is_no_word_of_the_program(code: str) -> None:
    """Colours in any form, movements, what it hides, titles and character sets: at the beginning
    of a line and within it."""
    assert bare_lines([f"{code}KeyError: {code}'x'"]) == [Line("KeyError: 'x'")]


@each_row(
    "time",
    [
        "2026-03-01 12:00:00 ",
        "2026-03-01T12:00:00Z\t",
        "2026-03-01T12:00:00.123456789Z ",
        "2026-03-01 12:00:00,123 ",
        "2026-03-01T12:00:00+02:00 ",
        "2026-03-01T12:00:00.123-0500 ",
    ],
)
def test_a_time_is_taken_off_in_whatever_form_and_says_nobody_s_name(time: str) -> None:
    """With parts of a second or none, with a zone or none, before a rank's name and after it."""
    assert bare_lines([f"{time}KeyError: 'x'"]) == [Line("KeyError: 'x'")]
    assert bare_lines([f"{time}[rank3]: {time}bad"]) == [Line("bad", "[rank3]: ")]


@each_row(
    "name",
    [
        "[3]: ",
        "[rank12]:",
        "[1,12]: ",
        "[1,12]<stdout>:",
        "[1][12]<stderr>:",
        "[12]<stdout>: ",
        "(pid=1234) ",
        "(train_loop_of_a_long_name_per_worker pid=1234) ",
        "(train pid=1234, ip=fd00::7) ",
        "trainer_1 | ",
        "0trainer-1    | ",
        "my.app2-worker_12                | ",
        "     3: ",
        "123456: ",
        "10.0.0.12: ",
        "gpu.rack3.lan: ",
        "n3.r2.site.lan: ",
        "gpu-n12: ",
        "n7: [rank3]: ",
        "[1,3]<stderr>:n7: ",
    ],
)
def test_a_launcher_s_name_is_the_speaker_of_a_line(name: str) -> None:
    """All that launchers write to say who speaks, in their several versions, and nothing else."""
    assert bare_lines([f"{name}KeyError: 'x'"]) == [Line("KeyError: 'x'", name)]


def prefixed(prefix: str) -> list[str]:
    """A traceback with something before each of its lines."""
    return [f"{prefix}{line}" for line in (*TRACEBACK.splitlines(), "KeyError: 'x'")]


@pytest.mark.parametrize("length", [1, 60, MOST_PREFIX_CHARS])
def test_a_prefix_that_nobody_here_knows_is_a_speaker_too(length: int) -> None:
    """Beside a name that is known, whatever it is; of two that begin alike the longer one."""
    prefix = "p" * length
    told = bare_lines(["[rank3]: " + line for line in prefixed(prefix)])
    assert told == [Line(line, f"[rank3]: {prefix}") for line in prefixed("")]
    both = [*prefixed("w "), *prefixed("w 1 ")]
    assert [line.text for line in bare_lines(both)] == prefixed("") * 2


@each_row(
    "lines",
    [
        prefixed("q" * 100),
        prefixed("  "),
        ['see   File "a.py", line 3, in f', "see also"],
        ["said: Traceback (most recent call last):", "said: no more"],
    ],
    ids=["a quotation", "an indentation", "a frame alone", "a header alone"],
)
def test_not_all_that_stands_before_a_traceback_is_a_prefix(lines: list[str]) -> None:
    """A line that quotes one at length, one that is set in, and halves of one stay as they are."""
    assert [told.text for told in bare_lines(lines)] == lines


SAY_WHO = [name for name in PREFIXES if name not in ("a log driver's time", "colour")]


@each_row("prefix", [*(PREFIXES[name] for name in SAY_WHO), "pod-{rank} main "])
def test_a_traceback_goes_on_in_its_own_rank_s_lines(prefix: str) -> None:
    """What another rank says between its header and its end is not that end; so the fault of the
    one outweighs the lost connection that the other is told much later."""
    begin, *rest = named(prefix, 3, TRACEBACK + "KeyError: 'label'\n").splitlines()
    between = named(prefix, 2, "rank 3 is late\n").splitlines()
    reads = "".join(f"shard {number} is read\n" for number in range(12))
    lost = named(prefix, 2, reads + TRACEBACK + NCCL).splitlines()
    log = "\n".join([begin, *between, *rest, *lost])
    assert RULES.classify(log.encode(), exit_code=1).reason == "semantic_error"


@given(st.lists(st.text(alphabet="[]()<>|: 1an,-.\x1b[31mTZ", max_size=40), max_size=8))
def test_what_is_left_is_the_end_of_the_line(lines: list[str]) -> None:
    """Of a line without a terminal's codes only its beginning is taken off, and no line is lost."""
    told = bare_lines(lines)
    assert len(told) == len(lines)
    for line, bare in zip(lines, told, strict=True):
        assert "\x1b" in line or line.endswith(bare.text)


@each_row("name", PREFIXES)
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
