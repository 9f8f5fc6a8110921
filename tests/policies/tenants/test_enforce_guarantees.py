"""What a guarantee owes: it comes in bounded time under every policy, and who waits is told why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Preemptibility
from coordinator.engine.invariants import crowded_out, starved
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import GUARANTEE, Preempt, Wait
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.tenants.enforce import GIVEN_BACK_AGAIN_S
from coordinator.policies.tenants.reclaim import given_back
from coordinator.sim.run.cluster import Delays
from tests.harness.builders import job_with, make_node_view, make_snapshot
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import A8, B8, cell, names, runs, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

slow = pytest.mark.slow


OTHERS = TenantView(name="a")
"""To these nothing is promised."""


DELAYS = Delays(report_s=1.0, ready_s=20.0, start_s=5.0, suspend_s=1.0, resume_s=1.0, stop_s=7.0)


START_S = 30.0
"""By then a gang is ready on GPUs that others left."""


OWED = (TenantSettings(name="b", guarantee_gpus=8), TenantSettings(name="c"))


IN_TURN = {"gandiva-sets", "las", "themis-lp"}
"""They give GPUs out in rounds, or by size: a job that fits waits for that."""


# --- in bounded time ----------------------------------------------------------------------------


@each_row("policy", FAMILIES)
def test_a_guarantee_is_met_though_the_borrower_still_starts_and_nothing_else_happens(
    policy: str,
) -> None:
    """It cannot be stopped before it runs, and that it runs brings no pass by itself."""
    played = Cell(policy, OWED, nodes=1, delays=DELAYS, check=True)
    played.ask(
        [
            Asked(tenant="c", at_s=1.0, gpus=8, work_s=9000.0),
            Asked(tenant="b", at_s=2.0, gpus=8, work_s=600.0),
        ]
    )
    played.run(until_s=300.0)
    job = played.engine.state.jobs[JobId("b1")]
    assert job.state == JobState.RUNNING
    assert (job.started_at_s or 0.0) <= 1.0 + START_S + GIVEN_BACK_AGAIN_S + START_S


@slow
@settings(max_examples=150, deadline=None)
@given(
    policy=st.one_of(st.sampled_from(sorted(POLICIES)), st.just("gandiva")),
    gpus=st.sampled_from((1, 2, 4, 8)),
    borrowed=st.lists(st.sampled_from((1, 2, 2, 4, 4, 8)), min_size=1, max_size=8),
    at_s=st.sampled_from((0.5, 3.0, 45.0, 130.0, 400.0)),
    delays=st.sampled_from((None, DELAYS)),
)
def test_a_job_within_a_guarantee_starts_in_bounded_time_under_every_policy(
    policy: str, gpus: int, borrowed: list[int], at_s: float, delays: Delays | None
) -> None:
    """However much of the node a borrower holds, in turns or not, in jobs that can be stopped."""
    played = Cell(policy, OWED, nodes=1, delays=delays, check=True)
    own = Asked(tenant="b", at_s=at_s, gpus=gpus, work_s=600.0)
    others = (Asked(tenant="c", gpus=size, work_s=9000.0) for size in borrowed)
    played.ask([own, *others])
    played.run(until_s=at_s + 3 * START_S + 2 * GIVEN_BACK_AGAIN_S)
    job = played.engine.state.jobs[JobId("b0")]
    fits = any(node.free_gpus >= gpus for node in played.engine.snapshot().nodes)
    assert job.state == JobState.RUNNING or (policy in IN_TURN and fits)
    assert played.engine.state.counters.decisions_refused == 0


# --- why not yet --------------------------------------------------------------------------------


@each_row(
    ("borrower", "why", "is_soon"),
    [
        (
            replace(runs("r", "a", "n0", 8), state=JobState.STARTING),
            "uses 0 of the 8 GPUs of its guarantee; borrowers that cannot be stopped yet: r",
            True,
        ),
        (
            replace(runs("r", "a", "n0", 8), preemptibility=Preemptibility.NON),
            "uses 0 of the 8 GPUs of its guarantee; borrowers that did not agree to be stopped: r",
            False,
        ),
        (replace(runs("r", "a", "n0", 8), is_resting=True), "cannot be stopped yet: r", False),
        (runs("r", "c", "n0", 8), "what others borrow is not enough", False),
    ],
    ids=["starts", "did not agree", "rests", "is within its own guarantee"],
)
def test_who_waits_within_a_guarantee_is_told_why(
    borrower: JobView, why: str, is_soon: bool
) -> None:
    """`explain` has it, its seconds count, and a pass follows where that can change by itself."""
    promised = TenantView(name="c", guarantee_gpus=8)
    snapshot = cell(borrower, waits("owed", "b", 8), tenants=(OTHERS, B8, promised), nodes=1)
    (hold,) = POLICIES["fifo"].pending_reasons(snapshot, b"")
    assert why in hold.blockers[-1]
    allocation = POLICIES["fifo"].allocate(snapshot, b"")
    assert allocation.waits == (Wait(kind=GUARANTEE, jobs=(JobId("owed"),)),)
    again_s = snapshot.now_s + GIVEN_BACK_AGAIN_S
    assert allocation.wake_at_s == (again_s if is_soon else None)


def test_nothing_is_said_of_a_guarantee_that_does_not_cover_a_job() -> None:
    """It is larger than what is left of it: it waits as any borrower's job does."""
    snapshot = cell(
        runs("r", "a", "n0", 8),
        waits("more", "b", 8),
        tenants=(OTHERS, TenantView(name="b", guarantee_gpus=4)),
        nodes=1,
    )
    (hold,) = POLICIES["fifo"].pending_reasons(snapshot, b"")
    assert not any("guarantee" in blocker for blocker in hold.blockers)
    assert POLICIES["fifo"].allocate(snapshot, b"").waits == ()


# --- whom it is taken from ----------------------------------------------------------------------


def test_a_job_whose_deadline_is_ahead_is_stopped_last() -> None:
    """It may have been promised: the other goes though it loses more; once missed it is as any."""
    jobs = (
        runs("other", "a", "n1", 8, lost_gpu_s=900.0),
        waits("owed", "b", 8),
    )
    dated = runs("dated", "a", "n0", 8, lost_gpu_s=1.0)
    for at_s, expected in ((5000.0, {"other"}), (1.0, {"dated"})):
        made = cell(replace(dated, deadline_at_s=at_s), *jobs, tenants=(OTHERS, B8))
        assert names(given_back(replace(made, now_s=100.0), ()).decisions, Preempt) == expected


def test_small_jobs_elsewhere_do_not_use_up_what_a_borrower_may_lose() -> None:
    """The cheap ones on two nodes are all that it borrows; the one on the third does as well."""
    snapshot = cell(
        runs("c0", "a", "n0", 2),
        runs("c1", "a", "n1", 2),
        runs("large", "a", "n2", 4, lost_gpu_s=99.0),
        *(runs(f"x{n}", "c", f"n{n}", gpus) for n, gpus in enumerate((6, 6, 4))),
        waits("owed", "b", 4),
        tenants=(
            TenantView(name="a", guarantee_gpus=4),
            B8,
            TenantView(name="c", guarantee_gpus=16),
        ),
        nodes=3,
    )
    assert names(given_back(snapshot, ()).decisions, Preempt) == {"large"}


def test_a_job_that_may_not_go_there_does_not_keep_its_like_from_going() -> None:
    """The first avoids the borrower's node; the second, else alike, gets it."""
    snapshot = cell(
        runs("r", "a", "n0", 8),
        job_with(waits("first", "b", 8), nodes_avoided=(NodeName("n0"),)),
        waits("second", "b", 8, submitted_at_s=1.0),
        tenants=(OTHERS, B8),
        nodes=1,
    )
    assert names(given_back(snapshot, ()).decisions, Preempt) == {"r"}


# --- the check ----------------------------------------------------------------------------------


def test_a_guarantee_that_a_pass_left_unmet_is_a_fault() -> None:
    """A borrower on one node has enough and could be stopped."""
    borrower = runs("r", "a", "n0", 8)
    snapshot = cell(borrower, waits("owed", "b", 8), tenants=(OTHERS, B8), nodes=1)
    (fault,) = starved(snapshot)
    assert "job owed of tenant b waits within its guarantee" in fault
    assert "r of tenant a on n0" in fault


@each_row(
    "borrower",
    [
        replace(runs("r", "a", "n0", 8), state=JobState.STARTING),
        replace(runs("r", "a", "n0", 8), preemptibility=Preemptibility.NON),
        runs("r", "c", "n0", 8),
        runs("r", "a", "n0", 4),
    ],
    ids=["starts", "did not agree", "within its own guarantee", "has not enough"],
)
def test_a_guarantee_that_cannot_be_met_is_no_fault(borrower: JobView) -> None:
    """Nobody could be stopped for it by right."""
    node = make_node_view("n0", free_gpus=0, workers=borrower.placed)
    made = make_snapshot(nodes=[node], jobs=(borrower, waits("owed", "b", 8)))
    promised = TenantView(name="c", guarantee_gpus=8)
    assert starved(replace(made, tenants=(OTHERS, B8, promised))) == []


def test_a_job_beyond_its_guarantee_is_starved_by_nobody() -> None:
    """Its tenant uses what it is promised."""
    snapshot = cell(
        runs("r", "b", "n0", 8), runs("s", "a", "n1", 8), waits("w", "b", 8), tenants=(A8, B8)
    )
    assert starved(snapshot) == []


SPARE = (
    TenantSettings(name="z", guarantee_gpus=4),
    TenantSettings(name="zq", parent="z"),
    TenantSettings(name="y", guarantee_gpus=6),
    TenantSettings(name="x"),
)


def test_what_a_stop_leaves_over_inside_a_guarantee_goes_to_others_after_that_pass() -> None:
    """`zq` gives 3 GPUs back for 2 of `z`: the third is `z`'s in that pass, and the next brings it
    to `y`, with what `x` borrows; the check wants no more than that."""
    played = Cell("fifo", SPARE, nodes=1, delays=DELAYS, check=True)
    played.ask(
        [
            Asked(tenant="y", gpus=4, work_s=9000.0),
            Asked(tenant="x", work_s=9000.0),
            Asked(tenant="zq", workers=(3, 3), work_s=9000.0),
            Asked(tenant="z", at_s=100.0, gpus=2, work_s=9000.0),
            Asked(tenant="y", at_s=100.0, gpus=2, work_s=9000.0),
        ]
    )
    played.run(until_s=100.0 + DELAYS.stop_s + START_S + DELAYS.stop_s + START_S)
    jobs = played.engine.state.jobs
    assert jobs[JobId("z3")].state == jobs[JobId("y4")].state == JobState.RUNNING
    assert jobs[JobId("x1")].state == JobState.PENDING


def left_over(
    *,
    leavers: int,
    promised: int,
    idle: int = 0,
    wanted: int = 6,
    gone_on: str = "n0",
    begun_on: str = "n0",
    whose: str = "z",
) -> ClusterSnapshot:
    """A job of `z` leaves GPUs for one of two; `y` waits for what is free then on the first node
    and what a job of `x` holds there.

    leavers, promised, idle, wanted: GPUs that are left, that are promised to `z`, that were free on
    the first node before, and that `y` waits for. whose: `z`, or its child that is promised 3.
    """
    gone = runs("gone", whose, gone_on, leavers)
    gone = replace(
        gone,
        state=JobState.PREEMPTING,
        placed=tuple(replace(worker, is_leaving=True) for worker in gone.placed),
    )
    begun = replace(runs("begun", whose, begun_on, 2), state=JobState.STARTING)
    there = leavers if gone_on == "n0" else 2
    borrower = runs("borrower", "x", "n0", 8 - there - idle)
    jobs = [borrower, begun, gone, waits("owed", "y", wanted)]
    free = {
        "n0": there + idle - (2 if begun_on == "n0" else 0),
        "n1": leavers if gone_on == "n1" else 0,
    }
    nodes = [
        make_node_view(
            name, free_gpus=gpus, workers=[w for job in jobs for w in job.placed if w.node == name]
        )
        for name, gpus in free.items()
    ]
    tenants = (
        TenantView(name="z", guarantee_gpus=promised),
        TenantView(name="zq", parent="z", guarantee_gpus=min(3, promised)),
        TenantView(name="y", guarantee_gpus=8),
        TenantView(name="x"),
    )
    return replace(make_snapshot(nodes=nodes, jobs=jobs), tenants=tenants)


def test_the_check_excuses_what_is_left_over_within_a_guarantee() -> None:
    """Two of three GPUs are taken again, and the third is free for nobody else yet."""
    assert starved(left_over(leavers=3, promised=4)) == []
    assert starved(left_over(leavers=3, promised=4, idle=1)) == []


@each_row(
    "snapshot",
    [
        left_over(leavers=3, promised=0),
        left_over(leavers=3, promised=2),
        left_over(leavers=4, promised=3),
        left_over(leavers=2, promised=4, idle=1),
        left_over(leavers=3, promised=4, idle=1, wanted=5),
        left_over(leavers=3, promised=4, idle=1, wanted=5, whose="zq"),
        left_over(leavers=3, promised=4, idle=1, gone_on="n1"),
        left_over(leavers=2, promised=4, wanted=8, begun_on="n1"),
    ],
    ids=[
        "no guarantee",
        "borrowed",
        "partly borrowed",
        "nothing over",
        "enough without",
        "counted once",
        "over on another node",
        "as much elsewhere",
    ],
)
def test_the_check_excuses_nothing_else(snapshot: ClusterSnapshot) -> None:
    """What was borrowed, or free before, is for others in the very pass."""
    (fault,) = starved(snapshot)
    assert "job owed of tenant y waits within its guarantee" in fault


KEEPING = (
    TenantSettings(name="z", guarantee_gpus=4),
    TenantSettings(name="zq", parent="z", guarantee_gpus=4, lend_limit_gpus=1),
    TenantSettings(name="x"),
)
"""Of what `zq` leaves idle one GPU is lent: for a job of two of `z` one of `x` has to go."""


@pytest.mark.parametrize("policy", ["afs", "srsf", "srtf"])
def test_what_is_left_over_brings_a_sibling_s_room_after_that_pass(policy: str) -> None:
    """A job of 4 GPUs of `zq` is stopped for one of 2: in the pass after that `z` has the others,
    as `x` gives back what keeps it out; the check wants no more than that."""
    played = Cell(policy, KEEPING, nodes=1, delays=DELAYS, check=True)
    played.ask(
        [
            Asked(tenant="zq", gpus=4, work_s=9000.0),
            Asked(tenant="x", work_s=9000.0),
            Asked(tenant="x", gpus=3, work_s=9000.0, preemptibility=Preemptibility.NON),
            Asked(tenant="zq", at_s=100.0, gpus=2, work_s=3000.0),
            Asked(tenant="z", at_s=100.0, gpus=2, work_s=9000.0),
        ]
    )
    played.run(until_s=100.0 + DELAYS.stop_s + START_S + DELAYS.stop_s + START_S)
    jobs = played.engine.state.jobs
    assert jobs[JobId("zq3")].state == jobs[JobId("z4")].state == JobState.RUNNING
    assert jobs[JobId("x1")].state == JobState.PENDING


def kept_out(*, promised: int = 4, idle: int = 0) -> ClusterSnapshot:
    """A job of `zq` leaves four GPUs for one of two, and `z` waits for two more. For these it has
    no room: `zq` lends nothing, and `x` has half of the eight that `p` may use.

    promised: GPUs to `zq`. idle: that nobody uses, on another node.
    """
    gone = runs("gone", "zq", "n0", 4)
    gone = replace(
        gone,
        state=JobState.PREEMPTING,
        placed=tuple(replace(worker, is_leaving=True) for worker in gone.placed),
    )
    begun = replace(runs("begun", "zq", "n0", 2), state=JobState.STARTING)
    stays = replace(runs("stays", "x", "n0", 2), preemptibility=Preemptibility.NON)
    jobs = [gone, begun, stays, runs("borrower", "x", "n0", 2), waits("owed", "z", 2)]
    nodes = [
        make_node_view("n0", free_gpus=2, workers=[w for job in jobs for w in job.placed]),
        make_node_view("n1", free_gpus=idle),
    ]
    tenants = (
        TenantView(name="p", guarantee_gpus=4, borrow_limit_gpus=4),
        TenantView(name="z", parent="p", guarantee_gpus=4),
        TenantView(name="zq", parent="z", guarantee_gpus=promised, lend_limit_gpus=0),
        TenantView(name="x", parent="p"),
    )
    return replace(make_snapshot(nodes=nodes, jobs=jobs), tenants=tenants)


def test_what_is_left_over_is_no_room_that_a_borrower_keeps_a_job_from() -> None:
    """It does not fit there before the next pass; where other GPUs are free, or the stopped job was
    borrowed, it is kept out as ever."""
    assert crowded_out(kept_out()) == []
    for snapshot in (kept_out(idle=2), kept_out(promised=3)):
        (fault,) = crowded_out(snapshot)
        assert "tenant x borrows what their parent may use" in fault
