"""Whoever watches outwaits a coordinator that is away, or that says that it is stopping."""

from __future__ import annotations

from collections.abc import Mapping

from common.api import (
    ApiErrorCode,
    Describe,
    Description,
    Events,
    GetEvents,
    GetLogs,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    Loans,
    Logs,
    Nodes,
    Submit,
    Submitted,
)
from common.errors import ProtocolError
from common.messages import Message
from common.model import JobState
from tests.cli.fake_cell import (
    Answer,
    FakeCell,
    aryl,
    job_row,
    no_answer,
    nobody,
    refusal,
    status,
    story_row,
)
from tests.tables import each_row

AWAY: dict[str, Answer] = {
    "no listener": nobody(),
    "nobody answers": no_answer(),
    "it is stopping": refusal(ApiErrorCode.UNAVAILABLE, "the coordinator is stopping"),
}
END = ProtocolError("the end of this test")


def log(text: str) -> Logs:
    """The log of its only worker."""
    return Logs(text=text, node="t0", worker_index=0, attempt=1)


def job(state: JobState = JobState.RUNNING) -> Description:
    """The job that is watched."""
    return Description(kind="job", name="jabc", job=job_row(state=state))


def watches(away: Answer) -> dict[str, Mapping[type[Message], Answer | list[Answer]]]:
    """Each command that watches, and a cell that goes away for two questions and comes back."""
    ended = job(JobState.SUCCEEDED)
    line = log("last\n")
    return {
        "job list --watch": {
            ListJobs: [Jobs(rows=()), away, away, Jobs(rows=(job_row("last"),)), END]
        },
        "job list --watch -o json": {
            ListJobs: [Jobs(rows=()), away, away, Jobs(rows=(job_row("last"),)), END]
        },
        "top -o json": {
            GetStatus: [status(), away, away, status(cell="last"), END],
            ListNodes: Nodes(rows=()),
            ListLoans: Loans(rows=()),
            ListJobs: Jobs(rows=()),
        },
        "events --follow": {
            GetEvents: [
                Events(rows=(), last=1),
                away,
                away,
                Events(rows=(story_row(2, what="last"),), last=2),
                END,
            ]
        },
        "job submit --wait -- last": {
            Submit: Submitted(job_id="jlast"),
            Describe: [away, job(), away, away, ended],
        },
        "job logs -f jabc": {Describe: [job(), away, away, ended], GetLogs: line},
    }


@each_row("away", AWAY.values(), ids=AWAY)
@each_row("line", list(watches(END)))
def test_whoever_watches_outwaits_a_coordinator(line: str, away: Answer) -> None:
    """What it says when it is there again is shown; that it was away is said once each time."""
    run = aryl(FakeCell(watches(away)[line]), *line.split())
    assert "last" in run.out, run.err
    assert run.err.count("waiting for the coordinator") == (2 if "--wait" in line else 1)
    assert run.code == (0 if line.startswith(("job submit", "job logs")) else 1)


@each_row("away", AWAY.values(), ids=AWAY)
@each_row("line", [one for one in watches(END) if "submit" not in one])
def test_a_watch_of_a_cell_that_is_not_there_is_an_error(line: str, away: Answer) -> None:
    """Before anything was seen there is nothing to wait for: a wrong name would wait for ever."""
    answers = {kind: [away, END] for kind in watches(END)[line]}
    run = aryl(FakeCell(answers), *line.split())
    assert run.code in (6, 7)
    assert run.out == ""
    assert "waiting" not in run.err


def test_a_log_outwaits_the_node_that_has_it() -> None:
    """While the job goes on: an agent may be restarted. What lies on a lost node is an error."""
    away = refusal(ApiErrorCode.UNAVAILABLE, "logs of node t0: no responders")
    texts: list[Answer] = [log("a\n"), away, away, log("a\nb\n")]
    looks: list[Answer] = [*[job() for _ in range(3)], job(JobState.SUCCEEDED)]
    run = aryl(FakeCell({GetLogs: texts, Describe: looks}), "job", "logs", "jabc", "-f")
    assert (run.code, run.out) == (0, "a\nb\n")
    assert run.err.splitlines() == [
        "worker 0 on t0:",
        "waiting for the log (logs of node t0: no responders)",
    ]
    lost = FakeCell({GetLogs: [log("a\n"), away], Describe: looks})
    lost.answers[Describe] = [job(), job(JobState.FAILED)]
    run = aryl(lost, "job", "logs", "jabc", "-f")
    assert (run.code, run.out) == (6, "a\n")
