"""Odds of loans: who has room at home takes none that is not sure, who waits long takes more."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import JobId, JobState
from coordinator.policies.aryl.lending.loan_lifetime import ODDS_MOST, Lifetimes
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.seasonal_load import Season
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import policy
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.policies.aryl.lending.midnight_cells import (
    HOUR_S,
    ONLY_LIFETIMES,
    cell,
    hours,
    lent_node,
    starts,
    with_home,
)
from tests.tables import each_row


def test_who_is_kept_from_home_by_a_claim_alone_takes_no_chances() -> None:
    """Where training nodes have room but for a claim, loans must surely outlive a job; where they
    are full, low odds do."""
    claiming = "aryl:lifetime_quantile=0.1:claim_ratio=0.5:claim_stretch=0"
    bold, careful = (f"{claiming}:near_quantile={q}" for q in ("null", "0.99"))
    full, claimed = with_home(is_claimed=False), with_home(is_claimed=True)
    assert starts(full, bold) == starts(full, careful) == starts(claimed, bold)
    assert 1 <= len(starts(claimed, careful)) < len(starts(claimed, bold))


def beside_flexible(*, has_room: bool) -> ClusterSnapshot:
    """A free lent node, two busy training nodes, and a job of two hours; nothing is known yet.

    has_room: on one training node there is a flexible worker, which may go.
    """
    base = make_worker_view("wide", 0, "t1", gpus=8)
    more = make_worker_view("wide", 1, "t2", gpus=8, is_flexible=has_room)
    wide = make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 2) if has_room else (2, 2),
        gpus_per_worker=8,
        remaining_work_s=40 * HOUR_S,
        placed=[base, more],
        is_resizable=has_room,
    )
    home = [make_node_view("t1", workers=[base]), make_node_view("t2", workers=[more])]
    found = cell([wide, hours("job", 2.0)], [lent_node("l1")], season=Season())
    return make_snapshot(
        nodes=[*home, *found.nodes], jobs=found.jobs, services=found.services, now_s=found.now_s
    )


@each_row("near", ["0.9", "null"])
@each_row(
    ("has_room", "odds", "node"),
    [(True, "true", "t2"), (True, "false", "l1"), (False, "true", "l1")],
)
def test_who_has_room_at_home_takes_no_loan_of_which_nothing_is_known(
    has_room: bool, odds: str, node: str, near: str
) -> None:
    """Before the first day was seen a job goes to a lent node if training nodes are full of base
    workers; where flexible ones can make room it goes there, unless odds are not weighed. That is
    so whatever quantile such jobs go by once the day is known, and if they go by that for all.
    """
    name = f"{ONLY_LIFETIMES}:near_quantile={near}:lifetime_odds={odds}"
    decisions = policy(name).allocate(beside_flexible(has_room=has_room), b"").decisions
    (start,) = (decision for decision in decisions if isinstance(decision, Start))
    assert [placement.node for placement in start.placements] == [node]


def test_who_waits_for_a_claim_on_an_unknown_day_is_told_so() -> None:
    """Not that loans are too short, which nobody knows, but that they are not known."""
    claimed = with_home(is_claimed=True)
    unknown = tuple(replace(service, season=Season()) for service in claimed.services)
    name = f"{ONLY_LIFETIMES}:near_quantile=0.9:lifetime_odds=true:claim_ratio=0.5:claim_stretch=0"
    held = policy(name).pending_reasons(replace(claimed, services=unknown), b"")
    told = {hold.job_id: " ".join(hold.blockers) for hold in held}
    assert "unknown until the load was measured for a day" in told[JobId("j0")]


ODDS = "aryl:lifetime_quantile=0.1:lifetime_odds="


def test_who_waits_long_takes_lower_odds() -> None:
    """Where training nodes come free in ten minutes a loan must outlive a job more surely than
    where they do in ten hours; without the rule both start as many."""
    started = {
        (left_s, odds): len(starts(_full(left_s), f"{ODDS}{odds}"))
        for left_s in (600.0, 10 * HOUR_S)
        for odds in ("true", "false")
    }
    assert started[600.0, "false"] == started[10 * HOUR_S, "false"]
    assert started[600.0, "true"] < started[10 * HOUR_S, "true"] <= started[600.0, "false"]


def _full(left_s: float) -> ClusterSnapshot:
    """As `with_home`, but with forty training nodes that are all busy for so long."""
    found = with_home(is_claimed=False)
    workers = [make_worker_view(f"b{number}", 0, f"t{number}", gpus=8) for number in range(40)]
    busy = [
        make_job_view(
            worker.job_id,
            state=JobState.RUNNING,
            gpus_per_worker=8,
            remaining_work_s=left_s,
            placed=[worker],
        )
        for worker in workers
    ]
    lent = [node for node in found.nodes if node.service is not None]
    return make_snapshot(
        nodes=[*(make_node_view(worker.node, workers=[worker]) for worker in workers), *lent],
        jobs=[*busy, *(job for job in found.jobs if job.state == JobState.PENDING)],
        services=found.services,
        now_s=found.now_s,
    )


def test_no_more_is_asked_of_a_loan_than_what_was_seen_often_enough() -> None:
    """A job that saves no wait at all goes by the quantile `ODDS_MOST`, and not by the highest."""
    full = _full(0.0)
    alone = [job for job in full.jobs if job.state == JobState.RUNNING or job.job_id == "j0"]
    snapshot = make_snapshot(nodes=full.nodes, jobs=alone, services=full.services, now_s=full.now_s)
    (job,) = (job for job in alone if job.state == JobState.PENDING)
    room = PlacementState(snapshot)
    weighed = Lifetimes(snapshot, room, q=0.1, weighs_odds=True)
    assert weighed.barred(job) == Lifetimes(snapshot, room, q=ODDS_MOST).barred(job)
    assert weighed.barred(job) != Lifetimes(snapshot, room, q=1.0).barred(job)
