"""Loan lifetimes rule by rule: how sure, held by which jobs, until when, on which nodes, and by
which forecast."""

from __future__ import annotations

from math import cos, pi

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.policies.aryl.lending.loan_lifetime import Lifetimes
from coordinator.policies.aryl.lending.odds import Odds
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.seasonal_load import DAY_S, Season
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.aryl.lending.midnight_cells import (
    HOUR_S,
    MIDNIGHT_S,
    ONLY_LIFETIMES,
    cell,
    hours,
    lent_node,
    starts,
    ten_days,
    with_home,
)
from tests.policies.aryl.lending.test_loan_lifetime_odds import beside_flexible
from tests.tables import each_row

SAMPLE_S = 300.0


def nine(each_h: float, *, season: Season | None = None) -> ClusterSnapshot:
    """Nine lent nodes of ten, and as many jobs of so many hours on a whole node each."""
    jobs = [hours(f"j{number}", each_h) for number in range(9)]
    return cell(jobs, [lent_node(f"l{number}") for number in range(9)], season=season)


def seen(hours_seen: float) -> Season:
    """The load of the last hours before midnight, from 10 at midnight to 90 at noon."""
    season = Season()
    steps = round(hours_seen * HOUR_S / SAMPLE_S)
    for step in range(steps + 1):
        at_s = MIDNIGHT_S + (step - steps) * SAMPLE_S
        season = season.after(at_s, 50.0 - 40.0 * cos(2.0 * pi * at_s / DAY_S))
    return season


# --- which nodes ----------------------------------------------------------------------------------


def held(hours_left: float, *, is_leaving: bool = False) -> ClusterSnapshot:
    """Of three lent nodes the last is half held for so long; a job of 14 hours wants half of it."""
    worker = make_worker_view("old", 0, "l2", gpus=4, is_leaving=is_leaving)
    old = make_job_view(
        "old",
        state=JobState.RUNNING,
        gpus_per_worker=4,
        remaining_work_s=hours_left * HOUR_S,
        placed=[worker],
    )
    node = make_node_view("l2", role=NodeRole.ON_LOAN, gpu_type="H100", workers=[worker])
    new = make_job_view("new", gpus_per_worker=4, remaining_work_s=14 * HOUR_S)
    return cell([old, new], [lent_node("l0"), lent_node("l1"), node])


def test_of_all_nodes_those_that_are_held_longest_are_used_first() -> None:
    """Over the noon a job goes to the node that is held over it anyway, and to no other."""
    (start,) = (
        decision
        for decision in policy(ONLY_LIFETIMES).allocate(held(20.0), b"").decisions
        if isinstance(decision, Start)
    )
    assert [placement.node for placement in start.placements] == [NodeName("l2")]


def test_a_worker_that_leaves_holds_its_node_no_longer() -> None:
    """However long its job has to go: nobody may stay there on its behalf."""
    assert starts(held(20.0)) == ["new"]
    assert starts(held(20.0, is_leaving=True)) == []


def test_nodes_that_are_drained_cannot_take_the_load_back() -> None:
    """Of ten nodes two are drained by an operator: two fewer can stay away until six."""
    snapshot = cell(
        [hours(f"j{number}", 5.8) for number in range(6)],
        [lent_node(f"l{number}") for number in range(6)],
    )
    fewer = tuple(
        replace(node, is_drained_by_operator=node.name in ("s0", "s1")) for node in snapshot.nodes
    )
    assert len(starts(replace(snapshot, nodes=fewer))) == len(starts(snapshot)) - 2


def test_a_service_whose_nodes_take_long_to_come_home_gets_them_sooner() -> None:
    """They must be on their way before the load is there."""
    snapshot = nine(1.8)
    by_return = {
        return_s: len(
            starts(
                replace(
                    snapshot,
                    services=tuple(replace(each, return_s=return_s) for each in snapshot.services),
                )
            )
        )
        for return_s in (0.0, HOUR_S, 2 * HOUR_S)
    }
    assert by_return[0.0] > by_return[HOUR_S] > by_return[2 * HOUR_S] > 0


@pytest.mark.parametrize(("each_h", "may"), [(2.0, True), (14.0, False)])
def test_nodes_are_wanted_on_loan_by_whom_one_more_would_do(each_h: float, *, may: bool) -> None:
    """Who is over before the noon would start on a node that is lent besides, however many are lent
    and held by nobody; who is not would not."""
    snapshot = nine(each_h)
    lifetimes = Lifetimes(snapshot, PlacementState(snapshot), q=0.9)
    assert lifetimes.may_use_loans(snapshot.jobs[0]) == may


def test_no_more_nodes_are_wanted_on_loan_than_can_be_held() -> None:
    """Nine are held until six, more than can stay away: one more would be one too many."""
    names = [f"old{number}" for number in range(9)]
    lent = [lent_node(f"l{number}", name) for number, name in enumerate(names)]
    old = [
        make_job_view(
            name,
            state=JobState.RUNNING,
            gpus_per_worker=8,
            remaining_work_s=6 * HOUR_S,
            placed=node.workers,
        )
        for name, node in zip(names, lent, strict=True)
    ]
    job = hours("new", 5.8)
    for running, may in (([], True), (old, False)):
        snapshot = cell([*running, job], lent if running else [lent_node("l0")])
        assert Lifetimes(snapshot, PlacementState(snapshot), q=0.9).may_use_loans(job) == may


# --- by which forecast ----------------------------------------------------------------------------


def test_a_day_that_was_seen_once_is_taken_with_a_part_of_its_peak_on_top() -> None:
    """No forecast was tested yet: fewer nodes are held than where ten like days were."""
    for each_h in (0.8, 1.8, 5.8):
        once, often = nine(each_h, season=seen(24.0)), nine(each_h)
        assert len(starts(once)) == len(starts(often)) - 1


def test_a_day_that_was_seen_in_part_forbids_nothing() -> None:
    """What is known of its hours says nothing of those that nobody saw."""
    assert len(starts(nine(14.0, season=seen(20.0)))) == 9


@pytest.mark.parametrize("bursts", [20.0, 60.0])
def test_who_takes_back_by_less_than_loans_outlive_lends_no_longer_for_it(bursts: float) -> None:
    """A reclaim that comes late gives nothing away: the quantile that they outlive holds."""
    for each_h in (0.8, 1.8, 3.8):
        snapshot = nine(each_h, season=ten_days(bursts=bursts))
        by_low, by_none = (
            starts(snapshot, f"aryl:lifetime_quantile=0.99:lend_quantile={low}")
            for low in ("0.05", "null")
        )
        assert by_low == by_none


def test_the_quantile_that_odds_ask_for_is_rounded_up() -> None:
    """Of odds of 0.62 a job goes by 0.7, and not by 0.6: no less sure than it must be."""
    job, snapshot = _alone(2000.0)
    room = PlacementState(snapshot)
    assert Odds(snapshot, room).needed(job, 1.8 * HOUR_S + 120.0) == pytest.approx(0.623, abs=0.001)
    weighed = Lifetimes(snapshot, room, q=0.1, weighs_odds=True).barred(job)
    assert weighed == Lifetimes(snapshot, room, q=0.7).barred(job)
    assert weighed != Lifetimes(snapshot, room, q=0.6).barred(job)


def _alone(left_s: float) -> tuple[JobView, ClusterSnapshot]:
    """One job of 1.8 hours that waits for two training nodes, both busy for so long."""
    found = with_home(is_claimed=False)
    busy = [
        job_with(each, remaining_work_s=left_s)
        for each in found.jobs
        if each.state == JobState.RUNNING
    ]
    (job,) = (each for each in found.jobs if each.job_id == "j0")
    return job, make_snapshot(
        nodes=found.nodes, jobs=[*busy, job], services=found.services, now_s=found.now_s
    )


def test_who_has_no_room_at_home_is_not_kept_away_with_those_that_have() -> None:
    """In one pass and by one quantile: of a load that nobody saw, who could start at home stays
    there, and a gang that could not goes to lent nodes."""
    found = beside_flexible(has_room=True)
    gang = replace(hours("gang", 3.0, workers=2), submitted_at_s=MIDNIGHT_S - 10.0)
    snapshot = make_snapshot(
        nodes=[*found.nodes, lent_node("l2"), lent_node("l3")],
        jobs=[*found.jobs, gang],
        services=found.services,
        now_s=found.now_s,
    )
    name = "aryl:lifetime_quantile=0.9:near_quantile=0.9:lifetime_odds=true"
    decisions = policy(name).allocate(snapshot, b"").decisions
    where = {
        decision.job_id: {placement.node for placement in decision.placements}
        for decision in decisions
        if isinstance(decision, Start)
    }
    assert where.keys() == {JobId("job"), JobId("gang")}
    assert where[JobId("job")] == {NodeName("t2")}
    assert where[JobId("gang")] <= {NodeName(name) for name in ("l1", "l2", "l3")}


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
