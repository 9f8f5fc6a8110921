"""What a tenant keeps within its guarantee, by hand: nobody of it makes room for nobody."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuUuid, JobId, JobState, NodeName
from common.profile import JobProfile
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Resize,
    Start,
    Suspend,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.tenants.quota_guard import guarded
from tests.harness.builders import make_job_view, make_worker_view
from tests.policies.tenant_books import A8, B8, cell, check, runs, shared_cells, start, stop, waits

GPUS = tuple(GpuUuid(f"GPU-{number}") for number in range(8))


def elastic(
    name: str, tenant: str, *nodes: str, least: int = 2, most: int = 8, gpus: int = 1
) -> JobView:
    """A job that runs, with a worker on each node named; the first two are its base gang."""
    placed = [
        make_worker_view(name, index, node, gpus=gpus, is_flexible=index >= least)
        for index, node in enumerate(nodes)
    ]
    made = make_job_view(
        name,
        state=JobState.RUNNING,
        workers=(least, most),
        gpus_per_worker=gpus,
        placed=placed,
    )
    return replace(made, tenant=tenant)


def shrink(name: str, *indices: int, added: tuple[Placement, ...] = ()) -> Resize:
    """These workers leave."""
    return Resize(job_id=JobId(name), removed_workers=indices, added=added, reason="test")


def grow(name: str, node: str, count: int) -> Resize:
    """So many workers more there."""
    added = (Placement(node=NodeName(node), worker_count=count, is_flexible=True),)
    return Resize(job_id=JobId(name), added=added, reason="test")


@pytest.mark.parametrize(
    "decision", [shrink("e", 5, 6, 7), stop("e")], ids=["some workers", "the whole job"]
)
def test_nobody_makes_room_for_nobody_within_a_guarantee(decision: Decision) -> None:
    """Another tenant would take it in the next pass: it is dropped, once and with the reason."""
    snapshot = cell(elastic("e", "a", *["n0"] * 8), waits("w", "b", 2), tenants=(A8, B8), nodes=1)
    kept, dropped = guarded(snapshot, (decision,))
    assert kept == ()
    assert [each.why for each in dropped] == [
        "tenant a is within its guarantee, and none of its jobs takes all of this"
    ]


def test_a_shrink_is_cut_down_to_what_its_own_tenant_takes() -> None:
    """Of four workers that leave one makes room for its own tenant's job: the newest goes."""
    snapshot = cell(
        elastic("e", "a", *["n0"] * 8),
        waits("own", "a", 1),
        waits("other", "b", 3),
        tenants=(A8, B8),
        nodes=1,
    )
    decisions = (shrink("e", 4, 5, 6, 7), start("own", "n0"), start("other", "n0"))
    kept, _ = guarded(snapshot, decisions)
    assert kept == (shrink("e", 7), start("own", "n0"))
    assert guarded(snapshot, kept) == (kept, ())


def test_what_is_borrowed_may_be_left_for_nobody() -> None:
    """Of six workers that leave, two are of the guarantee: four go."""
    jobs = (elastic("e", "a", *["n0"] * 8), runs("r", "a", "n1", 4))
    kept, _ = guarded(cell(*jobs, tenants=(A8, B8)), (shrink("e", 2, 3, 4, 5, 6, 7),))
    assert kept == (shrink("e", 4, 5, 6, 7),)
    alone = (stop("r"),)
    assert guarded(cell(*jobs, tenants=(A8, B8)), alone)[0] == alone


def test_all_that_is_borrowed_may_go_to_another() -> None:
    """Of twelve GPUs four are borrowed: these go, though an own job is stopped for one as well."""
    snapshot = cell(
        elastic("e", "a", *["n0"] * 8),
        runs("r", "a", "n1", 4),
        runs("x", "b", "n1", 4),
        waits("own", "a", 2),
        waits("w", "b", 4),
        tenants=(A8, B8),
    )
    decisions = (shrink("e", 4, 5, 6, 7), stop("r"), start("w", "n0"), start("own", "n1"))
    assert guarded(snapshot, decisions) == (decisions, ())


def test_a_borrower_s_last_job_is_whole() -> None:
    """Twelve GPUs are held and eight guaranteed: a stop of eight for nobody is made, as before."""
    jobs = (elastic("e", "a", *["n0"] * 4), runs("r", "a", "n1", 8))
    decisions = (stop("r"),)
    assert guarded(cell(*jobs, tenants=(A8, B8)), decisions) == (decisions, ())


def test_without_a_guarantee_a_job_gives_back_what_it_likes() -> None:
    """Nothing is promised to its tenant, so that nothing of it can be lost."""
    snapshot = cell(elastic("e", "c", *["n0"] * 8), tenants=(A8, B8), nodes=1)
    decisions = (shrink("e", 5, 6, 7),)
    assert guarded(snapshot, decisions) == (decisions, ())


def test_growing_elsewhere_makes_up_for_a_shrink() -> None:
    """A tenant that takes as many GPUs on another node as it leaves has lost none."""
    snapshot = cell(
        elastic("e", "a", *["n0"] * 6),
        elastic("f", "a", "n1", "n1"),
        tenants=(A8, B8),
    )
    decisions = (shrink("e", 4, 5), grow("f", "n1", 2))
    assert guarded(snapshot, decisions) == (decisions, ())


def test_workers_that_make_a_job_no_faster_may_go() -> None:
    """Its speed ends at four workers: it keeps these, and the others are no loss."""
    flat = JobProfile(speedup=((2, 2.0), (4, 3.0)))
    job = replace(elastic("e", "a", *["n0"] * 8), profile=flat)
    snapshot = cell(job, tenants=(A8, B8), nodes=1)
    every = (shrink("e", 2, 3, 4, 5, 6, 7),)
    assert guarded(snapshot, every)[0] == (shrink("e", 4, 5, 6, 7),)
    assert guarded(snapshot, (shrink("e", 4, 5, 6, 7),))[1] == ()


def test_a_worker_is_whole() -> None:
    """A job of one GPU takes the place of a worker of two: what is over of that is anyone's."""
    snapshot = cell(
        elastic("e", "a", *["n0"] * 4, gpus=2), waits("own", "a", 1), tenants=(A8, B8), nodes=1
    )
    decisions = (shrink("e", 3), start("own", "n0"))
    assert guarded(snapshot, decisions) == (decisions, ())


def test_a_division_shrinks_for_any_of_its_teams_and_for_nobody_else() -> None:
    """What a team borrows of its division's guarantee may go to a sibling, not to nobody."""
    tenants = (
        TenantView(name="p", guarantee_gpus=8),
        TenantView(name="c", parent="p", guarantee_gpus=4),
        TenantView(name="d", parent="p"),
    )
    snapshot = cell(elastic("e", "d", *["n0"] * 8), waits("own", "c", 2), tenants=tenants, nodes=1)
    assert guarded(snapshot, (shrink("e", 5, 6, 7),))[0] == ()
    decisions = (shrink("e", 5, 6, 7), start("own", "n0"))
    assert guarded(snapshot, decisions)[0] == (shrink("e", 6, 7), start("own", "n0"))


def test_a_job_that_moves_workers_keeps_none_beside_those_that_it_gets() -> None:
    """It would have more than before, and perhaps more than it can use, though it ran faster."""
    moves = Placement(node=NodeName("n1"), worker_count=4, is_flexible=True)
    best_at_4 = JobProfile(speedup=((2, 2.0), (4, 4.0), (6, 3.0)))
    snapshot = cell(
        replace(elastic("e", "a", *["n0"] * 4, most=6), profile=best_at_4),
        runs("r", "a", "n0", 4),
        tenants=(A8, B8),
    )
    decisions = (stop("r"), shrink("e", 2, 3, added=(moves,)))
    assert guarded(snapshot, decisions)[0] == decisions[1:]


def test_a_job_that_only_moves_goes_on_with_that() -> None:
    """It costs its tenant nothing, whatever else of the pass is dropped."""
    snapshot = cell(runs("m", "a", "n0", 4), runs("r", "a", "n0", 4), tenants=(A8, B8))
    away = Placement(node=NodeName("n1"), worker_count=1)
    moves = Migrate(job_id=JobId("m"), placements=(away,), reason="test")
    assert guarded(snapshot, (stop("r"), moves))[0] == (moves,)


def test_what_is_kept_is_nobody_else_s_on_that_node() -> None:
    """Of four workers that leave a node three are needed: one stays there, and all elsewhere."""
    snapshot = cell(
        elastic("e", "a", *["n0"] * 4),
        elastic("f", "a", *["n0"] * 4),
        elastic("g", "a", *["n1"] * 4),
        waits("own", "a", 3),
        tenants=(TenantView(name="a", guarantee_gpus=12), B8),
    )
    decisions = (shrink("g", 2, 3), shrink("e", 2, 3), shrink("f", 2, 3), start("own", "n0"))
    kept, _ = guarded(snapshot, decisions)
    assert kept == (shrink("e", 2, 3), shrink("f", 3), start("own", "n0"))


def test_a_team_keeps_its_own_where_its_division_borrows() -> None:
    """The division would still hold more than its guarantee, and the team less."""
    tenants = (
        TenantView(name="p", guarantee_gpus=8),
        TenantView(name="c", parent="p", guarantee_gpus=4),
        TenantView(name="d", parent="p"),
    )
    jobs = (elastic("e", "c", *["n0"] * 4), runs("r", "d", "n1", 8))
    assert guarded(cell(*jobs, tenants=tenants), (shrink("e", 2, 3),))[0] == ()


def test_a_job_is_not_packed_with_another_to_leave_its_gpus_to_nobody() -> None:
    """Two that shared the GPUs of one would leave those of the other; a move costs none."""
    host, guest = (runs(name, "a", node, 4) for name, node in (("host", "n0"), ("guest", "n1")))
    host = replace(host, placed=(replace(host.placed[0], gpu_uuids=GPUS[:4]),))
    guest = replace(guest, placed=(replace(guest.placed[0], gpu_uuids=GPUS[4:]),))
    snapshot = cell(host, guest, tenants=(A8, B8))
    seat = Placement(node=NodeName("n0"), worker_count=1, gpu_uuids=GPUS[:4])
    packs = (
        Suspend(job_id=JobId("host"), reason="test"),
        Migrate(job_id=JobId("guest"), placements=(seat,), reason="test"),
    )
    kept, dropped = guarded(snapshot, packs)
    assert kept == ()
    assert len(dropped) == 2
    away = Placement(node=NodeName("n0"), worker_count=1)
    moves = (Migrate(job_id=JobId("guest"), placements=(away,), reason="test"),)
    assert guarded(snapshot, moves) == (moves, ())


def test_a_stop_that_its_own_tenant_needs_on_one_of_its_nodes_is_made() -> None:
    """A job is whole: what the other node is left with goes to whoever comes."""
    wide = elastic("e", "a", "n0", "n0", "n1", "n1")
    snapshot = cell(wide, runs("r", "b", "n0", 6), waits("own", "a", 2), tenants=(A8, B8))
    decisions = (stop("e"), start("own", "n0"))
    assert guarded(snapshot, decisions) == (decisions, ())
    assert guarded(snapshot, (Preempt(job_id=JobId("e"), reason="test"),))[0] == ()


def teams(guarantee_gpus: int) -> tuple[TenantView, ...]:
    """A tenant that borrows nothing, and its two teams; the rest of its guarantee is its own."""
    return (
        TenantView(name="a", guarantee_gpus=guarantee_gpus, borrow_limit_gpus=0),
        TenantView(name="ax", parent="a", guarantee_gpus=2),
        TenantView(name="ay", parent="a", guarantee_gpus=2),
    )


def test_a_stop_that_makes_room_by_quota_for_its_own_tenant_is_made() -> None:
    """Free GPUs elsewhere are no use to who may not take them: the stop is for the start."""
    snapshot = cell(runs("own", "a", "n0", 4), waits("due", "ax", 2), tenants=teams(4))
    for node in ("n0", "n1"):
        decisions = (stop("own"), start("due", node))
        assert guarded(snapshot, decisions) == (decisions, ())
    kept, dropped = guarded(snapshot, (stop("own"),))
    assert kept == ()
    assert [each.decision for each in dropped] == [stop("own")]


def test_a_stop_is_for_nobody_where_there_is_room_by_quota_without_it() -> None:
    """Then the free GPUs are enough for the job of its own tenant."""
    snapshot = cell(runs("own", "a", "n0", 4), waits("due", "ax", 2), tenants=teams(6))
    kept, _ = guarded(snapshot, (stop("own"), start("due", "n1")))
    assert kept == (start("due", "n1"),)


def test_a_worker_that_makes_room_by_quota_for_its_own_tenant_leaves() -> None:
    """A worker is whole, and so is the room: of two that leave the newest is for the start."""
    large = elastic("e", "a", *["n0"] * 3, least=1, gpus=2)
    snapshot = cell(large, waits("due", "ax", 1), tenants=teams(6))
    kept, _ = guarded(snapshot, (shrink("e", 1, 2), start("due", "n1")))
    assert kept == (shrink("e", 2), start("due", "n1"))


def removed(decision: Decision) -> tuple[int, ...]:
    """Workers that leave by it."""
    return decision.removed_workers if isinstance(decision, Resize) else ()


@st.composite
def careless(draw: st.DrawFn) -> tuple[ClusterSnapshot, tuple[Decision, ...]]:
    """A cell that tenants share, random shrinks and stops, and starts on what was free before."""
    snapshot = draw(shared_cells())
    found: list[Preempt | Resize] = []
    for job in snapshot.jobs:
        flexible = [w.worker_index for w in job.placed if w.is_flexible and not w.is_leaving]
        if job.is_resizable and flexible:
            gone = draw(st.sets(st.sampled_from(flexible)))
            if gone:
                found.append(shrink(job.job_id, *sorted(gone)))
        elif job.state == JobState.RUNNING and draw(st.booleans()):
            found.append(stop(job.job_id))
    told = {each.job_id for each in found}  # a policy stops nobody twice
    rest = POLICIES["sjf"].allocate(snapshot, b"").decisions
    replaced = [each for each in rest if _job_of(each) in told]
    if any(isinstance(each, Preempt) or removed(each) for each in replaced):
        return snapshot, tuple(found)  # the policy's starts stand on what it would have stopped
    return snapshot, (*found, *(each for each in rest if each not in replaced))


def _job_of(decision: Decision) -> JobId | None:
    return decision.job_id if isinstance(decision, Start | Preempt | Resize) else None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(careless())
def test_whatever_is_decided_nobody_leaves_of_its_guarantee_for_nobody(
    case: tuple[ClusterSnapshot, tuple[Decision, ...]],
) -> None:
    """Counted apart from the guard; what is kept of the decisions would be kept again."""
    snapshot, decisions = case
    kept, _ = guarded(snapshot, decisions)
    check(snapshot, kept)
    assert guarded(snapshot, kept) == (kept, ())
