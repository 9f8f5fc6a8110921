"""What nodes take of one job while others come and go, and what it costs to look for victims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.resource_vectors import Bins
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.drf.policy import RoomsLeft
from tests.draws import pick
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.counted_calls import calls
from tests.policies.tenant_books import waits

GPUS, HERE = 8, "H100"


def running(name: str, node: str, gpus: int, cpus: float) -> JobView:
    """One worker on a node, of another tenant."""
    worker = make_worker_view(name, 0, node, gpus=gpus)
    made = make_job_view(
        name, state=JobState.RUNNING, gpus_per_worker=gpus, placed=(worker,), gpu_type=HERE
    )
    return replace(made, tenant="other", cpus_per_worker=cpus)


@given(
    held=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), pick(0.0, 0.3, 2.5, 7.0)), max_size=8
    ),
    gpus=st.integers(1, 8),
    cpus=pick(0.0, 0.7, 5.0),
    avoids=st.sets(st.integers(0, 3), max_size=2),
    goes=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=12),
)
def test_the_count_is_what_a_look_at_all_nodes_would_find(
    held: list[tuple[int, int, float]],
    gpus: int,
    cpus: float,
    avoids: set[int],
    goes: list[tuple[int, bool]],
) -> None:
    """Whoever goes, and stays after all: nodes are found for as many workers, and for no more."""
    jobs = [
        running(f"r{at}", f"n{node}", each, asked) for at, (node, each, asked) in enumerate(held)
    ]
    there = [
        replace(
            make_node_view(
                f"n{at}",
                gpu_type=HERE if at < 3 else "A100",
                gpus=32,
                workers=[w for job in jobs for w in job.placed if w.node == f"n{at}"],
            ),
            cpus=24,
        )
        for at in range(4)
    ]
    job = job_with(
        waits("new", "mine", gpus),
        cpus_per_worker=cpus,
        nodes_avoided=tuple(NodeName(f"n{at}") for at in sorted(avoids)),
    )
    bins = Bins(make_snapshot(nodes=there, jobs=[*jobs, job]))
    left = RoomsLeft(bins, job, HERE)
    gone: set[JobId] = set()
    for at, comes_back in goes:
        if at < len(jobs) and comes_back == (jobs[at].job_id in gone):
            bins.vacate(jobs[at], jobs[at].placed, -1.0 if comes_back else 1.0)
            gone ^= {jobs[at].job_id}
            left.look(worker.node for worker in jobs[at].placed)
        if left.workers:
            assert bins.pick(job, HERE, left.workers, bins.fullest)
        assert not bins.pick(job, HERE, left.workers + 1, bins.fullest)


def crowded(small_nodes: int) -> ClusterSnapshot:
    """Sixteen elastic jobs of one tenant fill eight nodes; a gang of another tenant waits for more
    GPUs than all who would make room for it have. Nobody has a use for the small nodes."""
    jobs = [
        replace(
            make_job_view(
                f"e{at}",
                state=JobState.RUNNING,
                workers=(1, 4),
                placed=[
                    make_worker_view(f"e{at}", index, f"n{at // 2}", is_flexible=index > 0)
                    for index in range(4)
                ],
            ),
            tenant="other",
        )
        for at in range(16)
    ]
    held = [[w for job in jobs for w in job.placed if w.node == f"n{at}"] for at in range(8)]
    nodes = [make_node_view(f"n{at}", workers=workers) for at, workers in enumerate(held)]
    nodes += [make_node_view(f"s{at}", gpus=1) for at in range(small_nodes)]
    gang = make_job_view("new", workers=(20, 20), gpus_per_worker=2)
    return make_snapshot(nodes=nodes, jobs=[*jobs, replace(gang, tenant="mine")])


def test_a_look_for_victims_costs_no_scan_of_all_nodes_for_each() -> None:
    """With 48 workers that could go, a node more costs a pass of DRF fewer than 48 calls."""
    few, many = crowded(60), crowded(120)
    drf = policy("drf")
    assert drf.allocate(few, b"").decisions == drf.allocate(many, b"").decisions == ()
    less = calls(lambda: drf.allocate(few, b""))
    assert calls(lambda: drf.allocate(many, b"")) - less < 48 * 60
