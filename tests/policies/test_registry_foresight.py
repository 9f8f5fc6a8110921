"""The policy `foresight`: its parts one by one, what it ships with, and `aryl` when all parts are
off."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from common.model import JobState, Mode, NodeRole, Preemptibility
from coordinator.policies.aryl.lending.balance import balance
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.contract.decisions import Decision, Loan, Preempt, Reclaim, Start
from coordinator.policies.contract.seasonal_load import DAY_S, Season
from coordinator.policies.contract.snapshot import ClusterSnapshot, LoadSample
from coordinator.policies.knobs import known, values
from coordinator.policies.registry import policy
from coordinator.service.settings import CoordinatorSettings, check
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.aryl.lending.midnight_cells import (
    HOUR_S,
    cell,
    hours,
    lent_node,
    ten_days,
    with_home,
)
from tests.policies.aryl.lending.test_loan_lifetime_odds import beside_flexible
from tests.strategies import snapshots
from tests.tables import each_row

ALL_OFF = (
    "foresight:separates_at_home=false:claim_ratio=0:lifetime_quantile=null"
    ":lifetime_odds=false:near_quantile=null:lend_quantile=null:waits_for_finish=false"
)


def test_it_is_aryl_when_every_part_is_off() -> None:
    """Its rules are then those of `aryl`, and rules are all that a bundle is made of."""
    assert policy(ALL_OFF).knobs == policy("aryl").knobs
    assert policy("foresight").knobs != policy("aryl").knobs


@settings(max_examples=60, deadline=None)
@given(snapshot=snapshots())
def test_waiting_jobs_stop_nobody(snapshot: ClusterSnapshot) -> None:
    """Whatever it keeps for the aged, a scheduling pass preempts no job: only a reclaim does."""
    decisions = policy("foresight").allocate(snapshot, b"").decisions
    assert not any(isinstance(decision, Preempt) for decision in decisions)


def test_base_workers_leave_whole_nodes_alone() -> None:
    """A small job joins base workers; without that part it joins the fuller node."""
    nodes, jobs = make_cluster(
        {"n1": {"base": 2}, "n3": {"wide": 8}},
        flexible={"n2": {"wide": 6}},
        role=NodeRole.TRAINING,
    )
    small = make_job_view("small", gpus_per_worker=1)
    snapshot = make_snapshot(nodes=nodes, jobs=[*jobs, small])

    def where(name: str) -> list[str]:
        return [
            placement.node
            for decision in policy(name).allocate(snapshot, b"").decisions
            if isinstance(decision, Start)
            for placement in decision.placements
        ]

    assert where("foresight") == ["n1"]
    assert where("aryl") == ["n2"]


def noon_and_midnight() -> tuple[Season, tuple[LoadSample, ...]]:
    """Ten days from 10 at midnight to 90 at noon, seen until half past seven; the last samples.

    In every third hour the load is 8 higher, now in its first half and now in its second.
    """
    season = Season()
    samples: list[LoadSample] = []
    for step in range(round((10 * DAY_S + 7.5 * 3600.0) / 300.0) + 1):
        at_s = step * 300.0
        is_higher = step % 36 < 6 if step // 288 % 2 else 6 <= step % 36 < 12
        load = 50.0 - 40.0 * cos(2.0 * pi * at_s / DAY_S) + 8.0 * is_higher
        season = season.after(at_s, load)
        samples.append(LoadSample(at_s, load))
    return season, tuple(samples[-600:])


def test_lending_follows_the_quantile_that_is_asked_for() -> None:
    """More caution needs more nodes, never fewer; without a quantile the season has no say."""
    season, samples = noon_and_midnight()
    nodes = [make_node_view(f"s{number:03}", role=NodeRole.SERVING) for number in range(100)]
    view = replace(make_service_view(capacity_per_node=1.0, load=samples), season=season)
    snapshot = make_snapshot(nodes=nodes, services=[view], now_s=samples[-1].at_s)
    needed = [balance(snapshot, replace(view, quantile=q)).needed for q in (0.1, 0.5, 0.9, 0.99)]
    assert needed == sorted(needed)
    assert needed[0] < needed[-1]
    assert balance(snapshot, view) == balance(snapshot, replace(view, season=Season()))


def test_an_unknown_season_lends_as_aryl_does() -> None:
    """Before the load's day was seen, loans and reclaims are those of `aryl`."""
    nodes = [make_node_view(f"s{number}", role=NodeRole.SERVING) for number in range(6)]
    snapshot = make_snapshot(
        nodes=nodes,
        jobs=[
            make_job_view(f"j{number}", gpus_per_worker=8, remaining_work_s=1800.0)
            for number in range(9)
        ],
        services=[make_service_view(load=25.0)],
    )
    lends = policy("foresight:waits_for_finish=false").lend(snapshot)
    assert lends == policy("aryl").lend(snapshot)
    assert any(isinstance(decision, Loan) for decision in lends)


def test_no_node_is_lent_that_nobody_may_hold() -> None:
    """A base gang that no loan is known to outlive wants no loan."""
    nodes = [make_node_view(f"s{number}", role=NodeRole.SERVING) for number in range(6)]
    long = make_job_view("long", gpus_per_worker=8, remaining_work_s=90_000.0)
    season, samples = noon_and_midnight()
    view = replace(make_service_view(capacity_per_node=15.0, load=samples), season=season)
    snapshot = make_snapshot(nodes=nodes, jobs=[long], services=[view], now_s=samples[-1].at_s)
    assert policy("foresight").lend(snapshot) == ()
    assert policy("aryl").lend(snapshot) != ()


@pytest.mark.parametrize("mode", [Mode.ACT, Mode.OBSERVE])
def test_a_short_service_gets_its_nodes_back(mode: Mode) -> None:
    """What is lent comes home when the load asks for it, whatever was foreseen."""
    lent, jobs = make_cluster({"l1": {"a": 8}, "l2": {"b": 8}})
    snapshot = make_snapshot(
        nodes=lent, jobs=jobs, services=[make_service_view(load=20.0, mode=mode)]
    )
    home = [d.node for d in policy("foresight").lend(snapshot) if isinstance(d, Reclaim)]
    assert sorted(home) == ["l1", "l2"]


def test_whoever_waits_is_told_what_keeps_it_away() -> None:
    """Both that loans end too early and for whom nodes are kept are among a job's blockers."""
    season, samples = noon_and_midnight()
    now_s = samples[-1].at_s
    lent, busy = make_cluster({"l1": {}, "n2": {"base": 8}})
    lent = [lent[0], *make_cluster({"n1": {}, "n2": {"base": 8}}, role=NodeRole.TRAINING)[0]]
    gang = make_job_view(
        "gang",
        workers=(2, 2),
        gpus_per_worker=8,
        remaining_work_s=200.0,
        preemptibility=Preemptibility.NON,
    )
    late = make_job_view(
        "late", gpus_per_worker=8, remaining_work_s=90_000.0, submitted_at_s=now_s - 5.0
    )
    view = replace(make_service_view(capacity_per_node=1.0, load=samples), season=season)
    snapshot = make_snapshot(nodes=lent, jobs=[*busy, gang, late], services=[view], now_s=now_s)
    told = {
        str(hold.job_id): " ".join(hold.blockers)
        for hold in policy("foresight:reservation_after_s=null").pending_reasons(snapshot, b"")
    }
    assert "lent nodes are expected to return before the job ends" in told["late"]
    assert "2 nodes of type H100 are kept for gang" in told["late"]
    assert "are kept for" not in told["gang"]


def test_a_coordinator_can_be_set_to_it() -> None:
    """Its name is a valid policy in the coordinator's settings, with knobs turned or not."""
    for name in ("foresight", "foresight:lifetime_quantile=0.95"):
        found = CoordinatorSettings(cell="here", nats_url="nats://127.0.0.1:4222")
        check(replace(found, engine=replace(found.engine, policy=name)))


def ends_in_a_minute() -> ClusterSnapshot:
    """A load that wants one of two lent nodes back: a job on one of them ends in a minute."""
    nodes, jobs = make_cluster({"l1": {"ends": 8}, "l2": {"stays": 8}})
    left_s = {"ends": 60.0, "stays": 1e6}
    jobs = [
        job_with(job, remaining_work_s=left_s[job.job_id], work_rate=1.0, as_of_s=NOW_S)
        for job in jobs
    ]
    return make_snapshot(nodes=nodes, jobs=jobs, services=[make_service_view(load=5.0)])


def fuller_by_flexible_workers() -> ClusterSnapshot:
    """A small job, a training node with base workers, and a fuller one with flexible ones."""
    nodes, jobs = make_cluster(
        {"n1": {"base": 2}, "n3": {"wide": 8}},
        flexible={"n2": {"wide": 6}},
        role=NodeRole.TRAINING,
    )
    return make_snapshot(nodes=nodes, jobs=[*jobs, make_job_view("small", gpus_per_worker=1)])


def before_the_morning() -> ClusterSnapshot:
    """Half past seven, a load that rises until noon, nodes that serve, and jobs that wait."""
    season, samples = noon_and_midnight()
    nodes = [make_node_view(f"s{number:03}", role=NodeRole.SERVING) for number in range(100)]
    view = replace(make_service_view(capacity_per_node=1.0, load=samples), season=season)
    jobs = [
        make_job_view(f"j{number:03}", gpus_per_worker=8, remaining_work_s=600.0)
        for number in range(100)
    ]
    return make_snapshot(nodes=nodes, jobs=jobs, services=[view], now_s=samples[-1].at_s)


def aged_gang(*, ready_s: float) -> ClusterSnapshot:
    """A gang of two nodes that waited 20 h; one is free, one busy for so long; and a late job."""
    waits = replace(
        hours("gang", 0.5, workers=2),
        submitted_at_s=NOW_S - 20 * HOUR_S,
        preemptibility=Preemptibility.NON,
    )
    worker = make_worker_view("busy", 0, "t2", gpus=8)
    busy = make_job_view(
        "busy",
        state=JobState.RUNNING,
        gpus_per_worker=8,
        remaining_work_s=ready_s,
        placed=[worker],
    )
    late = replace(hours("late", 16.0), submitted_at_s=NOW_S)
    nodes = [make_node_view("t1"), make_node_view("t2", workers=[worker])]
    return make_snapshot(nodes=nodes, jobs=[waits, busy, late])


def nine_nodes_at_midnight() -> ClusterSnapshot:
    """Nine lent nodes, nine jobs over noon, and a load that is known to come back."""
    lent = [lent_node(f"l{number}") for number in range(9)]
    jobs = [hours(f"j{number}", 4.0) for number in range(9)]
    return cell(jobs, lent, season=ten_days(bursts=60.0))


def decided(name: str, snapshot: ClusterSnapshot) -> tuple[Decision, ...]:
    """All that a policy does with a cell: loans and reclaims, and a scheduling pass."""
    made = policy(name)
    return (*made.lend(snapshot), *made.allocate(snapshot, b"").decisions)


RESERVES_NOT = ":reservation_after_s=null"
"""A gang that waited for 20 h has GPUs set aside for it in any case."""


CASES: dict[str, tuple[Callable[[], ClusterSnapshot], str, tuple[str, ...]]] = {
    "separates_at_home": (fuller_by_flexible_workers, "", ("false",)),
    "claim_ratio": (lambda: aged_gang(ready_s=9 * HOUR_S), RESERVES_NOT, ("0", "0.4")),
    "claim_ratio, no more": (lambda: aged_gang(ready_s=11 * HOUR_S), RESERVES_NOT, ("0.6",)),
    "lifetime_quantile": (nine_nodes_at_midnight, "", ("null", "0.2")),
    "lifetime_odds": (lambda: beside_flexible(has_room=True), "", ("false",)),
    "near_quantile": (lambda: with_home(is_claimed=True), ":claim_stretch=0", ("null", "0.5")),
    "lend_quantile": (before_the_morning, "", ("null", "0.5", "0.99")),
    "waits_for_finish": (ends_in_a_minute, "", ("false",)),
}
"""Per knob a cell, other knobs, and values with which it decides otherwise there."""


@each_row(("case", "value"), [(case, value) for case, found in CASES.items() for value in found[2]])
def test_every_part_that_is_shipped_decides_something(case: str, value: str) -> None:
    """As shipped it does other things than with that knob turned, in a cell where it matters."""
    snapshot, others, _ = CASES[case]
    knob, _, _ = case.partition(",")
    shipped = decided(f"foresight{others}", snapshot())
    assert shipped != decided(f"foresight{others}:{knob}={value}", snapshot())


def test_no_part_of_it_is_without_a_case() -> None:
    """Whatever it is shipped with that `aryl` is not is among them."""
    shipped, aryl = (values(policy(name).knobs) for name in ("foresight", "aryl"))
    ours = {
        knob
        for knob, value in shipped.items()
        if aryl.get(knob, known(Rules)[knob].default) != value
    }
    assert ours == {case.partition(",")[0] for case in CASES}


def test_it_waits_for_a_job_that_ends_in_time() -> None:
    """Nobody is stopped for a node whose job is over before the deadline would need it."""
    decisions = policy("foresight").lend(ends_in_a_minute())
    assert [d.node for d in decisions if isinstance(d, Reclaim)] == ["l1"]
    assert not any(isinstance(decision, Preempt) for decision in decisions)


def test_before_the_first_day_was_seen_its_loans_and_reclaims_are_those_of_aryl() -> None:
    """But for waiting, which needs no forecast."""
    snapshot = before_the_morning()
    unknown = replace(
        snapshot, services=tuple(replace(each, season=Season()) for each in snapshot.services)
    )
    assert policy("foresight").lend(unknown) == policy("aryl").lend(unknown)
