"""A higher priority waits behind nothing of lower priority that keeps taking its room."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import Allocation, PendingReason, Preempt, Start
from coordinator.policies.contract.free_gpus import is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.tenants.precedence import allocated, explained
from tests.harness.builders import job_with
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, names, runs, start, stop, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row


@pytest.mark.slow
@each_row("name", FAMILIES)
def test_small_jobs_of_a_lower_priority_do_not_starve_a_gang(name: str) -> None:
    """Each minute two jobs of one GPU and five minutes come; under every policy a job that needs
    the whole node runs once those that were there before it have ended."""
    played = Cell(name, [TenantSettings(name="a")], nodes=1)
    small = [Asked(tenant="a", work_s=300.0, at_s=30.0 * n) for n in range(45)]
    gang = Asked(tenant="a", gpus=8, work_s=2000.0, at_s=300.0, priority=10)
    played.ask([*small, gang])
    played.run(until_s=1350.0)
    assert played.engine.state.jobs[JobId("a45")].started_at_s is not None


@each_row("name", FAMILIES)
def test_nobody_is_stopped_for_a_job_of_a_lower_priority(name: str) -> None:
    """The gang has more than its share for all its time, and small lesser jobs wait for it."""
    played = Cell(name, [], nodes=1)
    gang = Asked(tenant="a", gpus=8, work_s=4000.0, priority=10)
    small = [Asked(tenant="b", work_s=300.0, at_s=60.0 + 60.0 * n) for n in range(30)]
    played.ask([gang, *small])
    played.run(until_s=5000.0)
    ran = played.engine.state.jobs[JobId("a0")]
    assert ran.started_at_s is not None
    assert ran.counts.preemptions == 0


def all_change(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Who runs and may be stopped is stopped, and all that wait start on the first node."""
    stops = [stop(job.job_id) for job in snapshot.jobs if is_movable(job)]
    waiting = [job.job_id for job in snapshot.jobs if job.state == JobState.PENDING]
    return Allocation(decisions=(*stops, *(start(each, "n0") for each in waiting)), memory=memory)


@each_row(
    ("tenant", "by_tenant", "tenants", "is_kept"),
    [
        ("a", False, (), True),
        ("b", False, (), True),
        ("a", True, (), True),
        ("b", True, (), False),
        ("b", False, (TenantView(name="a"), TenantView(name="b")), False),
    ],
)
def test_priorities_keep_nothing_from_other_tenants_that_are_due_a_share(
    tenant: str, *, by_tenant: bool, tenants: tuple[TenantView, ...], is_kept: bool
) -> None:
    """Else whoever calls all its jobs important would keep the cell."""
    has = replace(runs("has", "a", "n0", 8), priority=5)
    lower = waits("lower", tenant, 8)
    snapshot = cell(has, lower, tenants=tenants)
    made = allocated(all_change, snapshot, b"", by_tenant=by_tenant)
    assert any(isinstance(each, Preempt) for each in made.decisions) != is_kept


def test_a_deadline_that_is_ahead_goes_before_priority() -> None:
    """It may have been promised; one that is over is none."""
    has = replace(runs("has", "a", "n0", 8), priority=5)
    stopped: list[bool] = []
    for deadline_at_s in (1.0, 1e9):
        lower = replace(waits("lower", "a", 8), deadline_at_s=deadline_at_s)
        made = allocated(all_change, replace(cell(has, lower, tenants=()), now_s=2.0), b"")
        stopped.append(any(isinstance(each, Preempt) for each in made.decisions))
    assert stopped == [False, True]


@each_row(
    ("priority", "gpus", "is_kept"), [(0, 8, True), (5, 8, False), (9, 8, False), (0, 4, False)]
)
def test_only_room_that_a_lesser_job_lacks_keeps_others_from_being_stopped(
    priority: int, gpus: int, *, is_kept: bool
) -> None:
    """A start of an equal is a reason to stop, and one that has room beside it is none to keep."""
    has = replace(runs("has", "a", "n0", 4), priority=5)
    lower = replace(waits("lower", "a", gpus), priority=priority)
    made = allocated(all_change, cell(has, lower, tenants=()), b"")
    assert any(isinstance(each, Preempt) for each in made.decisions) != is_kept


def last_first(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Of those that fit somewhere the last by name starts, on the first such node."""
    for job in sorted(snapshot.jobs, key=lambda job: job.job_id, reverse=True):
        for node in snapshot.nodes:
            fits = node.free_gpus >= job.gpus_per_worker and node.name not in job.nodes.avoided
            if job.state == JobState.PENDING and fits:
                return Allocation(decisions=(start(job.job_id, node.name),), memory=memory)
    return Allocation(decisions=(), memory=memory)


def says_nothing(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """A policy without words for jobs that wait."""
    return ()


def contested(*, work_s: float = 1e6, gpus: int = 2, priority: int = 5) -> ClusterSnapshot:
    """`n0` has two GPUs free for long, `n1` four until its short job ends; `first` needs a node."""
    short = job_with(runs("short", "a", "n1", 4), remaining_work_s=300.0)
    long = job_with(runs("long", "a", "n0", 6), remaining_work_s=1e6)
    first = replace(waits("first", "a", 8), priority=priority)
    lower = job_with(waits("lower", "a", gpus), remaining_work_s=work_s, estimate_source="declared")
    return cell(short, long, first, lower, tenants=())


def placed(snapshot: ClusterSnapshot) -> dict[str, str]:
    """Who starts where."""
    found = allocated(last_first, snapshot, b"").decisions
    return {each.job_id: each.placements[0].node for each in found if isinstance(each, Start)}


def test_room_is_kept_where_it_comes_soonest_and_the_rest_is_for_all() -> None:
    """The lesser job goes to the other node, or waits where only the kept one would do."""
    assert placed(contested()) == {"lower": "n0"}
    assert placed(contested(gpus=3)) == {}


def test_equals_are_the_policys_own_matter() -> None:
    """Nothing is kept from a job of the same priority."""
    assert placed(contested(gpus=3, priority=0)) == {"lower": "n1"}


def test_who_is_over_in_time_may_have_it_meanwhile() -> None:
    """300 s until it is wanted: 150 s that may be late by half are in time, 250 s are not."""
    assert placed(contested(gpus=3, work_s=150.0)) == {"lower": "n1"}
    assert placed(contested(gpus=3, work_s=250.0)) == {}


def test_a_job_that_could_start_and_does_not_keeps_nothing() -> None:
    """It has its room if the policy takes it; where that starts others, nothing idles for it."""
    first = replace(waits("first", "a", 8), priority=5)
    assert placed(cell(first, waits("lower", "a", 2), tenants=(), nodes=1)) == {"first": "n0"}

    def never_first(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        others = tuple(job for job in snapshot.jobs if job.job_id != "first")
        return last_first(replace(snapshot, jobs=others), memory)

    snapshot = cell(first, waits("lower", "a", 2), tenants=(), nodes=1)
    found = allocated(never_first, snapshot, b"").decisions
    assert names(found, Start) == {"lower"}


def test_a_guarantee_waits_for_no_priority_that_none_covers() -> None:
    """What its owner is due is not kept from it."""
    tenants = (TenantView(name="b", guarantee_gpus=8), TenantView(name="a"))
    snapshot = contested(gpus=3)
    jobs = tuple(
        replace(job, tenant="b") if job.job_id == "lower" else job for job in snapshot.jobs
    )
    assert placed(replace(snapshot, jobs=jobs, tenants=tenants)) == {"lower": "n1"}


def test_a_job_from_which_room_is_kept_is_told_for_whom() -> None:
    """Also where the policy by itself would start it."""
    (hold,) = explained(last_first, says_nothing, contested(gpus=3), b"")
    assert (hold.job_id, hold.blockers) == (
        "lower",
        ("n1 is kept for first, which waits with priority 5 and can have it in 300 s",),
    )


def test_a_job_that_starts_is_not_told_that_it_waits() -> None:
    """The policy by itself may say so: it knows nothing of the room that is kept from others."""
    snapshot = cell(waits("one", "a", 2), tenants=(), nodes=1)

    def says_all(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
        return tuple(
            PendingReason(job_id=job.job_id, blockers=("no room",)) for job in snapshot.jobs
        )

    assert names(allocated(all_change, snapshot, b"").decisions, Start) == {"one"}
    assert explained(all_change, says_all, snapshot, b"") == ()
