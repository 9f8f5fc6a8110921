"""DRF makes room with flexible workers: those that it chose go, and nobody goes for nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.registry import policy
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.policies.tenant_books import waits


def elastic() -> JobView:
    """A base gang on one node, and flexible workers that alternate between two others."""
    nodes = ("n2", "n2", "n2", "n0", "n1", "n0", "n1")
    placed = tuple(
        make_worker_view("elastic", index, node, is_flexible=index > 2)
        for index, node in enumerate(nodes)
    )
    made = make_job_view("elastic", state=JobState.RUNNING, workers=(3, 7), placed=placed)
    return replace(made, tenant="b")


def full(*waiting: JobView) -> ClusterSnapshot:
    """Three nodes that the elastic job fills."""
    job = elastic()
    nodes = [
        make_node_view(name, gpus=gpus, workers=[w for w in job.placed if w.node == name])
        for name, gpus in (("n0", 2), ("n1", 2), ("n2", 3))
    ]
    return make_snapshot(nodes=nodes, jobs=(job, *waiting))


def resized(decisions: tuple[object, ...]) -> list[tuple[int, ...]]:
    """Who goes."""
    return [each.removed_workers for each in decisions if isinstance(each, Resize)]


def test_the_workers_go_that_make_room_on_one_node() -> None:
    """A gang that needs a node's GPUs starts there in the same pass: not the newest workers of any
    node leave, which would make room on neither."""
    found = policy("drf").allocate(full(waits("gang", "a", 2)), b"").decisions
    assert resized(found) == [(4, 6)]
    assert [
        (each.job_id, each.placements[0].node) for each in found if isinstance(each, Start)
    ] == [("gang", "n1")]


def test_flexible_workers_of_its_own_tenant_make_room_for_a_gang() -> None:
    """They are dealt on what gangs leave, whichever came first: nobody else has less by it."""
    found = policy("drf").allocate(full(waits("gang", "b", 2)), b"").decisions
    assert resized(found) == [(4, 6)]
    assert [each.job_id for each in found if isinstance(each, Start)] == ["gang"]


def test_who_has_more_gives_flexible_workers_before_its_own_tenant() -> None:
    """Of eight GPUs b has six and a two, one of each flexible at least: b gives one."""
    mine = (make_worker_view("mine", 0, "n"), make_worker_view("mine", 1, "n", is_flexible=True))
    theirs = [make_worker_view("theirs", at, "n", is_flexible=at > 0) for at in range(6)]
    held = [
        make_job_view(name, state=JobState.RUNNING, workers=(1, 8), placed=placed)
        for name, placed in (("mine", mine), ("theirs", theirs))
    ]
    jobs = (replace(held[0], tenant="a"), replace(held[1], tenant="b"), waits("gang", "a", 1))
    nodes = [make_node_view("n", workers=(*mine, *theirs))]
    found = policy("drf").allocate(make_snapshot(nodes=nodes, jobs=jobs), b"").decisions
    assert [each.job_id for each in found if isinstance(each, Resize)] == ["theirs"]


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_an_elastic_job_makes_room_for_several_gangs_at_a_time(tenant: str) -> None:
    """Of one tenant or another: each shrink takes its time, in which nobody else gets anything."""
    gangs = [waits(f"g{at}", tenant, 1) for at in range(2)]
    found = policy("drf").allocate(full(*gangs), b"").decisions
    assert resized(found) == [(5, 6)]
    assert [each.job_id for each in found if isinstance(each, Start)] == ["g0", "g1"]


def test_no_gang_of_others_is_stopped_as_if_its_own_flexible_workers_had_gone() -> None:
    """They make no room for it where they are: with them a has 10 of 20 after the start, b 8."""
    elastic = tuple(make_worker_view("e", at, "n1", is_flexible=at > 0) for at in range(4))
    held = [
        replace(
            make_job_view(
                name, state=JobState.RUNNING, workers=span, gpus_per_worker=gpus, placed=placed
            ),
            tenant=tenant,
        )
        for name, tenant, span, gpus, placed in (
            ("e", "a", (1, 4), 1, elastic),
            ("x", "b", (1, 1), 8, (make_worker_view("x", 0, "n0", gpus=8),)),
            ("y", "b", (1, 1), 8, (make_worker_view("y", 0, "n2", gpus=8),)),
        )
    ]
    nodes = [
        make_node_view(job.placed[0].node, gpus=gpus, workers=job.placed)
        for job, gpus in zip(held, (4, 8, 8), strict=True)
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=(*held, waits("gang", "a", 6)))
    assert policy("drf:preempts=true").allocate(snapshot, b"").decisions == ()


def grants(snapshot: ClusterSnapshot, workers: int, *leaving: int, room_for: str) -> list[Grant]:
    """The elastic job keeps so many, and the other jobs start."""
    job, *others = snapshot.jobs
    return [
        *(Grant(job=each, workers=1, reason="start", gpu_type="H100") for each in others),
        Grant(
            job=job,
            workers=workers,
            reason="shrink",
            leaving=leaving,
            room_for=(JobId(room_for),),
        ),
    ]


def test_named_workers_leave_before_the_newest() -> None:
    """And where too few are named the newest of the others."""
    snapshot = full(waits("one", "a", 1))
    for workers, leaving, gone in ((6, (3,), (3,)), (5, (3,), (3, 6)), (5, (3, 4, 5), (4, 5))):
        plan = carry_out(snapshot, grants(snapshot, workers, *leaving, room_for="one"))
        assert resized(plan.decisions) == [gone]


def test_nobody_leaves_for_a_start_that_does_not_come_about() -> None:
    """One worker less on each node is room for no gang of two GPUs, so that both stay; what another
    takes of it has gone all the same."""
    snapshot = full(waits("gang", "a", 2))
    plan = carry_out(snapshot, grants(snapshot, 5, 5, 6, room_for="gang"))
    assert plan.decisions == ()
    assert [hold.job_id for hold in plan.holds] == ["gang"]
    snapshot = full(waits("gang", "a", 2), waits("one", "a", 1))
    plan = carry_out(snapshot, grants(snapshot, 5, 5, 6, room_for="gang"))
    assert resized(plan.decisions) == [(5, 6)]
