"""Tenants below their guarantee by hand: which give back, how much, and how levels of a tree give
together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, JobId, JobState, NodeName, Preemptibility, WorkerRange
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import Placement, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.tenants.quota_guard import guarded
from coordinator.policies.tenants.reclaim import given_back
from tests.draws import pick, whole
from tests.harness.builders import job_with, make_job_view, make_worker_view
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import A8, B8, cell, check, names, runs, start, stop, waits
from tests.policies.tenant_passes import NODE_GPUS, Asked
from tests.policies.tenants.test_attempts_free_gpus import started
from tests.tables import each_row

OTHERS = TenantView(name="a")
"""To these nothing is promised."""


@pytest.mark.parametrize("policy", ["fifo", "aryl", "srtf"])
def test_a_tenant_gets_its_guarantee_back(policy: str) -> None:
    """Of two jobs of a borrower the one that loses less is stopped, and the owed job starts."""
    snapshot = cell(
        runs("dear", "a", "n0", 8, lost_gpu_s=900.0),
        runs("cheap", "a", "n1", 8, lost_gpu_s=10.0),
        waits("owed", "b", 8),
        tenants=(A8, B8),
    )
    decisions = POLICIES[policy].allocate(snapshot, b"").decisions
    check(snapshot, decisions)
    assert names(decisions, Start) == {"owed"}
    assert len(names(decisions, Preempt)) == 1
    if policy != "srtf":  # which has a rule of its own
        assert names(decisions, Preempt) == {"cheap"}


def test_flexible_workers_are_given_back_before_a_job_is_stopped() -> None:
    """As many as are needed, and nobody else is touched."""
    elastic = replace(
        make_job_view(
            "e",
            state=JobState.RUNNING,
            workers=(2, 8),
            placed=[make_worker_view("e", i, "n0", is_flexible=i >= 2) for i in range(8)],
        ),
        tenant="a",
    )
    snapshot = cell(
        elastic,
        runs("r", "a", "n1", 8),
        waits("owed", "b", 4),
        tenants=(A8, B8),
    )
    decisions = given_back(snapshot, ()).decisions
    assert names(decisions, Start) == {"owed"}
    (shrunk,) = (d for d in decisions if isinstance(d, Resize))
    assert len(shrunk.removed_workers) == 4
    assert not names(decisions, Preempt)


def test_a_borrower_does_not_start_where_a_guarantee_is_due() -> None:
    """The pass would give the last node to a borrower: that start is dropped, nobody is stopped."""
    snapshot = cell(
        runs("r", "a", "n0", 8), waits("more", "a", 8), waits("owed", "b", 8), tenants=(A8, B8)
    )
    assert (
        given_back(snapshot, (start("more", "n1"),))
        .decisions[-1]
        .reason.startswith("tenant b is owed its guarantee")
    )
    assert names(given_back(snapshot, (start("more", "n1"),)).decisions, Start) == {"owed"}


def test_only_borrowers_give_back_however_cheap_others_are() -> None:
    """A stop of the third tenant's job would lose nothing, but it is within its guarantee."""
    snapshot = cell(
        runs("dear", "a", "n0", 8, lost_gpu_s=900.0),
        runs("more", "a", "n1", 8, lost_gpu_s=950.0),
        runs("cheap", "c", "n2", 8),
        waits("owed", "b", 8),
        tenants=(A8, B8, TenantView(name="c", guarantee_gpus=8)),
        nodes=3,
    )
    assert names(given_back(snapshot, ()).decisions, Preempt) == {"dear"}


def test_nothing_is_taken_back_where_the_owed_job_may_not_go() -> None:
    """It failed on one of the nodes and avoids it: the borrower on the other one gives back."""
    owed = job_with(waits("owed", "b", 8), nodes_avoided=(NodeName("n0"),))
    snapshot = cell(
        runs("cheap", "a", "n0", 8),
        runs("dear", "a", "n1", 8, lost_gpu_s=900.0),
        owed,
        tenants=(TenantView(name="a"), B8),
    )
    decisions = POLICIES["fifo"].allocate(snapshot, b"").decisions
    assert names(decisions, Preempt) == {"dear"}
    [started] = [each for each in decisions if isinstance(each, Start)]
    assert [placement.node for placement in started.placements] == ["n1"]


def test_who_needs_more_workers_on_a_type_keeps_nobody_from_its_guarantee() -> None:
    """A job that counts twice here is due none; the next that asks for the same is."""
    twice = replace(waits("twice", "b", 8), gpu=GpuRequest(worker_multiplier={"H100": 2}))
    snapshot = cell(
        runs("r0", "a", "n0", 8), runs("r1", "a", "n1", 8), twice, waits("w", "b", 8),
        tenants=(TenantView(name="a"), B8),
    )  # fmt: skip
    decisions = given_back(snapshot, ()).decisions
    assert names(decisions, Start) == {"w"}


def test_nobody_is_stopped_in_vain_for_a_guarantee() -> None:
    """The cheapest job is no help, as its node stays half full: only the next one is stopped."""
    snapshot = cell(
        runs("half", "a", "n0", 4),
        runs("stays", "c", "n0", 4),
        runs("whole", "a", "n1", 8, lost_gpu_s=5.0),
        waits("owed", "b", 8),
        tenants=(TenantView(name="a"), B8, TenantView(name="c", guarantee_gpus=4)),
    )
    decisions = given_back(snapshot, ()).decisions
    assert names(decisions, Preempt) == {"whole"}
    assert names(decisions, Start) == {"owed"}


@pytest.mark.parametrize(
    ("guarantee", "wants", "free_nodes"),
    [(8, 8, 1), (4, 8, 0), (0, 4, 0)],
    ids=["there is room", "larger than its guarantee", "promised nothing"],
)
def test_nothing_is_taken_back_without_right(guarantee: int, wants: int, free_nodes: int) -> None:
    """Neither where there is room, nor beyond a guarantee: the borrower keeps what it has."""
    snapshot = cell(
        runs("r1", "a", "n0", 8),
        runs("r2", "a", "n1", 8),
        waits("w", "b", wants),
        tenants=(A8, TenantView(name="b", guarantee_gpus=guarantee)),
        nodes=2 + free_nodes,
    )
    assert given_back(snapshot, ()).decisions == ()


def test_within_a_division_teams_give_each_other_back_first() -> None:
    """A sibling that borrows of the division's guarantee gives it back; outsiders lose nothing."""
    tenants = (
        TenantView(name="p", guarantee_gpus=16),
        TenantView(name="c", parent="p", guarantee_gpus=8),
        TenantView(name="d", parent="p", guarantee_gpus=8),
    )
    snapshot = cell(
        runs("d1", "d", "n0", 8),
        runs("d2", "d", "n1", 8, lost_gpu_s=5.0),
        waits("owed", "c", 8),
        tenants=tenants,
    )
    decisions = given_back(snapshot, ()).decisions
    assert names(decisions, Preempt) == {"d1"}
    assert guarded(snapshot, decisions) == (decisions, ())


def test_nothing_is_taken_back_beyond_the_owed_job_s_own_limit() -> None:
    """Its division is due the GPUs, but its team may not use them: nobody is stopped for it."""
    division = TenantView(name="p", guarantee_gpus=8)
    team = TenantView(name="c", parent="p", borrow_limit_gpus=8)
    tenants = (division, team, TenantView(name="a"))
    jobs = (runs("r", "a", "n0", 8), waits("owed", "c", 8))
    allowed = given_back(cell(*jobs, tenants=tenants, nodes=1), ()).decisions
    assert (names(allowed, Preempt), names(allowed, Start)) == ({"r"}, {"owed"})
    tenants = (division, replace(team, borrow_limit_gpus=7), TenantView(name="a"))
    assert given_back(cell(*jobs, tenants=tenants, nodes=1), ()).decisions == ()


def test_a_job_that_is_enough_alone_gives_where_a_cheaper_one_keeps_it_from_that() -> None:
    """After `cheap` was stopped for it, `b` has no more to spare than its guarantee."""
    snapshot = cell(
        runs("dear", "b", "n0", 6, lost_gpu_s=900.0),
        runs("cheap", "by", "n0", 2),
        waits("own", "bx", 4),
        waits("owed", "a", 6),
        tenants=(
            A8,
            TenantView(name="b", guarantee_gpus=6),
            TenantView(name="bx", parent="b", guarantee_gpus=4),
            TenantView(name="by", parent="b"),
        ),
    )
    busy = replace(snapshot, nodes=(snapshot.nodes[0], replace(snapshot.nodes[1], free_gpus=4)))
    decisions = given_back(busy, (start("own", "n1"),)).decisions
    assert names(decisions, Start) == {"own", "owed"}
    assert names(decisions, Preempt) == {"dear"}


def test_so_it_does_where_what_siblings_borrow_of_their_parent_keeps_a_job_out() -> None:
    """GPUs are free, but `p` may use no more than it does."""
    snapshot = cell(
        runs("dear", "y", "n0", 6, lost_gpu_s=900.0),
        runs("cheap", "yb", "n0", 2),
        waits("own", "yx", 4),
        waits("owed", "x", 4),
        tenants=(
            TenantView(name="p", guarantee_gpus=12, borrow_limit_gpus=0),
            TenantView(name="x", parent="p", guarantee_gpus=4),
            TenantView(name="y", parent="p", guarantee_gpus=6),
            TenantView(name="yx", parent="y", guarantee_gpus=4),
            TenantView(name="yb", parent="y"),
        ),
        nodes=3,
    )
    decisions = given_back(snapshot, (start("own", "n1"),)).decisions
    assert names(decisions, Start) == {"own", "owed"}
    assert names(decisions, Preempt) == {"dear"}


def test_a_borrower_whose_growth_gives_way_is_stopped_for_the_next_that_is_due() -> None:
    """All in one pass: what it would have grown on goes to the first, what it has to the second."""
    running = replace(runs("r", "a", "n0", 2), workers=WorkerRange(min=1, max=3), gpus_per_worker=2)
    snapshot = cell(
        running,
        runs("own", "b", "n0", 2),
        waits("first", "b", 3),
        waits("second", "b", 3, submitted_at_s=1.0),
        tenants=(OTHERS, B8),
        nodes=1,
    )
    growth = Resize(
        job_id=JobId("r"),
        added=(Placement(node=NodeName("n0"), worker_count=2, is_flexible=True),),
        reason="it is faster",
    )
    decisions = given_back(snapshot, (growth,)).decisions
    check(snapshot, decisions)
    assert names(decisions, Start) == {"first", "second"}
    assert names(decisions, Preempt) == {"r"}
    assert names(decisions, Resize) == set()


def test_a_borrower_whose_growth_gives_way_runs_on_where_that_is_enough() -> None:
    """Nobody is stopped without need."""
    running = replace(runs("r", "a", "n0", 2), workers=WorkerRange(min=1, max=3), gpus_per_worker=2)
    snapshot = cell(running, waits("first", "b", 3), tenants=(OTHERS, B8), nodes=1)
    growth = Resize(
        job_id=JobId("r"),
        added=(Placement(node=NodeName("n0"), worker_count=2, is_flexible=True),),
        reason="it is faster",
    )
    decisions = given_back(snapshot, (growth,)).decisions
    assert names(decisions, Start) == {"first"}
    assert names(decisions, Preempt) == set()


def test_a_gang_starts_on_what_is_given_back_before_what_a_stop_leaves_over() -> None:
    """`ay` stops a job of 7 GPUs for one of 2, and `a` is due 6 of what `c` borrows on the other
    node: no worker goes to what `ay` leaves within its guarantee, or the guard would refuse all."""
    tenants = (
        TenantView(name="a", guarantee_gpus=8),
        TenantView(name="ay", parent="a", guarantee_gpus=8),
        TenantView(name="c"),
    )
    placed = [make_worker_view("borrower", n, "n1", gpus=4) for n in range(2)]
    borrower = make_job_view(
        "borrower", state=JobState.RUNNING, workers=(2, 2), gpus_per_worker=4, placed=placed
    )
    owed = make_job_view("owed", workers=(2, 2), gpus_per_worker=3)
    snapshot = cell(
        runs("whole", "ay", "n0", 7),
        replace(runs("fixed", "c", "n0", 1), is_resting=True),
        replace(borrower, tenant="c"),
        replace(owed, tenant="a"),
        waits("small", "ay", 2),
        tenants=tenants,
    )
    decisions = given_back(snapshot, (stop("whole"), start("small", "n0"))).decisions
    assert names(decisions, Preempt) == {"whole", "borrower"}
    assert [
        each.placements for each in decisions if isinstance(each, Start) and each.job_id == "owed"
    ] == [(Placement(node=NodeName("n1"), worker_count=2),)]
    assert guarded(snapshot, decisions) == (decisions, ())


SOON_S = 60.0


@each_row("policy", FAMILIES)
def test_siblings_and_outsiders_give_together(policy: str) -> None:
    """All of the organisation's guarantee is the team's, and a sibling uses half of it: no outsider
    owes the team anything until that is stopped, and it alone is not enough."""
    tenants = [
        TenantSettings(name="c", guarantee_gpus=2),
        TenantSettings(name="c0", parent="c", guarantee_gpus=2),
        TenantSettings(name="c1", parent="c"),
        TenantSettings(name="b"),
    ]
    jobs = [
        Asked(tenant="c1", work_s=20_000.0),
        *(Asked(tenant="b", work_s=20_000.0) for _ in range(NODE_GPUS - 1)),
        Asked(tenant="c0", at_s=100.0, gpus=2, work_s=15_000.0),
    ]
    assert started(policy, tenants, jobs)[JobId(f"c0{NODE_GPUS}")] <= 100.0 + SOON_S


@st.composite
def shared(draw: st.DrawFn) -> ClusterSnapshot:
    """A full node of jobs of one GPU: of a team, siblings at two levels and outsiders; and a job of
    the team that waits within its guarantee."""
    guarantee = draw(whole(1, 8))
    own = draw(whole(0, guarantee - 1))
    wanted = draw(whole(1, guarantee - own))
    whose = ["t"] * own + [draw(pick("s", "u", "b", "b")) for _ in range(8 - own)]
    jobs = [
        runs(f"j{at}", name, "n0", 1, lost_gpu_s=float(draw(pick(0, 60, 900))))
        for at, name in enumerate(whose)
    ]
    tenants = (
        TenantView(name="o", guarantee_gpus=guarantee),
        TenantView(name="p", parent="o", guarantee_gpus=guarantee),
        TenantView(name="t", parent="p", guarantee_gpus=guarantee),
        TenantView(name="s", parent="p"),
        TenantView(name="u", parent="o"),
        TenantView(name="b"),
    )
    return cell(*jobs, waits("due", "t", wanted), tenants=tenants, nodes=1)


@given(snapshot=shared())
def test_a_team_within_its_guarantee_gets_it_back_whoever_borrows_it(
    snapshot: ClusterSnapshot,
) -> None:
    """In one pass, with as many stops as it needs GPUs and none of its own."""
    found = given_back(snapshot, ()).decisions
    assert names(found, Start) == {"due"}
    stopped = names(found, Preempt)
    jobs = {job.job_id: job for job in snapshot.jobs}
    assert len(stopped) == jobs[JobId("due")].gpus_per_worker
    assert all(jobs[JobId(name)].tenant != "t" for name in stopped)


def test_no_outsider_gives_what_siblings_borrow() -> None:
    """Of two siblings' GPUs the team is due both; an outsider owes the organisation nothing."""
    tenants = (
        TenantView(name="p", guarantee_gpus=2),
        TenantView(name="t", parent="p", guarantee_gpus=2),
        TenantView(name="s", parent="p"),
        TenantView(name="b"),
    )
    jobs = [runs(f"s{at}", "s", "n0", 2, lost_gpu_s=900.0) for at in range(2)]
    outside = [runs(f"b{at}", "b", "n0", 2) for at in range(2)]
    found = given_back(cell(*jobs, *outside, waits("due", "t", 2), tenants=tenants, nodes=1), ())
    assert names(found.decisions, Preempt) == {"s0"}


def test_who_has_least_of_any_guarantee_above_it_is_served_first() -> None:
    """The team has half of its own; its organisation has a quarter, less than the other tenant."""
    tenants = (
        TenantView(name="p", guarantee_gpus=8),
        TenantView(name="t", parent="p", guarantee_gpus=4),
        TenantView(name="q", guarantee_gpus=8),
    )
    there = [
        *(runs(f"t{at}", "t", "n0", 1) for at in range(2)),
        *(runs(f"q{at}", "q", "n0", 1) for at in range(3)),
        runs("borrows", "x", "n0", 1),
    ]
    stays = replace(runs("stays", "x", "n0", 2), preemptibility=Preemptibility.NON)
    waiting = waits("earlier", "q", 1), waits("due", "t", 1, submitted_at_s=1.0)
    snapshot = cell(*there, stays, *waiting, tenants=tenants, nodes=1)
    assert names(given_back(snapshot, ()).decisions, Start) == {"due"}
