"""Loan lifetimes: base workers go to lent nodes only if the loans outlive them."""

from __future__ import annotations

from functools import cache
from math import cos, pi

import pytest
from msgspec.structs import replace

from common.model import JobState, NodeRole
from coordinator.policies.bundles import policy
from coordinator.policies.decisions import Start
from coordinator.policies.loans.seasonal import DAY_S, Season
from coordinator.policies.snapshot import ClusterSnapshot, JobView, NodeView
from tests.builders import (
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)

MIDNIGHT_S = 10 * DAY_S
HOUR_S = 3600.0
ONLY_LIFETIMES = "aryl:lifetime_quantile=0.9"


@cache
def ten_days(*, bursts: float = 0.0) -> Season:
    """Loads from 10 at midnight to 90 at noon, ten days alike.

    bursts: so much more in half an hour of every three, another one on every second day.
    """
    season = Season()
    for step in range(10 * 288 + 1):
        at_s = step * 300.0
        is_burst = step % 36 < 6 if step // 288 % 2 else 6 <= step % 36 < 12
        load = 50.0 - 40.0 * cos(2.0 * pi * at_s / DAY_S) + bursts * is_burst
        season = season.after(at_s, load)
    return season


def cell(jobs: list[JobView], lent: list[NodeView], *, season: Season | None = None) -> (
    ClusterSnapshot
):  # fmt: skip
    """Midnight: a service of ten nodes of 10 requests per second, some of them lent."""
    serving = [
        make_node_view(f"s{number}", role=NodeRole.SERVING, gpu_type="H100")
        for number in range(10 - len(lent))
    ]
    service = replace(
        make_service_view(capacity_per_node=10.0, load=10.0, return_s=120.0),
        season=ten_days() if season is None else season,
    )
    return make_snapshot(
        nodes=[*serving, *lent], jobs=jobs, services=[service], now_s=MIDNIGHT_S
    )  # fmt: skip


def lent_node(name: str, *jobs: str) -> NodeView:
    """A lent node with a base worker of 8 GPUs of each job."""
    workers = [make_worker_view(job, 0, name, gpus=8) for job in jobs]
    return make_node_view(name, role=NodeRole.ON_LOAN, gpu_type="H100", workers=workers)


def starts(snapshot: ClusterSnapshot, name: str = ONLY_LIFETIMES) -> list[str]:
    """Who starts."""
    decisions = policy(name).allocate(snapshot, b"").decisions
    return [decision.job_id for decision in decisions if isinstance(decision, Start)]


def hours(job_id: str, count: float, *, workers: int = 1) -> JobView:
    """A waiting job of that many hours."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=8,
        remaining_work_s=count * HOUR_S * workers,
    )


def test_a_job_that_ends_before_the_load_comes_back_may_run_on_lent_nodes() -> None:
    """Two hours from midnight fit a loan; a job over the noon does not, and aryl starts both."""
    lent = [lent_node("l1"), lent_node("l2")]
    jobs = [hours("short", 2.0), hours("long", 14.0)]
    assert starts(cell(jobs, lent)) == ["short"]
    assert starts(cell(jobs, lent), "aryl") == ["short", "long"]


def test_no_more_nodes_are_held_than_can_stay_away() -> None:
    """Of nine nodes that are lent at midnight about half can stay away until six, most until one.

    The load is 50 at six, which is five nodes of ten, and 11 at one.
    """
    lent = [lent_node(f"l{number}") for number in range(9)]
    few = starts(cell([hours(f"j{number}", 5.8) for number in range(9)], lent))
    many = starts(cell([hours(f"j{number}", 0.8) for number in range(9)], lent))
    assert 3 <= len(few) <= 5
    assert 7 <= len(many) <= 8


def test_a_node_that_is_held_as_long_anyway_costs_nothing_more() -> None:
    """Beside a job that holds its node over the noon another one may do so too."""
    worker = make_worker_view("old", 0, "l1", gpus=4)
    old = make_job_view(
        "old",
        state=JobState.RUNNING,
        gpus_per_worker=4,
        remaining_work_s=20 * HOUR_S,
        placed=[worker],
    )
    held = make_node_view("l1", role=NodeRole.ON_LOAN, gpu_type="H100", workers=[worker])
    new = make_job_view("new", gpus_per_worker=4, remaining_work_s=14 * HOUR_S)
    assert starts(cell([old, new], [held])) == ["new"]
    assert starts(cell([new], [make_node_view("l1", role=NodeRole.ON_LOAN)])) == []


def test_gangs_of_one_pass_are_counted_together() -> None:
    """Jobs of other lengths in one pass hold no more nodes until any instant than alone.

    Until six about half of nine nodes can stay away, as the test above has it.
    """
    lent = [lent_node(f"l{number}") for number in range(9)]
    jobs = [hours(f"short{number}", 0.8) for number in range(3)]
    jobs += [hours(f"long{number}", 5.8) for number in range(9)]
    started = starts(cell(jobs, lent))
    assert started[:3] == ["short0", "short1", "short2"]
    assert len(started[3:]) <= 5


def test_loans_outlive_what_nodes_are_taken_back_for() -> None:
    """Whoever takes back by a higher quantile lends for shorter: fewer nodes may be held."""
    lent = [lent_node(f"l{number}") for number in range(9)]
    jobs = [hours(f"j{number}", 1.8) for number in range(9)]
    snapshot = cell(jobs, lent, season=ten_days(bursts=20.0))
    gentle = starts(snapshot, "aryl:lifetime_quantile=0.1:lend_quantile=0.1")
    careful = starts(snapshot, "aryl:lifetime_quantile=0.1:lend_quantile=0.99")
    assert 1 <= len(careful) < len(gentle)


@pytest.mark.parametrize(("count", "is_started"), [(0.9, True), (3.0, False)])
def test_an_unknown_day_trusts_no_loan_for_long(count: float, *, is_started: bool) -> None:
    """Before the first day was seen, base workers stay an hour at most by what they may take."""
    snapshot = cell([hours("job", count)], [lent_node("l1")], season=Season())
    assert bool(starts(snapshot)) == is_started


def test_flexible_workers_use_any_lent_node() -> None:
    """They go home without a preemption, so no lifetime keeps them away."""
    worker = make_worker_view("wide", 0, "l1", gpus=8)
    wide = make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 3),
        gpus_per_worker=8,
        remaining_work_s=40 * HOUR_S,
        placed=[worker],
    )
    held = make_node_view("l1", role=NodeRole.ON_LOAN, gpu_type="H100", workers=[worker])
    snapshot = cell([wide], [held, lent_node("l2"), lent_node("l3")])
    (resize,) = policy(ONLY_LIFETIMES).allocate(snapshot, b"").decisions
    assert sorted(placement.node for placement in resize.added) == ["l2", "l3"]  # type: ignore[union-attr] # fmt: skip
