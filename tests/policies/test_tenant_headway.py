"""What gives way to a guarantee: no job is stopped for it in vain again and again, none idles."""

from __future__ import annotations

import pytest

from common.model import JobId, JobState
from coordinator.engine.settings import TenantSettings
from coordinator.policies.bundles import POLICIES
from coordinator.policies.decisions import Allocation, Preempt, Start
from coordinator.policies.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.tenants.rules import SHARES_AGAIN_S, allocated
from coordinator.policies.tenants.takeback import given_back
from coordinator.sim.cluster import Delays
from tests.policies.tenant_books import cell, names, runs, start, stop, waits
from tests.policies.tenant_passes import Asked, Cell

DELAYS = Delays(report_s=1.0, ready_s=20.0, start_s=5.0, suspend_s=1.0, resume_s=1.0, stop_s=7.0)

HALF = (TenantSettings(name="b", guarantee_gpus=8), TenantSettings(name="c"))
"""One of two nodes is promised to `b`, nothing to `c`."""

LENGTHS = ("short", "long", "longer")
"""Jobs, the shortest first."""

LONG_S, WHOLE = 7000.0, (2, 2)

IN_LINE = {"sjf", "aryl", "tetris", "foresight", "srtf", "fifo-skip"}
"""They start what is small or short while a large job waits, and nobody goes on in rounds."""


@pytest.mark.parametrize("policy", sorted(POLICIES))
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
    assert sum(job.preemption_count for job in jobs) <= 4 * len(jobs)


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


@pytest.mark.parametrize("policy", sorted(IN_LINE))
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
