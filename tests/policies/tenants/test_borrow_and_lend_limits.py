"""Limits on borrowing and lending inside a tree: no sibling's loan outweighs a guarantee, and what
a tenant keeps to itself is no outsider's, at whatever level."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, JobId, Preemptibility
from coordinator.engine.invariants import crowded_out
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import GUARANTEE, Preempt, Resize, Start, Wait
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.tenants.quota_guard import blocked, guarded
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.tenancy import Tenancy, waiting_gpus
from coordinator.policies.tenants.tree import WHOLE
from tests.harness.builders import make_node_view, make_snapshot
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, check, names, runs, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

P8 = TenantView(name="p", guarantee_gpus=8)


FULL = replace(P8, borrow_limit_gpus=0)


C4 = TenantView(name="c", parent="p", guarantee_gpus=4)


D = TenantView(name="d", parent="p")


KEEPER = TenantView(name="q", guarantee_gpus=8, lend_limit_gpus=0)


LIMITED = (FULL, C4, D)
"""Of the eight that `p` may use four are promised to `c`."""


BESIDE_KEEPER = (P8, C4, D, KEEPER)
"""`p` may use no more than eight of sixteen either: the others are kept."""


BOTH = pytest.mark.parametrize("tenants", [LIMITED, BESIDE_KEEPER], ids=["borrows", "kept"])


def borrowed(*more: JobView, tenants: tuple[TenantView, ...]) -> ClusterSnapshot:
    """Two nodes; on one eight jobs of `d`, of which the last lose least by a stop."""
    jobs = (runs(f"d{n}", "d", "n0", 1, lost_gpu_s=8.0 - n) for n in range(8))
    return cell(*jobs, *more, tenants=tenants)


@BOTH
def test_siblings_give_back_what_their_parent_may_not_use_beside_a_guarantee(
    tenants: tuple[TenantView, ...],
) -> None:
    """Though GPUs are free: as many jobs are stopped as make room, and the guard has no more to
    say."""
    snapshot = borrowed(waits("owed", "c", 4), tenants=tenants)
    decisions = given_back(snapshot, ()).decisions
    assert names(decisions, Preempt) == {"d4", "d5", "d6", "d7"}
    assert names(decisions, Start) == {"owed"}
    assert guarded(snapshot, decisions) == (decisions, ())
    books = check(snapshot, decisions)
    assert (books.used["p"], books.used["c"]) == (8, 4)
    for each in decisions:
        if isinstance(each, Preempt):
            assert each.beneficiary == "owed"
            assert "tenant d borrows these GPUs, and owed is due them" in each.reason


@BOTH
@pytest.mark.parametrize("policy", FAMILIES)
def test_a_guarantee_inside_a_full_parent_is_met_under_every_policy(
    policy: str, tenants: tuple[TenantView, ...]
) -> None:
    """Within a minute, while jobs of the sibling go on for a day; invariants hold all the time."""
    settings = tuple(
        TenantSettings(
            name=view.name,
            parent=view.parent,
            guarantee_gpus=view.guarantee_gpus,
            borrow_limit_gpus=view.borrow_limit_gpus,
            lend_limit_gpus=view.lend_limit_gpus,
        )
        for view in tenants
    )
    played = Cell(policy, settings, check=True)
    played.ask(
        [
            *(Asked(tenant="d", work_s=86_400.0) for _ in range(8)),
            Asked(tenant="c", at_s=1000.0, gpus=4, work_s=50_000.0),
        ]
    )
    played.run(until_s=1060.0)
    jobs = played.engine.state.jobs
    assert jobs[JobId("c8")].started_at_s is not None
    assert sum(job.running_workers for job in jobs.values() if job.tenant == "d") == 4
    assert played.engine.state.counters.decisions_refused == 0


def test_what_is_kept_is_there_for_whoever_keeps_it() -> None:
    """Once the sibling gave back, the keeper's job of a whole node starts at once."""
    tenants = [
        TenantSettings(name="p", guarantee_gpus=8),
        TenantSettings(name="c", parent="p", guarantee_gpus=4),
        TenantSettings(name="d", parent="p"),
        TenantSettings(name="q", guarantee_gpus=8, lend_limit_gpus=0),
    ]
    played = Cell("fifo", tenants, check=True)
    played.ask(
        [
            *(Asked(tenant="d", work_s=86_400.0) for _ in range(8)),
            Asked(tenant="c", at_s=10.0, gpus=4, work_s=1000.0),
            Asked(tenant="q", at_s=20.0, gpus=8, work_s=1000.0),
        ]
    )
    played.run(until_s=30.0)
    assert played.engine.state.jobs[JobId("q9")].started_at_s == 20.0


def test_a_division_s_guarantee_counts_for_its_teams() -> None:
    """No team has one of its own: what a division beside theirs borrows of a full parent goes."""
    tenants = (
        replace(FULL, guarantee_gpus=8),
        TenantView(name="m", parent="p", guarantee_gpus=4),
        TenantView(name="team", parent="m"),
        D,
    )
    decisions = given_back(borrowed(waits("owed", "team", 4), tenants=tenants), ()).decisions
    assert len(names(decisions, Preempt)) == 4
    assert names(decisions, Start) == {"owed"}
    beyond = borrowed(waits("more", "team", 5), tenants=tenants)
    assert given_back(beyond, ()).decisions == ()
    assert "tenant p: 5 GPUs" in blocked(beyond, Tenancy(beyond))[JobId("more")]


def test_flexible_workers_of_a_sibling_go_before_its_jobs() -> None:
    """Room by quota is made by what costs least, as room on nodes is."""
    wide = runs("wide", "d", "n0", 1)
    [worker] = wide.placed
    more = tuple(replace(worker, worker_index=n, is_flexible=True) for n in (1, 2, 3))
    wide = replace(
        wide,
        workers=replace(wide.workers, max=4),
        placed=(worker, *more),
        is_resizable=True,
    )
    held = runs("held", "d", "n0", 4)
    snapshot = cell(wide, held, waits("owed", "c", 3), tenants=LIMITED)
    [shrink, start] = given_back(snapshot, ()).decisions
    assert isinstance(shrink, Resize) and isinstance(start, Start)
    assert shrink.removed_workers == (1, 2, 3)


def test_a_sibling_gives_back_on_nodes_that_the_owed_job_may_not_have() -> None:
    """GPUs count whatever their type: it is the parent's room that is missing."""
    other = [runs(f"d{n}", "d", "n0", 4) for n in range(2)]
    nodes = (
        make_node_view("n0", gpu_type="A100", workers=[w for job in other for w in job.placed]),
        make_node_view("n1"),
    )
    owed = replace(waits("owed", "c", 4), gpu=GpuRequest(types=("H100",)))
    snapshot = replace(make_snapshot(nodes=nodes, jobs=(*other, owed)), tenants=LIMITED)
    decisions = given_back(snapshot, ()).decisions
    assert (len(names(decisions, Preempt)), names(decisions, Start)) == (1, {"owed"})
    assert guarded(snapshot, decisions) == (decisions, ())


def test_who_borrows_and_did_not_agree_to_be_stopped_is_named() -> None:
    """The job waits for the sibling's, and is told whose turn it is to give back."""
    jobs = [
        replace(job, preemptibility=Preemptibility.NON) for job in borrowed(tenants=LIMITED).jobs
    ]
    snapshot = cell(*jobs, waits("owed", "c", 4), tenants=LIMITED)
    allocation = POLICIES["fifo"].allocate(snapshot, b"")
    assert (allocation.decisions, allocation.waits) == (
        (),
        (Wait(kind=GUARANTEE, jobs=(JobId("owed"),)),),
    )
    [hold] = POLICIES["fifo"].pending_reasons(snapshot, b"")
    assert any("did not agree to be stopped: d0, d1, d2" in why for why in hold.blockers)
    assert any("but others of tenant p borrow what" in why for why in hold.blockers)


def test_a_borrower_is_no_reason_to_stop_a_sibling_s_jobs() -> None:
    """Neither of two within theirs, nor for a job beyond its own guarantee."""
    snapshot = borrowed(waits("more", "c", 5), tenants=LIMITED)
    assert given_back(snapshot, ()).decisions == ()
    assert JobId("more") in blocked(snapshot, Tenancy(snapshot))
    within = (FULL, C4, replace(D, guarantee_gpus=4))
    snapshot = cell(
        runs("d", "d", "n0", 4), runs("c", "c", "n0", 4), waits("w", "c", 1), tenants=within
    )
    assert given_back(snapshot, ()).decisions == ()


def test_what_a_team_does_not_lend_is_no_sibling_s_under_a_limited_parent() -> None:
    """Of the eight that the parent may use four are kept, though the parent has them all idle."""
    keeps = (FULL, replace(C4, lend_limit_gpus=0), D)
    job = waits("j", "d", 6)
    snapshot = cell(job, tenants=keeps)
    assert Tenancy(snapshot).room(job) == 4
    why = blocked(snapshot, Tenancy(snapshot))[job.job_id]
    assert why.endswith("it may take 4: c lends no more of its own")
    assert POLICIES["fifo"].allocate(snapshot, b"").decisions == ()
    lends = (FULL, replace(C4, lend_limit_gpus=2), D)
    assert Tenancy(cell(job, tenants=lends)).room(job) == 6


@BOTH
def test_the_check_sees_a_guarantee_that_siblings_crowd_out(
    tenants: tuple[TenantView, ...],
) -> None:
    """Not where nobody may be stopped, nor where the job is beyond its guarantee."""
    [fault] = crowded_out(borrowed(waits("owed", "c", 4), tenants=tenants))
    assert "job owed of tenant c waits within its guarantee" in fault
    assert "tenant d borrows what their parent may use" in fault
    assert crowded_out(borrowed(waits("more", "c", 5), tenants=tenants)) == []
    jobs = borrowed(tenants=tenants).jobs
    kept = (replace(job, preemptibility=Preemptibility.NON) for job in jobs)
    assert crowded_out(cell(*kept, waits("owed", "c", 4), tenants=tenants)) == []


LIMIT = st.one_of(st.none(), st.integers(0, 8))


@st.composite
def limited(draw: st.DrawFn) -> tuple[TenantView, ...]:
    """Two roots of two teams each and one of none; their guarantees are within 32."""
    found: list[TenantView] = []
    for root in "abz":
        teams = [] if root == "z" else [f"{root}{n}" for n in (1, 2)]
        shares = [draw(st.integers(0, 4)) for _ in teams]
        for name, gpus in (
            (root, sum(shares) + draw(st.integers(0, 4))),
            *zip(teams, shares, strict=True),
        ):
            found.append(
                TenantView(
                    name=name,
                    parent="" if name == root else root,
                    guarantee_gpus=gpus,
                    borrow_limit_gpus=draw(LIMIT),
                    lend_limit_gpus=draw(LIMIT),
                )
            )
    return tuple(found)


def kept(tenancy: Tenancy, name: str) -> float:
    """What a tenant and its teams keep of their idle guarantees, counted by hand."""
    view, below = tenancy.views[name], sum(kept(tenancy, each) for each in tenancy.children[name])
    if view.lend_limit_gpus is None:
        return below
    idle = view.guarantee_gpus - float(tenancy.used[name])
    return max(below, idle - view.lend_limit_gpus, 0.0)


@given(
    tenants=limited(),
    takes=st.lists(st.tuples(st.sampled_from(("a1", "a2", "b1", "b2", "z")), st.integers(1, 12))),
)
def test_whoever_takes_what_it_has_room_for_leaves_others_what_they_keep(
    tenants: tuple[TenantView, ...], takes: list[tuple[str, int]]
) -> None:
    """In any order of borrowers: a root beyond its guarantee leaves the other roots what they keep,
    so does a team of what its root may use, and no root or team exceeds its own limit."""
    tenancy = Tenancy(cell(tenants=tenants, nodes=4))
    for name, asked in takes:
        job, root = waits("j", name, 1), name[0]
        gpus = int(min(asked, tenancy.room(job), 32 - tenancy.used[WHOLE]))
        if gpus < 1:
            continue
        tenancy.take(job, gpus)
        for each in (name, root):
            assert tenancy.used[each] <= tenancy.limit_gpus(each)
        if tenancy.used[root] > tenancy.views[root].guarantee_gpus:
            others = sum(kept(tenancy, each) for each in "abz" if each != root)
            assert tenancy.used[WHOLE] + others <= 32
        teams = [each for each in tenancy.children[root] if each != name]
        if name != root and tenancy.used[name] > tenancy.views[name].guarantee_gpus:
            rest = sum(kept(tenancy, each) for each in teams)
            assert tenancy.used[root] + rest <= tenancy.limit_gpus(root)


@st.composite
def trees(draw: st.DrawFn) -> tuple[TenantView, ...]:
    """Three levels with limits at each; guarantees within the one above, and all within 64."""
    limit, few = st.one_of(st.none(), st.integers(0, 12)), st.integers(0, 6)
    found: list[TenantView] = []
    for top in "ab":
        middles: list[TenantView] = []
        for middle in (f"{top}1", f"{top}2"):
            leaves = [
                TenantView(
                    name=f"{middle}{n}",
                    parent=middle,
                    guarantee_gpus=draw(few),
                    borrow_limit_gpus=draw(limit),
                    lend_limit_gpus=draw(limit),
                )
                for n in (1, 2)
            ]
            has = sum(leaf.guarantee_gpus for leaf in leaves) + draw(few)
            view = TenantView(name=middle, parent=top, guarantee_gpus=has)
            middles += [
                replace(view, borrow_limit_gpus=draw(limit), lend_limit_gpus=draw(limit)),
                *leaves,
            ]
        has = sum(view.guarantee_gpus for view in middles if view.parent == top) + draw(few)
        view = TenantView(name=top, guarantee_gpus=has)
        found += [
            replace(view, borrow_limit_gpus=draw(limit), lend_limit_gpus=draw(limit)),
            *middles,
        ]
    assume(sum(view.guarantee_gpus for view in found if not view.parent) <= 64)
    return tuple(found)


@given(
    tenants=trees(),
    held=st.lists(st.integers(0, 6), min_size=8, max_size=8),
    place=st.integers(0, 8),
)
def test_a_borrower_never_has_more_of_a_guarantee_than_is_lent_at_any_level(
    tenants: tuple[TenantView, ...], held: list[int], place: int
) -> None:
    """All others being within theirs: what a tenant has and could have is at least its guarantee
    less what it lends. What is left of a guarantee is room at once outside the borrower's own root,
    and inside it once it has given back; and it is never said to be out of reach."""
    snapshot = cell(waits("j", "nobody", 1), tenants=tenants, nodes=8)
    tenancy = Tenancy(snapshot)
    leaves = [view.name for view in tenants if len(view.name) == 3]
    for leaf, gpus in zip(leaves, held, strict=True):
        own = min(gpus, tenancy.views[leaf].guarantee_gpus)
        tenancy.take(waits("h", leaf, own), own)
    borrower = waits("j", [*leaves, "nobody"][place], 1)
    before = dict(tenancy.used)
    tenancy.take(borrower, max(0, int(min(tenancy.room(borrower), 64 - tenancy.used[""]))))
    for view in tenants:
        others = tenancy.used[""] - tenancy.used[view.name]
        if view.lend_limit_gpus is not None and view.name not in tenancy.path(borrower):
            assert 64 - others >= view.guarantee_gpus - view.lend_limit_gpus
    siblings = [waits("j", leaf, 1) for leaf in leaves if leaf != borrower.tenant]
    rests = [tenancy.views[job.tenant].guarantee_gpus - before[job.tenant] for job in siblings]
    for job, rest in zip(siblings, rests, strict=True):
        assert not tenancy.why_not(job, int(rest), alone=True)
        if job.tenant[0] != borrower.tenant[0]:
            assert tenancy.room(job) >= rest
    owns = tenancy.views[borrower.tenant].guarantee_gpus
    tenancy.leave(borrower, max(0, tenancy.used[borrower.tenant] - owns))
    for job, rest in zip(siblings, rests, strict=True):
        assert tenancy.room(job) >= rest


@given(tenants=trees(), asked=st.lists(st.integers(0, 64), min_size=9, max_size=9))
def test_shares_leave_what_is_not_lent_at_any_level(
    tenants: tuple[TenantView, ...], asked: list[int]
) -> None:
    """Those of others and what a tenant does not lend of its own are never more than there is."""
    leaves = [view.name for view in tenants if len(view.name) == 3] + ["nobody"]
    jobs = [waits(name, name, gpus) for name, gpus in zip(leaves, asked, strict=True) if gpus]
    snapshot = cell(*jobs, tenants=tenants, nodes=8)
    tenancy = Tenancy(snapshot)
    shares = tenancy.fair_shares(waiting_gpus(snapshot, tenancy))
    for view in tenants:
        others = sum(shares.get(leaf, 0.0) for leaf in leaves if not leaf.startswith(view.name))
        lends = view.guarantee_gpus if view.lend_limit_gpus is None else view.lend_limit_gpus
        assert others <= 64 - max(0, view.guarantee_gpus - lends) + 1e-9


@each_row("policy", FAMILIES)
def test_teams_are_met_by_a_larger_job_of_their_full_parent_itself(policy: str) -> None:
    """Room by quota is for one team first: the parent has less than its guarantee for a moment,
    and its job is stopped all the same; both run within half an hour, and invariants hold."""
    settings = (
        TenantSettings(name="a", guarantee_gpus=4, borrow_limit_gpus=0),
        TenantSettings(name="ax", parent="a", guarantee_gpus=2),
        TenantSettings(name="ay", parent="a", guarantee_gpus=2),
    )
    played = Cell(policy, settings, nodes=2, delays=None, check=True)
    played.ask(
        [
            Asked(tenant="a", gpus=4, work_s=86400.0),
            Asked(tenant="ax", gpus=2, work_s=86400.0, at_s=30.0),
            Asked(tenant="ay", gpus=2, work_s=86400.0, at_s=30.0),
        ]
    )
    played.run(until_s=1900.0)
    jobs = played.engine.state.jobs
    assert {job_id: job.running_workers for job_id, job in jobs.items()} == {
        "a0": 0,
        "ax1": 1,
        "ay2": 1,
    }
    assert played.engine.state.counters.decisions_refused == 0
