"""Logs and events as they grow: nothing twice, nothing silently left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.api import (
    ApiErrorCode,
    Describe,
    Description,
    Events,
    GetEvents,
    GetLogs,
    Jobs,
    ListJobs,
    Logs,
)
from common.errors import ProtocolError
from common.messages import Message
from common.model import JobState
from coordinator.cli.follow import growth
from tests.cli.fake_cell import Answer, FakeCell, aryl, job_row, nobody, refusal, story_row

_CODES = "\x1b[31mred\x1b[0m\r10%\n\x1b[2J"
LINES = st.lists(st.integers(0, 10**9).map(lambda n: f"step {n}\n"), max_size=60, unique=True)


@given(LINES.filter(bool), LINES, st.integers(20, 2_000))
def test_windows_on_a_log_add_up_to_the_log(old: list[str], new: list[str], window: int) -> None:
    """However the window slides, what was shown and what is more is the end of the log, once."""
    before, after = "".join(old), "".join(dict.fromkeys(old + new))
    shown, text = before[-window:], after[-window:]
    more, is_gap = growth(shown, text)
    if is_gap:
        # Only without a whole line in common; then the whole new window is shown.
        assert more == text
        assert not set(shown.split("\n")[1:-1]) & set(text.split("\n")[1:-1])
    else:
        assert more == after[len(before) :]


def test_a_window_that_slid_shows_only_new_lines() -> None:
    """The cut first line of a window is not mistaken for a new one."""
    log = "".join(f"line {n}\n" for n in range(200))
    more, is_gap = growth(log[:1_000][-300:], log[:1_100][-300:])
    assert (more, is_gap) == (log[1_000:1_100], False)


def test_a_log_that_outran_the_window_says_so() -> None:
    """Without any overlap everything is shown, and the gap is known."""
    log = "".join(f"line {n}\n" for n in range(500))
    assert growth(log[:300], log[-300:]) == (log[-300:], True)


def test_logs_are_data_and_say_nothing_else() -> None:
    """Without --follow: the text as it is, and the worker that was asked for."""
    cell = FakeCell({GetLogs: Logs(text="a\nb", node="t0", worker_index=3, attempt=1)})
    run = aryl(cell, "job", "logs", "jabc", "--worker", "3", "--max-bytes", "100")
    assert (run.code, run.out, run.err) == (0, "a\nb", "")
    assert cell.asked == [GetLogs(job_id="jabc", worker_index=3, max_bytes=100)]


def test_logs_that_are_gone_are_not_found() -> None:
    """A worker that is not there is exit 3, with where to look."""
    answer = refusal(ApiErrorCode.NOT_FOUND, "job jabc has no worker 9 now", "worker_index")
    run = aryl(FakeCell({GetLogs: answer}), "job", "logs", "jabc")
    assert run.code == 3
    assert "aryl job describe" in run.err


@pytest.mark.parametrize(("flags", "shown"), [((), "red\n10%\n␛[2J"), (("--raw",), _CODES)])
def test_a_log_reaches_a_terminal_without_control_codes(flags: tuple[str, ...], shown: str) -> None:
    """A job writes what it likes; only a person who asks for raw text gets codes."""
    answer = Logs(text=_CODES, node="t0", worker_index=0, attempt=1)
    run = aryl(FakeCell({GetLogs: answer}), "job", "logs", "jabc", *flags)
    assert run.out == shown


def test_following_a_log_ends_with_the_job() -> None:
    """Each line comes once, a worker that moves is announced, and the end of the job ends it."""
    missing = refusal(ApiErrorCode.NOT_FOUND, "no worker", "worker_index")
    texts: list[Answer] = [
        missing,
        Logs(text="a\n", node="t0", worker_index=0, attempt=1),
        Logs(text="a\nb\n", node="t0", worker_index=0, attempt=1),
        Logs(text="c\n", node="t1", worker_index=0, attempt=1),
    ]
    states = [JobState.STARTING, JobState.RUNNING, JobState.RUNNING, JobState.SUCCEEDED]
    rows: list[Answer] = [
        Description(kind="job", name="jabc", job=job_row(state=state)) for state in states
    ]
    run = aryl(FakeCell({GetLogs: texts, Describe: rows}), "job", "logs", "jabc", "-f")
    assert (run.code, run.out) == (0, "a\nb\nc\n")
    assert run.err.splitlines() == ["waiting: no worker", "worker 0 on t0:", "worker 0 on t1:"]


def test_following_a_log_by_name_follows_one_job() -> None:
    """A second job of that name may be submitted meanwhile: from the first look its id is asked."""
    texts: list[Answer] = [
        Logs(text=text, node="t0", worker_index=0, attempt=1) for text in ("a\n", "a\nb\n")
    ]
    rows: list[Answer] = [
        Description(kind="job", name="jabc", job=job_row(state=state))
        for state in (JobState.RUNNING, JobState.SUCCEEDED)
    ]
    cell = FakeCell({GetLogs: texts, Describe: rows})
    assert aryl(cell, "job", "logs", "train", "-f").out == "a\nb\n"
    asked = [request.name for request in cell.asked if isinstance(request, Describe)]
    assert asked == ["train", "jabc"]
    assert {r.job_id for r in cell.asked if isinstance(r, GetLogs)} == {"jabc"}


def test_an_earlier_attempt_is_asked_for_by_its_number() -> None:
    """What the CLI asks is what was typed; one that is not known is exit 3, with where to look."""
    said = Logs(text="a\n", node="t0", worker_index=0, attempt=2)
    cell = FakeCell({GetLogs: said})
    run = aryl(cell, "job", "logs", "jabc", "--attempt", "2")
    assert (run.code, run.out) == (0, "a\n")
    assert cell.asked == [GetLogs(job_id="jabc", attempt=2)]
    unknown = refusal(ApiErrorCode.NOT_FOUND, "has no record of attempt 9", "attempt")
    run = aryl(FakeCell({GetLogs: unknown}), "job", "logs", "jabc", "--attempt", "9")
    assert run.code == 3
    assert "aryl job describe" in run.err
    assert aryl(FakeCell({}), "job", "logs", "jabc", "--attempt", "0").code == 2


def test_following_an_attempt_ends_when_another_one_begins() -> None:
    """Its log grows no more, however long its job goes on."""
    texts: list[Answer] = [
        Logs(text=text, node="t0", worker_index=0, attempt=1) for text in ("a\n", "a\n", "never\n")
    ]
    looks = [(JobState.RUNNING, 1), (JobState.RUNNING, 2), (JobState.SUCCEEDED, 2)]
    rows: list[Answer] = [
        Description(kind="job", name="jabc", job=job_row(state=state, attempt=attempt))
        for state, attempt in looks
    ]
    fake = FakeCell({GetLogs: texts, Describe: rows})
    run = aryl(fake, "job", "logs", "jabc", "-f", "--attempt", "1")
    assert (run.code, run.out) == (0, "a\n")


def test_a_worker_that_runs_again_in_its_place_is_announced() -> None:
    """The log of its next attempt is another log, even with the same index on the same node."""
    texts: list[Answer] = [
        Logs(text="a\n", node="t0", worker_index=0, attempt=1),
        Logs(text="b\n", node="t0", worker_index=0, attempt=2),
    ]
    states = [JobState.RUNNING, JobState.SUCCEEDED]
    rows: list[Answer] = [
        Description(kind="job", name="jabc", job=job_row(state=state)) for state in states
    ]
    run = aryl(FakeCell({GetLogs: texts, Describe: rows}), "job", "logs", "jabc", "-f")
    assert (run.code, run.out) == (0, "a\nb\n")
    assert run.err.splitlines() == ["worker 0 on t0:", "worker 0 on t0:"]


def test_what_attempts_wrote_between_two_looks_is_shown_before_the_next_one() -> None:
    """A failed try is followed at once by the next, and its last lines say why it failed."""
    running = iter([Logs(text="a\n", node="t0", worker_index=0, attempt=1)])
    last = Logs(text="c\n", node="t0", worker_index=0, attempt=4)
    earlier = {1: "a\nend of 1\n", 2: "all of 2\n"}

    def logs(request: Message) -> Message:
        assert isinstance(request, GetLogs)
        if request.attempt is None:
            return next(running, last)
        if request.attempt not in earlier:
            return refusal(ApiErrorCode.NOT_FOUND, "no worker 0 in attempt 3", "worker_index")
        return replace(last, text=earlier[request.attempt], attempt=request.attempt)

    rows: list[Answer] = [
        Description(kind="job", name="jabc", job=job_row(state=state))
        for state in (JobState.RUNNING, JobState.RUNNING, JobState.SUCCEEDED)
    ]
    run = aryl(FakeCell({GetLogs: logs, Describe: rows}), "job", "logs", "jabc", "-f")
    assert (run.code, run.out) == (0, "a\nend of 1\nall of 2\nc\n")
    assert "the rest of attempt 3 is missing" in run.err


def test_following_a_job_that_ended_without_logs_is_not_found() -> None:
    """Nothing was ever shown and nothing will be."""
    ended = Description(kind="job", name="jabc", job=job_row(state=JobState.FAILED))
    missing = refusal(ApiErrorCode.NOT_FOUND, "no worker", "worker_index")
    assert aryl(FakeCell({GetLogs: missing, Describe: ended}), "job", "logs", "x", "-f").code == 3


def test_following_events_goes_on_where_it_was() -> None:
    """Each question carries the last number and the id; headings come once; it outwaits a break."""
    answers: list[Answer] = [
        Events(rows=(story_row(4, subject="jabc"),), last=4, subject="job/jabc"),
        nobody(),
        Events(rows=(), last=4, subject="job/jabc"),
        Events(rows=(story_row(6, subject="jabc"),), last=7, subject="job/jabc"),
        ProtocolError("the end of this test"),
    ]
    cell = FakeCell({GetEvents: answers})
    run = aryl(cell, "events", "--follow", "--for", "train", "--after", "3")
    assert run.code == 1
    assert run.out.startswith("WHEN")
    assert len(run.out.splitlines()) == 3
    assert run.err.count("waiting for the coordinator") == 1
    asked = [(3, "train"), *((n, "job/jabc") for n in (4, 4, 4, 7))]
    assert cell.asked == [GetEvents(after=n, subject=name) for n, name in asked]


def test_following_events_as_json_is_one_object_per_line() -> None:
    """Each line is complete by itself, with the schema version."""
    answers: list[Answer] = [
        Events(rows=(story_row(1), story_row(2)), last=2),
        ProtocolError("the end of this test"),
    ]
    run = aryl(FakeCell({GetEvents: answers}), "events", "-f", "-o", "json")
    lines = run.out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith('{"schema_version":1,"event":{"number":') for line in lines)


def test_watching_the_queue_asks_again() -> None:
    """Every round is a whole table, until something ends it."""
    answers: list[Answer] = [
        Jobs(rows=(job_row("jone"),)),
        Jobs(rows=(job_row("jtwo"),)),
        ProtocolError("the end of this test"),
    ]
    run = aryl(FakeCell({ListJobs: answers}), "job", "list", "--watch", "--no-headers")
    assert [line.split()[0] for line in run.out.splitlines()] == ["jone", "jtwo"]
