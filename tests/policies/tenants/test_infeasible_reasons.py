"""What no waiting cures is the only cause that a policy names, and it blocks no other job's
line."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import NodeRole
from coordinator.policies.contract.decisions import FAIR_SHARE, Preempt, Reject, Start, Wait
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import POLICIES, policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.policies.tenant_books import names, runs
from tests.tables import each_row

WHY = "can never run here: all 2 nodes of type H100 have 4 GPUs together, room for 2 workers"


def gang() -> JobView:
    """Fifty workers of two GPUs."""
    made = make_job_view("big", workers=(50, 50), gpus_per_worker=2, submitted_at_s=NOW_S - 100.0)
    return replace(made, tenant="a", waiting_since_s=NOW_S - 100.0)


def small(name: str = "small", tenant: str = "b") -> JobView:
    """One GPU, submitted later."""
    return replace(make_job_view(name, submitted_at_s=NOW_S - 10.0), tenant=tenant)


def cell(*jobs: JobView) -> ClusterSnapshot:
    """Two nodes of two GPUs."""
    there = [
        make_node_view(
            f"n{n}", gpus=2, workers=[w for job in jobs for w in job.placed if w.node == f"n{n}"]
        )
        for n in range(2)
    ]
    return make_snapshot(nodes=there, jobs=jobs)


@each_row("name", sorted(POLICIES))
def test_a_job_that_can_never_run_is_told_so_under_every_policy(name: str) -> None:
    """Whoever is before it, and whatever the policy weighs; those that decide jointly add nothing
    that would not be true of it."""
    made, snapshot = policy(name), cell(gang(), small())
    memory = made.allocate(snapshot, b"").memory
    [blockers] = [
        hold.blockers for hold in made.pending_reasons(snapshot, memory) if hold.job_id == "big"
    ]
    assert WHY in blockers
    assert blockers == (WHY,) or blockers[0].startswith("needs 100 GPUs of type H100")


@pytest.mark.parametrize("name", ["yarn", "yarn-fair", "yarn-capacity"])
def test_the_head_of_a_line_that_can_never_run_blocks_nobody(name: str) -> None:
    """Not even in its own queue; one that does not fit now does."""
    made, late = policy(name), small("late", tenant="a")
    assert names(made.allocate(cell(gang(), late), b"").decisions, Start) == {"late"}
    full = replace(gang(), workers=replace(gang().workers, min=2, max=2))
    snapshot = cell(runs("r", "c", "n0", 1), full, late)
    assert names(made.allocate(snapshot, b"").decisions, Start) == set()


def test_nobody_is_stopped_for_a_queue_s_job_that_can_never_run() -> None:
    """The first of the queue that could run is who is due."""
    made = policy("yarn-fair:preempts=true:timeout_s=1")
    busy = [
        job_with(runs(f"r{n}", "b", f"n{n // 2}", 1), started_at_s=NOW_S - 9.0) for n in range(4)
    ]
    snapshot = cell(*busy, gang(), small("due", tenant="a"))
    before = made.allocate(snapshot, b"").memory
    found = made.allocate(replace(snapshot, now_s=NOW_S + 5.0), before).decisions
    assert names(found, Start) == {"due"}
    assert len(names(found, Preempt)) == 1


def test_neither_a_quota_nor_a_place_is_what_it_waits_for() -> None:
    """Philly counts no delay of it; of a gang that could run it does."""
    made, second = policy("philly"), small()
    assert made.allocate(cell(gang(), second), b"").waits == ()
    full = replace(gang(), workers=replace(gang().workers, min=2, max=2))
    found = made.allocate(cell(runs("r", "c", "n0", 1), runs("s", "c", "n1", 1), full), b"")
    assert found.waits == (Wait(kind=FAIR_SHARE, jobs=(full.job_id,)),)


def test_a_deadline_that_no_promise_to_another_stands_against_is_refused_for_its_gang() -> None:
    """Nothing was promised to anybody there."""
    asks = replace(gang(), deadline_at_s=NOW_S + 9e6)
    [reject] = policy("qos-elasticflow").allocate(cell(asks), b"").decisions
    assert isinstance(reject, Reject) and reject.earliest_s is None
    assert reject.reason.endswith("cannot be met at all: its base gang never fits")


def of_t4(role: NodeRole, *, is_open: bool = False) -> list[NodeView]:
    """Two nodes of two T4, and of little memory; of a service where they serve."""
    service = "chat" if role == NodeRole.SERVING else None
    made = [
        make_node_view(f"t{n}", gpus=2, gpu_type="T4", role=role, service=service) for n in range(2)
    ]
    return [replace(node, is_schedulable=is_open, cpus=8, memory_bytes=2**30) for node in made]


def told(name: str, nodes: list[NodeView], asks: JobView) -> tuple[str, ...]:
    """What a policy says of a job that waits beside a node of another type."""
    made = policy(name)
    services = [make_service_view("chat")]
    snapshot = make_snapshot(nodes=[*nodes, make_node_view("n0")], jobs=[asks], services=services)
    memory = made.allocate(snapshot, b"").memory
    [hold] = made.pending_reasons(snapshot, memory)
    return hold.blockers


def t4_job(**wants: int) -> JobView:
    """One worker of one T4."""
    return job_with(make_job_view("j", types=("T4",)), tenant="a", **wants)


@each_row("name", sorted(POLICIES))
@each_row(
    ("role", "why"),
    [
        (NodeRole.SERVING, "2 nodes of type T4 not lent to training"),
        (NodeRole.TRAINING, "2 nodes of type T4 closed to workers now"),
    ],
)
def test_a_job_is_told_that_no_node_of_its_type_is_open_under_every_policy(
    name: str, role: NodeRole, why: str
) -> None:
    """They may be again, so that it is not told that it can never run."""
    blockers = told(name, of_t4(role), t4_job())
    assert blockers.count(why) == 1
    assert not [said for said in blockers if "never" in said]


@each_row("name", ["drf", "tetris"])
@each_row("is_open", [False, True])
def test_what_no_node_has_cpus_or_memory_for_can_never_run(name: str, is_open: bool) -> None:
    """Whether or not its nodes are open now."""
    nodes = of_t4(NodeRole.TRAINING, is_open=is_open)
    for wants in ({"cpus_per_worker": 9}, {"memory_bytes_per_worker": 2**31}):
        assert told(name, nodes, t4_job(**wants))[0].startswith("can never run here: its CPUs")


@each_row("name", ["drf", "tetris", "yarn", "mesos", "philly"])
def test_a_job_that_others_keep_from_its_nodes_is_not_told_which_are_closed(name: str) -> None:
    """One is open, and would hold it if nobody else were there."""
    closed, open_ = of_t4(NodeRole.TRAINING, is_open=True)
    nodes = [replace(closed, is_schedulable=False), replace(open_, free_gpus=0)]
    assert not [said for said in told(name, nodes, t4_job()) if "closed to workers" in said]


@each_row("name", sorted(POLICIES))
def test_a_node_that_a_job_avoids_is_not_open_to_it(name: str) -> None:
    """With nobody else there it would run nowhere, so which nodes are closed is told."""
    closed, avoided = of_t4(NodeRole.TRAINING, is_open=True)
    nodes = [replace(closed, is_schedulable=False), avoided]
    asks = job_with(t4_job(), nodes_avoided=(avoided.name,))
    assert told(name, nodes, asks).count("1 node of type T4 closed to workers now") == 1


@each_row("name", sorted(POLICIES))
@each_row("cpus", [0, 8])
def test_a_node_without_gpus_hosts_nobody_whatever_else_it_has(name: str, cpus: int) -> None:
    """Its driver may have found none: a job that fits nowhere else waits, others go elsewhere."""
    bare = replace(make_node_view("c0", gpus=0, gpu_type=""), cpus=cpus)
    made, whole = policy(name), make_node_view("n0")
    for size, starts in ((1, {"j"}), (9, set[str]())):
        asks = replace(make_job_view("j", gpus_per_worker=size), tenant="a", cpus_per_worker=1)
        found = made.allocate(make_snapshot(nodes=[bare, whole], jobs=[asks]), b"").decisions
        assert names(found, Start) == starts
        places = [
            place.node for each in found if isinstance(each, Start) for place in each.placements
        ]
        assert bare.name not in places
