"""What tenants allow under every policy, over generated cells: quotas and guarantees hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.registry import POLICIES, Policy
from coordinator.policies.tenants.quota_guard import guarded
from tests.policies.tenant_books import Books, check, shared_cells
from tests.strategies import snapshots

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
