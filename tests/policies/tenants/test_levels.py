"""What a team is due where borrowers at several levels of the tree have to give together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, Preemptibility
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.tenants.reclaim import given_back
from tests.draws import pick, whole
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, names, runs, waits
from tests.policies.tenant_passes import NODE_GPUS, Asked
from tests.policies.tenants.test_free_gpus import started
from tests.tables import each_row

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
