"""What an exception with its traceback says of the end of a program that may have caught it."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from common.failure_rules import read_rules
from common.failures import RetryClass
from tests.common.failure_logs import NCCL, TRACEBACK
from tests.common.outlived_logs import (
    CAUGHT_EVALUATION,
    CAUGHT_FILE,
    LOST,
    OUTLIVED,
    epochs,
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
