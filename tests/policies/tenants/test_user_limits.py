"""What one user of a tenant may use at once, under every policy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, WorkerRange
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import (
    Decision,
    Preempt,
    Resize,
    Start,
    placed_count,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.tenants.infeasible import Fleet, wish_of
from coordinator.policies.tenants.quota_guard import blocked, guarded
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.sim.run.simulation import Submission
from coordinator.workloads.shaping import linear
from tests.draws import pick
from tests.harness.builders import make_spec
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, check, names, runs, shared_cells, start, waits
from tests.policies.tenant_passes import Asked, Cell

USERS = ("ada", "bob")
A = TenantView(name="a", user_max_gpus=4)


def of(user: str, job: JobView) -> JobView:
    """The same job, of a user."""
    return replace(job, user=user)


@st.composite
def cells_of_users(draw: st.DrawFn) -> ClusterSnapshot:
    """Clusters shared by tenants whose users may use so many GPUs, or any number."""
    snapshot = draw(shared_cells())
    jobs = tuple(of(draw(pick(*USERS)), job) for job in snapshot.jobs)
    most = st.one_of(st.none(), st.integers(1, 8))
    tenants = tuple(replace(view, user_max_gpus=draw(most)) for view in snapshot.tenants)
    return replace(snapshot, jobs=jobs, tenants=tenants, index=None)


def used(
    snapshot: ClusterSnapshot, decisions: tuple[Decision, ...] = ()
) -> Counter[tuple[str, str]]:
    """GPUs by tenant and user once decisions are carried out, on plain counts."""
    jobs = {job.job_id: job for job in snapshot.jobs}
    found: Counter[tuple[str, str]] = Counter()
    for job in snapshot.jobs:
        found[job.tenant, job.user] += sum(w.gpus for w in job.placed if not w.is_leaving)
    for each in decisions:
        if not isinstance(each, Start | Resize | Preempt):
            continue
        job = jobs[each.job_id]
        there = {w.worker_index: w.gpus for w in job.placed if not w.is_leaving}
        gone = tuple(there) if isinstance(each, Preempt) else ()
        added: tuple[int, ...] = ()
        if isinstance(each, Resize):
            gone = each.removed_workers
            added = tuple(placement.worker_count for placement in each.added)
        if isinstance(each, Start):
            added = tuple(placement.worker_count for placement in each.placements)
        found[job.tenant, job.user] += sum(added) * job.gpus_per_worker
        found[job.tenant, job.user] -= sum(there.get(index, 0) for index in gone)
    return found


@settings(max_examples=150)
@given(cells_of_users(), st.sampled_from(FAMILIES))
def test_no_pass_gives_a_user_more_than_the_limit(snapshot: ClusterSnapshot, policy: str) -> None:
    """Whoever has more keeps it and gets no more; what tenants are promised holds as without."""
    decisions = POLICIES[policy].allocate(snapshot, b"").decisions
    before, after = used(snapshot), used(snapshot, decisions)
    limits = {view.name: view.user_max_gpus for view in snapshot.tenants}
    for (tenant, user), gpus in after.items():
        most = limits.get(tenant)
        assert most is None or gpus <= max(most, before[tenant, user]), (tenant, user)
    check(snapshot, decisions)


@settings(max_examples=60)
@given(shared_cells(), st.sampled_from(FAMILIES))
def test_a_limit_beyond_the_cell_changes_no_decision(
    snapshot: ClusterSnapshot, policy: str
) -> None:
    """Nor does one that is not set: the decisions are the same."""
    tenants = tuple(replace(view, user_max_gpus=10_000) for view in snapshot.tenants)
    wide = replace(snapshot, tenants=tenants)
    plain, bounded = (POLICIES[policy].allocate(each, b"") for each in (snapshot, wide))
    assert plain == bounded


@pytest.mark.parametrize("policy", FAMILIES)
def test_each_user_gets_the_limit_and_no_more(policy: str) -> None:
    """Sixteen GPUs are free, and two users of one tenant ask for more than four each."""
    played = Cell(policy, [TenantSettings(name="a", user_max_gpus=4)], check=True)
    played.submit(
        Submission(
            at_s=0.0,
            job_id=JobId(f"{user}{number}"),
            spec=make_spec(f"{user}{number}", expected_runtime_s=40_000.0),
            work_s=40_000.0,
            speedup=linear(make_spec().workers),
            tenant="a",
            user=user,
        )
        for user in USERS
        for number in range(7)
    )
    played.run(until_s=900.0)
    state = played.engine.state
    held = Counter(job.user for job in state.live() if job.state != JobState.PENDING)
    assert held == dict.fromkeys(USERS, 4)
    assert all(count == 4 for count in Counter(
        job.user for job in state.live() if job.workers).values())  # fmt: skip


def test_a_job_beyond_the_limit_waits_with_its_user_named() -> None:
    """It blocks no other user's job, and starts when its user has less."""
    mine = [of("ada", runs(f"r{n}", "a", "n0", 1)) for n in range(4)]
    snapshot = cell(
        *mine, of("ada", waits("more", "a", 1)), of("bob", waits("his", "a", 1)), tenants=(A,)
    )
    why = blocked(snapshot, Tenancy(snapshot))
    assert why == {
        "more": "user ada of tenant a: 1 GPU on top of the 4 that its jobs use exceeds 4 "
        "(user_max_gpus)"
    }
    [hold] = POLICIES["fifo"].pending_reasons(snapshot, b"")
    assert (hold.job_id, hold.blockers[0]) == ("more", why[JobId("more")])
    kept, dropped = guarded(snapshot, (start("more", "n1"), start("his", "n1")))
    assert names(kept, Start) == {"his"}
    assert [each.is_quota for each in dropped] == [True]


def test_no_borrower_stops_for_a_user_beyond_the_limit() -> None:
    """A guarantee gives nothing back for a job that may not start; it does for another user's."""
    owner = TenantView(name="a", guarantee_gpus=16, user_max_gpus=4)
    jobs = [of("ada", runs(f"r{n}", "a", "n0", 1)) for n in range(4)]
    jobs += [runs(f"b{n}", "b", "n0" if n < 4 else "n1", 1) for n in range(12)]
    tenants = (owner, TenantView(name="b"))
    blocked_one = cell(*jobs, of("ada", waits("w", "a", 1)), tenants=tenants)
    assert given_back(blocked_one, ()).decisions == ()
    both = of("ada", waits("w", "a", 1)), of("bob", waits("x", "a", 1))
    assert names(given_back(cell(*jobs, *both, tenants=tenants), ()).decisions, Start) == {"x"}


def test_a_gang_larger_than_the_limit_can_never_run() -> None:
    """At submission it is said like a gang that no node could hold."""
    snapshot = cell(tenants=(A,))
    job = waits("big", "a", 5)
    [said] = Fleet(snapshot, tenants=["a"]).why_never(wish_of(job), "a")
    assert "a user of tenant a may use 4 (user_max_gpus)" in said
    assert Fleet(snapshot, tenants=["a"]).why_never(wish_of(waits("fits", "a", 4)), "a") == ()


def test_the_same_name_under_two_tenants_is_two_users() -> None:
    """Each tenant's limit counts the jobs of its own users."""
    there = [of("ada", runs(f"r{n}", "b", "n0", 1)) for n in range(4)]
    snapshot = cell(*there, of("ada", waits("w", "a", 4)), tenants=(A,))
    assert blocked(snapshot, Tenancy(snapshot)) == {}


@pytest.mark.parametrize("policy", ["aryl", "foresight"])
@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (TenantSettings(name="a", user_max_gpus=2), "exceed 2 (user_max_gpus)"),
        (TenantSettings(name="a", borrow_limit_gpus=2), "and its borrow limit of 2"),
        (TenantSettings(name="b", guarantee_gpus=6, lend_limit_gpus=0), "b lends no more"),
    ],
)
def test_a_job_that_may_not_grow_is_not_told_that_it_will(
    policy: str, limits: TenantSettings, why: str
) -> None:
    """The policy would give it free GPUs, but its tenant has no room: that is the reason told."""
    cell = Cell(policy, (limits,), nodes=1, resize_cooldown_s=0.0)
    cell.ask([Asked(tenant="a", workers=(1, 4), work_s=1e6)])
    cell.run(until_s=600.0)
    entry = cell.engine.state.jobs[JobId("a0")]
    assert len(entry.workers) == 2
    (told,) = cell.engine.explain.standing(entry.job_id)
    assert told.startswith("it does not grow by 2 workers: ")
    assert why in told


def test_what_a_job_is_told_of_its_size_is_about_jobs_that_may_start() -> None:
    """One that its tenant has no room for takes no GPU: the other one grows on all that are free,
    and is told so."""
    grows = replace(runs("g", "b", "n0", 1), workers=WorkerRange(min=1, max=8), is_resizable=True)
    tenants = (TenantView(name="a", borrow_limit_gpus=2), TenantView(name="b"))
    snapshot = cell(grows, waits("w", "a", 5), tenants=tenants, nodes=1)
    [resize] = POLICIES["aryl"].allocate(snapshot, b"").decisions
    assert isinstance(resize, Resize)
    assert placed_count(resize.added) == 7
    told = POLICIES["aryl"].standing(snapshot, b"", JobId("g"))
    assert told == ("the next pass gives it 7 workers more",)
