"""Which of the jobs that others run are stopped for one that is due, by what tenants keep.

Cells by hand, and generated ones beside a search over all sets of jobs that could be stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, JobId, NodeName, Preemptibility
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.borrowers import Lenders
from coordinator.policies.tenants.entitlements import beside_idle
from coordinator.policies.tenants.free_counts import Counts
from coordinator.policies.tenants.gpu_flow import Flow, Gang
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.victims import Choosing
from tests.draws import pick
from tests.harness.builders import job_with
from tests.policies.tenant_books import A8, cell, names, runs, waits

A6 = TenantView(name="a", guarantee_gpus=6)


B4 = TenantView(name="b", guarantee_gpus=4)


def stopped(snapshot: ClusterSnapshot) -> set[str]:
    """Jobs that are stopped for the one named `owed`, which starts."""
    found = given_back(snapshot, ()).decisions
    assert names(found, Start) == {"owed"}
    return names(found, Preempt)


@pytest.mark.parametrize(("big_gpu_s", "small_gpu_s"), [(0, 0), (360, 1200), (1200, 360)])
def test_a_job_larger_than_what_is_borrowed_runs_on_where_a_smaller_one_will_do(
    big_gpu_s: float, small_gpu_s: float
) -> None:
    """It loses less by a stop, but its tenant would lose GPUs of its guarantee with it."""
    big = runs("big", "a", "n0", 6, lost_gpu_s=big_gpu_s)
    small = runs("small", "a", "n0", 2, lost_gpu_s=small_gpu_s)
    assert stopped(cell(big, small, waits("owed", "b", 2), tenants=(A6, B4), nodes=1)) == {"small"}


def test_a_job_with_a_date_ahead_is_stopped_before_a_guarantee_is_touched() -> None:
    """A promised date is worth less than what a tenant is guaranteed."""
    big = runs("big", "a", "n0", 6)
    dated = replace(runs("dated", "a", "n0", 2), deadline_at_s=1e9)
    assert stopped(cell(big, dated, waits("owed", "b", 2), tenants=(A6, B4), nodes=1)) == {"dated"}


def test_two_small_jobs_go_before_one_that_reaches_into_a_guarantee() -> None:
    """Either is too small by itself, and the large one is the cheapest by far."""
    small = [runs(f"s{gpus}", "a", "n0", gpus, lost_gpu_s=900.0) for gpus in (1, 2)]
    a5 = TenantView(name="a", guarantee_gpus=5)
    jobs = runs("big", "a", "n0", 5), *small, waits("owed", "b", 3)
    assert stopped(cell(*jobs, tenants=(a5, B4), nodes=1)) == {"s1", "s2"}
    a3 = TenantView(name="a", guarantee_gpus=3)
    assert stopped(cell(*jobs, tenants=(a3, B4), nodes=1)) == {"big"}


def test_the_cheapest_is_left_out_where_it_leaves_no_room_for_those_that_will_do() -> None:
    """With the job of 3 GPUs another would be one GPU too many; two of 2 GPUs are enough."""
    jobs = [
        runs("three", "a", "n0", 3),
        *(runs(name, "a", "n0", 2, lost_gpu_s=900.0) for name in ("one", "two")),
        runs("own", "b", "n0", 1),
    ]
    lender, owner = (TenantView(name=name, guarantee_gpus=n) for name, n in (("a", 3), ("b", 5)))
    snapshot = cell(*jobs, waits("owed", "b", 4), tenants=(lender, owner), nodes=1)
    assert stopped(snapshot) == {"one", "two"}


def test_where_all_reach_into_a_guarantee_it_loses_as_little_as_can_be() -> None:
    """The job of 3 GPUs costs one GPU of the guarantee, that of 5 three."""
    jobs = runs("big", "a", "n0", 5), runs("small", "a", "n0", 3, lost_gpu_s=900.0)
    assert stopped(cell(*jobs, waits("owed", "b", 2), tenants=(A6, B4), nodes=1)) == {"small"}


def test_of_those_that_lose_as_much_the_smallest_is_stopped() -> None:
    """Whoever is promised nothing loses no more than is needed either."""
    *large, small = (
        runs(name, "c", "n0", gpus) for name, gpus in (("big", 4), ("next", 3), ("small", 1))
    )
    owed = waits("owed", "a", 1)
    assert stopped(cell(*large, small, owed, tenants=(A8,), nodes=1)) == {"small"}
    dear = job_with(small, unsaved_gpu_s=60.0)
    assert stopped(cell(*large, dear, owed, tenants=(A8,), nodes=1)) == {"next"}


def test_a_smaller_job_is_not_stopped_where_a_guarantee_would_lose_by_it() -> None:
    """The one of 4 GPUs leaves two for nobody, but is borrowed; that of 2 is half guaranteed."""
    jobs = [
        *(runs(f"own{gpus}", "b", node, gpus) for node, gpus in (("n0", 1), ("n1", 4))),
        *(runs(f"a{gpus}", "a", "n0", gpus) for gpus in (5, 2)),
        runs("borrowed", "x", "n1", 4),
    ]
    owner = TenantView(name="b", guarantee_gpus=8)
    snapshot = cell(*jobs, waits("owed", "b", 2), tenants=(A6, owner), nodes=2)
    assert stopped(snapshot) == {"borrowed"}


def test_a_larger_job_is_not_stopped_in_place_of_the_first_that_is_enough() -> None:
    """Nor is it where all lose as much: those that follow are looked at for fewer GPUs alone."""
    jobs = (runs(name, "c", "n0", gpus) for name, gpus in (("first", 3), ("second", 4)))
    rest = replace(runs("kept", "c", "n0", 1), preemptibility=Preemptibility.NON)
    owed = waits("owed", "a", 1)
    assert stopped(cell(*jobs, rest, owed, tenants=(A8,), nodes=1)) == {"first"}


@pytest.mark.parametrize(("owed", "big", "small"), [(4, 4, 2), (3, 3, 1), (3, 2, 1)])
def test_of_those_that_lose_as_much_the_smallest_is_stopped_beside_free_gpus(
    owed: int, big: int, small: int
) -> None:
    """Two are free, so that a job of as many GPUs as the one that is due is more than it needs."""
    rest = replace(runs("rest", "c", "n0", 6 - big - small), preemptibility=Preemptibility.NON)
    jobs = runs("big", "c", "n0", big), runs("small", "c", "n0", small), rest
    assert stopped(cell(*jobs, waits("owed", "a", owed), tenants=(A8,), nodes=1)) == {"small"}


def test_so_it_is_where_the_parent_of_both_has_room_for_part_of_the_job() -> None:
    """Of the 8 GPUs that it may use 6 are in use, and GPUs are free: two more make room."""
    tenants = (
        TenantView(name="p", guarantee_gpus=8, borrow_limit_gpus=0),
        TenantView(name="a", parent="p", guarantee_gpus=4),
        TenantView(name="c", parent="p"),
    )
    jobs = runs("big", "c", "n0", 4), runs("small", "c", "n0", 2), waits("owed", "a", 4)
    assert stopped(cell(*jobs, tenants=tenants)) == {"small"}


def test_what_a_sibling_gives_is_no_loss_of_the_parent_that_has_it_again() -> None:
    """The parent has as much after the start as before the stop, less than its guarantee though it
    is: so the cheapest is stopped, and not an outsider in its place."""
    tenants = (
        TenantView(name="p", guarantee_gpus=8),
        TenantView(name="s", parent="p", guarantee_gpus=1),
        TenantView(name="t", parent="p", guarantee_gpus=2),
    )
    outside = [runs(f"out{at}", "x", "n0", 2, lost_gpu_s=900.0) for at in range(2)]
    within = runs("first", "s", "n0", 2), runs("second", "s", "n0", 2, lost_gpu_s=60.0)
    snapshot = cell(*outside, *within, waits("owed", "t", 2), tenants=tenants, nodes=1)
    assert stopped(snapshot) == {"first"}


def test_of_several_ways_the_one_by_which_guarantees_lose_least_is_taken() -> None:
    """Though an earlier one is enough as well; of ways that lose as much it is the first."""
    jobs = [runs("big", "a", "n0", 6), runs("small", "a", "n0", 2, lost_gpu_s=900.0)]
    snapshot = cell(*jobs, waits("owed", "b", 2), tenants=(A6, B4), nodes=1)
    chosen, counts = taken(snapshot, ["big"], ["small"])
    assert chosen == ["small"]
    assert counts.free[NodeName("n0")] == 2  # and it is given


def test_of_one_way_a_smaller_job_is_no_better_where_a_guarantee_would_lose_by_it() -> None:
    """Though it leaves nothing for nobody, and no other way makes up for that."""
    jobs = [
        *(runs(f"own{gpus}", "b", node, gpus) for node, gpus in (("n0", 1), ("n1", 4))),
        *(runs(f"a{gpus}", "a", "n0", gpus) for gpus in (5, 2)),
        runs("borrowed", "x", "n1", 4),
    ]
    owner = TenantView(name="b", guarantee_gpus=8)
    snapshot = cell(*jobs, waits("owed", "b", 2), tenants=(A6, owner), nodes=2)
    assert taken(snapshot, ["borrowed", "a2"])[0] == ["borrowed"]
    spared = cell(*jobs, waits("owed", "b", 2), tenants=(owner,), nodes=2)
    assert taken(spared, ["borrowed", "a2"])[0] == ["a2"]


def taken(snapshot: ClusterSnapshot, *ways: Sequence[str]) -> tuple[list[str], Counts]:
    """Of ways that name whom they stop in turn: who is stopped for `owed`; and the counts then."""
    owed = next(job for job in snapshot.jobs if job.job_id == "owed")
    flow = Flow(snapshot)
    counts = Counts(snapshot, flow)
    lenders = Lenders(snapshot, flow, counts, (), ())
    gang = Gang(counts.free, flow.nodes, owed, snapshot.nodes[0].gpu_type)
    sources = {str(each.job.job_id): each for each in lenders.sources(owed, owed.base_gpus, gang)}
    chosen = Choosing(counts, lenders).take(
        [partial(iter, [sources[name] for name in way]) for way in ways], owed, gang
    )
    assert chosen is not None
    return [str(source.job.job_id) for source in chosen], counts


# --- generated cells ------------------------------------------------------------------------------


@st.composite
def lenders(draw: st.DrawFn) -> ClusterSnapshot:
    """One full node of jobs of two tenants of any guarantees, and one that is owed to a third."""
    jobs, left = list[JobView](), 8
    while left:
        gpus = min(left, draw(pick(1, 2, 3, 4, 6)))
        lost_gpu_s = float(draw(pick(0, 0, 60, 900)))
        jobs.append(
            runs(f"j{len(jobs)}", draw(pick("a", "a", "c")), "n0", gpus, lost_gpu_s=lost_gpu_s)
        )
        left -= gpus
    promised = draw(st.integers(0, 8))
    tenants = (
        TenantView(name="a", guarantee_gpus=promised),
        TenantView(name="b", guarantee_gpus=draw(st.integers(1, 8))),
        TenantView(name="c", guarantee_gpus=draw(st.integers(0, 8 - promised))),
    )
    owed = waits("owed", "b", draw(st.integers(1, tenants[1].guarantee_gpus)))
    return cell(*jobs, owed, tenants=tenants, nodes=1)


def lost(snapshot: ClusterSnapshot, gone: Iterable[JobView]) -> int:
    """GPUs that guarantees lose by stops, counted plainly."""
    gpus = {job.job_id: job.base_gpus for job in snapshot.jobs if job.placed}
    used: Counter[str] = Counter()
    for job in snapshot.jobs:
        used[job.tenant] += gpus.get(job.job_id, 0)
    has = used.copy()
    for job in gone:
        has[job.tenant] -= gpus[job.job_id]
    return sum(max(0, min(used[t.name], t.guarantee_gpus) - has[t.name]) for t in snapshot.tenants)


@given(snapshot=lenders())
def test_no_guarantee_loses_what_another_choice_of_stops_would_have_left_it(
    snapshot: ClusterSnapshot,
) -> None:
    """Where some jobs are enough for the one that is due and are all borrowed, such are stopped."""
    runners = [job for job in snapshot.jobs if job.placed]
    (owed,) = (job for job in snapshot.jobs if not job.placed)
    sets = (some for n in range(1, len(runners) + 1) for some in combinations(runners, n))
    enough = (some for some in sets if sum(job.base_gpus for job in some) >= owed.base_gpus)
    gone = names(given_back(snapshot, ()).decisions, Preempt)
    if gone and any(not lost(snapshot, some) for some in enough):
        assert not lost(snapshot, [job for job in runners if job.job_id in gone])


# --- who may wait, and what is said ---------------------------------------------------------------

P8 = TenantView(name="p", guarantee_gpus=8)


A4 = TenantView(name="a", parent="p", guarantee_gpus=4)


def idlers(*jobs: JobView, tenants: tuple[TenantView, ...], fit: set[str]) -> list[str]:
    """Jobs that nobody may keep waiting; `fit`: those that find free GPUs."""
    tenancy = Tenancy(cell(*jobs, tenants=tenants))
    return [
        job.job_id
        for job in beside_idle(tenancy, jobs, lambda job: job.job_id in fit, lambda job: False)
    ]


def test_a_large_job_may_keep_those_of_its_tenants_parent_waiting() -> None:
    """The guarantee that covers the next one is that of the parent that both are part of."""
    tenants = A4, TenantView(name="d", parent="p"), P8
    large, small = waits("large", "d", 9), waits("small", "a", 2, submitted_at_s=1.0)
    assert idlers(large, small, tenants=tenants, fit={"small"}) == []
    assert idlers(small, tenants=tenants, fit={"small"}) == ["small"]


def test_a_job_that_needs_more_of_the_only_type_it_may_use_than_a_limit_allows_stops_nobody() -> (
    None
):
    """A limit is held against what the job needs there, not on its reference type."""
    tenants = A4, TenantView(name="d", parent="p", borrow_limit_gpus=10), P8
    request = GpuRequest(types=("V100",), worker_multiplier={"V100": 2})
    large = replace(waits("large", "d", 9), gpu=request)
    small = waits("small", "a", 2, submitted_at_s=1.0)
    assert idlers(large, small, tenants=tenants, fit={"small"}) == ["small"]


def test_siblings_that_lend_nothing_are_named_to_a_job_that_they_keep_out() -> None:
    """Nobody borrows there: what is idle of the guarantee of `b` is not lent."""
    tenants = (
        TenantView(name="a", parent="p"),
        TenantView(name="b", parent="p", guarantee_gpus=4, lend_limit_gpus=0),
        replace(P8, borrow_limit_gpus=0),
    )
    snapshot = cell(runs("r", "b", "n0", 2), waits("owed", "a", 5), tenants=tenants)
    assert given_back(snapshot, ()).waits[JobId("owed")] == (
        "tenant p uses 2 of the 8 GPUs of its guarantee; tenant a: 5 GPUs on top of the 0 that it "
        "uses exceed its guarantee of 0, and it may take 4: b lends no more of its own"
    )
