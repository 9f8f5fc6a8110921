"""Promised deadlines within tenants' quotas: none is made beyond them, and none is forgotten."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.clock import SystemClock
from common.model import GpuRequest
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import FAIR_SHARE, Allocation, Reject, Start, Wait
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.quotas import Quotas, Rooms
from coordinator.policies.tenants.tenancy import Count, Tenancy
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import TraceJob, Workload
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.policies.tenant_books import cell, names, runs, waits

EXACT = "qos-elasticflow:margin=1"
ONLY_FOUR = TenantView(name="t", guarantee_gpus=4, borrow_limit_gpus=0)
HALF_IS_ITS_OWN = TenantView(name="t", guarantee_gpus=4)


def wants(name: str, tenant: str, gpus: int, work_s: float, deadline_s: float | None) -> JobView:
    """A job of one worker that waits; `deadline_s` from now."""
    at_s = None if deadline_s is None else NOW_S + deadline_s
    job = waits(name, tenant, gpus, submitted_at_s=NOW_S)
    return job_with(job, remaining_work_s=work_s, estimated_left_s=work_s, deadline_at_s=at_s)


def has(job: JobView, *, since_s: float, now_s: float) -> JobView:
    """The same once it runs, and saves when it is asked to."""
    made = runs(job.job_id, job.tenant, "n0", job.gpus_per_worker)
    return job_with(
        job,
        state=made.state,
        placed=made.placed,
        gpu_type=made.gpu_type,
        started_at_s=since_s,
        first_started_at_s=since_s,
        as_of_s=now_s,
        estimated_left_s=job.estimate.remaining_work_s - (now_s - since_s),
        saves_when_asked=True,
    )


def unpromised(quotas: Quotas, name: str, planned: Mapping[str, Count]) -> float:
    """GPUs that a tenant may take without a promise beside what is planned for each."""
    rooms = Rooms(quotas)
    return rooms.unpromised(name, rooms.row(tuple(planned[each] for each in rooms.names)))


def test_what_a_team_does_not_lend_outsiders_of_its_division_do_not_get_without_a_promise() -> None:
    """Though its division sets no limit itself."""
    tenants = (
        TenantView(name="division", guarantee_gpus=8),
        TenantView(name="team", parent="division", guarantee_gpus=8, lend_limit_gpus=2),
    )
    views = Tenancy(cell(waits("j", "other", 1), tenants=tenants)).views
    quotas = Quotas(capacity=16, views=views)
    for used, left in ((0, 10), (5, 10), (8, 8)):
        planned = {"division": used, "team": used, "other": 0}
        assert unpromised(quotas, "other", planned) == left


def one_node(*jobs: JobView, tenants: tuple[TenantView, ...], now_s: float) -> ClusterSnapshot:
    """Eight GPUs."""
    return replace(cell(*jobs, tenants=tenants, nodes=1), now_s=now_s)


def settled(snapshot: ClusterSnapshot, memory: bytes = b"") -> Allocation:
    """One pass."""
    return policy(EXACT).allocate(snapshot, memory)


def rejects(found: Allocation) -> dict[str, float | None]:
    """Who is refused, and the earliest deadline that is named."""
    return {d.job_id: d.earliest_s for d in found.decisions if isinstance(d, Reject)}


def test_admission_sees_the_quota_as_capacity() -> None:
    """Two jobs that fit side by side, but not within what their tenant may use: one is refused."""
    jobs = [wants(name, "t", 4, 1000.0, 1500.0) for name in ("p1", "p2")]
    found = settled(one_node(*jobs, tenants=(ONLY_FOUR,), now_s=NOW_S))
    assert names(found.decisions, Start) == {"p1"}
    assert rejects(found) == {"p2": 2001.0}
    [reason] = [d.reason for d in found.decisions if isinstance(d, Reject)]
    assert "within what tenant t may be promised" in reason


@pytest.mark.parametrize(("kind", "other"), [("H100", "T4"), ("T4", "H100")])
def test_a_promise_on_one_gpu_type_is_in_its_tenants_quota_for_the_other(
    kind: str, other: str
) -> None:
    """Whichever of the two is planned first in a pass."""

    def on(job: JobView, gpu_type: str) -> JobView:
        return replace(job, gpu=GpuRequest(types=(gpu_type,)))

    def there(*jobs: JobView, now_s: float) -> ClusterSnapshot:
        workers = [worker for job in jobs for worker in job.placed]
        nodes = [make_node_view("n0", gpu_type=kind, workers=workers)]
        nodes.append(make_node_view("n1", gpu_type=other))
        snapshot = make_snapshot(nodes=nodes, jobs=jobs, now_s=now_s)
        return replace(snapshot, tenants=(TenantView(name="t", borrow_limit_gpus=4),))

    first = on(wants("q", "u", 8, 1000.0, 1100.0), kind)
    second = on(wants("p", "t", 4, 1000.0, 2500.0), kind)
    before = settled(there(first, second, now_s=NOW_S))
    assert names(before.decisions, Start) == {"q"}
    runner = replace(has(first, since_s=NOW_S, now_s=NOW_S + 10.0), gpu_type=kind)
    # From the end of the first on its tenant's four GPUs are promised to the second.
    asks = on(wants("n", "t", 4, 1500.0, 1900.0), other)
    found = settled(there(runner, second, asks, now_s=NOW_S + 10.0), before.memory)
    assert rejects(found).keys() == {"n"}
    alone = settled(there(runner, asks, now_s=NOW_S + 10.0), before.memory)
    assert rejects(alone) == {}


def test_a_promise_is_kept_while_its_tenant_has_no_room() -> None:
    """It is planned for when its tenant has room again; nobody else is promised these GPUs."""
    first, second = wants("p1", "t", 4, 1000.0, 1500.0), wants("p2", "t", 8, 1000.0, 2500.0)
    tenant = TenantView(name="t", borrow_limit_gpus=8)
    before = settled(one_node(first, second, tenants=(tenant,), now_s=NOW_S))
    assert names(before.decisions, Start) == {"p1"}
    assert rejects(before) == {}
    # Without the promise the other tenant's job would be in time; with it, it is refused.
    runner = has(first, since_s=NOW_S, now_s=NOW_S + 10.0)
    other = wants("q", "u", 8, 900.0, 1950.0)
    later = one_node(runner, second, other, tenants=(tenant,), now_s=NOW_S + 10.0)
    during = settled(later, before.memory)
    assert names(during.decisions, Start) == set()
    assert set(rejects(during)) == {"q"}
    assert Wait(kind=FAIR_SHARE, jobs=(second.job_id,)) in during.waits
    # It starts when the first one ends, as it was promised.
    end = one_node(second, tenants=(tenant,), now_s=NOW_S + 1000.0)
    assert names(settled(end, during.memory).decisions, Start) == {"p2"}


def test_an_explanation_names_the_promise_and_the_quota() -> None:
    """Who waits for its tenant's room reads when it starts at the latest, and what it waits for."""
    first, second = wants("p1", "t", 4, 1000.0, 1500.0), wants("p2", "t", 4, 1000.0, 2500.0)
    before = settled(one_node(first, second, tenants=(ONLY_FOUR,), now_s=NOW_S))
    runner = has(first, since_s=NOW_S, now_s=NOW_S + 10.0)
    later = one_node(runner, second, tenants=(ONLY_FOUR,), now_s=NOW_S + 10.0)
    [hold] = policy(EXACT).pending_reasons(later, before.memory)
    assert hold.job_id == "p2"
    promise, quota = hold.blockers
    assert re.search(r"promised its deadline and starts in \d+ s", promise)
    assert "tenant t: 4 GPUs on top of the 4 that it uses" in quota


def test_nothing_is_promised_on_what_a_guarantee_covers() -> None:
    """Its tenant may take it back at any time: the other half is all that can be promised."""
    asks = wants("whole", "u", 8, 1000.0, 5000.0)
    found = settled(one_node(asks, tenants=(HALF_IS_ITS_OWN,), now_s=NOW_S))
    assert rejects(found) == {"whole": None}
    half = wants("half", "u", 4, 1000.0, 1001.0)
    own = wants("own", "t", 4, 1000.0, 1001.0)
    tenants = (HALF_IS_ITS_OWN,)
    before = settled(one_node(half, tenants=tenants, now_s=NOW_S))
    runner = has(half, since_s=NOW_S, now_s=NOW_S)
    found = settled(one_node(runner, own, tenants=tenants, now_s=NOW_S), before.memory)
    assert names(found.decisions, Start) == {"own"}


def test_what_is_not_promised_may_be_borrowed() -> None:
    """Best effort runs on an idle guarantee, as far as that is lent."""
    asks = [wants(name, "u", 4, 1000.0, None) for name in ("s1", "s2")]
    lends = settled(one_node(*asks, tenants=(HALF_IS_ITS_OWN,), now_s=NOW_S))
    assert names(lends.decisions, Start) == {"s1", "s2"}
    keeps = (replace(HALF_IS_ITS_OWN, lend_limit_gpus=0),)
    kept = settled(one_node(*asks, tenants=keeps, now_s=NOW_S))
    assert names(kept.decisions, Start) == {"s1"}


def test_what_one_tenant_may_not_have_goes_to_another_in_the_same_pass() -> None:
    """Of three jobs that gain as much, two are of a tenant that may have one: the third starts."""
    asks = [wants(name, name[0], 4, 1000.0, None) for name in ("t1", "t2", "u1")]
    found = settled(one_node(*asks, tenants=(ONLY_FOUR,), now_s=NOW_S))
    assert names(found.decisions, Start) == {"t1", "u1"}


def test_a_promise_within_the_quota_outlives_a_lowered_limit() -> None:
    """What runs is not taken from it, and its plan stays the one that was promised."""
    job = wants("p", "t", 4, 1000.0, 1010.0)
    before = settled(one_node(job, tenants=(ONLY_FOUR,), now_s=NOW_S))
    runner = has(job, since_s=NOW_S, now_s=NOW_S + 10.0)
    lowered = (replace(ONLY_FOUR, guarantee_gpus=0),)
    other = wants("q", "u", 8, 500.0, 1200.0)
    later = one_node(runner, other, tenants=lowered, now_s=NOW_S + 10.0)
    found = settled(later, before.memory)
    assert set(rejects(found)) == {"q"}
    assert len(found.decisions) == 1


def test_a_quota_counts_gpus_of_every_type() -> None:
    """What a tenant was promised on one type it cannot be promised on another at that time."""
    nodes = [make_node_view("n0", gpu_type="A100"), make_node_view("n1", gpu_type="H100")]
    jobs = [
        replace(wants(name, "t", 4, 1000.0, 1500.0), gpu=make_job_view("x", types=(kind,)).gpu)
        for name, kind in (("p1", "A100"), ("p2", "H100"))
    ]
    snapshot = replace(make_snapshot(nodes=nodes, jobs=jobs), tenants=(ONLY_FOUR,))
    found = settled(snapshot)
    assert names(found.decisions, Start) == {"p1"}
    assert set(rejects(found)) == {"p2"}


@settings(deadline=None)
@given(
    limits=st.lists(
        st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6), st.none() | st.integers(0, 6)),
        min_size=4,
        max_size=4,
    ),
    used=st.lists(st.integers(0, 5), min_size=3, max_size=3),
)
def test_room_is_what_the_guard_counts(
    limits: list[tuple[int, int | None, int | None]], used: list[int]
) -> None:
    """Without a promise a tenant may take what the rules of tenants let it take, in any tree."""
    names_of = ("p", "a", "b", "c")
    parents: Mapping[str, str] = {"a": "p", "b": "p"}
    views = tuple(
        TenantView(
            name=name,
            parent=parents.get(name, ""),
            guarantee_gpus=guarantee,
            borrow_limit_gpus=borrows,
            # Where everybody lends all, the tenancy leaves it to nodes to say what is left.
            lend_limit_gpus=lends if name != "c" else lends or 0,
        )
        for name, (guarantee, borrows, lends) in zip(names_of, limits, strict=True)
    )
    jobs = [runs(f"j{name}", name, "n0", gpus) for name, gpus in zip("abc", used, strict=True)]
    snapshot = replace(
        make_snapshot(nodes=[make_node_view("n0", gpus=40)], jobs=jobs), tenants=views
    )
    tenancy = Tenancy(snapshot)
    quotas = Quotas(capacity=tenancy.capacity, views=tenancy.views)
    for job in jobs:
        assert unpromised(quotas, job.tenant, tenancy.used) == tenancy.room(job)


# --- whole runs -----------------------------------------------------------------------------------

SHARED = (
    TenantSettings(name="a", guarantee_gpus=3, borrow_limit_gpus=2),
    TenantSettings(name="b", guarantee_gpus=2, lend_limit_gpus=1),
)
"""Of eight GPUs three are nobody's; `c` is promised nothing."""

ROWS = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.integers(1, 300),
        st.none() | st.integers(1, 400),
        st.integers(1, 4),
        st.sampled_from("abc"),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(ROWS)
@example(
    [(0, 200, 205, 4, "c"), (0, 200, 205, 4, "c"), (9, 99, None, 3, "a"), (9, 99, None, 2, "b")]
)
def test_who_is_admitted_is_in_time_whatever_tenants_hold(
    rows: list[tuple[int, int, int | None, int, str]],
) -> None:
    """No newcomer of any tenant, nor one that takes its guarantee back, breaks a promise."""
    jobs = tuple(
        TraceJob(
            job_id=f"j{number}",
            submit_s=float(at_s),
            duration_s=float(work_s),
            gpus=gpus,
            gpus_per_worker=1,
            min_workers=1,
            max_workers=gpus,
            deadline_s=None if deadline_s is None else float(deadline_s),
            tenant=tenant,
        )
        for number, (at_s, work_s, deadline_s, gpus, tenant) in enumerate(
            sorted(rows, key=lambda row: row[0])
        )
    )
    workload = Workload(
        name="shared", jobs=jobs, loads=(), nodes=parse_cluster("1x8+0x8"), length_s=200.0
    )
    options = RunOptions(
        policy=EXACT,
        has_delays=False,
        saves=Saves.ON_REQUEST,
        engine={"tenants": SHARED},
        check=True,
    )
    found = play(workload, options, clock=SystemClock())
    asked = sum(job.deadline_s is not None for job in jobs)
    met = round((found.result.deadlines_met_ratio or 0.0) * asked)
    assert met == asked - found.result.jobs_rejected
