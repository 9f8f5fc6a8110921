"""How far a job grows under Gandiva (OSDI'18, 3.4): on one node, on idle GPUs, after its
cooldown."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from common.model import GpuUuid, JobState
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Resize
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gandiva.policy import Memory
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

# --- packing ------------------------------------------------------------------------------------


def seated(
    name: str,
    node: str,
    *,
    busy: float,
    state: JobState = JobState.RUNNING,
    memory_gb: int = 0,
    since_s: float = 5.0,
    started_s_ago: float | None = None,
) -> JobView:
    """A job of one GPU on the only GPU of a node, that has said how far it is.

    since_s: how long it has run, or waited for its turn.
    """
    if started_s_ago is None:
        started_s_ago = since_s if state == JobState.RUNNING else 5000.0
    worker = replace(make_worker_view(name, 0, node), gpu_uuids=(GpuUuid(f"{node}-gpu"),))
    job = make_job_view(name, state=state, placed=[worker])
    return job_with(
        job,
        started_at_s=NOW_S - started_s_ago,
        suspended_at_s=NOW_S - since_s if state == JobState.SUSPENDED else None,
        progress_step=100,
        progress_step_gpu_s=100.0,
        profile=JobProfile(gpu_busy_ratio=busy, gpu_memory_bytes=memory_gb * 10**9),
    )


def suspended(
    name: str,
    node: str,
    *,
    busy: float = 0.5,
    memory_gb: int = 0,
    since_s: float = 5.0,
    started_s_ago: float | None = None,
) -> JobView:
    """The same, but it waits for its turn there."""
    return seated(
        name,
        node,
        busy=busy,
        state=JobState.SUSPENDED,
        memory_gb=memory_gb,
        since_s=since_s,
        started_s_ago=started_s_ago,
    )


# --- growing ------------------------------------------------------------------------------------


def elastic(*nodes: str, most: int = 8, resized_at_s: float | None = None) -> JobView:
    """A job that runs with its base gang of two, a worker of one GPU on each of these."""
    placed = [make_worker_view("e", number, node) for number, node in enumerate(nodes)]
    return make_job_view(
        "e",
        state=JobState.RUNNING,
        workers=(2, most),
        placed=placed,
        resizes_latest_at_s=resized_at_s,
    )


def grown(
    job: JobView,
    *,
    idle_s: float = 60.0,
    cooldown_s: float = 0.0,
    busy: int = 0,
    others: Sequence[JobView] = (),
) -> dict[str, int]:
    """Workers that it gets, by node, on two nodes of four GPUs that were idle for so long.

    others: jobs on the one GPU of a third node, n3.
    """
    nodes = [
        make_node_view(
            name,
            gpus=4,
            workers=(mine := [worker for worker in job.placed if worker.node == name]),
            free_gpus=4 - busy - len(mine),
        )
        for name in ("n1", "n2")
    ]
    theirs = [worker for other in others for worker in other.placed]
    nodes.append(make_node_view("n3", gpus=1, workers=theirs, free_gpus=0))
    memory = Memory(idle_since_s=NOW_S - idle_s)
    found = policy("gandiva").allocate(
        make_snapshot(nodes=nodes, jobs=[job, *others], resize_cooldown_s=cooldown_s),
        msgspec.msgpack.encode(memory),
    )
    return {
        placement.node: placement.worker_count
        for each in found.decisions
        if isinstance(each, Resize)
        for placement in each.added
    }


def test_a_job_grows_on_the_node_that_it_stands_on_only() -> None:
    """All of that server and none of another one, whatever is free there."""
    assert grown(elastic("n1", "n1")) == {"n1": 2}


def test_a_gang_on_two_nodes_does_not_grow() -> None:
    """Growth ends at one server: a gang that is spread already has none to grow on."""
    assert grown(elastic("n1", "n2")) == {}


def test_a_job_grows_to_what_it_can_use_of_what_is_free() -> None:
    """The least of both: its most workers, and the idle GPUs of its node."""
    assert grown(elastic("n1", "n1", most=3)) == {"n1": 1}
    assert grown(elastic("n1", "n1"), busy=1) == {"n1": 1}


def test_a_job_grows_after_an_idle_period_and_its_cooldown() -> None:
    """Not a second before GPUs were idle for `grow_after_s`, nor within a resize's cooldown."""
    assert grown(elastic("n1", "n1"), idle_s=59.0) == {}
    late = elastic("n1", "n1", resized_at_s=NOW_S - 99.0)
    assert grown(late, cooldown_s=100.0) == {}
    assert grown(late, cooldown_s=99.0) == {"n1": 2}


@pytest.mark.parametrize("since_s", [5.0, 90.0])
def test_nobody_grows_while_somebody_waits_for_a_turn(since_s: float) -> None:
    """A suspended job could compute on the idle GPUs as soon as it has rested, so that they are for
    it: whether its turn comes now or not, it has waited."""
    host = seated("host", "n3", busy=0.5, since_s=since_s)
    waits = suspended("waits", "n3", since_s=since_s, started_s_ago=100.0)
    assert grown(elastic("n1", "n1"), others=[host]) == {"n1": 2}
    assert grown(elastic("n1", "n1"), others=[host, waits]) == {}
