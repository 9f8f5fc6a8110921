"""Jobs that guarantees call back again and again: for how long they do not borrow there."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from msgspec.structs import replace

from common.model import Checkpoint, JobId, JobState
from coordinator.engine.jobs.borrower_backoff import FIRST_S, FREE_COUNT, MOST_S
from coordinator.engine.state.settings import TenantSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.job_groups import BackOff
from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.registry import POLICIES, policy
from coordinator.sim.run.cluster import Delays
from tests.draws import whole
from tests.engine.test_commit import harness_of
from tests.harness.builders import NOW_S, job_with
from tests.harness.cluster.engine import EngineHarness
from tests.policies.tenant_books import cell, names, runs, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

OWNER = TenantSettings(name="a", guarantee_gpus=8)


def played(name: str, *, nodes: int = 1, for_s: float = 20_000.0) -> tuple[Cell, JobEntry]:
    """An hour's job that borrows and saves nothing; its owner has a minute's job every five."""
    found = Cell(name, [OWNER], nodes=nodes, check=True, delays=Delays())
    often = [Asked(tenant="a", gpus=8, work_s=60.0, at_s=300.0 * n) for n in range(1, 66)]
    found.ask([Asked(tenant="b", gpus=8 * nodes, work_s=3600.0), *often])
    found.run(until_s=for_s)
    return found, found.engine.state.jobs[JobId("b0")]


@each_row("name", ["aryl", "foresight", "fifo", "drf", "qos-elasticflow"])
def test_a_borrower_is_not_started_over_and_over(name: str) -> None:
    """Of 65 times that its owner asks, few stop it, and the waits between double; when the owner
    asks no more it runs to its end."""
    found, borrower = played(name)
    doublings = log2(20_000.0 / FIRST_S)
    assert FREE_COUNT < borrower.counts.preemptions <= FREE_COUNT + doublings + 1
    rest = borrower.back_off
    assert rest is not None
    assert (rest.tenants, rest.count) == (("a",), borrower.counts.preemptions)
    found.run(until_s=20_000.0 + MOST_S + 4_000.0)
    assert borrower.state == JobState.SUCCEEDED


REST = BackOff(tenants=("a",), count=5, since_s=NOW_S - 100.0, until_s=NOW_S + 500.0)


@each_row("name", sorted(POLICIES))
def test_it_may_have_what_nobody_is_guaranteed(name: str) -> None:
    """Eight GPUs of sixteen are the owner's: it starts where eight stay free, else `explain` says
    since when, for how long, and why not, and a pass follows when it may."""
    borrower = job_with(waits("j", "b", 4), back_off=REST)
    tenants = (TenantView(name="a", guarantee_gpus=8), TenantView(name="b"))
    policy_ = policy(name)
    free = replace(cell(borrower, tenants=tenants), now_s=NOW_S)
    full = replace(cell(borrower, runs("r", "b", "n0", 8), tenants=tenants), now_s=NOW_S)
    later = replace(full, now_s=REST.until_s)
    found = policy_.allocate(full, b"")
    assert found.decisions == ()
    assert found.wake_at_s is not None
    assert found.wake_at_s <= REST.until_s
    (hold,) = (each for each in policy_.pending_reasons(full, b"") if each.job_id == "j")
    assert "has reclaimed it 5 times in a row, the last 100 s ago: for 500 s" in hold.blockers[0]
    if name not in ("las", "pollux", "themis-lp"):  # these start jobs in rounds
        assert names(policy_.allocate(free, b"").decisions, Start) == {"j"}
        assert names(policy_.allocate(later, b"").decisions, Start) == {"j"}


def test_what_its_own_guarantee_covers_it_always_may_have() -> None:
    """It borrows nothing then."""
    mine = job_with(waits("j", "b", 4), back_off=REST)
    tenants = (TenantView(name="a", guarantee_gpus=8), TenantView(name="b", guarantee_gpus=4))
    found = policy("aryl").allocate(replace(cell(mine, tenants=tenants, nodes=1), now_s=NOW_S), b"")
    assert names(found.decisions, Start) == {"j"}


def called_back(harness: EngineHarness, job: JobEntry) -> BackOff:
    """Start it, and stop it for the guarantee of `a`."""
    harness.start(job, "t0")
    harness.wait(1.0)
    harness.decide(Preempt(job_id=job.job_id, guarantee="a", reason="test"))
    harness.wait(60.0)
    assert job.back_off is not None
    return job.back_off


@given(whole(3, 14))
def test_the_wait_doubles_up_to_a_bound(count: int) -> None:
    """It begins after the free ones, and is never longer than four hours."""
    harness = harness_of(OWNER)
    job = harness.submit("j1", tenant="b")
    first = called_back(harness, job)
    job.back_off = replace(first, count=count)
    rest = called_back(harness, job)
    assert rest.count == count + 1
    expected_s = FIRST_S * 2 ** (count - FREE_COUNT)
    assert rest.until_s - rest.since_s == pytest.approx(min(MOST_S, expected_s))


def test_who_saved_meanwhile_begins_anew() -> None:
    """An attempt that had verified a save gets on: the stops before it are in no row with it."""
    harness = harness_of(OWNER)
    job = harness.submit("j1", tenant="b", path="/saves")
    assert called_back(harness, job).count == 1
    assert called_back(harness, job).count == 2
    harness.start(job, "t0")
    harness.wait(1.0)
    job.saves.checkpoint = Checkpoint(step=1, path="/saves/1", is_verified=True)
    job.saves.at_s = harness.sim.loop.now_s
    harness.decide(Preempt(job_id=job.job_id, guarantee="a", reason="test"))
    assert job.back_off is not None
    assert job.back_off.count == 1
