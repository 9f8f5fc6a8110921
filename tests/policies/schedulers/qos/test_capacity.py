"""GPUs that `qos-elasticflow` may promise: those of nodes that take jobs, less what stays held."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import JobState, NodeName, Preemptibility
from coordinator.policies.contract.decisions import Allocation, Reject, Start
from coordinator.policies.contract.snapshot import JobView, TenantView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

WORK_S = 1000.0
M, N = NodeName("m"), NodeName("n")


def asks(gpus: int, tenant: str = "") -> JobView:
    """A job of workers of one GPU that is in time only if all of them run from now on."""
    job = make_job_view(
        "asks", workers=(gpus, gpus), remaining_work_s=gpus * WORK_S, submitted_at_s=NOW_S
    )
    return job_with(job, deadline_at_s=NOW_S + 1.2 * WORK_S, estimated_left_s=WORK_S, tenant=tenant)


def runs(node: str, gpus: int, tenant: str = "") -> JobView:
    """A job of one worker that runs."""
    job = make_job_view(
        "runs",
        state=JobState.RUNNING,
        gpus_per_worker=gpus,
        placed=(make_worker_view("runs", 0, node, gpus=gpus),),
    )
    return structs.replace(job, tenant=tenant)


def decided(
    running: JobView,
    asking: JobView,
    *,
    cordoned: tuple[NodeName, ...] = (),
    tenants: tuple[TenantView, ...] = (),
) -> Allocation:
    """One pass on two nodes of four GPUs."""
    nodes = [
        make_node_view(
            name,
            gpus=4,
            workers=[worker for worker in running.placed if worker.node == name],
            is_drained_by_operator=name in cordoned,
        )
        for name in (M, N)
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=[running, asking])
    return policy("qos-elasticflow").allocate(structs.replace(snapshot, tenants=tenants), b"")


def is_refused(found: Allocation) -> bool:
    """Or else it starts, alone."""
    [decision] = found.decisions
    assert isinstance(decision, Start | Reject)
    return isinstance(decision, Reject)


@pytest.mark.parametrize(("gpus", "refused"), [(6, False), (7, True)])
def test_what_a_job_holds_that_cannot_be_stopped_is_promised_to_nobody(
    gpus: int, refused: bool
) -> None:
    """Of eight GPUs two are held by a job that is never preempted: six can be promised."""
    holds = structs.replace(runs("m", 2), preemptibility=Preemptibility.NON)
    assert is_refused(decided(holds, asks(gpus))) is refused


@pytest.mark.parametrize("preemptibility", [Preemptibility.NON, Preemptibility.FULL])
def test_who_runs_on_a_cordoned_node_needs_none_of_the_others(
    preemptibility: Preemptibility,
) -> None:
    """Four GPUs of a node beside it are promised, though a gang of four goes on without a node."""
    holds = structs.replace(runs("m", 4), preemptibility=preemptibility)
    found = decided(holds, asks(4), cordoned=(M,))
    assert [type(decision) for decision in found.decisions] == [Start]


def test_nor_do_guarantees_that_are_used_there() -> None:
    """A tenant uses all of its guarantee on a cordoned node: the other is promised to others."""
    tenants = (TenantView(name="a", guarantee_gpus=4), TenantView(name="b"))
    found = decided(runs("m", 4, "a"), asks(4, "b"), cordoned=(M,), tenants=tenants)
    assert not is_refused(found)
