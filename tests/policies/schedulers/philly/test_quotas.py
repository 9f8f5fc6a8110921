"""Quotas that are lent while they idle: what they are, who is within one, who has more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState, Preemptibility
from coordinator.policies.contract.decisions import FRAGMENTATION, Wait
from coordinator.policies.contract.snapshot import JobView, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.schedulers.philly.quotas import QuotasInUse, held_gpus
from coordinator.policies.tenants.tenancy import Tenancy
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row


def runs(name: str, tenant: str, gpus: int, *, started_at_s: float = 0.0) -> JobView:
    """A job that runs with one worker."""
    made = make_job_view(
        name,
        state=JobState.RUNNING,
        gpus_per_worker=gpus,
        placed=[make_worker_view(name, 0, "n0", gpus=gpus)],
    )
    return job_with(made, tenant=tenant, started_at_s=started_at_s)


def waits(tenant: str, gpus: int) -> JobView:
    """One that does not."""
    return replace(make_job_view(f"w{tenant}{gpus}", gpus_per_worker=gpus), tenant=tenant)


def quotas(*jobs: JobView, tenants: tuple[TenantView, ...] = ()) -> tuple[QuotasInUse, Tenancy]:
    """Of a cell of sixteen GPUs."""
    workers = [worker for job in jobs for worker in job.placed]
    nodes = [make_node_view("n0", workers=workers), make_node_view("n1")]
    snapshot = replace(make_snapshot(nodes=nodes, jobs=jobs), tenants=tenants)
    tenancy = Tenancy(snapshot)
    return QuotasInUse(snapshot, tenancy), tenancy


def test_guarantees_are_the_quotas_where_anybody_has_one() -> None:
    """Whoever has none then has a quota of nothing."""
    made, _ = quotas(waits("b", 1), tenants=(TenantView(name="a", guarantee_gpus=5),))
    assert made.gpus == {"a": 5.0, "b": 0.0}


def test_else_the_cell_is_divided_by_weight_over_tenants_that_have_jobs() -> None:
    """One that has none takes nothing from the others."""
    views = (TenantView(name="a", weight=3.0), TenantView(name="idle", weight=4.0))
    made, _ = quotas(waits("a", 1), waits("b", 1), tenants=views)
    assert (made.gpus["a"], made.gpus["b"]) == (12.0, 4.0)


def test_a_job_is_within_the_quota_that_its_gang_does_not_exceed() -> None:
    """With what its tenant uses already, which grows as the pass goes on."""
    made, tenancy = quotas(
        runs("r", "a", 3), waits("a", 2), tenants=(TenantView(name="a", guarantee_gpus=5),)
    )
    assert made.part_in_use("a") == pytest.approx(0.6)
    assert made.is_within(waits("a", 2))
    assert not made.is_within(waits("a", 3))
    tenancy.take(waits("a", 1), 1)
    assert not made.is_within(waits("a", 2))


def test_a_tenant_without_a_quota_uses_all_of_it_from_the_first_gpu_on() -> None:
    """Its part in use is counted in GPUs: nothing is divided by nothing."""
    made, _ = quotas(runs("r", "b", 2), tenants=(TenantView(name="a", guarantee_gpus=5),))
    assert made.part_in_use("b") == pytest.approx(2.0)


def test_those_beyond_their_quota_come_youngest_first() -> None:
    """Of equals by name; nobody of a tenant that has just its quota."""
    jobs = [
        runs("old", "a", 1, started_at_s=5.0),
        runs("new", "a", 1, started_at_s=9.0),
        runs("also", "a", 1, started_at_s=9.0),
        runs("own", "b", 2, started_at_s=99.0),
    ]
    views = [TenantView(name=name, guarantee_gpus=2) for name in "abc"]
    made, _ = quotas(*jobs, waits("c", 1), tenants=tuple(views))
    assert [job.job_id for job in made.beyond(jobs, waits("c", 1))] == ["also", "new", "old"]


def test_a_tenant_is_not_taken_below_its_quota() -> None:
    """Of three GPUs beyond it a job of three may go, and none of four."""
    small, large = runs("small", "a", 3), runs("large", "a", 4)
    views = (TenantView(name="a", guarantee_gpus=4), TenantView(name="b", guarantee_gpus=4))
    made, _ = quotas(small, large, waits("b", 4), tenants=views)
    assert made.is_used_without(small, waits("b", 4))
    assert not made.is_used_without(large, waits("b", 4))


def test_what_a_job_holds_counts_until_it_is_free() -> None:
    """Also GPUs of a worker that was told to stop."""
    job = runs("r", "a", 2)
    leaving = make_worker_view("r", 1, "n0", gpus=2, is_leaving=True)
    assert held_gpus(replace(job, placed=(*job.placed, leaving))) == 4
    assert held_gpus(make_job_view("w")) == 0


def test_what_a_gang_holds_is_used_of_its_quota_and_makes_nobody_a_tenant_beyond_it() -> None:
    """Three in use and two held are all of five: nobody of the tenant is within, its part is used,
    and none of its jobs may be stopped for others."""
    views = (TenantView(name="a", guarantee_gpus=5), TenantView(name="b", guarantee_gpus=4))
    ran, gang = runs("r", "a", 3), waits("a", 4)
    made, _ = quotas(ran, gang, waits("b", 4), tenants=views)
    assert (made.room(gang), made.is_within(gang)) == (2, False)
    made.hold(gang, 2)
    assert (made.room(gang), made.is_within(waits("a", 1))) == (0, False)
    assert made.part_in_use("a") == pytest.approx(1.0)
    made.hold(gang, 1)  # its tenant came to use more elsewhere
    assert made.beyond([ran], waits("b", 4)) == []
    made.hold(gang, -3)
    assert (made.room(gang), made.held["a"]) == (2, 0)


@pytest.mark.parametrize(("gpus", "room"), [(5, 2), (6, 0)])
def test_a_gang_may_hold_what_is_left_of_a_quota_that_it_does_not_exceed(
    gpus: int, room: int
) -> None:
    """Three of five are in use: one of five may hold the others, and one of six none."""
    views = (TenantView(name="a", guarantee_gpus=5),)
    made, _ = quotas(runs("r", "a", 3), waits("a", gpus), tenants=views)
    assert made.room(waits("a", gpus)) == room


# --- over a tree ------------------------------------------------------------------------------

PROMISED = (
    TenantView(name="a", guarantee_gpus=8),
    TenantView(name="b", guarantee_gpus=8),
    TenantView(name="a1", parent="a", guarantee_gpus=2),
    TenantView(name="a2", parent="a", weight=2.0),
    TenantView(name="a3", parent="a"),
    TenantView(name="b1", parent="b"),
)
WEIGHED = (
    TenantView(name="a"),
    TenantView(name="b", weight=3.0),
    *(TenantView(name=f"a{number}", parent="a") for number in range(1, 5)),
    TenantView(name="b1", parent="b"),
)


def test_what_is_left_of_a_parent_s_guarantee_is_divided_by_weight() -> None:
    """Over those of its parts that have jobs, beside what they are promised themselves; nobody has
    any of what is promised to nobody."""
    made, _ = quotas(*(waits(name, 1) for name in ("a1", "a2", "a3", "b1", "c")), tenants=PROMISED)
    assert made.gpus == pytest.approx(
        {"a": 8.0, "b": 8.0, "a1": 3.5, "a2": 3.0, "a3": 1.5, "b1": 8.0, "c": 0.0}
    )
    fewer, _ = quotas(waits("a1", 1), waits("a3", 1), tenants=PROMISED)
    assert (fewer.gpus["a1"], fewer.gpus["a3"]) == (5.0, 3.0)


def test_without_guarantees_each_level_divides_its_own_part() -> None:
    """Four teams of `a` have together what it weighs, and not four times as much."""
    made, _ = quotas(*(waits(f"a{n}", 1) for n in range(1, 5)), waits("b1", 1), tenants=WEIGHED)
    assert (made.gpus["a"], made.gpus["b"], made.gpus["b1"]) == (4.0, 12.0, 12.0)
    assert {made.gpus[f"a{number}"] for number in range(1, 5)} == {1.0}


def test_a_job_is_within_quota_at_any_level() -> None:
    """What the other teams of its organisation leave is its own before it is anybody else's."""
    made, tenancy = quotas(runs("r", "a1", 2), waits("a1", 4), waits("a3", 1), tenants=PROMISED)
    assert made.is_within(waits("a1", 6))
    assert not made.is_within(waits("a1", 7))
    tenancy.take(waits("a3", 1), 5)
    assert made.is_within(waits("a1", 3))  # five of its own
    assert not made.is_within(waits("a1", 4))


@each_row(
    ("own", "siblings", "room"),
    [(2, 0, 6), (0, 7, 3), (0, 9, 3), (2, 5, 1), (4, 6, 0)],
    ids=["its organisation's", "its own", "beside one beyond", "alike", "none"],
)
def test_a_gang_may_hold_the_most_that_any_level_leaves(own: int, siblings: int, room: int) -> None:
    """Of 3.5 GPUs of its own, and of eight of its organisation: as much as it counts as its own,
    at least all that it needs if and only if it is within quota."""
    made, tenancy = quotas(
        *(runs("r", "a1", own),) * (own > 0), waits("a1", 3), waits("a2", 1), waits("a3", 1),
        tenants=PROMISED,
    )  # fmt: skip
    tenancy.take(waits("a2", 1), siblings)
    assert made.room(waits("a1", 3)) == room
    assert made.is_within(waits("a1", 3)) == (room >= 3)


def test_a_part_is_never_less_than_what_it_is_promised() -> None:
    """Also where an organisation has promised its teams more than it has."""
    tenants = (
        TenantView(name="a", guarantee_gpus=8),
        TenantView(name="a1", parent="a", guarantee_gpus=6),
        TenantView(name="a2", parent="a", guarantee_gpus=6),
    )
    made, _ = quotas(waits("a1", 1), waits("a2", 1), tenants=tenants)
    assert (made.gpus["a1"], made.gpus["a2"]) == (6.0, 6.0)


def test_outsiders_get_nothing_of_an_organisation_within_its_quota() -> None:
    """Of its team that has more than its part only a sibling within its own part may."""
    jobs = [runs("r1", "a1", 6), runs("r2", "c", 8)]
    asking = [waits("a3", 1), waits("b1", 8), waits("a3", 4)]
    made, _ = quotas(*jobs, *asking, tenants=PROMISED)
    assert [job.job_id for job in made.beyond(jobs, asking[0])] == ["r1", "r2"]
    assert [job.job_id for job in made.beyond(jobs, asking[1])] == ["r2"]
    assert made.beyond(jobs, waits("a1", 1)) == [jobs[1]]
    assert made.beyond(jobs, waits("c", 1)) == []


def test_an_organisation_is_not_taken_below_its_quota_by_outsiders() -> None:
    """Of twelve GPUs four may go; for a sibling eight, as the team has four for itself."""
    small, large = runs("small", "a2", 4), runs("large", "a2", 8)
    made, _ = quotas(small, large, waits("a1", 1), waits("b1", 8), tenants=PROMISED)
    assert made.is_used_without(small, waits("b1", 8))
    assert not made.is_used_without(large, waits("b1", 8))
    assert made.is_used_without(large, waits("a1", 1))


def test_a_team_within_its_organisation_s_guarantee_holds_gpus_under_philly() -> None:
    """Though it has no guarantee itself: what its gang waits for is a place, and not its share."""
    tenants = (
        TenantView(name="b", guarantee_gpus=8),
        TenantView(name="b1", parent="b"),
        TenantView(name="x", guarantee_gpus=8),
        TenantView(name="x1", parent="x"),
    )
    big = replace(
        make_job_view(
            "big",
            state=JobState.RUNNING,
            workers=(2, 2),
            gpus_per_worker=5,
            placed=[make_worker_view("big", n, f"n{n}", gpus=5) for n in range(2)],
            preemptibility=Preemptibility.NON,
        ),
        tenant="x1",
    )
    nodes = [make_node_view(f"n{n}", workers=[big.placed[n]]) for n in range(2)]
    gang = waits("b1", 4)
    snapshot = replace(make_snapshot(nodes=nodes, jobs=(big, gang)), tenants=tenants)
    found = POLICIES["philly"].allocate(snapshot, b"")
    assert found.waits == (Wait(kind=FRAGMENTATION, jobs=(gang.job_id,)),)
    [hold] = POLICIES["philly"].pending_reasons(snapshot, found.memory)
    assert "within quota" in hold.blockers[0]
    assert "holds 3 on n0" in hold.blockers[0]
