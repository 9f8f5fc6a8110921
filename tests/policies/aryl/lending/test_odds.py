"""The odds from which on a loan pays: what a job and the line gain by it, against what it loses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.aryl.lending.odds import Odds
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.strategies import snapshots

HOUR_S = 3600.0


def cell(left_s: list[float], *waiting: JobView) -> ClusterSnapshot:
    """One training node of 8 GPUs per job that runs, each for so long, and who waits."""
    workers = [make_worker_view(f"r{n}", 0, f"n{n}", gpus=8) for n in range(len(left_s))]
    running = [
        make_job_view(
            worker.job_id,
            state=JobState.RUNNING,
            gpus_per_worker=8,
            remaining_work_s=each_s,
            placed=[worker],
        )
        for worker, each_s in zip(workers, left_s, strict=True)
    ]
    nodes = [make_node_view(worker.node, workers=[worker]) for worker in workers]
    return make_snapshot(nodes=nodes, jobs=[*running, *waiting])


def job(job_id: str, hours: float, *, workers: int = 1) -> JobView:
    """A waiting job of whole nodes."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=8,
        remaining_work_s=hours * HOUR_S * workers,
    )


def needed(snapshot: ClusterSnapshot, job_id: str) -> float:
    """From which chance on a loan pays for a job."""
    asked = next(job for job in snapshot.jobs if job.job_id == job_id)
    stays_s = asked.estimate.remaining_work_s / asked.workers.min
    return Odds(snapshot, PlacementState(snapshot)).needed(asked, stays_s)


def test_alone_in_line_it_weighs_its_wait_against_half_its_length() -> None:
    """Four hours, of which the half is lost on average, against a wait of one hour, or of six."""
    assert needed(cell([HOUR_S, 9 * HOUR_S], job("j", 4.0)), "j") == pytest.approx(4 / (4 + 2))
    assert needed(cell([6 * HOUR_S, 9 * HOUR_S], job("j", 4.0)), "j") == pytest.approx(4 / (4 + 12))


def test_a_gang_waits_for_the_last_of_its_nodes() -> None:
    """One of two nodes has room in an hour, both have in nine."""
    assert needed(cell([HOUR_S, 9 * HOUR_S], job("j", 4.0, workers=2)), "j") == pytest.approx(
        4 / (4 + 18)
    )


def test_the_work_of_shorter_jobs_comes_before() -> None:
    """Two GPU-hours of a shorter job on each of 16 GPUs are an hour more; a longer one adds none to
    the wait, and both are in line."""
    short, long = job("short", 2.0), job("long", 8.0)
    line_s = 1 * 8 * 4.0 / 16
    assert needed(cell([HOUR_S, 9 * HOUR_S], job("j", 4.0), short), "j") == pytest.approx(
        (4 - line_s) / (4 + line_s + 2 * (1 + 1))
    )
    assert needed(cell([HOUR_S, 9 * HOUR_S], job("j", 4.0), long), "j") == pytest.approx(
        (4 - line_s) / (4 + line_s + 2 * 1)
    )


def test_where_the_line_loses_more_than_the_job_any_odds_will_do() -> None:
    """Two others that would each wait half of its length longer are worth a run in vain."""
    others = [job(f"o{n}", 5.0) for n in range(2)]
    assert needed(cell([0.0, 9 * HOUR_S], job("j", 4.0), *others), "j") == 0.0


def test_without_training_nodes_there_is_nothing_to_wait_for() -> None:
    """Neither where no training node has a type that it accepts, nor where there are too few."""
    full = cell([HOUR_S, HOUR_S], job("three", 1.0, workers=3), job("other", 1.0))
    foreign = [
        replace(each, gpu=replace(each.gpu, types=("T4",))) if each.job_id == "other" else each
        for each in full.jobs
    ]
    snapshot = make_snapshot(nodes=full.nodes, jobs=foreign)
    assert needed(snapshot, "three") == needed(snapshot, "other") == 0.0


def test_flexible_workers_make_room_at_once() -> None:
    """A node whose GPUs are held by flexible workers alone has room now: no wait is saved."""
    snapshot = cell([HOUR_S, 9 * HOUR_S], job("j", 4.0))
    worker = make_worker_view("r1", 0, "n1", gpus=8, is_flexible=True)
    nodes = [snapshot.nodes[0], make_node_view("n1", workers=[worker])]
    assert needed(make_snapshot(nodes=nodes, jobs=snapshot.jobs), "j") == 1.0


def test_a_worker_on_its_way_out_makes_room_at_once() -> None:
    """Its job may have hours to go: the worker was told to stop, and its GPUs come free."""
    snapshot = cell([6 * HOUR_S, 9 * HOUR_S], job("j", 4.0))
    worker = make_worker_view("r1", 0, "n1", gpus=8, is_leaving=True)
    nodes = [snapshot.nodes[0], make_node_view("n1", workers=[worker])]
    assert needed(make_snapshot(nodes=nodes, jobs=snapshot.jobs), "j") == 1.0


def test_of_two_types_at_home_the_better_one_counts() -> None:
    """A job that both would do for waits for the one that comes free sooner."""
    slow = cell([6 * HOUR_S, 9 * HOUR_S], job("j", 4.0))
    worker = make_worker_view("old", 0, "old", gpus=8)
    old = make_job_view(
        "old",
        state=JobState.RUNNING,
        gpus_per_worker=8,
        remaining_work_s=HOUR_S,
        gpu_type="A100",
        placed=[worker],
    )
    node = make_node_view("old", gpu_type="A100", workers=[worker])
    both = make_snapshot(nodes=[*slow.nodes, node], jobs=[*slow.jobs, old])
    assert needed(both, "j") == pytest.approx(4 / (4 + 2 * 1))


def test_who_waits_for_another_type_is_in_no_line_here() -> None:
    """Neither before a job nor behind it: its GPUs are others."""
    t4 = job("t4", 2.0)
    other = replace(t4, gpu=replace(t4.gpu, types=("T4",)))
    assert needed(cell([HOUR_S, 9 * HOUR_S], job("j", 4.0), other), "j") == pytest.approx(4 / 6)


def test_each_size_of_worker_waits_for_room_of_its_own() -> None:
    """On a node whose halves come free in one hour and in six a worker of four GPUs waits for the
    first and one of eight for both, in whichever order it is asked."""
    workers = [make_worker_view(f"r{n}", 0, "n0", gpus=4) for n in range(2)]
    running = [
        make_job_view(
            worker.job_id,
            state=JobState.RUNNING,
            gpus_per_worker=4,
            remaining_work_s=hours * HOUR_S,
            placed=[worker],
        )
        for worker, hours in zip(workers, (1.0, 6.0), strict=True)
    ]
    half, whole = replace(job("half", 4.0), gpus_per_worker=4), job("whole", 4.0)
    expected = {"half": 4 / (4 + 2 * 1), "whole": 4 / (4 + 2 * 6)}
    for asked in ([half, whole], [whole, half]):
        nodes = [make_node_view("n0", workers=workers)]
        snapshot = make_snapshot(nodes=nodes, jobs=running)
        odds = Odds(snapshot, PlacementState(snapshot))
        found = {each.job_id: odds.needed(each, 4 * HOUR_S) for each in asked}
        assert found == pytest.approx(expected)


def test_on_a_type_that_needs_more_workers_a_job_holds_more_gpus() -> None:
    """Twice as many for as long: the line loses twice as much by it."""
    twice = job("j", 4.0)
    twice = replace(twice, gpu=replace(twice.gpu, worker_multiplier={"H100": 2}))
    left_s = [HOUR_S, 9 * HOUR_S, 9 * HOUR_S, 9 * HOUR_S]
    line_s = 16 * 4.0 / 32
    assert needed(cell(left_s, twice, job("long", 8.0)), "j") == pytest.approx(
        (4 - line_s) / (4 + line_s + 2 * 9)
    )


def test_what_needs_no_time_needs_no_loan_to_last() -> None:
    """Not even where it would save nobody any wait."""
    idle = make_snapshot(nodes=[make_node_view("n0")], jobs=[])
    assert Odds(idle, PlacementState(idle)).needed(job("j", 0.0), 0.0) == 0.0


@settings(max_examples=80, deadline=None)
@given(snapshot=snapshots())
def test_it_is_a_chance(snapshot: ClusterSnapshot) -> None:
    """Whoever waits for whatever, it is between 0 and 1."""
    odds = Odds(snapshot, PlacementState(snapshot))
    for each in snapshot.jobs:
        if each.state == JobState.PENDING:
            assert 0.0 <= odds.needed(each, each.estimate.remaining_work_s) <= 1.0
            assert odds.needed(each, 0.0) == 0.0
