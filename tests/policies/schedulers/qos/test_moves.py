"""Promised shares whose GPUs are free in pieces: others move, if they keep their own promises."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import JobState, WorkerRange
from coordinator.policies.contract.decisions import (
    Allocation,
    Decision,
    Migrate,
    Preempt,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

FLOW, STILL = "qos-elasticflow:margin=1", "qos-elasticflow:margin=1:migrates=false"
START_S, RESTART_S, RESIZE_S = 10.0, 30.0, 20.0


def job(
    name: str, node: str | None, *, gpus: int = 2, deadline_s: float | None = 10_000.0,
    work_s: float = 1000.0, **changed: object,
) -> JobView:  # fmt: skip
    """One worker; on a node it has run for long, and saves when it is asked to."""
    placed = [] if node is None else [make_worker_view(name, 0, node, gpus=gpus)]
    plain = make_job_view(
        name,
        state=JobState.PENDING if node is None else JobState.RUNNING,
        gpus_per_worker=gpus,
        remaining_work_s=work_s,
        submitted_at_s=NOW_S,
        placed=placed,
    )
    runs = node is not None
    return job_with(
        plain,
        **{
            "saves_when_asked": True,
            "deadline_at_s": None if deadline_s is None else NOW_S + deadline_s,
            "estimated_left_s": work_s,
            "as_of_s": NOW_S,
            "work_rate": 1.0 if runs else 0.0,
            "attempt_number": 1 if runs else 0,
            "started_at_s": NOW_S - 50_000.0 if runs else None,
            "first_started_at_s": NOW_S - 50_000.0 if runs else None,
            **changed,
        },
    )


def cell(*jobs: JobView) -> ClusterSnapshot:
    """Two nodes of four GPUs, in a cell where changes take time."""
    nodes = [
        make_node_view(
            name, gpus=4, workers=[w for each in jobs for w in each.placed if w.node == name]
        )
        for name in ("n1", "n2")
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    return structs.replace(snapshot, start_s=START_S, restart_s=RESTART_S, resize_s=RESIZE_S)


def moved(found: Allocation) -> list[str]:
    """Whoever moves."""
    return [each.job_id for each in found.decisions if isinstance(each, Migrate)]


def kinds(found: Allocation) -> list[type[Decision]]:
    """What is decided, in order."""
    return [type(each) for each in found.decisions]


def test_a_promised_job_whose_gpus_are_in_pieces_starts_as_another_moves() -> None:
    """Four GPUs are free, two on each of two nodes: whoever stands on one of these goes first."""
    snapshot = cell(job("a", "n1"), job("b", "n2"), job("new", None, gpus=4))
    found = policy(FLOW).allocate(snapshot, b"")
    assert kinds(found) == [Migrate, Start]
    assert moved(found) == ["a"]
    assert policy(STILL).allocate(snapshot, b"").decisions == ()


def test_a_promised_job_grows_as_another_moves() -> None:
    """It needs a second worker of two GPUs at once; one GPU is free beside it and one elsewhere."""
    tight = structs.replace(
        job("grows", "n1", deadline_s=560.0), workers=WorkerRange(min=1, max=2), is_resizable=True
    )
    snapshot = cell(
        tight, job("a", "n1", gpus=1), job("b", "n2", gpus=1), job("c", "n2")
    )  # fmt: skip
    found = policy(FLOW).allocate(snapshot, b"")
    assert kinds(found) == [Migrate, Resize]
    assert moved(found) == ["a"]
    assert policy(STILL).allocate(snapshot, b"").decisions == ()


def test_who_is_told_why_it_waits_hears_of_pieces_only_where_nobody_moves() -> None:
    """With moves it does not wait."""
    snapshot = cell(job("a", "n1"), job("b", "n2"), job("new", None, gpus=4))
    [hold] = policy(STILL).pending_reasons(snapshot, b"")
    assert "only 0 can be placed" in hold.blockers[0]
    assert policy(FLOW).pending_reasons(snapshot, b"") == ()


def test_who_would_be_late_by_a_move_stays() -> None:
    """Of two jobs the one moves whose deadline holds a stop, a restart and a start."""
    tight = job("a", "n1", deadline_s=1050.0)
    snapshot = cell(tight, job("b", "n2"), job("new", None, gpus=4))
    assert moved(policy(FLOW).allocate(snapshot, b"")) == ["b"]
    both = cell(tight, job("b", "n2", deadline_s=1050.0), job("new", None, gpus=4))
    assert moved(policy(FLOW).allocate(both, b"")) == []


def test_who_would_lose_work_stays() -> None:
    """No job does its work over so that another one finds room."""
    a, b = (
        job_with(
            job(name, node),
            saves_when_asked=False,
            attained_gpu_s=9e9,
            unsaved_gpu_s=100.0,
        )
        for name, node in (("a", "n1"), ("b", "n2"))
    )
    snapshot = cell(a, b, job("new", None, gpus=4))
    assert moved(policy(FLOW).allocate(snapshot, b"")) == []


def test_nobody_moves_for_a_job_without_a_promise() -> None:
    """It takes what it finds."""
    snapshot = cell(
        job("a", "n1"), job("b", "n2"), job("new", None, gpus=4, deadline_s=None)
    )  # fmt: skip
    assert policy(FLOW).allocate(snapshot, b"").decisions == ()


def test_jobs_without_a_promise_move_for_one_that_has_one() -> None:
    """They are not stopped: they go on where there is room for them."""
    snapshot = cell(
        job("a", "n1", deadline_s=None), job("b", "n2"), job("new", None, gpus=4)
    )  # fmt: skip
    found = policy(FLOW).allocate(snapshot, b"")
    assert moved(found) == ["a"]
    assert Preempt not in kinds(found)


def test_who_finds_room_for_less_than_it_was_granted_is_told() -> None:
    """Six GPUs are free, four and two: of two workers of three GPUs one is started."""
    wide = structs.replace(
        job("new", None, gpus=3, deadline_s=None), workers=WorkerRange(min=1, max=2)
    )
    [start] = policy(FLOW).allocate(cell(job("b", "n2"), wide), b"").decisions
    assert isinstance(start, Start)
    assert start.reason == (
        "2 now: without a promise, on what the promised shares leave; there is room for 1 of 2 "
        "workers to add"
    )


def test_the_plan_of_whoever_moves_has_its_pause() -> None:
    """What is promised after that is promised beside it, with the time that the move takes."""
    snapshot = cell(job("a", "n1"), job("b", "n2"), job("new", None, gpus=4))
    still, found = (policy(name).allocate(snapshot, b"") for name in (STILL, FLOW))
    assert still.memory != found.memory
    # 1000 s of work, a grace of 30 s, a restart and a start.
    book = Book(NOW_S, 8, {})
    book.promise([plain()])
    assert book.plans["a"][-1].end_s == pytest.approx(NOW_S + 1000.0)
    assert book.bears("a", 70.0)
    assert book.plans["a"][-1].end_s == pytest.approx(NOW_S + 1070.0)


def plain(deadline_s: float = 1100.0) -> Claim:
    """1000 s of work of a job that runs."""
    return Claim(
        job_id="a",
        sizes=(1,),
        rates=(1.0,),
        gpus_per_worker=2,
        work_s=1000.0,
        deadline_s=NOW_S + deadline_s,
        runs=True,
        present=1,
        resize_s=RESIZE_S,
    )


@pytest.mark.parametrize(("pause_s", "does"), [(99.0, True), (101.0, False)])
def test_a_pause_is_borne_that_leaves_a_job_in_time(pause_s: float, does: bool) -> None:
    """Else its plan stays as it was."""
    book = Book(NOW_S, 2, {})
    book.promise([plain()])
    before = book.plans["a"]
    assert book.bears("a", pause_s) is does
    assert (book.plans["a"] == before) is not does


def test_a_pause_is_borne_only_beside_what_others_were_promised() -> None:
    """The GPUs that it would take longer are another one's by then."""
    first = plain(deadline_s=1960.0)
    second = structs.replace(plain(deadline_s=2050.0), job_id="b", runs=False, present=0)
    alone, book = Book(NOW_S, 2, {}), Book(NOW_S, 2, {})
    for each in (alone, book):
        each.promise([first])
    assert book.admit([second])
    assert (alone.bears("a", 900.0), book.bears("a", 100.0)) == (True, False)


def test_who_was_promised_nothing_bears_any_pause() -> None:
    """There is no plan of it that could break."""
    assert Book(NOW_S, 2, {}).bears("z", 1e9)
