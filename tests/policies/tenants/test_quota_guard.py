"""Quotas and guarantees: what is dropped of decisions that tenants do not allow, by hand and over
generated cells."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuUuid, JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Placement, Preempt, Resume, Start, Suspend
from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.registry import POLICIES, Policy
from coordinator.policies.tenants.quota_guard import guarded
from tests.harness.builders import make_job_view
from tests.policies.tenant_books import (
    A8,
    B8,
    Books,
    cell,
    check,
    names,
    runs,
    shared_cells,
    start,
    stop,
    waits,
)
from tests.strategies import snapshots


def test_a_tenant_within_its_guarantee_is_not_stopped_for_another() -> None:
    """Neither is its job stopped nor does the other start."""
    snapshot = cell(runs("r", "a", "n0", 8), waits("w", "b", 8), tenants=(A8, B8), nodes=1)
    kept, dropped = guarded(snapshot, (stop("r"), start("w", "n0")))
    assert kept == ()
    assert ["loses nothing" in each.why for each in dropped] == [True, False]


def test_a_tenant_may_stop_its_own_job_for_its_own() -> None:
    """What it leaves of it is nobody's in this pass: an outsider does not start there."""
    snapshot = cell(
        runs("r", "a", "n0", 8),
        waits("own", "a", 4),
        waits("other", "b", 4),
        tenants=(A8, B8),
        nodes=1,
    )
    decisions = (stop("r"), start("own", "n0"), start("other", "n0"))
    assert guarded(snapshot, decisions)[0] == decisions[:2]


@pytest.mark.parametrize(("own_gpus", "follow"), [(4, {"own", "other"}), (3, {"own"})])
def test_who_has_as_much_as_before_loses_nothing_to_who_comes_after_it(
    own_gpus: int, follow: set[str]
) -> None:
    """A tenant below its guarantee stops its job on one node for its next one on another: what it
    left may be taken by an outsider where it has no less than it had, and else not."""
    snapshot = cell(
        runs("r", "a", "n0", 4),
        runs("stays", "b", "n0", 4),
        waits("own", "a", own_gpus),
        waits("other", "b", 4),
        tenants=(A8, B8),
    )
    decisions = (stop("r"), start("own", "n1"), start("other", "n0"))
    assert names(guarded(snapshot, decisions)[0], Start) == follow


def test_what_is_borrowed_may_go_to_another() -> None:
    """A stop is no loss of a guarantee while the tenant holds more than that before it."""
    snapshot = cell(
        runs("r1", "a", "n0", 8),
        runs("r2", "a", "n1", 8),
        waits("w1", "b", 8),
        waits("w2", "b", 8),
        tenants=(A8, B8),
    )
    decisions = (stop("r1"), stop("r2"), start("w1", "n0"), start("w2", "n1"))
    kept, _ = guarded(snapshot, decisions)
    assert names(kept, Preempt) == {"r1"}
    assert names(kept, Start) == {"w1"}


def test_flexible_workers_go_before_the_gang_is_refused() -> None:
    """Room for six GPUs: of two base and six flexible workers four flexible ones start."""
    job = replace(make_job_view("w", workers=(2, 8)), tenant="a")
    snapshot = cell(job, tenants=(TenantView(name="a", guarantee_gpus=4, borrow_limit_gpus=2),))
    node = NodeName("n0")
    asked = Start(
        job_id=job.job_id,
        gpu_type="H100",
        placements=(
            Placement(node=node, worker_count=2),
            Placement(node=node, worker_count=6, is_flexible=True),
        ),
        estimated_runtime_s=60.0,
        estimate_source="declared",
        reason="test",
    )
    (kept,), _ = guarded(snapshot, (asked,))
    assert isinstance(kept, Start)
    assert [placement.worker_count for placement in kept.placements] == [2, 4]
    assert kept.estimated_runtime_s == 80.0


def test_a_job_that_its_quota_holds_blocks_nobody() -> None:
    """Strict order of submission, and the head's tenant has no room: the next one starts."""
    snapshot = cell(
        runs("r", "a", "n0", 8),
        waits("head", "a", 8),
        waits("next", "b", 8, submitted_at_s=1.0),
        tenants=(TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0),),
    )
    decisions = POLICIES["fifo"].allocate(snapshot, b"").decisions
    assert names(decisions, Start) == {"next"}
    (hold,) = (h for h in POLICIES["fifo"].pending_reasons(snapshot, b"") if h.job_id == "head")
    assert "borrow limit of 0" in hold.blockers[0]


def test_a_job_without_room_blocks_nobody_where_it_does_not_fit_either() -> None:
    """Strict order, the head wants both nodes and its tenant may have one: the next one starts."""
    head = replace(make_job_view("head", workers=(2, 2), gpus_per_worker=8), tenant="a")
    snapshot = cell(
        runs("r", "a", "n0", 8),
        head,
        waits("next", "b", 8, submitted_at_s=1.0),
        tenants=(TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0),),
    )
    assert names(POLICIES["fifo"].allocate(snapshot, b"").decisions, Start) == {"next"}


def test_what_a_quota_refuses_goes_to_others_in_the_same_pass() -> None:
    """Two of a tenant fit alone and not together: the room of the second is another's."""
    snapshot = cell(
        waits("a1", "a", 8),
        waits("a2", "a", 8, submitted_at_s=1.0),
        waits("b1", "b", 8, submitted_at_s=2.0),
        tenants=(TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0),),
    )
    decisions = POLICIES["fifo"].allocate(snapshot, b"").decisions
    assert names(decisions, Start) == {"a1", "b1"}


def test_nobody_is_suspended_for_one_that_may_not_share_its_gpus() -> None:
    """Jobs of two tenants share no GPU: where the one does not start the other computes on."""
    gpus = tuple(GpuUuid(f"GPU-{number}") for number in range(8))
    host = runs("host", "a", "n0", 8)
    host = replace(host, placed=(replace(host.placed[0], gpu_uuids=gpus),))
    seat = Placement(node=NodeName("n0"), worker_count=1, gpu_uuids=gpus)
    decisions = (
        Suspend(job_id=JobId("host"), reason="test"),
        replace(start("guest", "n0"), placements=(seat,)),
    )
    for tenant, expected in (("b", ()), ("a", decisions)):
        snapshot = cell(host, waits("guest", tenant, 8), tenants=(A8, B8))
        assert guarded(snapshot, decisions)[0] == expected


def test_whoever_is_suspended_for_nobody_is_not_spared() -> None:
    """A suspension that was for no start and no resume is none of the guard's business."""
    alone = Suspend(job_id=JobId("host"), reason="test")
    refused = start("guest", "n1")
    snapshot = cell(
        runs("host", "b", "n0", 8),
        waits("guest", "b", 8),
        tenants=(A8, replace(B8, borrow_limit_gpus=0)),
    )
    assert guarded(snapshot, (alone, refused))[0] == (alone,)


def test_whoever_gives_way_to_one_that_goes_on_still_does() -> None:
    """That somebody else may not start has nothing to do with a turn that is kept."""
    gpus = tuple(GpuUuid(f"GPU-{number}") for number in range(8))
    both = [runs(name, "a", "n0", 8) for name in ("over", "next")]
    both = [replace(job, placed=(replace(job.placed[0], gpu_uuids=gpus),)) for job in both]
    turn = (
        Suspend(job_id=JobId("over"), reason="test"),
        Resume(job_id=JobId("next"), reason="test"),
    )
    snapshot = cell(
        both[0],
        replace(both[1], state=JobState.SUSPENDED),
        waits("guest", "b", 8),
        tenants=(A8, replace(B8, guarantee_gpus=0, borrow_limit_gpus=0)),
    )
    kept, dropped = guarded(snapshot, (*turn, start("guest", "n1")))
    assert kept == turn
    assert len(dropped) == 1


slow = pytest.mark.slow


often = settings(max_examples=150, deadline=None)


@slow
@settings(often, max_examples=200)
@given(policy=st.sampled_from(sorted(POLICIES)), snapshot=shared_cells())
def test_no_policy_breaks_a_quota_or_takes_from_a_guarantee_and_who_waits_for_it_is_told_so(
    policy: str, snapshot: ClusterSnapshot
) -> None:
    """Under every policy the GPUs that are given away are there, and the guard has no more to say;
    a job whose tenant has no room does not start, and its only blocker names its tenant; whoever
    waits, and nobody else, is told why."""
    made: Policy = POLICIES[policy]
    decisions = made.allocate(snapshot, b"").decisions
    check(snapshot, decisions)
    assert guarded(snapshot, decisions) == (decisions, ())
    started = {d.job_id for d in decisions if isinstance(d, Start)}
    waits = {job.job_id for job in snapshot.jobs if job.state == JobState.PENDING}
    holds = made.pending_reasons(snapshot, b"")
    assert sorted(hold.job_id for hold in holds) == sorted(waits - started)
    for hold in holds:
        if any(why.startswith("tenant ") for why in hold.blockers):
            books = Books(snapshot)
            tenant = books.tenants.get(books.jobs[hold.job_id].tenant)
            within = tenant is not None and tenant.guarantee_gpus > books.used[tenant.name]
            assert within or hold.job_id not in started


@slow
@often
@given(policy=st.sampled_from(sorted(POLICIES)), snapshot=snapshots())
def test_without_promises_tenants_change_nothing(policy: str, snapshot: ClusterSnapshot) -> None:
    """Tenants that are promised nothing and bounded by nothing are as good as none."""
    named = replace(snapshot, tenants=(TenantView(name="t"),))
    made = POLICIES[policy]
    assert made.allocate(named, b"") == made.allocate(snapshot, b"")
