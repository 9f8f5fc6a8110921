"""Time lines of jobs and ways home as numbers."""

from __future__ import annotations

from common.api import SaveRow, StoryRow
from common.model import JobState, NodeRole
from coordinator.web import timeline
from tests.cli.fake_cell import NOW_S, job_row, loan_row, story_row


def line(number: int, after_s: float, what: str, reason: str = "") -> StoryRow:
    return story_row(number, at_s=NOW_S + after_s, what=what, reason=reason)


def test_a_jobs_life_has_its_states_workers_and_marks() -> None:
    """States follow each other without gaps; workers are counted while it runs; saves are marks."""
    story = (
        line(1, 0, "submitted", "by lab/ada"),
        line(2, 10, "start -> starting", "head of the line"),
        line(3, 12, "gang_ready -> running", "workers ready: 2"),
        line(4, 20, "resize -> resizing", "two more fit"),
        line(5, 22, "resized -> running", "4 workers"),
        line(6, 40, "preempt -> preempting", "its node goes home"),
        line(7, 42, "vacated -> pending", "waits again"),
    )
    saves = (SaveRow(at_s=NOW_S + 30, step=5, is_verified=True),)
    row = job_row(submitted_at_s=NOW_S, state=JobState.PENDING)
    found = timeline.of_job(row, story, saves, now_s=NOW_S + 50)
    states = [(span.name, span.begin_s - NOW_S, span.end_s - NOW_S) for span in found.states]
    assert states == [
        ("pending", 0, 10),
        ("starting", 10, 12),
        ("running", 12, 20),
        ("resizing", 20, 22),
        ("running", 22, 40),
        ("preempting", 40, 42),
        ("pending", 42, 50),
    ]
    workers = [(span.workers, span.begin_s - NOW_S, span.end_s - NOW_S) for span in found.workers]
    assert workers == [(2, 12, 22), (4, 22, 40)]
    marks = [(mark.kind, mark.at_s - NOW_S) for mark in found.marks]
    assert marks == [("save", 30), ("resize", 20), ("preemption", 40)]
    assert (found.at(NOW_S), found.at(NOW_S + 25), found.at(NOW_S + 99)) == (0.0, 50.0, 100.0)


def test_a_job_that_ended_ends_its_line() -> None:
    """Time goes on, and the line of a job that ended does not."""
    row = job_row(submitted_at_s=NOW_S, state=JobState.SUCCEEDED, finished_at_s=NOW_S + 5.0)
    story = (line(1, 1, "start -> starting"), line(2, 5, "succeed -> succeeded"))
    found = timeline.of_job(row, story, (), now_s=NOW_S + 500)
    assert found.end_s == NOW_S + 5
    assert [span.name for span in found.states] == ["pending", "starting"]


def test_a_way_home_is_cut_by_the_roles_of_its_node() -> None:
    """Up to its first role it is `ordered`; roles from before the order do not count."""
    loan = loan_row(reclaim_ordered_at_s=NOW_S, reclaim_deadline_s=40.0)
    roles = [
        (NOW_S - 9, NodeRole.ON_LOAN),
        (NOW_S + 1, NodeRole.VACATING),
        (NOW_S + 4, NodeRole.WARMING),
    ]
    way = timeline.under_way(loan, roles, now_s=NOW_S + 10)
    assert [(stage.name, stage.took_s) for stage in way.stages] == [
        ("ordered", 1.0),
        ("vacating", 3.0),
        ("warming", 6.0),
    ]
    assert way.stages[-1].begun_at_s == NOW_S + 4
    assert (way.deadline_s, way.scale_s) == (40.0, 50.0)


def test_a_loan_that_came_home_has_the_stages_of_its_promise() -> None:
    """What came before the order is not part of it; a lapse has its own deadline."""
    stages = {"decide": 3.0, "notify": 0.5, "exit": 2.0, "device_free": 0.0}
    loan = loan_row(returned_at_s=NOW_S, reclaim_s=2.5, stage_durations_s=stages)
    way = timeline.home(loan)
    assert ([stage.name for stage in way.stages], way.took_s) == (["notify", "exit"], 2.5)
    assert way.deadline_s == 120.0
    lapsed = loan_row(returned_at_s=NOW_S, lapse_s=2.5, lapse_deadline_s=30.0)
    assert timeline.home(lapsed).deadline_s == 30.0
