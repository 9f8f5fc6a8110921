"""`aryl node drain --at`: what is read of a time, what is sent, and who is hit by then."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import msgspec
import pytest

from common.api import (
    MAX_WINDOW_S,
    ApiErrorCode,
    Describe,
    Description,
    Done,
    JobRow,
    Jobs,
    ListJobs,
    Operate,
    WindowRow,
)
from common.errors import ConfigError
from coordinator import plain_text
from coordinator.cli.window import Window
from coordinator.engine.state.events import OperatorAction
from tests.cli.fake_cell import NOW_S, FakeCell, aryl, job_row, node_row, refusal
from tests.cli.slurm.fake_slurm import asked
from tests.tables import each_row

A = OperatorAction
HOUR_S = 3600.0


EIGHT_S = 1_800_000_000.0
"""2027-01-15, 08:00 in UTC."""


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@each_row(
    ("text", "in_s"),
    [
        ("now+2hours", 2 * HOUR_S),
        ("now+3h", 3 * HOUR_S),
        ("now+30m", 1800.0),
        ("now+30min", 1800.0),
        ("now+5s", 5.0),
        ("now+1d", 24 * HOUR_S),
        ("now+90", 90.0),
        ("2027-01-15T09:00:00+00:00", HOUR_S),
        ("2027-01-15 11:00+02:00", HOUR_S),
        ("2027-01-15T09:00Z", HOUR_S),
        ("09:00", HOUR_S),
        ("2027-01-16T08:00", 24 * HOUR_S),
        ("01/16/27", 16 * HOUR_S),
        (f"now+{MAX_WINDOW_S:.0f}", MAX_WINDOW_S),
    ],
)
def test_a_time_is_read_as_iso_or_as_slurm_has_it(text: str, in_s: float) -> None:
    """Without an offset it is local time."""
    assert Window.at(text, now_s=EIGHT_S).in_s(EIGHT_S) == in_s


@each_row(
    "text",
    [
        "07:59",
        "now",
        "now-1hour",
        "today",
        "2026-01-01",
        "2031-01-01",
        "soon",
        "25:00",
        "",
        "now+3x",
    ],
)
def test_a_time_that_is_past_too_far_or_none_names_the_option(text: str) -> None:
    """And what was expected: no time that is past."""
    with pytest.raises(ConfigError, match=f"--at: {re.escape(repr(text))}.*expected") as refused:
        Window.at(text, now_s=EIGHT_S)
    assert "now-" not in str(refused.value).partition("expected")[2]
    assert "today" not in str(refused.value).partition("expected")[2]


def test_such_a_time_is_refused_before_anything_is_asked() -> None:
    """Exit 2, and nobody is told."""
    here = cell()
    run = aryl(here, "node", "drain", "t0", "--at", "yesterday", "--yes")
    assert (run.code, run.out, here.asked) == (2, "", [])


def cell(*jobs: JobRow) -> FakeCell:
    """A cell with nodes of any name and these jobs."""

    def describe(request: Describe) -> Description:
        return Description(kind="node", name=request.name, node=node_row(request.name))

    def operate(request: Operate) -> Done:
        return Done(detail=f"drain_at {request.target} in 7200 s")

    return FakeCell({Operate: operate, Describe: describe, ListJobs: Jobs(rows=jobs)})


def orders(cell: FakeCell) -> list[Operate]:
    """What was ordered."""
    return [request for request in cell.asked if isinstance(request, Operate)]


def limited(job_id: str, limit_s: float | None) -> JobRow:
    """A job on t0 that began to run now, with a grace of 30 s."""
    request = asked(time_limit_s=limit_s, grace_s=30.0, attempt_started_at_s=NOW_S)
    return job_row(job_id, nodes=("t0",), request=request)


def test_only_jobs_that_may_be_there_then_are_hit() -> None:
    """Each node gets the order, with its reason; who is over by then is not asked about."""
    jobs = [limited("jshort", 3500.0), limited("jlong", 3590.0), limited("jnone", None)]
    here = cell(*jobs)
    words = ("node", "drain", "t0", "t1", "t0", "--at", "now+1hour", "--reason", "fan")
    run = aryl(here, *words, is_interactive=True, types="y\n")
    assert run.code == 0
    assert [(one.action, one.target, one.reason) for one in orders(here)] == [
        (A.DRAIN_AT, "t0", "fan"),
        (A.DRAIN_AT, "t1", "fan"),
    ]
    assert all(one.in_s == pytest.approx(HOUR_S, abs=5.0) for one in orders(here))
    assert "draining t0, t1 at 23:13 hits 2 jobs:" in run.err
    assert ("jshort" in run.err, "jlong" in run.err, "jnone" in run.err) == (False, True, True)
    assert "ordered: drain at t1 in 7200 s" in run.err


def test_nothing_is_ordered_where_one_node_is_unknown() -> None:
    """And what was ordered before a later failure is said."""
    here = cell()
    nobody = refusal(ApiErrorCode.NOT_FOUND, "no node 'x'", "node")
    here.answers[Describe] = [Description(kind="node", name="t0", node=node_row()), nobody]
    run = aryl(here, "node", "drain", "t0", "x", "--at", "now+1hour")
    assert (run.code, orders(here)) == (3, [])
    here = cell()
    here.answers[Operate] = [Done(detail="drain_at t0"), refusal(ApiErrorCode.CONFLICT)]
    run = aryl(here, "node", "drain", "t0", "t1", "--at", "now+1hour")
    assert run.code == 4
    assert "ordered before this failed: drain_at t0" in run.err


def test_a_node_that_is_drained_gets_no_window_and_is_named() -> None:
    """The other nodes of a rack get theirs; where there is none, nothing is ordered."""
    here = cell()
    drained = node_row("t0", is_cordoned=True, is_draining=True, jobs=())
    rows = [drained, node_row("t1", jobs=())]
    here.answers[Describe] = [Description(kind="node", name=row.node, node=row) for row in rows]
    run = aryl(here, "node", "drain", "t0", "t1", "--at", "now+1hour")
    assert run.code == 0
    assert [one.target for one in orders(here)] == ["t1"]
    assert "node t0 is drained already, so it gets no window" in run.err
    here = cell()
    here.answers[Describe] = Description(kind="node", name="t0", node=drained)
    run = aryl(here, "node", "drain", "t0", "--at", "now+1hour", "--wait")
    assert (run.code, orders(here), "ordered" in run.err) == (0, [], False)


def test_a_window_is_shown_where_nodes_are() -> None:
    """In local time, with seconds where it is near, and from now."""
    soon = WindowRow(at_s=EIGHT_S + 2 * HOUR_S, left_s=2 * HOUR_S, reason="by ops/me: fan")
    row = node_row(window=soon)
    assert plain_text.role(row) == "training (closes at 10:00, in 2h)"
    far = msgspec.structs.replace(soon, at_s=EIGHT_S + 86_400.0, left_s=86_400.0)
    assert plain_text.closes(far) == "closes at Sat 2027-01-16 08:00, in 1d"
    near = msgspec.structs.replace(soon, at_s=EIGHT_S + 116.9, left_s=116.9)
    assert plain_text.closes(near) == "closes at 08:01:57, in 1m 57s"
    even = msgspec.structs.replace(soon, at_s=EIGHT_S + 119.9, left_s=119.9)
    assert plain_text.closes(even) == "closes at 08:02, in 2m"
    here = cell()
    here.answers[Describe] = Description(kind="node", name="t0", node=row)
    run = aryl(here, "node", "describe", "t0")
    assert "closes at 10:00, in 2h, ordered by ops/me: fan" in run.out


def test_who_waits_for_a_window_waits_for_its_begin_and_its_end() -> None:
    """One line says so, then one for each change of the jobs that are left. An uncordon ends it."""
    row = node_row(jobs=(), window=WindowRow(at_s=NOW_S + 5.0, left_s=5.0, reason="by ops/me"))
    begun = node_row(jobs=(), is_cordoned=True, is_draining=True)
    later = node_row(jobs=(), window=WindowRow(at_s=NOW_S + 5.0, left_s=4.0, reason=""))
    busy = msgspec.structs.replace(begun, jobs=("j1",))
    here = cell()
    looks = [node_row(jobs=()), row, later, busy, busy, begun]
    here.answers[Describe] = [Description(kind="node", name="t0", node=one) for one in looks]
    run = aryl(here, "node", "drain", "t0", "--at", "now+5", "--wait")
    assert run.code == 0
    assert sum(isinstance(one, Describe) for one in here.asked) == len(looks)
    lines = [line for line in run.err.splitlines() if line.startswith("node t0 ")]
    assert lines == [
        "node t0 closes at 22:13:25, in 5s: waiting until then",
        "node t0 is training (draining), with j1",
    ]
    here.answers[Describe] = [
        Description(kind="node", name="t0", node=one) for one in (node_row(), row, node_row())
    ]
    run = aryl(here, "node", "drain", "t0", "--at", "now+5", "--wait")
    assert run.code == 1
