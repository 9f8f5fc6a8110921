"""What gives way to a guarantee: no job is stopped for it in vain again and again, none idles."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import Allocation, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.enforce import SHARES_AGAIN_S, allocated
from coordinator.policies.tenants.quota_guard import blocked
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.sim.run.cluster import Delays
from tests.harness.builders import job_with, make_job_view, make_worker_view
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, names, runs, start, stop, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

DELAYS = Delays(report_s=1.0, ready_s=20.0, start_s=5.0, suspend_s=1.0, resume_s=1.0, stop_s=7.0)


HALF = (TenantSettings(name="b", guarantee_gpus=8), TenantSettings(name="c"))
"""One of two nodes is promised to `b`, nothing to `c`."""


LENGTHS = ("short", "long", "longer")
"""Jobs, the shortest first."""


LONG_S, WHOLE = 7000.0, (2, 2)


IN_LINE = {"sjf", "aryl", "tetris", "foresight", "srtf", "fifo-skip"}
"""They start what is small or short while a large job waits, and nobody goes on in rounds."""


@pytest.mark.slow
@each_row("policy", FAMILIES)
def test_a_stop_whose_beneficiary_gives_way_to_the_stopped_tenant_is_not_decided_again_and_again(
    policy: str,
) -> None:
    """`mid` borrows; were it stopped for `c`, a job of its own tenant would be due its GPUs."""
    played = Cell(policy, HALF, delays=DELAYS, check=True)
    played.ask(
        [
            Asked(tenant="b", gpus=8, work_s=LONG_S),
            Asked(tenant="b", gpus=8, work_s=LONG_S),
            Asked(tenant="b", at_s=300.0, gpus=8, workers=WHOLE, work_s=2000.0),
            Asked(tenant="c", at_s=600.0, gpus=8, workers=WHOLE, work_s=400.0),
        ]
    )
    for number in range(1, 50):
        played.loop.at(60.0 * number, played.ask_pass)
    played.run(until_s=3000.0)
    jobs = played.engine.state.jobs.values()
    assert sum(job.counts.preemptions for job in jobs) <= 4 * len(jobs)


def test_a_stop_that_makes_its_own_tenant_due_is_no_use_to_it() -> None:
    """A borrower's job runs on where those that it would leave its GPUs to give way."""
    tenants = TenantView(name="b", guarantee_gpus=4), TenantView(name="c")
    snapshot = cell(
        runs("mid", "b", "n0", 8),
        waits("long", "b", 4),
        waits("short", "c", 8),
        tenants=tenants,
        nodes=1,
    )
    found = given_back(snapshot, (stop("mid"), start("short", "n0"))).decisions
    assert names(found, Preempt) == names(found, Start) == set()


LEAF_LIMIT = TenantView(name="team", parent="a", borrow_limit_gpus=8)


KEEPER = TenantView(name="far", lend_limit_gpus=0)


@pytest.mark.parametrize(
    "more", [(TenantView(name="team", parent="a"), KEEPER), (LEAF_LIMIT,)], ids=["lends", "borrows"]
)
def test_a_stop_that_alone_gives_the_next_job_of_its_tenant_room_is_no_use_to_it(
    more: tuple[TenantView, ...],
) -> None:
    """It had none only as the stopped one has all; that one comes back once others of it end."""
    tenants = TenantView(name="a", guarantee_gpus=4), TenantView(name="b", guarantee_gpus=4), *more
    snapshot = cell(
        runs("mid", "team", "n0", 8),
        waits("next", "team", 4),
        waits("first", "b", 8),
        tenants=tenants,
        nodes=1,
    )
    assert JobId("next") in blocked(snapshot, Tenancy(snapshot))
    found = given_back(snapshot, (stop("mid"), start("first", "n0"))).decisions
    assert names(found, Preempt) == names(found, Start) == set()


def test_a_stop_of_another_tenant_is_no_use_to_one_that_its_own_limit_kept_out() -> None:
    """Who gives is looked for anew then: `dear` would have room again, so `cheap` is stopped."""
    snapshot = cell(
        runs("mine", "a", "n1", 2),
        runs("fixed", "b", "n1", 6),
        runs("dear", "c", "n0", 4, lost_gpu_s=1000.0),
        runs("cheap", "c", "n0", 4),
        job_with(waits("next", "a", 2), nodes_avoided=(NodeName("n1"),)),
        waits("second", "b", 2),
        waits("first", "b", 4),
        tenants=(
            TenantView(name="a", guarantee_gpus=2, borrow_limit_gpus=0),
            TenantView(name="b", guarantee_gpus=8),
            TenantView(name="c", guarantee_gpus=6, borrow_limit_gpus=2),
        ),
    )
    made = stop("mine"), start("second", "n1"), stop("dear"), start("first", "n0")
    found = given_back(snapshot, made).decisions
    assert names(found, Start) == {"second", "next"}
    assert names(found, Preempt) == {"mine", "cheap"}


B4, C = TenantView(name="b", guarantee_gpus=4), TenantView(name="c")


def limited(guarantee_gpus: int, borrow_limit_gpus: int) -> TenantView:
    """Tenant `a`."""
    return TenantView(name="a", guarantee_gpus=guarantee_gpus, borrow_limit_gpus=borrow_limit_gpus)


@pytest.mark.parametrize(("guarantee", "limit"), [(4, 4), (8, 0)])
def test_a_stop_is_no_use_to_its_own_tenant_where_the_stopped_job_has_room_again(
    guarantee: int, limit: int
) -> None:
    """After it, or once the rest of its tenant's jobs have left part of the guarantee."""
    snapshot = cell(
        runs("mid", "a", "n0", 5),
        runs("beside", "a", "n0", 2),
        runs("fixed", "b", "n0", 1),
        waits("next", "a", 2 if limit else 1),
        waits("first", "c", 5),
        tenants=(limited(guarantee, limit), B4, C),
        nodes=1,
    )
    found = given_back(snapshot, (stop("mid"), start("first", "n0"))).decisions
    assert names(found, Preempt) == names(found, Start) == set()


def test_workers_that_go_are_no_use_to_the_next_job_of_their_own_tenant() -> None:
    """The policy would want them back as soon as its limit allows for them."""
    there = [make_worker_view("wide", n, "n0", gpus=2, is_flexible=n > 0) for n in range(2)]
    wide = make_job_view(
        "wide", state=JobState.RUNNING, workers=(1, 2), gpus_per_worker=2, placed=there
    )
    snapshot = cell(
        replace(wide, tenant="a"),
        runs("fixed", "b", "n0", 4),
        waits("next", "a", 2),
        waits("first", "c", 2),
        tenants=(limited(4, 0), B4, C),
        nodes=1,
    )
    shrinks = Resize(job_id=JobId("wide"), removed_workers=(1,), reason="test")
    found = given_back(snapshot, (shrinks, start("first", "n0"))).decisions
    assert found == ()


def gang(name: str, tenant: str, *nodes: str, is_running: bool) -> JobView:
    """A job of one worker of 3 GPUs on each node, or of two that waits."""
    there = [make_worker_view(name, n, node, gpus=3) for n, node in enumerate(nodes)]
    state = JobState.RUNNING if is_running else JobState.PENDING
    made = make_job_view(name, state=state, workers=(2, 2), gpus_per_worker=3, placed=there)
    return replace(made, tenant=tenant)


def test_each_of_the_stops_must_be_of_a_job_that_is_kept_out() -> None:
    """`mid` is; `dear` has room again, and the guarantee's job is due less than that loses."""
    fixed = [runs(f"fixed{n}", "b", f"n{n}", gpus) for n, gpus in enumerate((5, 5, 2))]
    snapshot = cell(
        *fixed,
        gang("mid", "a", "n0", "n1", is_running=True),
        runs("dear", "c", "n2", 3, lost_gpu_s=1000.0),
        runs("cheap", "c", "n2", 3),
        job_with(gang("next", "a", is_running=False), nodes_avoided=(NodeName("n1"),)),
        gang("first", "c", is_running=False),
        waits("second", "c", 3),
        tenants=(limited(6, 0), TenantView(name="b", guarantee_gpus=15), C),
        nodes=3,
    )
    places = tuple(place for node in ("n0", "n2") for place in start("first", node).placements)
    first = replace(start("first", "n0"), placements=places)
    made = stop("mid"), stop("dear"), first, start("second", "n1")
    found = given_back(snapshot, made).decisions
    assert names(found, Preempt) == {"mid", "cheap"}


def test_a_stop_counts_for_one_that_is_kept_out_whatever_else_is_stopped_elsewhere() -> None:
    """`other` makes way on another node for one of its own tenant."""
    snapshot = cell(
        runs("mid", "a", "n0", 4),
        runs("fixed", "b", "n0", 4),
        waits("next", "a", 2),
        waits("first", "c", 4),
        runs("other", "c", "n1", 8),
        waits("second", "c", 8),
        tenants=(limited(2, 2), B4, C),
    )
    made = stop("mid"), start("first", "n0"), stop("other"), start("second", "n1")
    found = given_back(snapshot, made).decisions
    assert names(found, Start) == {"next", "second"}
    assert names(found, Preempt) == {"mid", "other"}


@each_row("policy", sorted(IN_LINE))
def test_what_a_start_that_gives_way_leaves_goes_to_others_in_the_same_pass(policy: str) -> None:
    """The policy starts `short` on all that `mid` left; half of it goes to `b`, half is over."""
    played = Cell(policy, HALF, delays=DELAYS, check=True)
    played.ask(
        [
            Asked(tenant="b", gpus=8, workers=WHOLE, work_s=2000.0),
            Asked(tenant="b", at_s=10.0, gpus=8, work_s=LONG_S),
            Asked(tenant="b", at_s=20.0, gpus=8, work_s=LONG_S),
            Asked(tenant="c", at_s=30.0, gpus=8, workers=WHOLE, work_s=400.0),
        ]
    )
    played.run(until_s=1300.0)
    jobs = played.engine.state.jobs
    assert jobs[JobId("b0")].state == JobState.SUCCEEDED
    began_s = [jobs[JobId(name)].started_at_s for name in ("b1", "b2")]
    assert None not in began_s
    assert began_s[0] == began_s[1]


def _shortest(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """All that it sees and that fits on the node, the shortest first."""
    free, starts = 8, list[Start]()
    for job in sorted(snapshot.jobs, key=lambda each: LENGTHS.index(each.job_id)):
        if job.gpus_per_worker <= free:
            free -= job.gpus_per_worker
            starts.append(start(job.job_id, "n0"))
    return Allocation(decisions=tuple(starts), memory=memory)


@pytest.mark.parametrize("keeps_quotas", [False, True])
def test_whoever_has_all_jobs_before_it_is_asked_again_for_what_is_left(keeps_quotas: bool) -> None:
    """None is hidden from a policy that remembers promises: a pass follows instead of another."""
    tenants = TenantView(name="b", guarantee_gpus=4), TenantView(name="c")
    asks = waits("short", "c", 8), waits("long", "b", 4), waits("longer", "b", 4)
    snapshot = cell(*asks, tenants=tenants, nodes=1)
    made = allocated(_shortest, snapshot, b"", keeps_quotas=keeps_quotas)
    assert names(made.decisions, Start) == ({"long"} if keeps_quotas else {"long", "longer"})
    assert made.wake_at_s == (snapshot.now_s + SHARES_AGAIN_S if keeps_quotas else None)
