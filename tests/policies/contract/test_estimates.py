"""Estimates: how long a start takes by a job's measured speed-up, and what a view says of one that
is used up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import NodeName
from coordinator.policies.contract.decisions import Placement, Start, placed_count
from coordinator.policies.contract.estimates import runtime_on
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.tenants.quota_guard import guarded
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.policies.profiled_jobs import told
from tests.tables import each_row

CURVE = ((2, 1.0), (4, 1.5), (8, 2.0))
"""Four workers are half as fast again as two, not twice as fast."""


def job(*, multiplier: int = 1) -> JobView:
    """Of 2 to 8 workers, 6,000 seconds with two; of tenant `a`."""
    made = make_job_view(
        "j",
        workers=(2, 8),
        remaining_work_s=12_000.0,
        types=("H100",),
        multiplier={"H100": multiplier},
    )
    return replace(told(made, CURVE), tenant="a")


def cell(each: JobView, *tenants: TenantView) -> ClusterSnapshot:
    """Two empty nodes."""
    nodes = [make_node_view("n1"), make_node_view("n2")]
    return replace(make_snapshot(nodes=nodes, jobs=[each]), tenants=tenants)


@pytest.mark.parametrize(("workers", "runtime_s"), [(2, 6000.0), (4, 4000.0), (6, 12_000 / 3.5)])
def test_a_granted_start_goes_by_the_curve(workers: int, runtime_s: float) -> None:
    """Not in proportion to the workers that a joint policy gives it."""
    each = job()
    plan = carry_out(cell(each), [Grant(job=each, workers=workers, reason="test")])
    (start,) = plan.decisions
    assert isinstance(start, Start)
    assert placed_count(start.placements) == workers
    assert start.estimated_runtime_s == pytest.approx(runtime_s)


def test_the_curve_is_stretched_to_a_type_that_needs_more_workers() -> None:
    """Where a type needs twice the workers, eight there are as fast as four."""
    each = job(multiplier=2)
    (start,) = carry_out(cell(each), [Grant(job=each, workers=8, reason="test")]).decisions
    assert isinstance(start, Start)
    assert start.estimated_runtime_s == pytest.approx(4000.0)


A4 = TenantView(name="a", guarantee_gpus=4, borrow_limit_gpus=0)
"""Whose jobs may have four GPUs."""


@pytest.mark.parametrize(("trusts", "runtime_s"), [("true", 4000.0), ("false", 3000.0)])
def test_what_a_quota_leaves_of_a_start_goes_by_what_the_policy_believes(
    trusts: str, runtime_s: float
) -> None:
    """It is four workers of eight: half as fast again as the base gang by the curve, and twice as
    fast to whoever does not trust it."""
    name = f"aryl:trusts_profiles={trusts}:resize_cost_s=0"
    (start,) = policy(name).allocate(cell(job(), A4), b"").decisions
    assert isinstance(start, Start)
    assert placed_count(start.placements) == 4
    assert start.estimated_runtime_s == pytest.approx(runtime_s)


def test_a_guard_that_is_told_nothing_trusts_the_curve() -> None:
    """Of eight workers, twice as fast as two, four are left: 4,000 s instead of 3,000."""
    each = job()
    asked = Start(
        job_id=each.job_id,
        gpu_type="H100",
        placements=(
            Placement(node=NodeName("n1"), worker_count=2),
            Placement(node=NodeName("n1"), worker_count=6, is_flexible=True),
        ),
        estimated_runtime_s=3000.0,
        estimate_source="declared",
        reason="test",
    )
    (kept,), _ = guarded(cell(each, A4), (asked,))
    assert isinstance(kept, Start)
    assert kept.estimated_runtime_s == pytest.approx(4000.0)


@each_row("name", sorted(POLICIES))
@each_row("tenants", [(), (A4,)], ids=["alone", "within a quota"])
def test_every_policy_tells_the_same_of_the_same_start(
    name: str, tenants: tuple[TenantView, ...]
) -> None:
    """Whatever size it gives a job: the work that is left at the speed of that size."""
    each = job()
    snapshot = cell(each, *tenants)
    starts = [d for d in policy(name).allocate(snapshot, b"").decisions if isinstance(d, Start)]
    for start in starts:
        count = placed_count(start.placements)
        expected_s = runtime_on(each, start.gpu_type, count, snapshot.now_s)
        assert start.estimated_runtime_s == pytest.approx(expected_s)
    assert starts or name == "opportunistic"  # which runs on lent nodes alone


RATE = 4.0


def view(left_s: float, as_of_s: float, least_work_s: float = 8.0) -> JobView:
    """A running job with so much left by its estimate at an instant."""
    return job_with(
        make_job_view("a", workers=(4, 4)),
        as_of_s=as_of_s,
        work_rate=RATE,
        remaining_work_s=max(abs(left_s), least_work_s),
        estimated_left_s=left_s,
        least_work_s=least_work_s,
    )


@each_row("rounding", [-4e-15, 0.0, 4e-15, 1e-9])
def test_views_of_different_instants_agree_where_an_estimate_is_used_up(rounding: float) -> None:
    """An older view comes there by arithmetic and a fresh one exactly: both have outlived it."""
    ran_s = 4.5
    older = view(RATE * ran_s * (1.0 + rounding), NOW_S - ran_s)
    fresh = view(0.0, NOW_S)
    assert older.estimate_left_s(NOW_S) == fresh.estimate_left_s(NOW_S) == 8.0


def test_until_then_it_is_the_estimate_alone() -> None:
    """However little: a millisecond is no rounding, though less than the least that counts."""
    assert view(0.001, NOW_S).estimate_left_s(NOW_S) == 0.001
    assert view(18.0, NOW_S - 4.0).estimate_left_s(NOW_S) == 2.0
