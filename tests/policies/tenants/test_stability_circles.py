"""What policies stop jobs for is not undone by the passes that follow: stops come to an end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Preemptibility
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import (
    OTHERS_GUARANTEE,
    Allocation,
    Decision,
    PendingReason,
    Placement,
    Preempt,
    Resize,
    Start,
    Wait,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.tenants.attempts import COMES_AND_GOES
from coordinator.policies.tenants.enforce import allocated, held
from coordinator.policies.tenants.gpu_flow import Flow
from coordinator.policies.tenants.stability import after
from tests.draws import pick
from tests.harness.builders import job_with, make_job_view, make_worker_view
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, names, runs, shared_cells, start, stop, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

slow = pytest.mark.slow


MOST_PASSES = 12
"""In a cell where nothing comes or ends, until one changes nothing."""


MOST_STOPS = 2
"""Of one job by the policy's order, while nothing comes or ends."""


Decide = Callable[[ClusterSnapshot, bytes], Allocation]


def _placed(snapshot: ClusterSnapshot) -> set[str]:
    return {job.job_id for job in snapshot.jobs if job.placed}


def in_order(*order: str) -> Decide:
    """A policy of one node: who fits has it, in this order, and whoever else is there is stopped
    for them."""

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        jobs = {job.job_id: job for job in snapshot.jobs}
        there = {job.job_id: sum(w.gpus for w in job.placed) for job in snapshot.jobs}
        free, chosen = snapshot.nodes[0].free_gpus + sum(there.values()), list[str]()
        for name in order:
            job = jobs.get(JobId(name))
            if job is not None and job.gpus_per_worker <= free:
                free -= job.gpus_per_worker
                chosen.append(name)
        placed = _placed(snapshot)
        stops = (stop(name) for name in sorted(placed - set(chosen)))
        starts = (start(name, "n0") for name in chosen if name not in placed)
        return Allocation(decisions=(*stops, *starts), memory=memory)

    return decide


A4, B, C = TenantView(name="a", guarantee_gpus=4), TenantView(name="b"), TenantView(name="c")


SECOND = waits("second", "b", 6), waits("little", "c", 2)
"""In place of `first` and `lesser` the policy would stop `large` for these, and then give way."""


ORDER = "first", "large", "lesser", "due"


def shared(*running: str) -> ClusterSnapshot:
    """Eight GPUs of which tenant `a` is promised four, and two jobs of it."""
    asked = [("first", "b", 4), ("large", "a", 8), ("lesser", "c", 4), ("due", "a", 4)]
    jobs = (
        runs(name, tenant, "n0", gpus) if name in running else waits(name, tenant, gpus)
        for name, tenant, gpus in asked
    )
    return cell(*jobs, tenants=(A4, B, C), nodes=1)


def test_nobody_is_stopped_for_what_starts_beside_a_job_that_gives_way() -> None:
    """`first` would give way to `due`, and for `lesser` alone `large` is not stopped."""
    assert allocated(in_order(*ORDER), shared("large"), b"").decisions == ()


def test_a_stop_for_which_nothing_gives_way_stands() -> None:
    """`large` precedes both of the others that run, and has their GPUs from then on."""
    found = allocated(in_order(*ORDER), shared("lesser", "due"), b"").decisions
    assert (names(found, Preempt), names(found, Start)) == ({"lesser", "due"}, {"large"})


def test_who_is_due_whoever_is_stopped_keeps_the_stop_that_is_for_it() -> None:
    """`first` gives way to it, but its tenant has nothing, and `large` is of another one."""
    snapshot = shared("large")
    jobs = (replace(j, tenant="b") if j.job_id == "large" else j for j in snapshot.jobs)
    found = allocated(in_order(*ORDER), replace(snapshot, jobs=tuple(jobs)), b"").decisions
    assert names(found, Preempt) == {"large"}
    assert "due" in names(found, Start)


def test_a_start_is_not_lost_for_a_stop_that_is_spared() -> None:
    """Without `first` the policy would need no stop, but `gang` would give way instead of it."""
    gang = replace(make_job_view("gang", workers=(3, 3), gpus_per_worker=2), tenant="b")
    fixed = replace(runs("fixed", "c", "n1", 6), preemptibility=Preemptibility.NON)

    def gang_on(first: int, second: int) -> Start:
        places = [
            Placement(node=NodeName(node), worker_count=count)
            for node, count in (("n0", first), ("n1", second))
            if count
        ]
        return replace(start("gang", "n0"), placements=tuple(places))

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        made: tuple[Decision, ...] = (gang_on(2, 1),)
        if any(job.job_id == "first" for job in snapshot.jobs):
            made = stop("victim"), start("first", "n0"), gang_on(3, 0)
        return Allocation(decisions=() if "gang" in _placed(snapshot) else made, memory=memory)

    owed = job_with(waits("due", "a", 2), nodes_avoided=(NodeName("n1"),))
    there = runs("victim", "c", "n0", 4), fixed, waits("first", "b", 2), gang, owed
    found = allocated(decide, cell(*there, tenants=(A4, B, C)), b"").decisions
    assert (names(found, Preempt), names(found, Start)) == ({"victim"}, {"gang", "due"})


def in_turn(count: int, *, is_circle: bool) -> Decide:
    """Of some jobs of the whole node each is stopped for the next, and the last for the first."""
    after_it = {f"r{n}": f"r{(n + 1) % count}" for n in range(count - (not is_circle))}

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        (has,) = _placed(snapshot)
        comes = after_it.get(has)
        sees = any(job.job_id == comes for job in snapshot.jobs)
        made = (stop(has), start(comes, "n0")) if comes is not None and sees else ()
        return Allocation(decisions=made, memory=memory)

    return decide


def ring(count: int) -> ClusterSnapshot:
    """Nothing is called back, and nobody gives way."""
    others = (waits(f"r{n}", "bc"[n % 2], 8) for n in range(1, count))
    return cell(runs("r0", "b", "n0", 8), *others, tenants=(A4, B, C), nodes=1)


@each_row("keeps_quotas", [False, True])
@each_row("count", [2, 3, 5])
def test_a_stop_that_begins_a_circle_of_stops_is_not_made(count: int, keeps_quotas: bool) -> None:
    """So many passes later the first job would have its GPUs again."""
    circle = in_turn(count, is_circle=True)
    found = allocated(circle, ring(count), b"", keeps_quotas=keeps_quotas)
    assert found.decisions == ()
    waits_for = Wait(kind=OTHERS_GUARANTEE, jobs=(JobId("r1"),))
    assert found.waits == (() if keeps_quotas else (waits_for,))


@each_row("count", [2, 3, 5, 9])
def test_a_stop_that_begins_a_row_of_stops_stands(count: int) -> None:
    """Nobody comes back in it, however long it is."""
    found = allocated(in_turn(count, is_circle=False), ring(count), b"").decisions
    assert (names(found, Preempt), names(found, Start)) == ({"r0"}, {"r1"})


def test_passes_ahead_are_of_the_policy_with_what_it_remembers_by_then() -> None:
    """It stops for `r1` as long as it remembers nothing, and then each for the other."""

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        (has,) = _placed(snapshot)
        comes = {"r0": "r1", "r1": "r0"}[has]
        sees = any(job.job_id == comes for job in snapshot.jobs)
        made = (stop(has), start(comes, "n0")) if sees and (has == "r0" or memory) else ()
        return Allocation(decisions=made, memory=b"seen")

    assert allocated(decide, ring(2), b"").decisions == ()


def test_a_circle_goes_on_after_a_pass_that_only_stops() -> None:
    """Nobody has the node for one pass of it."""

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        placed, sees = _placed(snapshot), {job.job_id for job in snapshot.jobs}
        made: tuple[Decision, ...] = ()
        if "r1" in placed:
            made = (stop("r1"),)
        elif not placed:
            made = (start("r0", "n0"),)
        elif "r1" in sees:
            made = (stop("r0"), start("r1", "n0"))
        return Allocation(decisions=made, memory=memory)

    assert allocated(decide, ring(2), b"").decisions == ()


@pytest.mark.parametrize("keeps_quotas", [False, True])
def test_who_starts_elsewhere_in_a_pass_that_begins_a_circle_starts(keeps_quotas: bool) -> None:
    """Nobody is stopped for `free`, which has the other node."""
    circle = in_turn(2, is_circle=True)

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        jobs = tuple(job for job in snapshot.jobs if job.job_id != "free")
        made = circle(replace(snapshot, jobs=jobs, index=None), memory)
        is_due = len(jobs) < len(snapshot.jobs) and "free" not in _placed(snapshot)
        more = (start("free", "n1"),) if is_due else ()
        return replace(made, decisions=(*made.decisions, *more))

    jobs = runs("r0", "b", "n0", 8), waits("r1", "b", 8), waits("free", "c", 8)
    there = cell(*jobs, tenants=(A4, B, C), nodes=2)
    found = allocated(decide, there, b"", keeps_quotas=keeps_quotas)
    assert found.decisions == (start("free", "n1"),)


MORE = Placement(node=NodeName("n0"), worker_count=1, is_flexible=True)


GROW = Resize(job_id=JobId("wide"), added=(MORE,), reason="test")


def elastic(*, gpus: int) -> JobView:
    """`wide` runs with one worker of that many GPUs, and may have another."""
    return make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 2),
        gpus_per_worker=gpus,
        placed=[make_worker_view("wide", 0, "n0", gpus=gpus)],
    )


def test_the_same_jobs_on_more_gpus_are_no_circle() -> None:
    """`small` finds another place in the next pass, and `wide` keeps what it had."""
    wide = elastic(gpus=2)

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        has = next(job for job in snapshot.jobs if job.job_id == "wide")
        made: tuple[Decision, ...] = ()
        if len(has.placed) < 2:
            made = (stop("small"), GROW)
        elif "small" not in _placed(snapshot):
            made = (start("small", "n0"),)
        return Allocation(decisions=made, memory=memory)

    jobs = replace(wide, tenant="b"), runs("small", "c", "n0", 4)
    found = allocated(decide, cell(*jobs, tenants=(A4, B, C), nodes=1), b"").decisions
    assert found == (stop("small"), GROW)


@pytest.mark.parametrize("keeps_quotas", [False, True])
def test_a_stop_beside_one_that_begins_a_circle_stands(keeps_quotas: bool) -> None:
    """`new` has the GPUs of `old` for good, though others of the same pass would take turns."""
    circle = in_turn(2, is_circle=True)

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        jobs = tuple(job for job in snapshot.jobs if job.job_id in ("r0", "r1"))
        made = circle(replace(snapshot, jobs=jobs, index=None), memory)
        sees = any(job.job_id == "new" for job in snapshot.jobs)
        more = (stop("old"), start("new", "n1")) if sees and "old" in _placed(snapshot) else ()
        return replace(made, decisions=(*made.decisions, *more))

    there = runs("r0", "b", "n0", 8), runs("old", "c", "n1", 8)
    snapshot = cell(*there, waits("r1", "b", 8), waits("new", "b", 8), tenants=(A4, B, C))
    found = allocated(decide, snapshot, b"", by_weight=False, keeps_quotas=keeps_quotas)
    assert found.decisions == (stop("old"), start("new", "n1"))


def _nothing(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """It holds nobody."""
    return ()


def test_who_would_come_and_go_is_told_so() -> None:
    """By `explain`."""
    found = held(in_turn(3, is_circle=True), _nothing, ring(3), b"")
    assert found == (PendingReason(job_id=JobId("r1"), blockers=(COMES_AND_GOES,)),)


def test_who_waits_on_for_a_circle_starts_on_free_gpus() -> None:
    """A second node is free: no stop is needed there."""

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        has = next(job for job in snapshot.jobs if job.job_id == "r0")
        sees = any(job.job_id == "r1" for job in snapshot.jobs)
        if "r1" in _placed(snapshot):
            made: tuple[Decision, ...] = (stop("r1"), start("r0", "n0")) if not has.placed else ()
        elif has.is_resting and sees:
            made = (start("r1", "n1"),)
        else:
            made = (stop("r0"), start("r1", "n0")) if sees else ()
        return Allocation(decisions=made, memory=memory)

    jobs = runs("r0", "b", "n0", 8), waits("r1", "b", 8)
    found = allocated(decide, cell(*jobs, tenants=(A4, B), nodes=2), b"").decisions
    assert found == (start("r1", "n1"),)


def test_a_stop_for_workers_that_are_given_back_again_is_not_made() -> None:
    """Who would grow sees the pass all the same: what it would have had is dropped alone."""
    wide = elastic(gpus=4)
    shrink = Resize(job_id=JobId("wide"), removed_workers=(1,), reason="test")

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        is_there = "small" in _placed(snapshot)
        made = (stop("small"), GROW) if is_there else (shrink, start("small", "n0"))
        return Allocation(decisions=made, memory=memory)

    jobs = replace(wide, tenant="b"), runs("small", "c", "n0", 4)
    found = allocated(decide, cell(*jobs, tenants=(A4, B, C), nodes=1), b"").decisions
    assert found == ()


# --- played ---------------------------------------------------------------------------------------


@each_row("policy_name", FAMILIES)
def test_a_gang_and_smaller_jobs_of_others_do_not_take_turns_for_ever(policy_name: str) -> None:
    """On the engine: by its order the gang precedes `c`, and `b` it only if `b` stays."""
    tenants = (TenantSettings(name="a", guarantee_gpus=4), TenantSettings(name="b"))
    played = Cell(policy_name, (*tenants, TenantSettings(name="c")), nodes=1, check=True)
    played.ask(
        [
            Asked(tenant="a", gpus=8, work_s=3000.0),
            Asked(tenant="b", gpus=4, work_s=100.0, at_s=5.0, priority=1),
            Asked(tenant="c", gpus=4, work_s=5000.0, at_s=5.0),
            Asked(tenant="a", gpus=4, work_s=6000.0, at_s=5.0),
        ]
    )
    for number in range(1, 50):
        played.loop.at(30.0 * number, played.ask_pass)
    played.run(until_s=1500.0)
    jobs = played.engine.state.jobs.values()
    assert max(job.counts.preemptions for job in jobs) <= MOST_STOPS


# --- generated ------------------------------------------------------------------------------------


def in_turns(*more: JobView) -> ClusterSnapshot:
    """The same by what is left: `first` and `second` have priority, then the shortest."""
    left_s = {"first": 100.0, "second": 200.0, "large": 400.0, "lesser": 5000.0}
    left_s |= {"little": 5500.0, "due": 6000.0}
    there = shared("large")
    jobs = (
        job_with(
            job,
            remaining_work_s=left_s[job.job_id],
            estimated_left_s=left_s[job.job_id],
            priority=int(job.job_id in ("first", "second")),
        )
        for job in (*there.jobs, *more)
    )
    return replace(there, jobs=tuple(jobs), index=None)


@slow
@settings(max_examples=300, deadline=None)
@example(name="srtf", there=in_turns())
@example(name="afs", there=in_turns())
@example(name="srtf", there=in_turns(*SECOND))
@example(name="afs", there=in_turns(*SECOND))
@given(
    name=st.one_of(pick(*sorted(POLICIES)), pick("srtf", "qos-edf", "afs")), there=shared_cells()
)
def test_passes_in_a_cell_to_which_nothing_comes_end_with_one_that_changes_nothing(
    name: str, there: ClusterSnapshot
) -> None:
    """Under every policy, whatever tenants are promised, lend and borrow, on two levels."""
    found, memory, stops = there, b"", 0
    for _ in range(MOST_PASSES):
        made = policy(name).allocate(found, memory)
        placed = _placed(found)
        moves = [
            each
            for each in made.decisions
            if (isinstance(each, Start) and each.job_id not in placed)
            or (isinstance(each, Preempt) and each.job_id in placed)
        ]
        stops += sum(isinstance(each, Preempt) for each in moves)
        if not moves:
            break
        found, memory = after(found, made.decisions, Flow(found)), made.memory
    else:
        pytest.fail(f"after {MOST_PASSES} passes jobs still come and go")
    assert stops <= MOST_STOPS * len(there.jobs)
