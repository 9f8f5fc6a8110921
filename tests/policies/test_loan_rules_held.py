"""Rules of loan lifetimes one by one: how sure, held by whom, until when, and by which nodes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState, NodeRole
from coordinator.policies.aryl.lending.loan_lifetime import Lifetimes
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from tests.builders import (
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.midnight import HOUR_S, MIDNIGHT_S, hours, ten_days
from tests.tables import each_row

LENT, SERVING = 80, 20


def fleet(
    jobs: list[JobView],
    *,
    lent: list[NodeView] | None = None,
    home: tuple[NodeView, ...] = (),
    drained: int = 0,
    return_s: float = 120.0,
    bursts: float = 20.0,
) -> ClusterSnapshot:
    """Midnight: a hundred nodes of one request per second each, most of them lent."""
    if lent is None:
        lent = [make_node_view(f"l{n}", role=NodeRole.ON_LOAN) for n in range(LENT)]
    serving = [
        make_node_view(f"s{n}", role=NodeRole.SERVING, is_drained_by_operator=n < drained)
        for n in range(SERVING)
    ]
    service = replace(
        make_service_view(capacity_per_node=1.0, load=10.0, return_s=return_s),
        season=ten_days(bursts=bursts),
    )
    return make_snapshot(
        nodes=[*home, *serving, *lent], jobs=jobs, services=[service], now_s=MIDNIGHT_S
    )


def usable(snapshot: ClusterSnapshot, job: JobView, *, q: float, weighs_odds: bool = False) -> int:
    """On how many lent nodes base workers of a job may go."""
    lifetimes = Lifetimes(snapshot, PlacementState(snapshot), q=q, weighs_odds=weighs_odds)
    return LENT - lifetimes.barred(job).bit_count()


def beside_home(opens_s: float, job: JobView) -> ClusterSnapshot:
    """One training node whose job ends in so many seconds, and a job that waits alone."""
    worker = make_worker_view("busy", 0, "t1", gpus=8)
    busy = make_job_view(
        "busy",
        state=JobState.RUNNING,
        gpus_per_worker=8,
        remaining_work_s=opens_s,
        placed=[worker],
    )
    return fleet([busy, job], home=(make_node_view("t1", workers=[worker]),))


@each_row(
    ("opens_s", "least_q", "goes_by", "not_by"),
    [
        (1.0, 0.25, 0.9, (0.5, 0.99)),
        (1.0, 0.95, 0.95, (0.9, 0.99)),
        (HOUR_S, 0.25, 0.7, (0.6, 0.65)),
        (100 * HOUR_S, 0.25, 0.25, (0.1, 0.5)),
    ],
    ids=["at most 0.9", "never below its own", "rounded up to a tenth", "any odds will do"],
)
def test_the_quantile_is_the_odds_rounded_up_and_bounded(
    opens_s: float, least_q: float, goes_by: float, not_by: tuple[float, ...]
) -> None:
    """A job of 3.8 hours that would wait for nothing asks for 0.9 of what could be 1; one that
    would wait for an hour needs 3.83 / 5.83 = 0.66 and goes by 0.7; one that would wait for days
    goes by the least there is."""
    job = hours("job", 3.8)
    snapshot = beside_home(opens_s, job)
    found = usable(snapshot, job, q=least_q, weighs_odds=True)
    assert found == usable(snapshot, job, q=goes_by)
    assert all(found != usable(snapshot, job, q=q) for q in not_by)


@pytest.mark.parametrize(("is_flexible", "count"), [(False, LENT), (True, 0)])
def test_only_base_workers_hold_a_loan(is_flexible: bool, count: int) -> None:
    """Beside base workers that stay over the noon others may; beside flexible ones, which go home
    without a preemption, no node is held yet, and the noon asks for ninety of a hundred."""
    workers = [
        make_worker_view("old", n, f"l{n}", gpus=4, is_flexible=is_flexible) for n in range(LENT)
    ]
    old = make_job_view(
        "old",
        state=JobState.RUNNING,
        workers=(LENT, LENT),
        gpus_per_worker=4,
        remaining_work_s=LENT * 30 * HOUR_S,
        placed=workers,
    )
    lent = [
        make_node_view(worker.node, role=NodeRole.ON_LOAN, workers=[worker]) for worker in workers
    ]
    new = make_job_view("new", gpus_per_worker=4, remaining_work_s=20 * HOUR_S)
    snapshot = fleet([old, new], lent=lent, bursts=0.0)
    room = PlacementState(snapshot)
    barred = Lifetimes(snapshot, room, q=0.9).barred(new).bit_count()
    alone = usable(fleet([new], bursts=0.0), new, q=0.9)
    assert LENT - barred == (count or alone)
    assert alone < LENT // 2


def test_a_job_must_be_over_before_the_way_home_begins() -> None:
    """Nodes that need an hour to come home serve a job of three hours as nodes that are home at
    once serve one of four; those are fewer than the latter lend for three."""
    three, four = hours("three", 2.9), hours("four", 3.9)
    slow = usable(fleet([three], return_s=HOUR_S), three, q=0.9)
    at_once = fleet([three, four], return_s=0.0)
    assert slow == usable(at_once, four, q=0.9) < usable(at_once, three, q=0.9)


@pytest.mark.parametrize("drained", [0, 1, 7])
def test_a_node_that_the_operator_drains_cannot_stay_away(drained: int) -> None:
    """It serves nobody and lends nobody anything: each leaves one node less to be lent."""
    job = hours("job", 3.8)
    whole = usable(fleet([job]), job, q=0.9)
    assert usable(fleet([job], drained=drained), job, q=0.9) == whole - drained
