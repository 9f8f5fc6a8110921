"""What comes back for a guarantee is what its tenant may use, and costs no other start in vain."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Preemptibility
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import Allocation, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.tenants.attempts import GO_FIRST
from coordinator.policies.tenants.enforce import allocated, held
from coordinator.policies.tenants.entitlements import PATIENCE_S
from coordinator.policies.tenants.quota_guard import guarded
from coordinator.policies.tenants.reclaim import given_back
from tests.harness.builders import NOW_S, job_with, make_job_view, make_worker_view
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import A8, B8, cell, names, runs, start, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.policies.tenants.test_enforce_idle_gpus import BEHIND, gang, halves
from tests.tables import each_row

# --- what others do not lend --------------------------------------------------------------------

KEPT = (
    TenantSettings(name="p", guarantee_gpus=8),
    TenantSettings(name="a", parent="p", guarantee_gpus=6, lend_limit_gpus=0),
    TenantSettings(name="d", parent="p"),
    TenantSettings(name="c"),
)


@each_row("policy", FAMILIES)
def test_a_job_that_a_team_s_lending_limit_forbids_keeps_no_borrower_from_starting(
    policy: str,
) -> None:
    """Its division is due the GPUs, but a team of it lends none: others use them."""
    played = Cell(policy, KEPT, nodes=1, check=True)
    forbidden = Asked(tenant="d", gpus=8)
    played.ask([forbidden, Asked(tenant="c", at_s=10.0, work_s=600.0)])
    played.run(until_s=5000.0)
    states = {job_id: job.state for job_id, job in played.engine.state.jobs.items()}
    assert states == {"d0": JobState.PENDING, "c1": JobState.SUCCEEDED}


@pytest.mark.parametrize(("kept", "stopped"), [(0, {"r"}), (6, set[str]())])
def test_nothing_is_taken_back_beyond_what_a_sibling_lends(kept: int, stopped: set[str]) -> None:
    """The start would be refused: nobody is stopped for it, nor told to have to wait for it."""
    team = TenantView(name="a", parent="p", guarantee_gpus=6, lend_limit_gpus=6 - kept)
    tenants = (TenantView(name="p", guarantee_gpus=8), team, TenantView(name="d", parent="p"))
    snapshot = cell(
        runs("r", "c", "n0", 8),
        waits("w", "d", 8),
        tenants=(*tenants, TenantView(name="c")),
        nodes=1,
    )
    back = given_back(snapshot, ())
    assert names(back.decisions, Preempt) == stopped
    assert guarded(snapshot, back.decisions) == (back.decisions, ())
    assert back.waits == {} and back.fits == frozenset()


def test_what_a_sibling_uses_that_does_not_give_back_counts_as_well() -> None:
    """By itself the job might start; with what its sibling runs it would be refused."""
    tenants = (
        TenantView(name="p", guarantee_gpus=8),
        TenantView(name="a", parent="p", guarantee_gpus=4, lend_limit_gpus=0),
        TenantView(name="d", parent="p"),
        TenantView(name="e", parent="p"),
        TenantView(name="c"),
    )
    busy = runs("r", "c", "n0", 4), waits("w", "d", 4)
    alone = given_back(cell(*busy, runs("x", "c", "n0", 4), tenants=tenants, nodes=1), ())
    assert names(alone.decisions, Start) == {"w"}
    beside = given_back(cell(*busy, runs("x", "e", "n0", 4), tenants=tenants, nodes=1), ())
    assert beside.decisions == ()


# --- what the guard refuses ---------------------------------------------------------------------


def swaps(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """A job of a tenant gives flexible workers up for another job of it."""
    shrunk = Resize(job_id=JobId("q-first"), removed_workers=(1, 2), reason="test")
    return Allocation(decisions=(shrunk, start("q-next", "n0")))


def swapped(preemptibility: Preemptibility) -> ClusterSnapshot:
    """Its tenant has one GPU more than its guarantee, and the start gives two."""
    lent = [runs("c0", "c", "n0", 5), runs("c1", "c", "n1", 2)]
    there = [make_worker_view("q-first", n, "n0", is_flexible=n > 0) for n in range(3)]
    first = make_job_view("q-first", state=JobState.RUNNING, workers=(1, 3), placed=there)
    return cell(
        replace(first, tenant="q"),
        runs("q-stays", "q", "n1", 6),
        *(replace(job, preemptibility=preemptibility) for job in lent),
        waits("q-next", "q", 2),
        waits("owed", "p", 1),
        tenants=(TenantView(name="p", guarantee_gpus=8), TenantView(name="q", guarantee_gpus=8)),
    )


def test_a_start_that_may_not_give_way_stays_and_borrowers_that_run_give_back() -> None:
    """Two GPUs of it are one more than its tenant borrows: the guard would refuse the owed job."""
    found = allocated(swaps, swapped(Preemptibility.FULL), b"").decisions
    assert names(found, Start) == {"q-next", "owed"}
    assert len(names(found, Preempt) & {"c0", "c1"}) == 1


def test_a_start_does_not_give_way_for_one_that_is_refused() -> None:
    """Nobody else gives back: the pass stays as the policy decided it."""
    snapshot = swapped(Preemptibility.NON)
    assert allocated(swaps, snapshot, b"").decisions == swaps(snapshot, b"").decisions


def test_a_tenant_that_starts_beyond_its_guarantee_gives_what_it_has_beside() -> None:
    """It borrows then, as in the next pass, and keeps its guarantee by what it starts."""
    owed = job_with(waits("owed", "b", 8), nodes_avoided=(NodeName("n1"),))
    snapshot = cell(runs("r", "a", "n0", 8), waits("more", "a", 8), owed, tenants=(A8, B8))
    found = given_back(snapshot, (start("more", "n1"),)).decisions
    assert (names(found, Preempt), names(found, Start)) == ({"r"}, {"more", "owed"})
    assert guarded(snapshot, found) == (found, ())


# --- those that fit -----------------------------------------------------------------------------


def idle(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Nobody starts, whoever is there."""
    return Allocation(decisions=())


def test_nobody_stands_behind_a_job_that_does_not_start_without_it_either() -> None:
    """A borrower's job is not told to wait for a guarantee where its own policy waits."""
    assert allocated(idle, BEHIND, b"").waits == ()
    told = held(idle, lambda seen, _: (), BEHIND, b"")
    assert not any(GO_FIRST in hold.blockers for hold in told)


def late(*workers: int) -> ClusterSnapshot:
    """Jobs of one tenant that fit, each of so many workers, and have waited for long enough."""
    return halves(
        *(
            replace(gang(f"j{n}", "a", each), waiting_since_s=NOW_S - PATIENCE_S)
            for n, each in enumerate(workers)
        )
    )


def test_patience_ends_for_what_the_guarantee_covers_and_no_more() -> None:
    """The first of two jobs uses all of it: the second is a borrower's then."""
    assert names(given_back(late(1, 1), ()).decisions, Start) == {"j0", "j1"}
    assert names(given_back(late(2, 2), ()).decisions, Start) == {"j0"}


@pytest.mark.parametrize("asks", ["cpus_per_worker", "memory_bytes_per_worker"])
def test_patience_does_not_end_for_what_may_lack_something_beside_gpus(asks: str) -> None:
    """Whether there is room is its policy's matter."""
    snapshot = late(1)
    (job,) = snapshot.jobs
    found = given_back(replace(snapshot, jobs=(job_with(job, **{asks: 1}),)), ())
    assert (found.decisions, found.wake_at_s) == ((), None)
    assert found.fits == {JobId("j0")}
