"""Who is stopped for a tenant's room where GPUs are free, in which order, and how many."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from common.model import JobId, Preemptibility
from coordinator.policies.contract.decisions import Decision, Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.parts.grants import turn_over
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.quota_stops import with_quota_stops
from coordinator.policies.tenants.quota_guard import guarded
from tests.harness.builders import NOW_S, job_with
from tests.policies.tenant_books import cell, names, runs, start, stop, waits

MAY_USE_8 = (TenantView(name="t", borrow_limit_gpus=8),)


def has(name: str, gpus: int, loses_gpu_s: float, *, tenant: str = "t") -> JobView:
    """It runs on the first node, and a stop throws so much of its work away."""
    return runs(name, tenant, "n0", gpus, lost_gpu_s=loses_gpu_s)


def made(
    snapshot: ClusterSnapshot, *decisions: Decision, granted: Collection[str] = ()
) -> tuple[Decision, ...]:
    """The decisions with the stops that they need. granted: who goes on beside those who start."""
    return with_quota_stops(snapshot, decisions, {*map(JobId, granted)}, turn_over)


def stops(decisions: Collection[Decision]) -> list[tuple[str, str]]:
    """Who is stopped, and for whom; each as often as it is."""
    return [(d.job_id, d.beneficiary) for d in decisions if isinstance(d, Preempt)]


def test_who_loses_least_is_stopped_first() -> None:
    """Of two whose stop gives the same room; whatever their names and their order."""
    jobs = (has("a", 4, 50.0), has("b", 4, 10.0), waits("new", "t", 4))
    asked = start("new", "n1")
    assert stops(made(cell(*jobs, tenants=MAY_USE_8), asked)) == [("b", "new")]
    assert stops(made(cell(*reversed(jobs), tenants=MAY_USE_8), asked)) == [("b", "new")]


def test_who_may_not_be_stopped_goes_on() -> None:
    """Though it would lose nothing."""
    never = replace(has("never", 4, 0.0), preemptibility=Preemptibility.NON)
    jobs = (never, has("may", 4, 50.0), waits("new", "t", 4))
    found = made(cell(*jobs, tenants=MAY_USE_8), start("new", "n1"))
    assert stops(found) == [("may", "new")]


def test_no_more_are_stopped_than_are_needed() -> None:
    """One loses less, but leaves too little, and the room that the next one leaves is enough
    without it: so it goes on."""
    jobs = (has("little", 1, 10.0), has("large", 7, 50.0), waits("new", "t", 4))
    found = made(cell(*jobs, tenants=MAY_USE_8), start("new", "n1"))
    assert stops(found) == [("large", "new")]


def test_of_those_that_may_go_on_after_all_it_is_the_one_that_loses_most() -> None:
    """With a large job one of two smaller ones is enough: that is the one that loses less."""
    jobs = (has("a", 2, 10.0), has("b", 2, 20.0), has("c", 3, 30.0), waits("new", "t", 6))
    found = made(cell(*jobs, tenants=MAY_USE_8), start("new", "n1"))
    assert stops(found) == [("a", "new"), ("c", "new")]


def test_nobody_is_stopped_where_all_that_may_be_leave_too_little() -> None:
    """What was reckoned for it is forgotten: a smaller one behind it is made room for."""
    jobs = (has("a", 4, 10.0), has("kept", 4, 0.0), waits("new", "t", 8), waits("less", "t", 4))
    snapshot = cell(*jobs, tenants=MAY_USE_8)
    assert made(snapshot, start("new", "n1"), granted=["kept"]) == (start("new", "n1"),)
    both = made(snapshot, start("new", "n1"), start("less", "n1"), granted=["kept"])
    assert stops(both) == [("a", "less")]


def test_who_is_stopped_already_is_not_stopped_again() -> None:
    """Its room is counted once: another one goes for the rest."""
    jobs = (has("gone", 4, 0.0), has("next", 4, 50.0), waits("new", "t", 8))
    found = made(cell(*jobs, tenants=MAY_USE_8), stop("gone"), start("new", "n1"))
    assert stops(found) == [("gone", ""), ("next", "new")]


def test_one_stop_makes_room_for_one_job() -> None:
    """Two who start need a stop each; no one is stopped twice."""
    jobs = (has("a", 4, 10.0), has("b", 4, 50.0), waits("new1", "t", 4), waits("new2", "t", 4))
    found = made(cell(*jobs, tenants=MAY_USE_8), start("new1", "n1"), start("new2", "n1"))
    assert stops(found) == [("a", "new1"), ("b", "new2")]


def test_who_gives_no_room_goes_on_though_it_loses_nothing() -> None:
    """It is another tenant's, and no limit bounds both."""
    jobs = (has("a", 4, 50.0), has("b", 4, 90.0), waits("new", "t", 4))
    other = runs("other", "u", "n1", 4)
    found = made(cell(*jobs, other, tenants=MAY_USE_8), start("new", "n1"))
    assert stops(found) == [("a", "new")]


def borrowed() -> ClusterSnapshot:
    """Of 16 GPUs five jobs have borrowed ten, four are kept idle, and two are what the guarantee of
    the newcomer's tenant leaves it: without one of these jobs it has still no more than that."""
    tenants = (
        TenantView(name="t", guarantee_gpus=4),
        TenantView(name="keeper", guarantee_gpus=8, lend_limit_gpus=4),
    )
    jobs = [runs(f"u{n}", "u", f"n{n // 4}", 2, lost_gpu_s=10.0 * n) for n in range(5)]
    new = job_with(
        waits("new", "t", 6, submitted_at_s=NOW_S),
        remaining_work_s=1000.0,
        estimated_left_s=1000.0,
        deadline_at_s=NOW_S + 1100.0,
    )
    return cell(*jobs, new, tenants=tenants)


def test_those_who_give_room_only_together_are_stopped() -> None:
    """And of them no more than are needed, those that lose least; tenants allow all of it."""
    snapshot = borrowed()
    found = made(snapshot, start("new", "n1"))
    assert stops(found) == [("u0", "new"), ("u1", "new")]
    assert guarded(snapshot, found) == (found, ())


def test_a_promised_start_gets_its_room_from_several_who_give_none_alone() -> None:
    """Those that the shares leave nothing to: it starts as it was promised."""
    found = policy("qos-elasticflow").allocate(borrowed(), b"").decisions
    assert names(found, Start) == {"new"}
    assert stops(found) == [("u0", "new"), ("u1", "new")]


def test_stops_come_behind_those_for_nodes_and_before_whoever_starts() -> None:
    """Only so do tenants let all of it happen: nobody starts before there is room for it, and what
    a tenant gives up counts as borrowed as long as it has more than its guarantee."""
    tenants = (TenantView(name="t", guarantee_gpus=4, borrow_limit_gpus=4),)
    there = (runs("a", "t", "n1", 2), runs("filler", "u", "n1", 6), has("b", 6, 10.0))
    before, starts = stop("a"), (start("outside", "n1"), start("own", "n2"))
    snapshot = cell(
        *there, waits("outside", "u", 2), waits("own", "t", 3), tenants=tenants, nodes=3
    )
    found = made(snapshot, before, *starts, granted=["filler"])
    assert stops(found) == [("a", ""), ("b", "own")]
    assert (found[0], found[2:]) == (before, starts)
    assert guarded(snapshot, found) == (found, ())
