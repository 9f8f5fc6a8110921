"""What guarantees would undo of a pass, by hand: each kind of decision, and the cell after it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.gpu_flow import Flow
from coordinator.policies.tenants.stability import after, short_lived
from tests.builders import make_job_view, make_worker_view
from tests.policies.tenant_books import B8, cell, runs, start, stop, waits

A4, C = TenantView(name="a", guarantee_gpus=4), TenantView(name="c")


def elastic(name: str, workers: int) -> JobView:
    """A job of `c` of one or two workers of 4 GPUs, that runs with so many or waits with none."""
    there = [make_worker_view(name, n, "n0", gpus=4, is_flexible=n > 0) for n in range(workers)]
    state = JobState.RUNNING if workers else JobState.PENDING
    made = make_job_view(name, state=state, workers=(1, 2), gpus_per_worker=4, placed=there)
    return replace(made, tenant="c", is_resizable=bool(workers))


def of_one_node(*jobs: JobView) -> ClusterSnapshot:
    """Beside the jobs one of `a` waits for the 4 GPUs that are promised to it."""
    return cell(*jobs, waits("owed", "a", 4), tenants=(A4, C), nodes=1)


def test_what_starts_on_the_workers_of_a_job_that_shrinks_is_looked_at() -> None:
    """As what starts by a stop: the workers would not come back."""
    snapshot = of_one_node(elastic("grown", 2), waits("big", "c", 4))
    shrinks = Resize(job_id=JobId("grown"), removed_workers=(1,), reason="test")
    made = shrinks, start("big", "n0")
    assert short_lived(snapshot, made, made) == [made[1]]


def test_workers_that_a_job_would_have_to_give_back_are_told() -> None:
    """It grows on what a stop leaves."""
    snapshot = of_one_node(elastic("grows", 1), runs("gone", "c", "n0", 4))
    more = Placement(node=NodeName("n0"), worker_count=1, is_flexible=True)
    made = stop("gone"), Resize(job_id=JobId("grows"), added=(more,), reason="test")
    assert short_lived(snapshot, made, made) == [made[1]]


def test_a_stop_is_told_whose_job_would_be_due_others_gpus_while_a_guarantee_has_its_own() -> None:
    """What comes back in the pass itself lasts; the policy started nothing there."""
    snapshot = cell(
        runs("mine", "a", "n0", 4),
        runs("lent", "c", "n1", 8),
        waits("due", "b", 8),
        tenants=(A4, B8, C),
    )
    made = (stop("mine"),)
    assert short_lived(snapshot, made, (*made, start("due", "n0"))) == [made[0]]


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RESIZING])
def test_whoever_is_on_the_way_is_looked_at_as_one_that_runs(state: JobState) -> None:
    """What is called back from it then is called back soon."""
    snapshot = of_one_node(replace(runs("late", "c", "n0", 4), state=state))
    found = {job.job_id: job for job in after(snapshot, (), Flow(snapshot)).jobs}
    assert found[JobId("late")].state == JobState.RUNNING


def test_whoever_is_stopped_waits_from_then_on_and_whoever_starts_may_shrink_later() -> None:
    """As the engine would show them."""
    snapshot = of_one_node(runs("gone", "c", "n0", 8), elastic("wide", 0), waits("rigid", "c", 4))
    made = stop("gone"), start("wide", "n0"), start("rigid", "n0")
    found = {job.job_id: job for job in after(snapshot, made, Flow(snapshot)).jobs}
    assert found[JobId("gone")].waiting_since_s == snapshot.now_s
    assert found[JobId("wide")].waiting_since_s is None
    assert found[JobId("wide")].is_resizable
    assert not found[JobId("rigid")].is_resizable
