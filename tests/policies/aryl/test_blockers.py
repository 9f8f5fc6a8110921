"""Why a job waits: all blockers at once, with numbers, and nothing that is not one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from common.model import NodeRole, Preemptibility
from coordinator.policies.aryl.blockers import blockers_of, holds
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.snapshot import JobView, NodeView, ServiceView
from coordinator.policies.tenants.infeasible import hosts_of
from tests.harness.builders import (
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)

LENT = NodeRole.ON_LOAN


def why(
    job: JobView,
    *nodes: NodeView,
    services: Iterable[ServiceView] = (),
    jobs: Iterable[JobView] = (),
) -> tuple[str, ...]:
    """Blockers of a job on nodes."""
    services = tuple(services) or (make_service_view(),)
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=services)
    return blockers_of(snapshot, PlacementState(snapshot), job)


def test_the_need_is_named_beside_what_is_free() -> None:
    """GPUs, workers and their size against free GPUs, nodes and whole workers that fit."""
    nodes = [make_node_view("n1", free_gpus=3), make_node_view("n2", free_gpus=3)]
    nodes += [make_node_view("n3", free_gpus=0)]
    job = make_job_view("j", workers=(3, 3), gpus_per_worker=2)
    assert why(job, *nodes) == (
        "needs 6 GPUs of type H100, 3 workers of 2; 6 free on 2 nodes, room for 2 workers",
    )
    fits = why(make_job_view("fits"), *nodes)
    assert fits[0].endswith("1 worker of 1; 6 free on 2 nodes, room for 1 worker")


def test_gpus_of_flexible_workers_that_can_go_are_told_apart_from_free_ones() -> None:
    """What base demand could take is no blocker, and nobody sees it free in the list of nodes."""
    nodes, jobs = make_cluster(
        {"n1": {"wide": 4}}, flexible={"n1": {"wide": 4}}, role=NodeRole.TRAINING
    )
    found = why(make_job_view("j", gpus_per_worker=8), *nodes, jobs=jobs)
    assert found[0].endswith(
        "1 worker of 8; 0 free and 4 held by flexible workers that can be released, on 1 node, "
        "room for 0 workers"
    )


def test_gpus_that_are_sick_or_used_by_strangers_are_named_with_their_nodes() -> None:
    """Else an idle node that takes nobody looks like one that does; closed ones have their own
    reason."""
    sick = replace(make_node_view("n1", free_gpus=6), sick_gpus=2)
    taken = replace(make_node_view("n2", free_gpus=7), trespassed_gpus=1)
    both = replace(make_node_view("n3", free_gpus=4), sick_gpus=1, trespassed_gpus=3)
    closed = replace(make_node_view("n4", is_drained_by_operator=True), sick_gpus=8)
    found = why(make_job_view("j", gpus_per_worker=8), sick, taken, both, closed)
    assert found[-2:] == (
        "3 GPUs not well: 2 on n1, 1 on n3",
        "4 GPUs used by foreign processes: 1 on n2, 3 on n3",
    )


def test_every_blocker_is_named_not_the_first() -> None:
    """One job, six reasons: too large a worker, no room, cordoned, serving, silent, not lent for
    it; each of them with its numbers."""
    nodes = [
        make_node_view("n1", gpus=4),
        make_node_view("n2", gpus=4, is_drained_by_operator=True),
        make_node_view("n3", gpus=4, role=NodeRole.LOST),
        make_node_view("s1", gpus=4, role=NodeRole.SERVING),
        make_node_view("s2", gpus=4, role=NodeRole.WARMING),
        make_node_view("l1", gpus=4, role=LENT, is_reclaimed=True),
        make_node_view("l2", gpus=4, role=LENT),
    ]
    found = why(make_job_view("j", gpus_per_worker=8, preemptibility=Preemptibility.NON), *nodes)
    assert found == (
        "needs 8 GPUs of type H100, 1 worker of 8; 4 free on 1 node, room for 0 workers",
        "can never run here: no node of type H100 has 8 GPUs; the largest has 4",
        "1 node of type H100 cordoned",
        "3 nodes of type H100 not lent to training",
        "1 node of type H100 closed to workers now",
        "service chat: preemptibility non excludes the job from nodes that it lends",
    )


def test_each_accepted_type_is_explained() -> None:
    """In the order of the job's own list; one that no node has is named as such."""
    nodes = [make_node_view("h1", gpus=4), make_node_view("a1", gpu_type="A100", gpus=2)]
    job = make_job_view("j", types=("A100", "B200", "H100"), gpus_per_worker=8)
    found = why(job, *nodes)
    assert [line for line in found if line.startswith(("needs", "GPU type"))] == [
        "needs 8 GPUs of type A100, 1 worker of 8; 2 free on 1 node, room for 0 workers",
        "GPU type B200 not present",
        "needs 8 GPUs of type H100, 1 worker of 8; 4 free on 1 node, room for 0 workers",
    ]


def test_a_fungible_job_is_told_of_types_that_take_nobody() -> None:
    """Also those types whose nodes all serve or are cordoned now."""
    nodes = [
        make_node_view("h1", gpus=4),
        make_node_view("s1", gpu_type="T4", role=NodeRole.SERVING),
    ]
    found = why(make_job_view("j", gpus_per_worker=8, multiplier={"T4": 2}), *nodes)
    assert (
        "needs 16 GPUs of type T4, 2 workers of 8; 0 free on 0 nodes, room for 0 workers" in found
    )
    assert "1 node of type T4 not lent to training" in found


@pytest.mark.parametrize("role", [LENT, NodeRole.SERVING])
def test_services_that_exclude_a_job_are_named_whether_they_lend_or_not(role: NodeRole) -> None:
    """Grace above a service's limit, semi-preemptible base gangs, a service that nobody set: also
    while its nodes still serve, as none is lent for the sake of a job that may not use it."""
    nodes = [
        make_node_view("l1", role=role),
        make_node_view("l2", role=role, service="search"),
        make_node_view("l3", role=role, service="voice"),
        make_node_view("l4", role=role, service="who"),
    ]
    services = [
        make_service_view("chat", max_grace_s=60.0),
        make_service_view("search", max_grace_s=10.0),
        make_service_view("voice", max_grace_s=300.0),
    ]
    slow = make_job_view("slow", types=("H100",), grace_s=90.0)
    found = why(slow, *nodes, services=services)
    assert [line for line in found if line.startswith("service")] == [
        "service chat: the job's grace 90 s exceeds the 60 s that chat allows, "
        "so chat's nodes are not lent to it",
        "service search: the job's grace 90 s exceeds the 10 s that search allows, "
        "so search's nodes are not lent to it",
        "service who: this cell has no settings of it, so its nodes are not lent",
    ]
    semi = make_job_view("semi", types=("H100",), preemptibility=Preemptibility.SEMI)
    assert [line for line in why(semi, *nodes, services=services) if "semi" in line] == [
        f"service {name}: preemptibility semi excludes the base gang from nodes that it lends"
        for name in ("chat", "search", "voice", "who")
    ]


def test_a_service_of_another_gpu_type_is_no_blocker() -> None:
    """A job that accepts one type is not told of nodes that it would not take anyway."""
    nodes = [make_node_view("h1"), make_node_view("s1", gpu_type="T4", role=NodeRole.SERVING)]
    job = make_job_view("j", types=("H100",), gpus_per_worker=8, grace_s=90.0)
    assert not [line for line in why(job, *nodes) if line.startswith("service")]


def test_a_gang_larger_than_all_nodes_together_is_told_that_it_never_runs() -> None:
    """Waiting cures nothing: neither too few GPUs, nor GPUs that lie in too small pieces, nor nodes
    that the job may never use."""
    nodes = [make_node_view("n1", gpus=6), make_node_view("n2", gpus=6, free_gpus=0)]
    never = "can never run here: all 2 nodes of type H100 have 12 GPUs together, room for "
    assert never + "12 workers" in why(make_job_view("many", workers=(13, 13)), *nodes)
    pieces = make_job_view("pieces", workers=(3, 3), gpus_per_worker=4)
    assert never + "2 workers" in why(pieces, *nodes)
    fits = make_job_view("fits", workers=(12, 12))
    assert not [line for line in why(fits, *nodes) if "never" in line]
    lent = [*nodes, *(make_node_view(f"s{n}", gpus=8, role=NodeRole.SERVING) for n in (1, 2))]
    loyal = make_job_view("loyal", workers=(13, 13), preemptibility=Preemptibility.NON)
    assert (
        "can never run here: the 2 nodes of type H100 that it may use have 12 GPUs together, "
        "room for 12 workers" in why(loyal, *lent)
    )
    assert not [
        line for line in why(make_job_view("j", workers=(13, 13)), *lent) if "never" in line
    ]


def test_an_empty_cell_says_so() -> None:
    """No nodes, no types: one plain sentence."""
    assert why(make_job_view("j")) == ("no nodes are known",)


def test_a_hold_carries_all_blockers() -> None:
    """The sentence that people read is all of the blockers, in their order."""
    node = make_node_view("n1", gpus=4)
    snapshot = make_snapshot(nodes=[node])
    job = make_job_view("j", gpus_per_worker=8)
    (hold,) = holds(snapshot, PlacementState(snapshot), [job])
    assert hold.job_id == "j"
    assert len(hold.blockers) == 2


def test_a_strict_order_names_the_job_in_front() -> None:
    """The head is told what it needs, all others whom they wait for."""
    snapshot = make_snapshot(nodes=[make_node_view("n1", free_gpus=4)])
    jobs = [make_job_view("head", gpus_per_worker=8), make_job_view("next"), make_job_view("last")]
    head, *others = holds(snapshot, PlacementState(snapshot), jobs, strict=hosts_of(snapshot))
    assert head.blockers[0].startswith("needs 8 GPUs")
    behind = ("behind head, which does not fit (the order is strict)",)
    assert [hold.blockers for hold in others] == [behind, behind]


def test_jobs_of_one_shape_get_the_same_answer_and_others_their_own() -> None:
    """Sharing the work of looking mixes nobody up."""
    nodes = [make_node_view("n1", gpus=4), make_node_view("l1", gpus=4, role=LENT)]
    snapshot = make_snapshot(nodes=nodes, services=[make_service_view()])
    jobs = [
        make_job_view("a", gpus_per_worker=8),
        make_job_view("b", gpus_per_worker=8, grace_s=90.0),
        make_job_view("c", gpus_per_worker=8),
    ]
    room = PlacementState(snapshot)
    by_job = {hold.job_id: hold.blockers for hold in holds(snapshot, room, jobs)}
    assert by_job == {job.job_id: blockers_of(snapshot, room, job) for job in jobs}
    assert by_job[jobs[0].job_id] != by_job[jobs[1].job_id]
