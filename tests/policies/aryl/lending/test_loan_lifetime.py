"""Loan lifetimes: base workers go to lent nodes only if the loans outlive them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from common.model import JobState, NodeRole
from coordinator.policies.aryl.lending.loan_lifetime import longest_runtime_s
from coordinator.policies.contract.seasonal_load import Season
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
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
)
from tests.strategies import snapshots
from tests.tables import each_row


def half_held(count: int, *, hours_left: float) -> tuple[list[JobView], list[NodeView]]:
    """So many jobs that run, and the lent nodes of which each holds half of one."""
    jobs, nodes = list[JobView](), list[NodeView]()
    for number in range(count):
        worker = make_worker_view(f"old{number}", 0, f"l{number}", gpus=4)
        job = make_job_view(
            f"old{number}",
            state=JobState.RUNNING,
            gpus_per_worker=4,
            remaining_work_s=hours_left * HOUR_S,
            placed=[worker],
        )
        jobs.append(job)
        role, name = NodeRole.ON_LOAN, f"l{number}"
        nodes.append(make_node_view(name, role=role, gpu_type="H100", workers=[worker]))
    return jobs, nodes


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


@pytest.mark.parametrize(
    ("bursts", "hours_each", "below", "above"), [(60.0, 4.0, 0.24, None), (20.0, 5.4, None, 0.26)]
)
def test_foresight_takes_the_quantile_that_its_figures_were_measured_with(
    bursts: float, hours_each: float, below: float | None, above: float | None
) -> None:
    """A quarter (docs/foresight.md): of loads with bursts it holds fewer nodes than by a lower
    quantile, and more than by a higher one."""
    lent = [lent_node(f"l{number}") for number in range(9)]
    jobs = [hours(f"j{number}", hours_each) for number in range(9)]
    snapshot = cell(jobs, lent, season=ten_days(bursts=bursts))
    shipped = starts(snapshot, "foresight")
    if below is not None:
        assert len(shipped) < len(starts(snapshot, f"foresight:lifetime_quantile={below}"))
    if above is not None:
        assert len(shipped) > len(starts(snapshot, f"foresight:lifetime_quantile={above}"))


def test_a_job_must_be_over_two_minutes_before_its_node_is_wanted() -> None:
    """To start and to end take time; an estimate that is a guess may be three times too short."""
    job = hours("j", 1.0)
    assert longest_runtime_s(job, "H100", MIDNIGHT_S) == HOUR_S + 120.0
    guessed = job_with(job, estimate_source="default")
    assert longest_runtime_s(guessed, "H100", MIDNIGHT_S) == 3 * HOUR_S + 120.0


SAVING = "aryl:lifetime_quantile=0.9:lifetime_saves=true"


@each_row(
    ("job", "starts_there"),
    [
        ({}, False),
        ({"saves_when_asked": True}, True),
        ({"saves_when_asked": True, "wasted_gpu_s": 6e4, "attained_gpu_s": 1e5}, False),
        ({"preemptions_count": 2, "wasted_gpu_s": 8e4, "attained_gpu_s": 1e5}, False),
        ({"preemptions_count": 2, "wasted_gpu_s": 2e3, "attained_gpu_s": 1e5}, True),
        ({"preemptions_count": 1, "wasted_gpu_s": 1e5, "attained_gpu_s": 1e5}, False),
        ({"preemptions_count": 20, "wasted_gpu_s": 1e5, "attained_gpu_s": 1e5}, False),
    ],
    ids=[
        *("silent", "asked", "no longer believed", "old saves", "young saves", "saved nothing"),
        "never saved anything",
    ],
)
def test_what_saves_need_not_be_over(job: dict[str, float], *, starts_there: bool) -> None:
    """Over the noon a job goes to a lent node if a stop is known to cost it little of the loan; by
    its end alone none does."""
    long = job_with(hours("long", 14.0), **job)
    snapshot = cell([long], [lent_node("l1")])
    assert (starts(snapshot, SAVING) == ["long"]) == starts_there
    assert starts(snapshot) == []


def test_a_loan_that_ends_at_once_is_worth_nothing_to_what_saves() -> None:
    """Where the load is about to come back, nobody starts there for the sake of a restart."""
    saves = job_with(hours("saves", 14.0), saves_when_asked=True)
    later = replace(
        cell([saves], [lent_node(f"l{number}") for number in range(9)]),
        now_s=MIDNIGHT_S + 11.5 * HOUR_S,
    )
    assert starts(later, "aryl") == ["saves"]
    assert starts(later, SAVING) == []


def test_what_saves_holds_a_node_no_longer_than_it_needs_it() -> None:
    """Nine nodes are held over the noon by jobs that save: others may use those that can stay away
    until six beside them."""
    old, held = half_held(9, hours_left=14.0)
    saving = [job_with(job, saves_when_asked=True) for job in old]
    new = [
        make_job_view(f"new{number}", gpus_per_worker=4, remaining_work_s=5.8 * HOUR_S)
        for number in range(9)
    ]
    assert len(starts(cell([*old, *new], held), SAVING)) == 9
    assert 3 <= len(starts(cell([*saving, *new], held), SAVING)) <= 5


def test_what_a_stop_costs_does_not_hang_on_when_a_view_was_made() -> None:
    """What jobs computed since counts for whether they are believed to save: views are shared until
    something happens, and whoever replays a journal makes them anew."""
    old, held = half_held(9, hours_left=14.0)
    kept = [
        job_with(
            job, saves_when_asked=True, wasted_gpu_s=1e5, attained_gpu_s=1.9e5, computing_gpus=4,
            as_of_s=MIDNIGHT_S - HOUR_S,
        )
        for job in old
    ]  # fmt: skip
    anew = [job_with(job, attained_gpu_s=1.9e5 + 4 * HOUR_S, as_of_s=MIDNIGHT_S) for job in kept]
    new = [
        make_job_view(f"new{number}", gpus_per_worker=4, remaining_work_s=5.8 * HOUR_S)
        for number in range(9)
    ]
    found = [starts(cell([*jobs, *new], held), SAVING) for jobs in (kept, anew)]
    assert found[0] == found[1]
    assert 3 <= len(found[0]) <= 5


def test_a_job_that_saves_is_told_why_it_waits() -> None:
    """Not that it would have to be over, but that the loan is too short for its restart."""
    saves = job_with(hours("saves", 14.0), saves_when_asked=True)
    later = replace(cell([saves], [lent_node("l1")]), now_s=MIDNIGHT_S + 11.5 * HOUR_S)
    (hold,) = policy(SAVING).pending_reasons(later, b"")
    assert "too soon for the cost of a stop of the job" in " ".join(hold.blockers)


@settings(max_examples=80, deadline=None)
@given(snapshot=snapshots())
def test_an_unknown_day_forbids_nothing(snapshot: ClusterSnapshot) -> None:
    """Before the first day was seen, a pass decides to the last worker as without lifetimes, unless
    odds are weighed: jobs that have room at home then stay there."""
    assert all(service.season == Season() for service in snapshot.services)
    for name in ("aryl", "foresight:lifetime_odds=false"):
        free, limited = (policy(f"{name}:lifetime_quantile={q}") for q in ("null", "0.9"))
        assert limited.allocate(snapshot, b"") == free.allocate(snapshot, b"")
        assert limited.lend(snapshot) == free.lend(snapshot)


@pytest.mark.parametrize("count", [0.9, 3.0, 90.0])
def test_before_the_first_day_a_job_of_any_length_may_run_on_lent_nodes(count: float) -> None:
    """Beside others that end sooner and on nodes that nobody holds, like any job of `aryl`."""
    old, half = half_held(3, hours_left=1.0)
    new = [
        make_job_view(f"new{number}", gpus_per_worker=4, remaining_work_s=count * HOUR_S)
        for number in range(3)
    ]
    snapshot = cell([*old, *new], half, season=Season())
    assert starts(snapshot) == starts(snapshot, "aryl") == ["new0", "new1", "new2"]


def test_to_hold_a_node_for_longer_takes_no_more_nodes_now() -> None:
    """Nine nodes are held for half an hour; about half of them may be held until six all the same.

    Until then no more nodes are away than anyway, and afterwards as many as can stay away.
    """
    old, held = half_held(9, hours_left=0.5)
    new = [
        make_job_view(f"new{number}", gpus_per_worker=4, remaining_work_s=5.8 * HOUR_S)
        for number in range(9)
    ]
    assert 3 <= len(starts(cell([*old, *new], held))) <= 5


@each_row(
    ("source", "longest_s"),
    [
        ("live progress", 1120.0),
        ("length of its pre-run", 1120.0),
        ("progress of an earlier attempt", 1120.0),
        ("declared", 1120.0),
        ("history of 5 runs", 1120.0),
        ("median of 4 jobs of this size", 3120.0),
        ("an earlier attempt that outlived the estimate (declared)", 3120.0),
        ("recovered from a node's ledger", 3120.0),
        ("default", 3120.0),
    ],
)
def test_only_a_guess_is_taken_for_longer_than_it_says(source: str, longest_s: float) -> None:
    """Of 1,000 s that were measured or declared a loan must outlive 1,000 s and a start; of a guess
    three times as much."""
    job = job_with(make_job_view("job", remaining_work_s=1000.0), estimate_source=source)
    assert longest_runtime_s(job, "H100", job.as_of_s) == longest_s


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
