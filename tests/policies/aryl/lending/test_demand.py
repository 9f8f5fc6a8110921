"""Which spare nodes are lent: those that a waiting gang or an elastic job could use, no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, JobId, JobState, Mode, NodeName, NodeRole, Preemptibility
from coordinator.policies.aryl.lending.balance import balance, lendable, loan_limit
from coordinator.policies.contract.decisions import Loan, Recommend, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView, ServiceView
from coordinator.policies.registry import policy
from tests.draws import pick, whole
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.strategies import snapshots
from tests.tables import each_row

FULL = 8


def serving(count: int, **changes: Any) -> list[NodeView]:
    """Nodes of 8 GPUs that serve `chat`, or what `changes` says."""
    return [
        make_node_view(f"n{number}", role=NodeRole.SERVING, **changes) for number in range(count)
    ]


def idle(name: str = "chat", **changes: Any) -> ServiceView:
    """A service that can spare every node it has."""
    return make_service_view(name, load=0.0, min_serving=0, **changes)


def lent(
    nodes: Sequence[NodeView],
    jobs: Sequence[JobView],
    *,
    services: Sequence[ServiceView] = (),
    bundle: str = "aryl",
) -> list[str]:
    """Names of the nodes that the next loan pass lends."""
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=services or [idle()])
    return sorted(d.node for d in policy(bundle).lend(snapshot) if isinstance(d, Loan))


def gang(name: str = "gang", *, nodes: int, **changes: Any) -> JobView:
    """A job that needs that many whole nodes."""
    return make_job_view(name, workers=(nodes, nodes), gpus_per_worker=FULL, **changes)


def test_a_node_that_takes_nothing_serves_on_while_another_one_is_lent() -> None:
    """It is as ready as the others, so it keeps none of them at home either."""
    stuck, *others = serving(3)
    nodes = [replace(stuck, takes_nothing=True), *others]
    service = make_service_view(load=5.0, capacity_per_node=10.0, min_serving=0)
    assert lent(nodes, [gang(nodes=2)], services=[service]) == ["n1", "n2"]
    assert lent(nodes, [gang(nodes=3)], services=[service]) == []


def test_nothing_is_lent_while_nobody_waits() -> None:
    """Spare alone is no reason."""
    assert lent(serving(4), []) == []


@pytest.mark.parametrize(("first", "expected"), [(4, []), (5, ["n0", "n1"])])
def test_nodes_are_lent_past_the_head_of_a_strict_line_that_could_never_run(
    first: int, expected: list[str]
) -> None:
    """Of four nodes two are spare: a gang of four keeps them from others, one of five never."""
    service = make_service_view(load=20.0, capacity_per_node=10.0, min_serving=0)
    head, small = gang(nodes=first, remaining_work_s=1.0), gang("small", nodes=2)
    found = lent(serving(4), [head, small], services=[service], bundle="aryl:is_strict=true")
    assert found == expected


def test_a_gang_gets_all_its_nodes_or_none() -> None:
    """Three spare nodes: a gang of three starts, one of four would wait on, so nothing is lent."""
    assert lent(serving(3), [gang(nodes=3)]) == ["n0", "n1", "n2"]
    assert lent(serving(3), [gang(nodes=4)]) == []


def test_a_gang_gets_only_what_is_missing() -> None:
    """Room on training nodes counts, and what flexible workers would leave to base demand."""
    nodes = [*serving(3), make_node_view("t1"), make_node_view("t2", free_gpus=4)]
    assert lent(nodes, [gang(nodes=3)]) == ["n0", "n1"]
    elastic = make_job_view(
        "elastic",
        state=JobState.RUNNING,
        workers=(1, 3),
        gpus_per_worker=4,
        placed=[
            make_worker_view("elastic", 0, "t1", gpus=4),
            make_worker_view("elastic", 1, "t2", gpus=4, is_flexible=True),
            make_worker_view("elastic", 2, "t2", gpus=4, is_flexible=True),
        ],
        preemptibility=Preemptibility.NON,
    )
    workers = elastic.placed
    nodes = [
        *serving(3),
        make_node_view("t1", workers=workers[:1]),
        make_node_view("t2", workers=workers[1:]),
    ]
    assert lent(nodes, [elastic, gang(nodes=3)]) == ["n0", "n1"]


def test_a_job_that_starts_without_a_loan_gets_none() -> None:
    """Loans are decided before the pass that would start it on the free training node."""
    assert lent([*serving(2), make_node_view("t1")], [gang(nodes=1)]) == []
    assert lent([*serving(2), make_node_view("t1", free_gpus=7)], [gang(nodes=1)]) == ["n0"]


def test_a_node_that_a_job_may_not_use_is_no_supply_for_it() -> None:
    """It is not lent for the job, and what one job may not use is lent for another one."""
    choosy = job_with(gang(nodes=1), nodes_avoided=(NodeName("n0"), NodeName("n2")))
    assert lent(serving(3), [choosy]) == ["n1"]
    assert (
        lent(serving(3), [job_with(choosy, nodes_avoided=tuple(n.name for n in serving(3)))]) == []
    )
    assert lent(serving(3), [choosy, gang("any", nodes=1)]) == ["n0", "n1"]


def test_a_job_that_may_not_use_a_free_node_does_not_hide_it_from_others() -> None:
    """The second one grows onto the free training node; a loan is made for the first alone."""

    def elastic(name: str) -> JobView:
        worker = make_worker_view(name, 0, f"t-{name}", gpus=FULL)
        return make_job_view(
            name,
            state=JobState.RUNNING,
            workers=(1, 2),
            gpus_per_worker=FULL,
            gpu_type="H100",
            placed=[worker],
            remaining_work_s=1e6,
        )

    jobs = [job_with(elastic("a"), nodes_avoided=(NodeName("t2"),)), elastic("b")]
    nodes = [make_node_view(f"t-{job.job_id}", workers=job.placed) for job in jobs]
    assert len(lent([*serving(3), *nodes, make_node_view("t2")], jobs)) == 1


def test_pieces_do_not_make_a_node() -> None:
    """A worker of eight GPUs is not helped by nodes of four, however many; two of four are."""
    small = serving(4, gpus=4)
    assert lent(small, [gang(nodes=1)]) == []
    assert lent(small, [make_job_view("two", workers=(2, 2), gpus_per_worker=4)]) == ["n0", "n1"]


def test_a_gang_has_one_gpu_type() -> None:
    """One spare node of each of two types is not room for two workers."""
    mixed = [
        make_node_view("a", role=NodeRole.SERVING, gpu_type="A100"),
        make_node_view("h", role=NodeRole.SERVING, gpu_type="H100"),
    ]
    assert lent(mixed, [gang(nodes=2)]) == []
    assert lent(mixed, [gang("one", nodes=1, types=("H100",))]) == ["h"]
    assert lent(mixed, [gang("one", nodes=1, types=("A100", "H100"))]) == ["a"]


def test_a_worker_multiplier_makes_a_gang_larger() -> None:
    """One worker that becomes four on the lent type needs four nodes, and three are no use."""
    job = gang(nodes=1, multiplier={"H100": 4})
    assert len(lent(serving(9), [job])) == 4
    assert lent(serving(3), [job]) == []


def test_two_services_may_lend_for_one_gang() -> None:
    """Each has one node to spare and the gang needs two: both are lent, or neither."""
    nodes = [
        make_node_view("a", role=NodeRole.SERVING, service="ask"),
        make_node_view("c", role=NodeRole.SERVING, service="chat"),
    ]
    both = [idle("ask"), idle("chat")]
    assert lent(nodes, [gang(nodes=2)], services=both) == ["a", "c"]
    strict = [idle("ask", max_grace_s=1.0), idle("chat")]
    assert lent(nodes, [gang(nodes=2)], services=strict) == []


def test_no_more_than_is_spare_is_planned_with() -> None:
    """Two of three nodes are spare: a gang of two gets both, one of three nothing."""
    service = [make_service_view(load=5.0)]
    assert lent(serving(3), [gang(nodes=2)], services=service) == ["n0", "n1"]
    assert lent(serving(3), [gang(nodes=3)], services=service) == []


def test_a_node_on_its_way_covers_demand() -> None:
    """A node that drains for a loan counts before another one is lent, one that is cordoned does
    not: no worker will start there."""
    coming = make_node_view("d1", role=NodeRole.DRAINING)
    cordoned = replace(coming, is_drained_by_operator=True)
    assert lent([*serving(2), coming], [gang(nodes=1)]) == []
    assert lent([*serving(2), cordoned], [gang(nodes=1)]) == ["n0"]
    assert lent([*serving(2), coming], [gang(nodes=2)]) == ["n0"]


def test_the_order_of_the_policy_says_whose_gang_is_completed() -> None:
    """The shorter job is next; what it leaves is too little for the longer one."""
    long = gang("long", nodes=3, remaining_work_s=9e5)
    short = gang("short", nodes=2, remaining_work_s=9e2)
    assert lent(serving(4), [long, short]) == ["n0", "n1"]
    assert lent(serving(5), [long, short]) == [f"n{number}" for number in range(5)]


def test_small_jobs_share_a_node() -> None:
    """Nine jobs of one GPU are two nodes, not nine."""
    jobs = [make_job_view(f"j{number}") for number in range(9)]
    assert lent(serving(9), jobs) == ["n0", "n1"]


def test_the_longest_serving_node_that_helps_is_lent_first() -> None:
    """Ties by name; a node within its hold-off, or too small, is passed over."""
    nodes = [
        make_node_view("n1", role=NodeRole.SERVING, serving_since_s=300.0),
        make_node_view("n2", role=NodeRole.SERVING, serving_since_s=100.0),
        make_node_view("n3", role=NodeRole.SERVING, serving_since_s=0.0, gpus=4),
        make_node_view("n4", role=NodeRole.SERVING, serving_since_s=1e9),
    ]
    assert lent(nodes, [gang(nodes=1)]) == ["n2"]
    assert lent(nodes, [gang(nodes=2)]) == ["n1", "n2"]


@each_row(
    ("job", "is_wanted"),
    [
        (gang("full", nodes=1), True),
        (gang("other type", nodes=1, types=("B200",)), False),
        (make_job_view("too large", gpus_per_worker=16), False),
        (gang("slow to stop", nodes=1, grace_s=61.0), False),
        (gang("never", nodes=1, preemptibility=Preemptibility.NON), False),
        (gang("base only", nodes=1, preemptibility=Preemptibility.SEMI), False),
    ],
)
def test_who_could_use_a_lent_node(job: JobView, is_wanted: bool) -> None:
    """Type, worker size, grace and preemptibility must let the waiting job run there."""
    assert bool(lent(serving(2), [job])) == is_wanted


def test_a_running_elastic_job_grows_on_nodes_of_its_own_type() -> None:
    """If scaling is on, up to its most workers, also a semi-preemptible one; not when the time
    that a worker more saves is less than what its rendezvous costs."""
    elastic = make_job_view(
        "elastic",
        state=JobState.RUNNING,
        workers=(1, 3),
        gpus_per_worker=FULL,
        preemptibility=Preemptibility.SEMI,
        placed=[make_worker_view("elastic", 0, "t1", gpus=FULL)],
    )
    nodes = [*serving(4), make_node_view("t1", workers=elastic.placed)]
    assert lent(nodes, [elastic]) == ["n0", "n1"]
    assert lent(nodes, [elastic], bundle="aryl-loan") == []
    assert lent(nodes, [replace(elastic, gpu_type="A100")]) == []
    assert lent(nodes, [job_with(elastic, remaining_work_s=8.0)]) == []


def test_a_job_that_starts_on_a_loan_may_grow_there() -> None:
    """Its flexible demand counts after every base gang: the last node is another job's."""
    elastic = make_job_view("elastic", workers=(1, 3), gpus_per_worker=FULL)
    assert lent(serving(4), [elastic]) == ["n0", "n1", "n2"]
    assert lent(serving(4), [elastic], bundle="aryl-loan") == ["n0"]
    later = gang("later", nodes=3, remaining_work_s=9e9)
    assert lent(serving(4), [elastic, later]) == ["n0", "n1", "n2", "n3"]


def spanning(job: JobView, speed_ratio: float) -> JobView:
    """The same job on H100 and A100 at once, at that part of its full speed."""
    types = GpuRequest(types=("H100", "A100"), heterogeneous_speed_ratio=speed_ratio)
    return replace(job, gpu=types)


def test_a_gang_that_may_span_types_is_completed_with_two() -> None:
    """One spare node of each type is room for it; it is not for one that has one type at a time,
    nor is one node alone."""
    a100 = make_node_view("a", role=NodeRole.SERVING, gpu_type="A100")
    h100 = make_node_view("h", role=NodeRole.SERVING, gpu_type="H100")
    assert lent([a100, h100], [spanning(gang(nodes=2), 0.7)]) == ["a", "h"]
    assert lent([a100, h100], [spanning(gang(nodes=2), 0.0)]) == []
    assert lent([h100], [spanning(gang(nodes=2), 0.7)]) == []


def test_a_job_grows_on_another_type_only_if_that_makes_it_faster() -> None:
    """Two workers at 0.7 of full speed are faster than one, at 0.4 they are slower."""
    elastic = make_job_view(
        "elastic",
        state=JobState.RUNNING,
        workers=(1, 2),
        gpus_per_worker=FULL,
        placed=[make_worker_view("elastic", 0, "t1", gpus=FULL)],
    )
    a100 = make_node_view("a", role=NodeRole.SERVING, gpu_type="A100")
    nodes = [a100, make_node_view("t1", workers=elastic.placed)]
    assert lent(nodes, [spanning(elastic, 0.7)]) == ["a"]
    assert lent(nodes, [spanning(elastic, 0.4)]) == []


def test_what_is_only_recommended_covers_nothing() -> None:
    """A service in mode act lends for the job whatever another one recommends; that one then
    recommends for what is left, and what it would lend is not counted as lent."""
    nodes = [
        make_node_view("a", role=NodeRole.SERVING, service="ask"),
        make_node_view("c", role=NodeRole.SERVING, service="chat"),
    ]
    services = [idle("ask", mode=Mode.RECOMMEND), idle("chat")]
    for jobs, expected in (
        ([gang(nodes=1)], []),
        ([gang(nodes=1), gang("more", nodes=1)], ["a"]),
        ([gang(nodes=2)], []),
    ):
        snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=services)
        decisions = policy("aryl").lend(snapshot)
        assert [d.node for d in decisions if isinstance(d, Recommend)] == expected
        loans = [d.node for d in decisions if isinstance(d, Loan)]
        assert loans == ([] if jobs[0].workers.min == 2 else ["c"])


# --- a node that is lent is used --------------------------------------------------------------


@st.composite
def generous(draw: st.DrawFn) -> ClusterSnapshot:
    """A busy cluster whose services can spare all their nodes but those that are too fresh."""
    snapshot = draw(snapshots())
    nodes = [
        replace(node, free_gpus=min(node.free_gpus, draw(pick(0, 0, 0, 2, 8))))
        if node.is_schedulable
        else replace(node, serving_since_s=draw(pick(0.0, 0.0, NOW_S)))
        if node.role == NodeRole.SERVING
        else node
        for node in snapshot.nodes
    ]
    services = [
        make_service_view(service.name, load=0.0, min_serving=draw(whole(0, 1)), hold_off_s=200.0)
        for service in snapshot.services
    ]
    made = replace(
        snapshot, nodes=tuple(nodes), services=tuple(services), resize_cooldown_s=0.0, index=None
    )
    # A lent node comes later: by then a pass has done what it can at once, and nobody rests.
    assume(not policy("aryl").allocate(made, b"").decisions)
    return made


def handed_over(snapshot: ClusterSnapshot, names: set[NodeName]) -> ClusterSnapshot:
    """The same cluster when these nodes, and those on their way, have come to training."""
    nodes = [
        replace(node, role=NodeRole.ON_LOAN, is_schedulable=True, serving_since_s=None)
        if node.name in names
        or (node.role == NodeRole.DRAINING and not node.is_drained_by_operator)
        else node
        for node in snapshot.nodes
    ]
    return replace(snapshot, nodes=tuple(nodes), index=None)


def put(snapshot: ClusterSnapshot) -> tuple[set[NodeName], set[JobId]]:
    """Nodes on which the next pass puts workers, and jobs that it starts."""
    nodes: set[NodeName] = set()
    jobs: set[JobId] = set()
    for decision in policy("aryl").allocate(snapshot, b"").decisions:
        match decision:
            case Start():
                jobs.add(decision.job_id)
                nodes |= {placement.node for placement in decision.placements}
            case Resize():
                nodes |= {placement.node for placement in decision.added}
            case _:
                pass
    return nodes, jobs


def loans(snapshot: ClusterSnapshot) -> set[NodeName]:
    """What the next loan pass lends."""
    return {d.node for d in policy("aryl").lend(snapshot) if isinstance(d, Loan)}


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(snapshot=generous())
def test_every_lent_node_is_used_and_no_gang_waits_that_a_loan_would_start(
    snapshot: ClusterSnapshot,
) -> None:
    """Once what was lent has come, the very next pass puts workers on each of these nodes; where
    nothing is lent, all the spare nodes together would not let one more job start."""
    names = loans(snapshot)
    if names:
        used, _ = put(handed_over(snapshot, names))
        assert names <= used
        return
    spare: set[NodeName] = set()
    for service in snapshot.services:
        have = balance(snapshot, service)
        nodes = lendable(snapshot, service, have)
        spare |= {node.name for node in nodes[: loan_limit(have, nodes)]}
    _, without = put(handed_over(snapshot, set()))
    _, with_all = put(handed_over(snapshot, spare))
    assert with_all <= without


def test_no_node_is_lent_for_a_job_that_nodes_could_not_start() -> None:
    """Others that are like it in all else have theirs, also where it stands before them; and no
    service keeps a node ready for it alone."""
    hangs = job_with(gang("a-hangs", nodes=1), wants_no_loan=True)
    assert lent(serving(2), [hangs]) == []
    assert lent(serving(3), [hangs, gang("b", nodes=1), gang("c", nodes=1)]) == ["n0", "n1"]
    snapshot = make_snapshot(nodes=serving(1), jobs=[hangs], services=[idle()])
    said = policy("aryl").not_lent_reasons(snapshot, NodeName("n0"))
    assert said == policy("aryl").not_lent_reasons(
        make_snapshot(nodes=serving(1), services=[idle()]), NodeName("n0")
    )


def test_a_job_that_nodes_could_not_start_has_no_node_lent_to_grow() -> None:
    """It may have what is lent already."""
    grows = make_job_view(
        "grows",
        workers=(1, 4),
        gpus_per_worker=FULL,
        remaining_work_s=1e6,
        placed=(make_worker_view("grows", 0, "t0", gpus=FULL),),
        state=JobState.RUNNING,
        is_resizable=True,
        gpu_type="H100",
    )
    for wants_no_loan in (False, True):
        found = lent(serving(2), [job_with(grows, wants_no_loan=wants_no_loan)])
        assert bool(found) is not wants_no_loan
