"""A tenant within its guarantee does not wait beside idle GPUs for what another one's job waits
for: under every policy, in bounded time, and with the true cause told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.engine.invariants import LATE_S, BesideIdle
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import (
    OTHERS_GUARANTEE,
    Allocation,
    PendingReason,
    Preempt,
    Start,
    Wait,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.tenants.attempts import GO_FIRST
from coordinator.policies.tenants.enforce import allocated, held
from coordinator.policies.tenants.entitlements import PATIENCE_S
from coordinator.policies.tenants.reclaim import given_back
from coordinator.sim.run.cluster import Delays
from tests.draws import pick
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import names, runs, start, stop, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

slow = pytest.mark.slow


HALVES = (TenantView(name="a", guarantee_gpus=16), TenantView(name="b", guarantee_gpus=16))


TENANTS = (
    TenantSettings(name="a", guarantee_gpus=16),
    TenantSettings(name="b", guarantee_gpus=16),
    TenantSettings(name="c"),
)


LOSES_NOTHING = "tenant a is within its guarantee and loses nothing to another tenant"


SOON_S = 60.0
"""A pass or two, stops and starts among them."""


ROUND_S = {"las": 120.0, "themis-lp": 360.0, "pollux": 60.0, "gandiva-sets": PATIENCE_S}
"""Policies that give GPUs out in rounds, and one that keeps idle nodes for gangs of one size."""


def bound_s(policy: str) -> float:
    """So long at most such a job waits."""
    return ROUND_S.get(policy, 0.0) + SOON_S


def gang(name: str, tenant: str, workers: int, *, submitted_at_s: float = 0.0) -> JobView:
    """A job that waits, of workers of eight GPUs."""
    made = make_job_view(
        name, workers=(workers, workers), gpus_per_worker=8, submitted_at_s=submitted_at_s
    )
    return replace(made, tenant=tenant)


def halves(*jobs: JobView) -> ClusterSnapshot:
    """Four nodes of eight GPUs, half of them promised to each of two tenants."""
    there = [
        make_node_view(
            f"n{n}", workers=[w for job in jobs for w in job.placed if w.node == f"n{n}"]
        )
        for n in range(4)
    ]
    return replace(make_snapshot(nodes=there, jobs=jobs), tenants=HALVES)


BEHIND = halves(
    gang("first", "b", 4),
    replace(runs("mine", "a", "n0", 8), submitted_at_s=1.0),
    waits("owed", "a", 8, submitted_at_s=2.0),
)
"""A gang of all GPUs was stopped for a job within a guarantee; now another such job waits."""


# --- under every policy -------------------------------------------------------------------------


@each_row("policy", FAMILIES)
def test_a_borrower_s_gang_that_cannot_start_keeps_no_job_within_a_guarantee_waiting(
    policy: str,
) -> None:
    """Beside 24 idle GPUs, the gang being older than any of the tenant's jobs."""
    played = Cell(policy, TENANTS, nodes=4, check=True)
    jobs = [Asked(tenant="a", at_s=10.0 + n, gpus=8, work_s=20000.0) for n in range(2)]
    played.ask([Asked(tenant="b", workers=(4, 4), gpus=8, work_s=200000.0), *jobs])
    played.run(until_s=11.0 + bound_s(policy))
    assert played.engine.state.jobs[JobId("a2")].state == JobState.RUNNING


DELAYS = Delays(report_s=1.0, ready_s=20.0, start_s=5.0, suspend_s=1.0, resume_s=1.0, stop_s=7.0)


@st.composite
def borrowed(draw: st.DrawFn) -> Asked:
    """A gang larger than any guarantee."""
    count = draw(pick(3, 4))
    return Asked(
        tenant=draw(pick(*"bbc")),
        at_s=draw(pick(0.0, 30.0, 300.0)),
        gpus=8,
        workers=(count, count),
        work_s=count * 9000.0,
        deadline_s=draw(pick(None, 20000.0)),
    )


@st.composite
def small(draw: st.DrawFn) -> Asked:
    """A job of one worker, of a tenant with a guarantee or one without."""
    return Asked(
        tenant=draw(pick(*"aaac")),
        gpus=draw(pick(1, 2, 4, 8)),
        at_s=draw(pick(10.0, 11.0, 90.0, 200.0, 900.0)),
        work_s=draw(pick(600.0, 1800.0, 7200.0)),
    )


class _Watched(BesideIdle):
    """The longest that any job waited so."""

    most_s = 0.0

    def faults(self, snapshot: ClusterSnapshot) -> list[str]:
        """As the check looks."""
        found = super().faults(snapshot)
        ages_s = (snapshot.now_s - since_s for since_s in self.since_s.values())
        self.most_s = max(self.most_s, *ages_s, 0.0)
        return found


@slow
@settings(max_examples=60, deadline=None)
@given(
    policy=st.one_of(st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(ROUND_S))),
    gangs=st.lists(borrowed(), min_size=1, max_size=3),
    jobs=st.lists(small(), min_size=2, max_size=8),
    delays=st.sampled_from((None, DELAYS)),
)
def test_a_job_within_a_guarantee_that_fits_starts_in_bounded_time_under_every_policy(
    policy: str, gangs: list[Asked], jobs: list[Asked], delays: Delays | None
) -> None:
    """On several nodes, whatever of others waits before it."""
    played = Cell(policy, TENANTS, nodes=4, delays=delays, check=True)
    watched = played.beside_idle = _Watched()
    played.ask([*gangs, *jobs])
    played.run(until_s=6000.0)
    assert watched.most_s <= bound_s(policy)
    assert played.engine.state.counters.decisions_refused == 0


# --- what a policy does not see -----------------------------------------------------------------


def first_come(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """All GPUs for the first that waits, whoever is stopped for it; else each where it fits."""
    jobs = sorted(snapshot.jobs, key=lambda job: job.submitted_at_s)
    waiting = [job.job_id for job in jobs if job.state == JobState.PENDING]
    if "first" not in waiting:
        return Allocation(decisions=tuple(start(name, "n1") for name in waiting[:1]))
    workers = jobs[waiting.index(JobId("first"))].workers.min
    placements = (start("first", f"n{n}").placements for n in range(workers))
    begun = replace(start("first", "n0"), placements=tuple(each for (each,) in placements))
    return Allocation(decisions=(stop("mine"), begun))


def strict(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """The line waits for its head, which does not fit."""
    if any(job.job_id == "first" for job in snapshot.jobs):
        return Allocation(decisions=())
    return first_come(snapshot, memory)


def unsaid(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """The first takes all, so it has no reason to wait."""
    waiting = [job.job_id for job in snapshot.jobs if job.state == JobState.PENDING]
    if "first" not in waiting:
        return ()
    return (PendingReason(job_id=JobId("owed"), blockers=("the first leaves nothing",)),)


def test_whoever_would_take_from_a_guarantee_is_hidden_and_others_have_its_room() -> None:
    """In the same pass, and what it waits for is told apart."""
    found = allocated(first_come, BEHIND, b"")
    assert names(found.decisions, Start) == {"owed"}
    assert names(found.decisions, Preempt) == set()
    assert found.waits == (Wait(kind=OTHERS_GUARANTEE, jobs=(JobId("first"),)),)


def test_so_is_one_that_its_own_guarantee_covers_but_not_on_these_nodes() -> None:
    """GPUs of one tenant's guarantee are not taken for another's: what is free goes to others."""
    spread = [replace(runs("mine", "a", f"n{n}", 2).placed[0], worker_index=n) for n in range(4)]
    mine = replace(runs("mine", "a", "n0", 2), placed=tuple(spread), submitted_at_s=1.0)
    found = allocated(
        first_come,
        halves(gang("first", "b", 2), mine, waits("owed", "a", 4, submitted_at_s=2.0)),
        b"",
    )
    assert names(found.decisions, Start) == {"owed"}
    assert names(found.decisions, Preempt) == set()


def test_an_explanation_does_not_name_a_job_that_cannot_start_as_a_cause() -> None:
    """Whoever is refused is told by whose guarantee; whoever starts waits for nothing."""
    found = held(first_come, unsaid, BEHIND, b"")
    assert found == (PendingReason(job_id=JobId("first"), blockers=(LOSES_NOTHING,)),)


def test_a_line_s_head_that_does_not_fit_stands_behind_who_is_within_a_guarantee() -> None:
    """It blocks no other tenant's jobs that their guarantee covers."""
    found = allocated(strict, BEHIND, b"")
    assert names(found.decisions, Start) == {"owed"}
    assert found.waits == (Wait(kind=OTHERS_GUARANTEE, jobs=(JobId("first"),)),)
    behind = held(strict, lambda seen, _: (), BEHIND, b"")
    assert behind == (PendingReason(job_id=JobId("first"), blockers=(GO_FIRST,)),)


def test_a_line_is_strict_inside_a_tenant_and_among_those_that_guarantees_cover() -> None:
    """A head of the same tenant, or one within a guarantee of its own, is waited for."""
    for head in (gang("first", "a", 4), gang("first", "b", 2)):
        busy = (runs(f"r{n}", "c", f"n{n}", 8) for n in (2, 3))
        snapshot = halves(head, runs("mine", "a", "n0", 8), waits("owed", "a", 8), *busy)
        snapshot = replace(
            snapshot, jobs=tuple(replace(job, is_resting=True) for job in snapshot.jobs)
        )
        assert names(allocated(strict, snapshot, b"").decisions, Start) == set()


def too_large(tenant: str, *, submitted_at_s: float = 0.0) -> JobView:
    """A job that waits, of one worker with more GPUs than a node has, within a guarantee."""
    made = make_job_view("first", workers=(1, 1), gpus_per_worker=16, submitted_at_s=submitted_at_s)
    return replace(made, tenant=tenant)


def test_a_head_that_no_node_could_ever_run_is_waited_for_by_no_other_tenant() -> None:
    """A guarantee covers it, and no GPUs would: whoever is within its own starts in the pass."""
    snapshot = halves(too_large("b"), waits("owed", "a", 8, submitted_at_s=2.0))
    assert names(allocated(strict, snapshot, b"").decisions, Start) == {"owed"}


@each_row("name", ["afs-p", "fifo", "gandiva-sets", "qos-edf", "yarn"])
def test_policies_start_it_in_the_same_pass(name: str) -> None:
    """And stop nobody for that."""
    found = policy(name).allocate(BEHIND, b"")
    assert names(found.decisions, Start) == {"owed"}
    assert names(found.decisions, Preempt) == set()
    assert [hold.job_id for hold in policy(name).pending_reasons(BEHIND, b"")] == ["first"]


# --- patience, and the check --------------------------------------------------------------------


def patient(waited_s: float, *before: JobView) -> ClusterSnapshot:
    """A job within a guarantee that fits, and has waited so long."""
    owed = replace(waits("owed", "a", 8), waiting_since_s=NOW_S - waited_s)
    return halves(*before, owed)


def test_a_policy_s_patience_with_a_job_that_fits_ends() -> None:
    """After half an hour beside free GPUs it is started anyway; until then a pass is asked for."""
    early, late = given_back(patient(PATIENCE_S - 1.0), ()), given_back(patient(PATIENCE_S), ())
    assert (early.decisions, early.wake_at_s) == ((), NOW_S + 1.0)
    assert names(late.decisions, Start) == {"owed"}
    assert late.wake_at_s is None


@pytest.mark.parametrize(
    "before",
    [gang("x", "a", 4, submitted_at_s=-1.0), gang("x", "b", 2, submitted_at_s=-1.0)],
    ids=["its own tenant's", "within a guarantee"],
)
def test_patience_does_not_end_for_an_order_that_may_be_strict(before: JobView) -> None:
    """A job before it waits that does not fit: of its tenant, or covered by a guarantee."""
    busy = [replace(runs(f"r{n}", "c", f"n{n}", 8), is_resting=True) for n in (0, 1, 2)]
    found = given_back(patient(PATIENCE_S, before, *busy), ())
    assert names(found.decisions, Start) == set()
    idle = BesideIdle()
    assert idle.faults(patient(PATIENCE_S, before, *busy)) == [] and idle.since_s == {}


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_patience_ends_though_a_job_before_it_could_never_run(tenant: str) -> None:
    """Of its own tenant or not, it would keep others waiting for ever; the check counts so too."""
    snapshot = patient(PATIENCE_S, too_large(tenant, submitted_at_s=-1.0))
    assert names(given_back(snapshot, ()).decisions, Start) == {"owed"}
    idle = BesideIdle()
    idle.faults(snapshot)
    assert set(idle.since_s) == {"owed"}


@each_row("policy", ["fifo", "sjf", "drf", "qos-edf"])
@each_row("tenant", ["a", "b"])
def test_a_gang_larger_than_the_fleet_keeps_no_guarantee_idle(policy: str, tenant: str) -> None:
    """Nothing runs, and nothing would ever free more: a job within a guarantee runs after all."""
    most = (
        TenantSettings(name="a", guarantee_gpus=16),
        TenantSettings(name="b", guarantee_gpus=16),
    )
    played = Cell(policy, most, nodes=1, check=True)
    played.ask(
        [
            Asked(tenant=tenant, workers=(2, 2), gpus=8, work_s=600.0),
            Asked(tenant="a", at_s=5.0, gpus=1, work_s=9000.0),
        ]
    )
    played.run(until_s=PATIENCE_S + SOON_S)
    assert played.engine.state.jobs[JobId("a1")].state == JobState.RUNNING


def test_a_job_that_waits_beside_idle_gpus_for_too_long_is_a_fault() -> None:
    """By the check's own clock, from the first pass that left it."""
    idle, snapshot = BesideIdle(), patient(9.0)
    assert idle.faults(snapshot) == []
    late_s = NOW_S + PATIENCE_S + LATE_S
    assert idle.faults(replace(snapshot, now_s=late_s)) == []
    (fault,) = idle.faults(replace(snapshot, now_s=late_s + 1.0))
    assert "job owed waits within its guarantee for 1861 s" in fault


def test_the_check_s_clock_begins_anew_where_the_job_did_not_fit_in_between() -> None:
    """Only GPUs that are free all the time count."""
    idle = BesideIdle()
    idle.faults(patient(9.0))
    full = [runs(f"r{n}", "b", f"n{n}", 8) for n in range(4)]
    assert idle.faults(replace(patient(9.0, *full), now_s=NOW_S + 60.0)) == []
    assert idle.since_s == {}
    assert idle.faults(replace(patient(9.0), now_s=NOW_S + PATIENCE_S + LATE_S + 1.0)) == []


def test_nobody_avoids_the_check_by_a_node_that_it_leaves_alone() -> None:
    """Free GPUs where a job may not go are no room for it."""
    snapshot = patient(PATIENCE_S)
    nodes = tuple(NodeName(f"n{n}") for n in range(4))
    (job,) = snapshot.jobs
    snapshot = replace(snapshot, jobs=(job_with(job, nodes_avoided=nodes),))
    assert given_back(snapshot, ()).decisions == ()
    idle = BesideIdle()
    assert idle.faults(snapshot) == [] and idle.since_s == {}
