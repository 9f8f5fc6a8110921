"""`aryl top` and `aryl job logs` for programs: one complete object on each line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.api import (
    Describe,
    Description,
    GetLogs,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    Loans,
    Logs,
    Nodes,
)
from common.errors import ProtocolError
from common.messages import Message
from common.model import JobState
from tests.cli.fake_cell import (
    NOW_S,
    Answer,
    FakeCell,
    Run,
    aryl,
    job_row,
    loan_row,
    nobody,
    node_row,
    status,
)


def cell(statuses: list[Answer]) -> FakeCell:
    """One node, one loan, one job; the status is answered as the test says."""
    answers: dict[type[Message], Answer | list[Answer]] = {
        GetStatus: statuses,
        ListNodes: Nodes(rows=(node_row("t0"),)),
        ListLoans: Loans(rows=(loan_row("l7"),)),
        ListJobs: Jobs(rows=(job_row("jrun"),)),
    }
    return FakeCell(answers)


def objects(run: Run) -> list[dict[str, Any]]:
    """Each line by itself."""
    return [json.loads(line) for line in run.out.splitlines()]


def test_one_frame_is_one_object_with_all_that_the_screen_shows() -> None:
    """Status, nodes, loans and jobs under the names of the API, and when that was."""
    run = aryl(cell([status()]), "top", "--once", "-o", "json")
    assert run.code == 0
    (frame,) = objects(run)
    assert (frame["schema_version"], frame["at_s"]) == (1, NOW_S)
    assert frame["status"]["cell"] == "lab"
    assert [row["node"] for row in frame["nodes"]] == ["t0"]
    assert [row["lease_id"] for row in frame["loans"]] == ["l7"]
    assert [row["job_id"] for row in frame["jobs"]] == ["jrun"]


def test_frames_come_again_and_a_break_is_waited_out() -> None:
    """A line per refresh until something ends it; standard output has nothing else."""
    answers: list[Answer] = [
        status(epoch=1),
        nobody(),
        nobody(),
        status(epoch=2),
        ProtocolError("the end of this test"),
    ]
    run = aryl(cell(answers), "top", "-o", "json")
    assert run.code == 1
    assert [frame["status"]["epoch"] for frame in objects(run)] == [1, 2]
    assert run.err.count("waiting for the coordinator") == 1


def test_a_first_frame_that_nobody_gives_is_an_error() -> None:
    """A program must not wait for a cell that was never there."""
    run = aryl(cell([nobody(), ProtocolError("it went on")]), "top", "-o", "json")
    assert (run.code, run.out) == (6, "")


def test_a_log_as_json_says_whose_it_is() -> None:
    """The text as it is, with its job, node, worker and attempt."""
    logs = Logs(text='a "b"\nc', node="t0", worker_index=3, attempt=1)
    run = aryl(FakeCell({GetLogs: logs}), "job", "logs", "jabc", "-o", "json")
    assert run.json == {
        "schema_version": 1,
        "logs": {
            "job": "jabc",
            "text": 'a "b"\nc',
            "node": "t0",
            "worker_index": 3,
            "attempt": 1,
        },
    }


def test_a_followed_log_as_json_is_one_object_for_each_piece() -> None:
    """The texts add up to the log, and a look that found nothing new is no line."""
    texts: list[Answer] = [
        Logs(text="a\n", node="t0", worker_index=0, attempt=1),
        Logs(text="a\n", node="t0", worker_index=0, attempt=1),
        Logs(text="a\nb\n", node="t0", worker_index=0, attempt=1),
    ]
    states = [JobState.RUNNING, JobState.RUNNING, JobState.SUCCEEDED]
    rows: list[Answer] = [
        Description(kind="job", name="jabc", job=job_row(state=state)) for state in states
    ]
    fake = FakeCell({GetLogs: texts, Describe: rows})
    run = aryl(fake, "job", "logs", "jabc", "-f", "-o", "json")
    assert run.code == 0
    assert [piece["logs"]["text"] for piece in objects(run)] == ["a\n", "b\n"]


@pytest.mark.parametrize("words", [("top",), ("job", "logs", "jabc")])
def test_what_has_no_name_says_so(words: tuple[str, ...]) -> None:
    """`-o name` prints ids to go on with; of a frame and of a text there is none."""
    run = aryl(cell([status()]), *words, "-o", "name")
    assert (run.code, run.out) == (2, "")
    assert "-o name" in run.err
