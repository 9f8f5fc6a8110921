"""What a traceback, or a line in passing, says of the end of a program that may have gone on."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from common.failure_rules import read_rules
from common.failures import RetryClass
from tests.common.failure_logs import (
    CAUGHT_EVALUATION,
    CAUGHT_FILE,
    LOST,
    NCCL,
    OOM,
    OUTLIVED,
    TRACEBACK,
    WATCHDOG,
    epochs,
    of_rank,
    steps,
)
from tests.tables import each_row

RULES = read_rules()


@each_row(
    ("expected", "exit_code", "log"), [each[1:] for each in OUTLIVED], ids=[o[0] for o in OUTLIVED]
)
def test_what_a_program_outlived_is_not_its_end(expected: str, exit_code: int, log: str) -> None:
    """An exception that was caught and printed counts only where nothing else ended the program."""
    assert RULES.classify(log.encode(), exit_code=exit_code).reason == expected


def _print_exc() -> str:
    out = io.StringIO()
    traceback.print_exc(file=out)
    return out.getvalue()


def _exception() -> str:
    out = io.StringIO()
    record = logging.LogRecord("data", logging.ERROR, __file__, 1, "no index", None, None)
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.emit(record)
    return out.getvalue() + _print_exc()


@pytest.mark.parametrize("told", [_print_exc, _exception])
def test_python_s_own_words_are_read(told: Callable[[], str], tmp_path: Path) -> None:
    """What Python prints of an exception that was caught does not give a job up hours later."""
    caught = ""
    try:
        (tmp_path / "cache.idx").read_bytes()
    except FileNotFoundError:
        caught = told()
    log = caught + steps(400) + TRACEBACK + LOST
    assert "FileNotFoundError" in caught
    failure = RULES.classify(log.encode(), exit_code=1)
    assert (failure.reason, failure.retry) == ("mpi_runtime_failure", RetryClass.BACK_OFF)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(99, "incorrect_inputs"), (100, "mpi_error")],
)
def test_so_many_lines_of_progress_prove_that_it_was_caught(count: int, expected: str) -> None:
    """Fewer may be those of other ranks, which go on until they wait for the one that died."""
    log = CAUGHT_FILE + steps(count) + TRACEBACK + NCCL
    assert RULES.classify(log.encode(), exit_code=1).reason == expected


def test_a_loop_must_have_gone_on_for_as_long_once() -> None:
    """The same traceback of several ranks that fail together is no loop that goes on after each."""
    together = steps(400) + CAUGHT_EVALUATION * 8 + TRACEBACK + NCCL
    assert RULES.classify(together.encode(), exit_code=1).reason == "semantic_error"
    loop = epochs(8, CAUGHT_EVALUATION) + TRACEBACK + NCCL
    assert RULES.classify(loop.encode(), exit_code=1).reason == "mpi_error"


def test_what_is_not_told_in_the_same_words_is_another_failure() -> None:
    """An exception from another call, or of another kind, is not taken for the one of a loop."""
    loop = epochs(8, CAUGHT_EVALUATION)
    for other in (
        CAUGHT_EVALUATION.replace("in evaluate", "in predict"),
        CAUGHT_EVALUATION.replace("in train", "in main"),
        CAUGHT_EVALUATION.replace("KeyError", "IndexError"),
    ):
        log = loop + other + TRACEBACK + NCCL
        assert RULES.classify(log.encode(), exit_code=1).reason == "semantic_error"


WRAPPER = (
    "/w/run.sh: line 3: module: command not found\n",
    "-bash: line 3: nvidia-smi: command not found\n",
    "/w/run.sh: line 4: /etc/profile.d/modules.sh: No such file or directory\n",
    "./run.sh: 4: .: /etc/profile.d/modules.sh: Permission denied\n",
    "rm: cannot remove '/scratch/cache': No such file or directory\n",
    "mkdir: cannot create directory '/data': Permission denied\n",
    "chmod: changing permissions of '/data': Operation not permitted\n",
    "/w/run.sh: line 2: ulimit: open files: cannot modify limit: Operation not permitted\n",
    "oom 0\noom_kill 0\n",
)
"""Lines of scripts that went on to their next command."""
OOPS = "deepstuff.Oops: what now\n"
UNCAUGHT = (
    ("mpi_runtime_failure", LOST),
    ("mpi_error", NCCL),
    ("cuda_failure", "RuntimeError: CUDA error: unspecified launch failure\n"),
    ("traceback_from_crash", OOPS),
    ("traceback_from_crash", "ConnectionResetError: [Errno 104] Connection reset by peer\n"),
)
CAUSES = (
    ("gpu_out_of_memory", "terminate called after ...\n  what():  CUDA out of memory.\n"),
    ("gpu_out_of_memory", f"worker 3: {OOM}"),
    ("model_diverged", "Loss is nan, stopping training\n"),
    ("incorrect_inputs", "E0301 12:00:00.1 811 reader.cc:9] /data/a: No such file or directory\n"),
    (
        "incorrect_inputs",
        "python: can't open file '/w/t.py': [Errno 2] No such file or directory\n",
    ),
)
"""What a rank prints that ends without a traceback, by `exit()` or as a program in C++."""


def told(count: int) -> str:
    """Lines that say nothing."""
    return "".join(f"INFO setting up {number}\n" for number in range(count))


def reason(log: str) -> str:
    """What the packaged rules say."""
    return RULES.classify(log.encode(), exit_code=1).reason


@each_row("prefix", ["", "[default3]:"])
@each_row("count", [0, 9, 300])
@each_row(("expected", "end"), UNCAUGHT)
@each_row("line", WRAPPER)
def test_a_line_of_a_start_script_yields_to_an_exception_that_nobody_caught(
    line: str, expected: str, end: str, count: int, prefix: str
) -> None:
    """However far it stands before it, and with steps of training between them or without."""
    for between in (told(count), told(count) + steps(9)):
        log = line + between + TRACEBACK + end
        assert reason("".join(f"{prefix}{each}\n" for each in log.splitlines())) == expected


@each_row("line", WRAPPER)
def test_a_lost_connection_after_a_start_script_s_line_is_tried_again(line: str) -> None:
    """The job is not given up, and the exception is the line that is told."""
    found = RULES.classify((line + told(9) + TRACEBACK + LOST).encode(), exit_code=1)
    assert (found.retry, found.line) == (RetryClass.BACK_OFF, LOST.strip())


@each_row("end", [NCCL, LOST, OOPS])
@each_row(("expected", "cause"), CAUSES)
def test_a_rank_that_ends_without_a_traceback_explains_the_others(
    expected: str, cause: str, end: str
) -> None:
    """Its words count where the others' exceptions follow, with few other lines between them."""
    others = "".join(of_rank(rank, TRACEBACK + end) for rank in range(1, 8))
    for between in ("", steps(9), of_rank(3, told(4)), "frame #0: c10::Error\n" * 40):
        assert reason(steps(40) + cause + between + others) == expected
    assert reason(WRAPPER[0] + told(40) + cause + others) == expected


@pytest.mark.parametrize(("count", "is_cause"), [(9, True), (10, False)])
def test_with_much_output_between_them_a_line_in_passing_yields_to_an_exception(
    count: int, is_cause: bool
) -> None:
    """Ten lines of any output say that the program went on; nine may be those of other ranks."""
    line = "cache: [Errno 13] Permission denied: '/scratch/cache'\n"
    for expected, end in UNCAUGHT:
        log = line + told(count) + TRACEBACK + end
        assert reason(log) == ("permission_error" if is_cause else expected)


@pytest.mark.parametrize(("count", "is_cause"), [(9, True), (10, False)])
def test_with_much_output_between_them_a_start_script_s_line_yields_to_an_abort(
    count: int, is_cause: bool
) -> None:
    """The library that gives up raises nothing: there a near line of a shell counts."""
    log = WRAPPER[0] + told(count) + WATCHDOG + "SIGABRT\n"
    assert reason(log) == ("syntax_error" if is_cause else "mpi_runtime_failure")
    assert reason("Loss is nan, stopping training\n" + told(count) + WATCHDOG) == "model_diverged"


def test_alone_a_start_script_s_line_counts() -> None:
    """Also before what a launcher raises when its process has failed: that says nothing of why."""
    assert reason(WRAPPER[0] + told(40)) == "syntax_error"
    for raised in (
        "subprocess.CalledProcessError: Command 'python t.py' returned non-zero exit status 127.\n",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
    ):
        assert reason(WRAPPER[0] + TRACEBACK + raised) == "syntax_error"


def test_what_is_told_after_the_exception_does_not_bring_the_start_script_s_line_back() -> None:
    """Words of fewer steps that are no end change nothing between the two."""
    after = "n7: CUDA failure 700\n"
    assert reason(WRAPPER[0] + told(3) + TRACEBACK + NCCL + after) == "mpi_error"


def test_an_exception_that_a_loop_catches_is_no_end_for_a_script_s_line_to_yield_to() -> None:
    """It was followed by training before, in the same words."""
    caught = CAUGHT_EVALUATION.replace("KeyError: 'label'\n", OOPS)
    assert reason(steps(40) + WRAPPER[0] + caught) == "traceback_from_crash"
    assert reason(epochs(8, caught) + WRAPPER[0] + caught) == "syntax_error"


def test_a_counter_of_kills_that_is_zero_is_no_kill() -> None:
    """A cgroup's counts in a log do not give a job up that loses a peer hours later."""
    log = "oom 0\noom_kill 0\n" + steps(1000) + TRACEBACK + NCCL
    assert reason(log) == "mpi_error"
    assert reason(log.replace("oom_kill 0", "oom_kill 2")) == "cpu_out_of_memory"
