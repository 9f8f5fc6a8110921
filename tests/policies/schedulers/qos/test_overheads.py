"""Promises where starts and changes take time: what plans hold of it, and who is late anyway."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Reject
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.admission import Book, Plans
from coordinator.policies.schedulers.qos.minimum_shares import Claim, fill, greedily
from coordinator.policies.schedulers.qos.overheads import NONE, Overhead, changes_of, left_s, seen
from coordinator.policies.schedulers.qos.timeline import Piece, Timeline
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

A = JobId("a")


START_S, RESTART_S, RESIZE_S = 15.0, 35.0, 30.0


def claim(name: str = "a", **changed: object) -> Claim:
    """100 s of work on one of up to four workers, and what its start and changes take."""
    plain = Claim(
        job_id=name,
        sizes=(1, 2, 4),
        rates=(1.0, 2.0, 4.0),
        gpus_per_worker=1,
        work_s=100.0,
        deadline_s=1000.0,
        begins_s=START_S,
        again_s=START_S + RESTART_S,
        resize_s=RESIZE_S,
        grow_s=START_S + RESIZE_S,
    )
    return structs.replace(plain, **changed)


def job(deadline_s: float | None = None, **changed: object) -> JobView:
    """It takes 100 s on one worker."""
    plain = make_job_view("a", workers=(1, 4), remaining_work_s=100.0, submitted_at_s=NOW_S)
    return job_with(
        plain,
        **{
            "estimated_left_s": 100.0,
            "as_of_s": NOW_S,
            "deadline_at_s": None if deadline_s is None else NOW_S + deadline_s,
            **changed,
        },
    )


def costly(jobs: list[JobView], node: NodeView | None = None) -> ClusterSnapshot:
    """A snapshot of a cell in which starts and changes take their time."""
    snapshot = make_snapshot(nodes=[] if node is None else [node], jobs=jobs)
    return structs.replace(snapshot, start_s=START_S, restart_s=RESTART_S, resize_s=RESIZE_S)


# --- plans ----------------------------------------------------------------------------------------


@each_row(("deadline_s", "workers"), [(115.1, 1), (114.9, 2), (65.1, 2), (40.1, 4)])
def test_a_plan_holds_its_own_start(deadline_s: float, workers: int) -> None:
    """The smallest size whose start and work fit before the deadline, not whose work alone does."""
    plan = fill(Timeline(0.0, 4), claim(deadline_s=deadline_s), 0.0)
    assert plan is not None
    assert max(piece.workers for piece in plan) == workers
    assert claim().done_by(plan, 0.0) == pytest.approx(100.0)


def test_without_the_time_for_a_start_there_is_no_plan() -> None:
    """With all GPUs it takes 25 s and 15 to begin."""
    assert fill(Timeline(0.0, 4), claim(deadline_s=39.9), 0.0) is None
    assert fill(Timeline(0.0, 4), claim(deadline_s=39.9, begins_s=0.0), 0.0) is not None


def test_nothing_is_started_in_a_gap_too_short_to_compute_in() -> None:
    """A gap of 40 s among others' plans is no use to a job that loads for 50 s after a stop."""
    line = Timeline(0.0, 1)
    line.take((Piece(40.0, 300.0, 1),), 1)
    plan = fill(line, claim(begins_s=START_S + RESTART_S), 0.0)
    assert plan is not None
    assert plan[0].start_s == 300.0
    assert plan[-1].end_s == pytest.approx(450.0)


def test_a_plan_holds_the_restart_behind_each_gap() -> None:
    """Of 50 s and 100 s behind a pause 15 and 50 are for beginning and loading."""
    assert claim().done_by((Piece(0.0, 50.0, 1), Piece(100.0, 200.0, 1)), 0.0) == 35.0 + 50.0


def test_a_plan_does_not_grow_for_less_than_the_change_takes() -> None:
    """45 s of standing still for three workers more pay only if these compute long enough."""
    line = Timeline(0.0, 4)
    line.take((Piece(0.0, 100.0, 3), Piece(120.0, 900.0, 3)), 1)
    plan = fill(line, claim(work_s=500.0, runs=True, present=1, begins_s=0.0), 0.0)
    assert plan is not None
    assert {piece.workers for piece in plan} == {1}


COSTS = st.sampled_from((0.0, 5.0, 30.0))


PIECES = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 200), st.integers(1, 4)), max_size=6
)


@settings(max_examples=200, deadline=None)
@given(PIECES, COSTS, COSTS, COSTS, st.integers(10, 600), st.sampled_from((0, 1, 2, 4)))
@example([(40, 200, 4)], 5.0, 30.0, 30.0, 300, 2)
def test_every_plan_does_the_work_with_all_that_it_takes(
    taken: list[tuple[int, int, int]],
    start_s: float,
    again_s: float,
    resize_s: float,
    work_s: int,
    present: int,
) -> None:
    """Whatever is free: a plan fits, ends before the deadline, and its work is done by then."""
    line = Timeline(0.0, 4)
    for from_s, lasts_s, gpus in taken:
        piece = Piece(float(from_s), float(from_s + lasts_s), gpus)
        if line.has_room((piece,), 1):
            line.take((piece,), 1)
    asks = claim(
        work_s=float(work_s),
        deadline_s=700.0,
        begins_s=0.0 if present else start_s,
        again_s=again_s,
        resize_s=resize_s,
        grow_s=resize_s + start_s,
        runs=present > 0,
        present=present,
    )
    plan = fill(line, asks, 0.0)
    if plan is not None:
        assert plan[-1].end_s <= 700.0
        assert line.has_room(plan, 1)
        assert asks.done_by(plan, 0.0) == pytest.approx(work_s)


def test_no_growth_that_the_deadline_does_not_allow() -> None:
    """A job that has just the time it needs does not stand still to grow for a while."""
    line = Timeline(0.0, 4)
    line.take((Piece(60.0, 1000.0, 3),), 1)
    tight = claim(runs=True, present=1, begins_s=0.0, deadline_s=100.1)
    assert greedily(line, tight, 0.0, 60.0, 2) is None
    assert greedily(line, structs.replace(tight, deadline_s=400.0), 0.0, 60.0, 2) is not None


# --- promises -------------------------------------------------------------------------------------


def test_who_is_in_time_as_predicted_is_not_late_for_want_of_a_margin() -> None:
    """The margin is for admission: who has used it up keeps its plan, and is not put off."""
    book = Book(0.0, 1, {})
    book.promise([claim(work_s=105.0, predicted_s=100.0, deadline_s=116.0)])
    assert (book.late, list(book.plans)) == ([], ["a"])


def test_who_is_late_gets_the_earliest_date_and_keeps_it() -> None:
    """Behind the other promise, not for ever; a later pass does not put it off again."""
    late, other = claim(deadline_s=50.0, sizes=(1,), rates=(1.0,)), claim("b", deadline_s=120.0)
    book = Book(0.0, 1, {})
    book.promise([late, other])
    assert [each.job_id for each in book.late] == ["a"]
    dates = book.put_off({}, {"a", "b"})
    assert dates == {"a": pytest.approx(230.0, abs=1.1)}
    assert sorted(book.plans) == ["a", "b"]
    again = Book(0.0, 1, book.plans)
    again.promise([late, other])
    assert again.put_off({"a": 400.0}, {"a", "b"}) == {"a": 400.0}


def test_who_was_promised_nothing_is_not_put_off() -> None:
    """It goes on without a promise, and takes no room from those who ask for one."""
    book = Book(0.0, 1, {})
    book.promise([claim(deadline_s=50.0, sizes=(1,), rates=(1.0,))])
    assert book.put_off({"a": 400.0}, ()) == {}
    assert [each.job_id for each in book.late] == ["a"]


def test_one_that_is_in_time_only_by_its_plan_keeps_nobody_out() -> None:
    """Planned anew the first would be late; a newcomer that needs it to make way is let in."""
    line = claim(work_s=200.0, runs=True, present=2, begins_s=0.0, deadline_s=100.0005)
    slow = claim("b", work_s=300.0, runs=True, present=1, begins_s=0.0, deadline_s=400.0)
    kept: Plans = {"a": (Piece(0.0, 100.0, 2),), "b": (Piece(0.0, 300.0, 1),)}
    book = Book(0.0, 3, kept)
    book.promise([line, slow])
    assert fill(Timeline(0.0, 3), line, 0.0) is None
    assert sorted(book.plans) == ["a", "b"]
    assert book.admit([claim("c", work_s=20.0, deadline_s=60.0)])


# --- what estimates do not see --------------------------------------------------------------------


def test_an_estimate_does_not_see_starts_restarts_and_resizes() -> None:
    """Work that it counts as done while the gang began, loaded or stood still is still to do."""
    runs = job(state=JobState.RUNNING, started_at_s=NOW_S, attempt_number=1, work_rate=1.0)
    known = seen({}, costly([runs]))
    assert known[A].unseen_s == START_S
    again = job_with(runs, attempt_number=2)
    known = seen(known, costly([again]))
    assert known[A].unseen_s == START_S + RESTART_S
    resized = job_with(again, resizes_latest_at_s=NOW_S + 5.0)
    known = seen(known, costly([resized]))
    assert known[A].unseen_s == START_S + RESTART_S + RESIZE_S
    assert seen(known, costly([resized])) == known
    assert left_s(resized, known[A], NOW_S) == 100.0 + START_S + RESTART_S + RESIZE_S


def test_a_start_that_was_seen_to_begin_is_not_counted_twice() -> None:
    """What has passed of it before its workers were told to run is behind it."""
    starts = job(state=JobState.STARTING, attempt_number=1)
    known = seen({}, costly([starts]))
    later = structs.replace(costly([starts]), now_s=NOW_S + 4.0)
    changes = changes_of(starts, seen(known, later)[A], later)
    assert changes is not None
    assert changes.begins_s == START_S - 4.0
    runs = job_with(starts, state=JobState.RUNNING, started_at_s=NOW_S + 4.0)
    known = seen(known, structs.replace(later, jobs=(runs,)))
    assert known[A].unseen_s == START_S - 4.0


def test_a_job_at_the_end_of_its_estimate_is_about_to_end() -> None:
    """One that ran over by a second has about a second left, not a twentieth of its life."""
    over = job(estimated_left_s=-1.0, least_work_s=5000.0, remaining_work_s=5000.0)
    assert left_s(over, NONE, NOW_S) == 1.0
    assert left_s(over, Overhead(unseen_s=3.0), NOW_S) == 2.0


def test_where_nothing_takes_time_nothing_is_remembered() -> None:
    """Plans are the paper's then."""
    runs = job(state=JobState.RUNNING, started_at_s=NOW_S, attempt_number=2)
    snapshot = make_snapshot(nodes=[], jobs=[runs])
    assert (seen({}, snapshot), changes_of(runs, NONE, snapshot)) == ({}, None)


# --- the policy -----------------------------------------------------------------------------------


@each_row(
    ("deadline_s", "free_gpus", "is_admitted"),
    [(40.1, 4, True), (39.9, 4, False), (60.0, 0, False), (70.1, 0, True)],
)
def test_a_newcomer_is_promised_what_holds_its_start(
    deadline_s: float, free_gpus: int, is_admitted: bool
) -> None:
    """15 s to begin and, where no GPU is idle, 30 s until those who stop have left theirs."""
    held = [make_worker_view("z", index, "n") for index in range(4 - free_gpus)]
    node = make_node_view("n", gpus=4, workers=held)
    other = make_job_view("z", workers=(1, 4), state=JobState.RUNNING, placed=held)
    jobs = [job(deadline_s), other] if held else [job(deadline_s)]
    found = policy("qos-elasticflow:margin=1").allocate(costly(jobs, node), b"")
    refused = [each for each in found.decisions if isinstance(each, Reject)]
    assert (refused == []) is is_admitted
