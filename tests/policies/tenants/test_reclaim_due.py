"""What comes back in one pass comes to everybody who is due: nobody loses a start or a place to
another one that is due as well and gets nothing for it, and what is given the guard allows."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import JobState, NodeName
from coordinator.engine.invariants import starved
from coordinator.policies.contract.decisions import Allocation, Decision, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.enforce import allocated
from coordinator.policies.tenants.entitlements import PATIENCE_S
from coordinator.policies.tenants.quota_guard import guarded
from coordinator.policies.tenants.reclaim import given_back
from tests.harness.builders import NOW_S, job_with, make_job_view, make_worker_view
from tests.policies.tenant_books import A8, B8, cell, names, runs, start, stop, waits

DIVISION = (
    TenantView(name="p", guarantee_gpus=8),
    TenantView(name="a", parent="p", guarantee_gpus=4),
    TenantView(name="d", parent="p"),
    TenantView(name="c"),
)


def elastic(name: str, tenant: str, node: str, workers: int) -> JobView:
    """A job of one worker of one GPU, that runs with more."""
    there = [make_worker_view(name, n, node, is_flexible=n > 0) for n in range(workers)]
    made = make_job_view(name, state=JobState.RUNNING, workers=(1, workers), placed=there)
    return replace(made, tenant=tenant)


def after(snapshot: ClusterSnapshot, decisions: tuple[Decision, ...]) -> ClusterSnapshot:
    """The cell once starts and stops of whole jobs of one worker are over."""
    gone = names(decisions, Preempt)
    begun = {each.job_id: each.placements[0].node for each in decisions if isinstance(each, Start)}
    jobs = [
        runs(job.job_id, job.tenant, begun[job.job_id], job.gpus_per_worker)
        if job.job_id in begun
        else replace(job, state=JobState.PENDING, placed=()) if job.job_id in gone
        else job
        for job in snapshot.jobs
    ]  # fmt: skip
    return cell(*jobs, tenants=snapshot.tenants, nodes=len(snapshot.nodes))


def test_whoever_gives_up_a_start_for_a_sibling_gets_another_from_who_borrows_of_both() -> None:
    """The division's guarantee covers both: its own team comes first, then it is due itself."""
    jobs = runs("r", "c", "n0", 4), waits("w", "d", 4), waits("owed", "a", 4)
    snapshot = cell(*jobs, tenants=DIVISION, nodes=1)
    found = given_back(snapshot, (start("w", "n0"),)).decisions
    assert (names(found, Preempt), names(found, Start)) == ({"r"}, {"w", "owed"})
    assert guarded(snapshot, found) == (found, ())
    assert starved(after(snapshot, found)) == []


def test_a_start_that_gives_way_does_not_count_against_its_own_limit() -> None:
    """Its tenant may borrow as much as the job needs, and no more."""
    limited = replace(DIVISION[2], borrow_limit_gpus=4)
    jobs = runs("r", "c", "n0", 4), waits("w", "d", 4), waits("owed", "a", 4)
    snapshot = cell(*jobs, tenants=(*DIVISION[:2], limited, DIVISION[3]), nodes=1)
    found = given_back(snapshot, (start("w", "n0"),)).decisions
    assert (names(found, Preempt), names(found, Start)) == ({"r"}, {"w", "owed"})


def test_nobody_is_stopped_for_a_start_that_gives_way() -> None:
    """What a guarantee is due is less than what the start needed: one who runs on gives it."""
    lent = [runs(name, "c", node, 8) for name, node in (("r", "n0"), ("s", "n1"))]
    big = replace(make_job_view("big", workers=(2, 2), gpus_per_worker=8), tenant="c")
    snapshot = cell(*lent, big, waits("owed", "b", 1), tenants=(A8, B8, TenantView(name="c")))
    both = tuple(place for n in (0, 1) for place in start("big", f"n{n}").placements)
    begun = (stop("r"), stop("s"), replace(start("big", "n0"), placements=both))
    found = given_back(snapshot, begun).decisions
    assert names(found, Start) == {"owed"}
    assert len(names(found, Preempt)) == 1


def test_whoever_loses_the_room_that_it_had_to_another_is_due_what_borrowers_hold() -> None:
    """The first one fits as it is, and the second takes its place for part of what it needs."""
    jobs = runs("r", "c", "n0", 4), runs("s", "c", "n1", 8)
    owed = [
        job_with(waits(name, "a", gpus), nodes_avoided=(NodeName(avoids),))
        for name, gpus, avoids in (("first", 2, "none"), ("second", 6, "n1"))
    ]
    snapshot = cell(*jobs, runs("t", "a", "n0", 2), *owed, tenants=(a_of(16), TenantView(name="c")))
    found = given_back(snapshot, ()).decisions
    assert names(found, Start) == {"first", "second"}
    assert guarded(snapshot, found) == (found, ())


def a_of(gpus: int) -> TenantView:
    """Tenant `a` with so much promised."""
    return TenantView(name="a", guarantee_gpus=gpus)


def test_so_is_one_whose_place_goes_to_a_job_that_waited_for_too_long() -> None:
    """Both fit, but not together; the borrower beside them has enough for the other."""
    late = replace(waits("late", "a", 4), waiting_since_s=NOW_S - PATIENCE_S)
    jobs = runs("r", "c", "n0", 4), late, replace(waits("next", "b", 4), waiting_since_s=NOW_S)
    snapshot = cell(*jobs, tenants=(A8, B8, TenantView(name="c")), nodes=1)
    found = given_back(snapshot, ()).decisions
    assert (names(found, Preempt), names(found, Start)) == ({"r"}, {"late", "next"})
    assert starved(after(snapshot, found)) == []


def test_whom_a_stop_in_the_same_pass_makes_room_for_by_quota_is_due_at_once() -> None:
    """Its tenant was at its borrow limit before the pass, and is not after it."""
    limited = TenantView(name="a", guarantee_gpus=6, borrow_limit_gpus=2)
    mine = runs("a0", "a", "n0", 4), runs("a1", "a", "n1", 4), waits("owed", "a", 2)
    lent = runs("r", "c", "n0", 4), waits("next", "c", 4)
    snapshot = cell(*mine, *lent, tenants=(limited, TenantView(name="c")))
    snapshot = cell(*snapshot.jobs, runs("s", "c", "n1", 4), tenants=snapshot.tenants)
    found = given_back(snapshot, (stop("a1"), start("next", "n1"))).decisions
    assert "owed" in names(found, Start)


def test_workers_go_before_jobs_that_are_larger_than_what_their_tenant_borrows() -> None:
    """After such a stop it would be below its guarantee, and its workers were no more borrowed."""
    lender = TenantView(name="z", guarantee_gpus=4)
    owed = replace(make_job_view("owed", workers=(5, 5)), tenant="a")
    jobs = runs("first", "z", "n0", 4), elastic("second", "z", "n0", 2), owed
    stays = runs("other", "a", "n0", 2)
    snapshot = cell(*jobs, stays, tenants=(A8, lender), nodes=1)
    found = given_back(snapshot, ()).decisions
    assert [type(each) for each in found] == [Resize, Preempt, Start]
    assert guarded(snapshot, found) == (found, ())


def for_less(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """A job of a tenant within its guarantee makes way for a smaller one of the same."""
    return Allocation(decisions=(stop("t8"), start("t4", "n0")))


def test_one_that_is_refused_costs_no_other_what_is_due() -> None:
    """One would need what a guarantee leaves in this very pass; the other only what is borrowed."""
    tenants = (TenantView(name="t", guarantee_gpus=6), TenantView(name="p", guarantee_gpus=14))
    theirs = runs("t8", "t", "n0", 6), waits("t4", "t", 4)
    lent = runs("r2", "c", "n0", 2), runs("r8", "c", "n1", 8)
    owed = [
        job_with(waits(name, "p", gpus), nodes_avoided=(NodeName(avoids),))
        for name, gpus, avoids in (("refused", 4, "n1"), ("served", 8, "n0"))
    ]
    snapshot = cell(*theirs, *lent, *owed, tenants=tenants)
    asked = given_back(snapshot, for_less(snapshot, b"").decisions)
    _, dropped = guarded(snapshot, asked.decisions)
    assert names(tuple(each.decision for each in dropped), Start) == {"refused"}
    found = allocated(for_less, snapshot, b"").decisions
    assert names(found, Start) == {"t4", "served"}
    assert names(found, Preempt) == {"t8", "r8"}


def test_who_is_refused_what_the_policy_gave_it_is_still_due_what_borrowers_hold() -> None:
    """`due` comes in place of `late`, which is larger: so `p` would fall below its guarantee by the
    second stop for `owed`, but by one alone it does not."""
    division = (
        TenantView(name="a", guarantee_gpus=8),
        TenantView(name="p", guarantee_gpus=8),
        TenantView(name="p1", parent="p", guarantee_gpus=4),
        TenantView(name="p2", parent="p", guarantee_gpus=4),
    )
    there = [runs(name, "p1", "n0", gpus) for name, gpus in (("k", 4), ("v", 2), ("w", 2))]
    there += [runs("on", "p1", "n1", 2), runs("mine", "a", "n1", 4)]
    asked = waits("owed", "a", 4), waits("late", "p1", 2), waits("due", "p2", 1)
    snapshot = cell(*there, *asked, tenants=division)
    made = (stop("v"), stop("w"), start("late", "n1"), start("owed", "n0"))
    assert guarded(snapshot, made) == (made, ())

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        return Allocation(decisions=made, memory=memory)

    found = allocated(decide, snapshot, b"").decisions
    assert (names(found, Preempt), names(found, Start)) == ({"k"}, {"due", "owed"})
    assert starved(after(snapshot, found)) == []


def test_what_children_leave_of_a_guarantee_is_that_of_its_own_jobs() -> None:
    """A team that borrows the rest of its division's guarantee gives it back to the division."""
    division = DIVISION[0], replace(DIVISION[1], guarantee_gpus=6)
    jobs = runs("within", "a", "n0", 6), runs("beyond", "a", "n0", 2), waits("own", "p", 2)
    found = given_back(cell(*jobs, tenants=division, nodes=1), ()).decisions
    assert (names(found, Preempt), names(found, Start)) == ({"beyond"}, {"own"})
