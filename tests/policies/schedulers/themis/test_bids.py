"""What an app's own agent says GPUs are worth, and how like apps share what they bid for."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import log

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import NodeName
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.bids import Agent, Offer
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.lease_terms import Horizon, Payment, inverse, saved
from coordinator.policies.schedulers.themis.leases import Memory
from tests.draws import pick
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.tables import each_row

LEASE_S = 1200.0


GPUS = 8


N1 = NodeName("n1")


def elastic(name: str, work_s: float, *, waited_s: float = 0.0, least: int = 1) -> JobView:
    """One that may have all GPUs of a node, and gets on as much faster."""
    job = make_job_view(
        name,
        workers=(least, GPUS),
        remaining_work_s=work_s,
        submitted_at_s=NOW_S - waited_s,
    )
    return job_with(job, whole_work_s=work_s)


def arbiter(jobs: list[JobView], **knobs: object) -> Arbiter:
    """One node, idle, and everybody bids."""
    turned = replace(ThemisKnobs(f=0.0, lease_s=LEASE_S), **knobs)
    return Arbiter(turned, make_snapshot(nodes=[make_node_view("n1")], jobs=jobs), Memory())


def shared(jobs: list[JobView], **knobs: object) -> dict[str, int]:
    """GPUs of each job after a pass."""
    found = arbiter(jobs, **knobs)
    found.run()
    given = found.sale.given.items()
    return {job_id: sum(each.worker_count for each in won.more) for job_id, won in given}


# --- like apps ------------------------------------------------------------------------------------


@each_row("work_s", [2_000.0, 50_000.0, 1_000_000.0])
@each_row(("count", "shares"), [(2, [4, 4]), (3, [2, 3, 3]), (4, [2, 2, 2, 2])])
def test_like_apps_have_like_shares(work_s: float, count: int, shares: list[int]) -> None:
    """However much they have left, and however long they waited: nobody wins all of it."""
    for waited_s in (0.0, 5_000.0):
        jobs = [elastic(name, work_s, waited_s=waited_s) for name in "abcd"[:count]]
        assert sorted(shared(jobs, payment=Payment.NONE).values()) == shares


def test_what_all_bidders_lost_is_shared_in_turn() -> None:
    """Two of whom one or both may lose the lottery have their half in nearly every draw, and nobody
    is told that no other one wanted its GPUs."""
    halves, drawn = 0, 100
    for seed in range(drawn):
        found = arbiter([elastic(name, 50_000.0) for name in "ab"], seed=seed)
        found.run()
        given = found.sale.given.values()
        halves += sorted(sum(each.worker_count for each in won.more) for won in given) == [4, 4]
        assert not any(won.why.startswith("no other app") for won in given)
    assert halves > 0.9 * drawn


def test_who_holds_gpus_bids_for_more_behind_who_holds_none() -> None:
    """What is held counts as won: of two alike, who has half of a node gets none of the rest."""
    running = arbiter([elastic(name, 50_000.0) for name in "ab"], payment=Payment.NONE)
    first, second = running.standings.values()
    assert running.sale.give_least(first, "for a start")
    while sum(held.workers for held in first.held.values()) < GPUS // 2:
        assert running.sale.give_least(first, "and more")
    assert running.sale.auction([first, second])
    assert [held.workers for held in (*first.held.values(), *second.held.values())] == [4, 4]


# --- worths ---------------------------------------------------------------------------------------


@st.composite
def scaling(draw: st.DrawFn) -> JobView:
    """An elastic job of any length that waited for any time, each of whose workers brings no more
    than the one before it."""
    least = draw(st.integers(1, 3))
    job = elastic(
        "a",
        draw(st.floats(10.0, 1e7)),
        waited_s=draw(pick(0.0, 60.0, 1e4, 1e6)),
        least=least,
    )
    step, speeds = 1.0, [(least, float(least))]
    for workers in range(least + 1, GPUS + 1):
        step *= draw(st.floats(0.5, 1.0))
        speeds.append((workers, speeds[-1][1] + step))
    return replace(job, profile=replace(job.profile, speedup=tuple(speeds)))


@settings(deadline=None)
@given(scaling(), st.integers(0, 7))
@example(elastic("a", 50_000.0), 1)
def test_no_gpu_adds_more_to_a_worth_than_the_one_before_it(job: JobView, others: int) -> None:
    """Nothing is worth 1, more GPUs are worth more, and logarithms of worths grow less and less:
    the premise of what the auction promises holds of tables that agents make. Not of an app that
    could end on its share within the lease: who ends sooner than that saves what it need not wait.
    """
    found = arbiter([job, *(elastic(f"other{number}", 1e5) for number in range(others))])
    own = next(each for each in found.standings.values() if each.jobs[0].job_id == job.job_id)
    assume(own.measure.share_left_s >= LEASE_S)
    offer = Offer(free={N1: GPUS}, nodes={N1: make_node_view("n1")}, back=frozenset())
    by_lease = partial(own.measure.left_by_lease_s, lease_s=LEASE_S)
    bundles = Agent(own.jobs, own.measure, {}, offer, by_lease, saved).table({N1: 0})
    table = [(bundle.bid.gpus, bundle.bid.value) for bundle in bundles]
    assert table[0] == (0, 1.0)
    slopes = [
        (log(worth) - log(before)) / (gpus - fewer)
        for (fewer, before), (gpus, worth) in pairwise(table)
    ]
    assert all(slope > 0.0 for slope in slopes)
    assert all(later <= slope * (1.0 + 1e-6) for slope, later in pairwise(slopes))


def test_worths_of_the_two_horizons() -> None:
    """By hand: two thirds of rho are left with a bundle, so a third is saved."""
    assert saved(2.0 / 3.0) == pytest.approx(4.0 / 3.0)
    assert inverse(2.0 / 3.0) == pytest.approx(3.0 / 2.0)
    assert saved(1.0) == inverse(1.0) == 1.0
    assert ThemisKnobs().horizon == Horizon.LEASE
