"""A policy's patience with a job that a guarantee covers ends after half an hour also where jobs
wait before it that quotas keep from the free GPUs: for these nobody waits, by rule and check."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from common.model import JobId, JobState
from coordinator.engine.invariants import LATE_S, BesideIdle
from coordinator.policies.contract.decisions import Allocation, Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.enforce import allocated
from coordinator.policies.tenants.entitlements import PATIENCE_S, covers
from coordinator.policies.tenants.gpu_flow import Flow
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.stability import after
from coordinator.policies.tenants.tenancy import Tenancy
from tests.draws import pick, whole
from tests.harness.builders import NOW_S
from tests.policies.tenant_books import cell, names, runs, waits
from tests.policies.tenant_passes import trees
from tests.tables import each_row

KEEPS = (
    TenantView(name="p", guarantee_gpus=8),
    TenantView(name="a", parent="p", guarantee_gpus=6, lend_limit_gpus=0),
    TenantView(name="d", parent="p"),
    TenantView(name="b", guarantee_gpus=4),
)
"""What `a` does not lend, the others below `p` never have: 2 GPUs are theirs."""


BORROWED = (
    TenantView(name="p", guarantee_gpus=8, borrow_limit_gpus=0),
    TenantView(name="a", parent="p", guarantee_gpus=4),
    TenantView(name="d", parent="p"),
    TenantView(name="b", guarantee_gpus=4),
)
"""What `d` has of the 8 GPUs that are all for `p`, `a` has not."""


LIMITED = (TenantView(name="b", guarantee_gpus=3, borrow_limit_gpus=1),)


def fixed(name: str, tenant: str, gpus: int) -> JobView:
    """A job that runs, and that nobody may stop yet."""
    return replace(runs(name, tenant, "n0", gpus), is_resting=True)


def patient(waited_s: float, job: JobView) -> JobView:
    """It has waited so long, and came last."""
    return replace(job, submitted_at_s=9.0, waiting_since_s=NOW_S - waited_s)


SCENES = {
    "its parent's own job, as it lends nothing": (
        KEEPS,
        (fixed("mine", "a", 3), waits("large", "p", 3)),
        "a",
    ),
    "a sibling's, as it lends nothing": (
        KEEPS,
        (fixed("mine", "a", 3), waits("large", "d", 3)),
        "a",
    ),
    "a job of another root, as teams there lend nothing": (
        KEEPS,
        (fixed("theirs", "a", 2), waits("large", "d", 3)),
        "b",
    ),
    "a job of another root, as others there borrow": (
        BORROWED,
        (fixed("theirs", "d", 6), waits("large", "a", 4)),
        "b",
    ),
    "its parent's own job that no guarantee covers now, as others keep what it would need": (
        KEEPS,
        (fixed("mine", "a", 2), fixed("other", "d", 2), waits("large", "p", 5)),
        "a",
    ),
    "its parent's own job that no guarantee covers now, and that could run in no empty cell": (
        KEEPS,
        (fixed("mine", "a", 6), waits("large", "p", 3)),
        "a",
    ),
    "a borrower of its own tenant that finds GPUs, of which others keep some for now": (
        (LIMITED[0], TenantView(name="a", guarantee_gpus=3, lend_limit_gpus=0)),
        (fixed("theirs", "a", 2), fixed("other", "x", 2), waits("large", "b", 4)),
        "b",
    ),
    "one of its own tenant that could run once others of it have ended": (
        LIMITED,
        (fixed("mine", "b", 2), fixed("other", "x", 4), waits("large", "b", 3)),
        "b",
    ),
    "one of its own tenant that exceeds a limit": (LIMITED, (waits("large", "b", 6),), "b"),
}
"""Tenants; who is there; and whose job of one GPU waits behind `large`."""


def scene(name: str, waited_s: float) -> ClusterSnapshot:
    """One node of eight GPUs."""
    tenants, jobs, owner = SCENES[name]
    return cell(*jobs, patient(waited_s, waits("owed", owner, 1)), tenants=tenants, nodes=1)


@each_row("name", sorted(SCENES))
def test_nobody_waits_for_a_job_that_quotas_keep_from_free_gpus(name: str) -> None:
    """Patience ends with whoever is behind it, and a pass is asked for at that time."""
    early, late = given_back(scene(name, 1.0), ()), given_back(scene(name, PATIENCE_S), ())
    assert (early.decisions, early.wake_at_s) == ((), NOW_S + PATIENCE_S - 1.0)
    assert names(late.decisions, Start) == {"owed"}


@each_row("name", sorted(SCENES))
def test_the_check_counts_no_such_job_either(name: str) -> None:
    """Its clock runs for the job that is owed alone."""
    idle = BesideIdle()
    assert idle.faults(scene(name, 1.0)) == []
    late_s = NOW_S + PATIENCE_S + LATE_S + 1.0
    (fault,) = idle.faults(replace(scene(name, 1.0), now_s=late_s))
    assert "job owed waits within its guarantee for 1861 s" in fault


def test_patience_waits_for_one_that_has_room_by_quota_and_lacks_gpus() -> None:
    """A job before it that a guarantee covers may be the head of a strict line, whoever's it is."""
    lends = (KEEPS[0], replace(KEEPS[1], lend_limit_gpus=None), *KEEPS[2:])
    there = fixed("mine", "a", 3), fixed("other", "x", 3)
    owed = patient(PATIENCE_S, waits("owed", "b", 1))
    for gpus, begun in ((2, {"owed"}), (3, set[str]())):
        snapshot = cell(*there, waits("large", "d", gpus), owed, tenants=lends, nodes=1)
        assert names(given_back(snapshot, ()).decisions, Start) == begun
        idle = BesideIdle()
        idle.faults(snapshot)
        assert ("owed" in idle.since_s) == bool(begun)


def test_a_job_that_takes_all_that_quotas_leave_its_tenant_is_started_too() -> None:
    """`d` may have 2 of the 8 GPUs of its parent, whose guarantee covers them."""
    owed = patient(PATIENCE_S, waits("owed", "d", 2))
    for gpus, begun in ((2, {"owed"}), (3, set[str]())):
        snapshot = cell(replace(owed, gpus_per_worker=gpus), tenants=KEEPS, nodes=1)
        assert names(given_back(snapshot, ()).decisions, Start) == begun
        idle = BesideIdle()
        idle.faults(snapshot)
        assert idle.since_s.keys() == begun


def test_a_borrower_that_waits_for_nodes_is_waited_for_where_others_lend_nothing_too() -> None:
    """By its own tenant: that nodes are in use is no quota, and once they are free it has room."""
    keeper = TenantView(name="k", guarantee_gpus=1, lend_limit_gpus=0)
    tenants = (TenantView(name="b", guarantee_gpus=4), keeper)
    jobs = fixed("other", "x", 3), waits("large", "b", 6)
    held = cell(*jobs, patient(PATIENCE_S, waits("owed", "b", 1)), tenants=tenants, nodes=1)
    assert names(given_back(held, ()).decisions, Start) == set()
    assert BesideIdle().faults(held) == []


# --- generated ------------------------------------------------------------------------------------


@st.composite
def overdue_cells(draw: st.DrawFn) -> ClusterSnapshot:
    """A node of eight GPUs with jobs that run on, and others that have waited for half an hour."""
    known = TenantView.__struct_fields__
    tenants = tuple(
        TenantView(**{field: value for field, value in asdict(each).items() if field in known})
        for each in draw(trees())
    )
    owners = pick(*"dabcp")
    there = [
        fixed(f"r{number}", draw(owners), draw(pick(1, 2, 3)))
        for number in range(draw(whole(0, 2)))
    ]
    for number in range(draw(whole(2, 4))):
        job = waits(f"w{number}", draw(owners), draw(pick(3, 1, 2)), submitted_at_s=float(number))
        there.append(replace(job, waiting_since_s=NOW_S - PATIENCE_S))
    return cell(*there, tenants=tenants, nodes=1)


def kept_by_nobody(snapshot: ClusterSnapshot) -> set[JobId]:
    """Jobs that fit, and that all guarantees on their way up cover, behind none but such as would
    find GPUs and have no room by quota."""
    (node,), tenancy = snapshot.nodes, Tenancy(snapshot)
    for job in (each for each in snapshot.jobs if each.state == JobState.PENDING):
        if job.gpus_per_worker > node.free_gpus:
            break
        if not tenancy.why_not(job, job.gpus_per_worker):
            is_covered = len(covers(tenancy, job)) == len(tenancy.path(job))
            return {job.job_id} if is_covered else set()
    return set()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(snapshot=overdue_cells())
def test_whoever_waits_for_quotas_alone_is_started_and_the_check_sees_the_same(
    snapshot: ClusterSnapshot,
) -> None:
    """Whatever lend and borrow limits tenants have, in one tree or two."""
    idle = BesideIdle()
    idle.faults(snapshot)
    assert kept_by_nobody(snapshot) <= idle.since_s.keys()
    if not names(given_back(snapshot, ()).decisions, Start):
        assert idle.since_s == {}


def decides_nothing(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """All is left to guarantees."""
    return Allocation(decisions=(), memory=memory)


def test_patience_that_ends_for_what_a_stop_leaves_over_keeps_no_other_job_from_its_guarantee() -> (
    None
):
    """`d` stops a job of 8 GPUs for `owed`, which goes elsewhere; `late` would fit there at last,
    but no outsider takes what `d` leaves within its guarantee: it starts in the next pass."""
    tenants = (
        TenantView(name="d", guarantee_gpus=8, borrow_limit_gpus=0),
        TenantView(name="dx", parent="d", guarantee_gpus=8),
        TenantView(name="dz", parent="d"),
        TenantView(name="c", guarantee_gpus=8),
    )
    late = patient(PATIENCE_S, waits("late", "c", 8))
    whole, owed = runs("whole", "dz", "n1", 8), waits("owed", "dx", 2)
    snapshot = cell(fixed("half", "e", 4), whole, owed, late, tenants=tenants)
    made = allocated(decides_nothing, snapshot, b"").decisions
    assert names(made, Preempt) == {"whole"}
    assert names(made, Start) == {"owed"}
    (then,) = allocated(decides_nothing, after(snapshot, made, Flow(snapshot)), b"").decisions
    assert names((then,), Start) == {"late"}
