"""Guarantees where borrowers share GPUs: a seat is taken back whole, and counted once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import GpuUuid, JobId, JobState, NodeName, Preemptibility
from coordinator.engine.invariants import starved
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Resume,
    Start,
    Suspend,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.tenants.giveback import left_by, seats
from coordinator.policies.tenants.gpu_flow import Left
from coordinator.policies.tenants.quota_guard import guarded
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.tenancy import Count, Tenancy
from tests.harness.builders import NOW_S, job_with, make_node_view, make_snapshot
from tests.policies.sharing_cell import DELAYS, SLICE_S, Cell
from tests.policies.tenant_books import A8, B8, names, runs, start, stop, waits

OTHERS = TenantView(name="a")
"""To these nothing is promised."""


def named(node: str, count: int = 8) -> tuple[GpuUuid, ...]:
    """The GPUs of a node."""
    return tuple(GpuUuid(f"{node}-{number}") for number in range(count))


def sits(
    name: str, tenant: str, node: str, *, is_suspended: bool = False, lost_gpu_s: float = 0.0
) -> JobView:
    """A job on all eight GPUs of a node, alone or not."""
    made = runs(name, tenant, node, 8, lost_gpu_s=lost_gpu_s)
    state = JobState.SUSPENDED if is_suspended else JobState.RUNNING
    return replace(made, state=state, placed=(replace(made.placed[0], gpu_uuids=named(node)),))


def shared(*jobs: JobView, tenants: tuple[TenantView, ...], nodes: int = 1) -> ClusterSnapshot:
    """Nodes of eight GPUs, whose workers may share them."""
    there = [
        make_node_view(
            f"n{n}",
            free_gpus=0 if any(w.node == f"n{n}" for j in jobs for w in j.placed) else 8,
            workers=[w for job in jobs for w in job.placed if w.node == f"n{n}"],
        )
        for n in range(nodes)
    ]
    return replace(make_snapshot(nodes=there, jobs=jobs), tenants=tenants)


def joins(name: str, node: str, gpus: tuple[GpuUuid, ...]) -> Start:
    """A start on GPUs that others have."""
    seat = Placement(node=NodeName(node), worker_count=1, gpu_uuids=gpus)
    return replace(start(name, node), placements=(seat,))


# --- what is counted ----------------------------------------------------------------------------


def test_what_several_share_comes_free_with_the_last_of_them() -> None:
    """One of two is stopped: its tenant uses as much as before, and has no room for another."""
    tight = TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0)
    snapshot = shared(
        sits("r1", "a", "n0"),
        sits("r2", "a", "n0", is_suspended=True),
        waits("w", "a", 8),
        tenants=(tight,),
        nodes=2,
    )
    one, both = (stop("r1"),), (stop("r1"), stop("r2"))
    assert names(guarded(snapshot, (*one, start("w", "n1")))[0], Start) == set()
    assert guarded(snapshot, (*both, start("w", "n1")))[0] == (*both, start("w", "n1"))


def test_all_that_share_are_not_stopped_for_another_tenant() -> None:
    """Their tenant is within its guarantee: neither of them leaves, and nobody starts there."""
    snapshot = shared(
        sits("r1", "a", "n0"),
        sits("r2", "a", "n0", is_suspended=True),
        waits("w", "b", 8),
        tenants=(A8, B8),
    )
    kept, dropped = guarded(snapshot, (stop("r1"), stop("r2"), start("w", "n0")))
    assert kept == ()
    assert "loses nothing" in dropped[0].why


def test_where_somebody_comes_to_share_nothing_comes_free() -> None:
    """The only one on a seat is stopped and another joins: the tenant has no more room by it."""
    tight = TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0)
    snapshot = shared(
        sits("r", "a", "n0"), waits("j", "a", 8), waits("w", "a", 8), tenants=(tight,), nodes=2
    )
    turn = (stop("r"), joins("j", "n0", named("n0")))
    assert guarded(snapshot, (*turn, start("w", "n1")))[0] == turn


def test_seats_are_jobs_with_any_gpu_together_directly_or_through_others() -> None:
    """Three in a chain are one seat, whose GPUs count once; the fourth has its own."""
    halves = named("n0")[:4], named("n0")[2:6], named("n0")[5:8]
    chain = [runs(f"c{i}", "a", "n0", len(gpus)) for i, gpus in enumerate(halves)]
    chain = [
        replace(job, placed=(replace(job.placed[0], gpu_uuids=gpus),))
        for job, gpus in zip(chain, halves, strict=True)
    ]
    found = seats([chain[0], chain[2], runs("own", "a", "n1", 8), chain[1]])
    assert [[job.job_id for job in seat.jobs] for seat in found] == [["c0", "c2", "c1"], ["own"]]
    all_of_them = [worker for job in found[0].jobs for worker in job.placed]
    assert left_by(all_of_them) == Left(free={NodeName("n0"): 8}, used=8)


# --- what is taken back -------------------------------------------------------------------------


def test_all_that_share_gpus_are_stopped_for_a_guarantee() -> None:
    """Of a seat the one that computes and the one that is suspended; the owed job starts there."""
    snapshot = shared(
        sits("r1", "a", "n0"),
        sits("r2", "a", "n0", is_suspended=True),
        waits("owed", "b", 8),
        tenants=(OTHERS, B8),
    )
    decisions = given_back(snapshot, ()).decisions
    assert names(decisions, Preempt) == {"r1", "r2"}
    assert names(decisions, Start) == {"owed"}
    assert guarded(snapshot, decisions) == (decisions, ())


@pytest.mark.parametrize("is_dear", [False, True])
def test_what_a_seat_costs_is_what_all_on_it_lose(is_dear: bool) -> None:
    """Two that lose 60 GPU-s each together lose more than one that loses 100."""
    alone_gpu_s = 130.0 if is_dear else 100.0
    snapshot = shared(
        sits("r1", "a", "n0", lost_gpu_s=60.0),
        sits("r2", "a", "n0", is_suspended=True, lost_gpu_s=60.0),
        sits("alone", "a", "n1", lost_gpu_s=alone_gpu_s),
        waits("owed", "b", 8),
        tenants=(OTHERS, B8),
        nodes=2,
    )
    expected = {"r1", "r2"} if is_dear else {"alone"}
    assert names(given_back(snapshot, ()).decisions, Preempt) == expected


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
def test_nobody_is_stopped_where_another_would_stay(state: JobState) -> None:
    """One on the seat still starts, or did not agree: the other computes on."""
    stays = replace(
        sits("stays", "a", "n0"),
        state=state,
        preemptibility=Preemptibility.NON if state == JobState.RUNNING else Preemptibility.FULL,
    )
    snapshot = shared(sits("r1", "a", "n0"), stays, waits("owed", "b", 8), tenants=(OTHERS, B8))
    assert given_back(snapshot, ()).decisions == ()


@pytest.mark.parametrize("ago_s", [10.0, 700.0])
def test_nobody_is_stopped_where_another_was_stopped_lately(ago_s: float) -> None:
    """The engine would refuse to stop the suspended one again within ten minutes."""
    rests = sits("rests", "a", "n0", is_suspended=True)
    rests = job_with(rests, preemptions_latest_at_s=NOW_S - ago_s)
    jobs = (sits("r1", "a", "n0"), rests, waits("owed", "b", 8))
    snapshot = replace(shared(*jobs, tenants=(OTHERS, B8)), min_runtime_s=600.0)
    allocation = POLICIES["fifo"].allocate(snapshot, b"")
    stopped = names(allocation.decisions, Preempt)
    assert stopped == (set() if ago_s < 600.0 else {"r1", "rests"})
    assert len(starved(snapshot)) == len(stopped) // 2


def test_nobody_is_stopped_where_another_is_on_its_way() -> None:
    """A job moves to the seat in this pass, or GPUs of it are held for one that does."""
    comes = sits("comes", "a", "n1")
    seat = Placement(node=NodeName("n0"), worker_count=1, gpu_uuids=named("n0"))
    move = Migrate(job_id=comes.job_id, placements=(seat,), is_packed=True, reason="test")
    mine = (sits("r1", "a", "n0", lost_gpu_s=1.0), waits("owed", "b", 8))
    tenants = (OTHERS, B8)
    snapshot = shared(*mine, comes, tenants=tenants, nodes=2)
    assert given_back(snapshot, (move,)).decisions == (move,)
    leaves = replace(
        comes,
        state=JobState.PREEMPTING,
        placed=(replace(comes.placed[0], is_leaving=True),),
        held=(replace(comes.placed[0], node=NodeName("n0"), gpu_uuids=named("n0")),),
    )
    assert given_back(shared(*mine, leaves, tenants=tenants), ()).decisions == ()


def test_a_guarantee_takes_the_place_of_turns() -> None:
    """Nobody is suspended or resumed there, nor joins; turns on other seats are as before."""
    turn: tuple[Decision, ...] = (
        Suspend(job_id=JobId("r1"), reason="test"),
        Resume(job_id=JobId("r2"), reason="test"),
        joins("more", "n0", named("n0")),
    )
    other: tuple[Decision, ...] = (
        Suspend(job_id=JobId("s1"), reason="test"),
        Resume(job_id=JobId("s2"), reason="test"),
    )
    snapshot = shared(
        sits("r1", "a", "n0"),
        sits("r2", "a", "n0", is_suspended=True),
        sits("s1", "a", "n1", lost_gpu_s=9.0),
        sits("s2", "a", "n1", is_suspended=True),
        waits("more", "a", 8),
        waits("owed", "b", 8),
        tenants=(OTHERS, B8),
        nodes=2,
    )
    decisions = given_back(snapshot, (*turn, *other)).decisions
    assert decisions[:2] == other
    assert names(decisions, Preempt) == {"r1", "r2"}
    assert names(decisions, Start) == {"owed"}


# --- on the engine ------------------------------------------------------------------------------

POOR = (TenantSettings(name="poor", guarantee_gpus=4), TenantSettings(name="rich"))


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_a_guarantee_is_met_though_the_borrower_s_jobs_take_turns(jobs: int) -> None:
    """At once in the middle of a slice, at the cost of those on the seat and of no more."""
    cell = Cell(delays=DELAYS, tenants=POOR)
    for number in range(jobs):
        cell.submit(f"rich{number}", at_s=1.0 + number, tenant="rich", work_s=1e5)
    at_s = 1.0 + 6.5 * SLICE_S
    cell.submit("poor", at_s=at_s, tenant="poor", work_s=600.0)
    cell.until(at_s - 1.0)
    there = sum(cell.state(f"rich{number}") != JobState.PENDING for number in range(jobs))
    assert there == jobs
    cell.until(at_s + SLICE_S)
    counters = cell.sim.engine.state.counters
    assert cell.state("poor") == JobState.RUNNING
    assert (counters.preemptions, counters.decisions_refused) == (there, 0)
    cell.until(at_s + 600.0 + SLICE_S)
    assert cell.end_s("poor") <= at_s + 600.0 + SLICE_S


def test_a_guarantee_is_met_where_something_happens_all_the_time() -> None:
    """Small jobs of the borrower come and go between the turns: nobody is stopped in vain."""
    cell = Cell(delays=DELAYS, tenants=POOR)
    for number in range(3):
        cell.submit(f"rich{number}", at_s=1.0 + number, tenant="rich", work_s=1e5)
    cell.submit("poor", at_s=130.0, tenant="poor", work_s=600.0)
    for number in range(20):
        cell.submit(f"x{number}", at_s=150.0 + 70.5 * number, tenant="rich", work_s=10.0, gpus=3)
    cell.until(130.0 + 600.0 + 2 * SLICE_S)
    assert cell.end_s("poor") <= 130.0 + 600.0 + 2 * SLICE_S
    assert cell.sim.engine.state.counters.decisions_refused == 0


def test_what_is_held_for_a_job_that_moves_is_its_tenant_s() -> None:
    """While its workers leave a node and GPUs of another are held, it uses those, once."""
    cell = Cell(nodes=2, delays=DELAYS, tenants=(TenantSettings(name="rich"),))
    cell.submit("short", tenant="rich", work_s=900.0)
    cell.submit("a", at_s=2.0, tenant="rich", work_s=5000.0)
    cell.submit("b", at_s=3.0, tenant="rich", work_s=5000.0)
    used: set[Count] = set()
    while not cell.made(Migrate) and cell.sim.loop.now_s < 3000.0:
        cell.until(cell.sim.loop.now_s + 0.25)
    [(moved_s, move)] = cell.made(Migrate)
    assert isinstance(move, Migrate)
    while cell.job(move.job_id).migration is not None:
        used.add(Tenancy(cell.sim.engine.snapshot()).used["rich"])
        cell.until(cell.sim.loop.now_s + 0.25)
    assert cell.sim.loop.now_s > moved_s + 1.0
    assert used == {8}
