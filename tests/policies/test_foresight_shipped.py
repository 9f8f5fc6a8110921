"""What `foresight` ships with: each of its knobs, turned back, decides something else."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from common.model import JobState, NodeRole, Preemptibility
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.contract.decisions import Decision, Preempt, Reclaim
from coordinator.policies.contract.seasonal_load import Season
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.knobs import known, values
from coordinator.policies.registry import policy
from tests.builders import (
    NOW_S,
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.midnight import HOUR_S, cell, hours, lent_node, ten_days, with_home
from tests.policies.test_foresight import noon_and_midnight
from tests.policies.test_near_home import beside_flexible
from tests.tables import each_row


def ends_in_a_minute() -> ClusterSnapshot:
    """A load that wants one of two lent nodes back: a job on one of them ends in a minute."""
    nodes, jobs = make_cluster({"l1": {"ends": 8}, "l2": {"stays": 8}})
    left_s = {"ends": 60.0, "stays": 1e6}
    jobs = [
        replace(job, remaining_work_s=left_s[job.job_id], work_rate=1.0, as_of_s=NOW_S)
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
