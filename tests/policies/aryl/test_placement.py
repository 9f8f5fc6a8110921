"""Where workers go: best fit, groups on lent nodes, and who may run on a lent node at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model import JobState, NodeName, NodeRole, Preemptibility
from coordinator.policies.aryl.gpu_types import types_in_order
from coordinator.policies.aryl.placement import PlacementState, fill
from coordinator.policies.contract.decisions import Placement, merge, placed_count
from coordinator.policies.contract.snapshot import JobView, NodeView, ServiceView
from tests.harness.builders import (
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)

LENT = NodeRole.ON_LOAN
HOME = NodeRole.TRAINING


def room_of(
    *nodes: NodeView,
    service: ServiceView | None = None,
    elastic_base_prefers_loan: bool = False,
) -> PlacementState:
    """Room on nodes that belong to one service, as far as they are lent."""
    snapshot = make_snapshot(nodes=nodes, services=[service or make_service_view()])
    return PlacementState(snapshot, elastic_base_prefers_loan=elastic_base_prefers_loan)


def where(
    room: PlacementState, job: JobView, count: int = 1, *, is_flexible: bool = False
) -> dict[str, int]:
    """Workers per node, in the order of choice."""
    placements = fill(room, job, "H100", count, is_flexible=is_flexible)
    return {str(placement.node): placement.worker_count for placement in placements}


def node_with(name: str, *, base: int = 0, flexible: int = 0, role: NodeRole = LENT) -> NodeView:
    """A node on which jobs hold GPUs: one worker per kind."""
    kinds = [(gpus, is_flexible) for gpus, is_flexible in ((base, False), (flexible, True)) if gpus]
    workers = [
        make_worker_view(f"on-{name}", index, name, gpus=gpus, is_flexible=is_flexible)
        for index, (gpus, is_flexible) in enumerate(kinds)
    ]
    return make_node_view(name, role=role, workers=workers)


def test_a_worker_goes_to_the_fullest_node_that_still_fits() -> None:
    """Best fit: least free GPUs first, and an empty node is opened last."""
    room = room_of(
        node_with("n1", base=2, role=HOME),
        node_with("n2", base=5, role=HOME),
        node_with("n3", base=7, role=HOME),
        make_node_view("n0", gpus=2),
    )
    chosen = where(room, make_job_view("j", gpus_per_worker=2), 9)
    assert list(chosen.items()) == [("n2", 1), ("n1", 3), ("n0", 1)]


def test_equal_nodes_are_taken_by_name() -> None:
    """Nothing but the name decides between equal nodes, so that decisions repeat."""
    room = room_of(make_node_view("n2"), make_node_view("n1"))
    assert list(where(room, make_job_view("j", gpus_per_worker=8), 2)) == ["n1", "n2"]


def test_fill_places_what_fits_and_holds_nothing() -> None:
    """Less than asked when the room ends; the room itself is unchanged until it is held."""
    room = room_of(make_node_view("n1"))
    job = make_job_view("j", gpus_per_worker=3)
    placements = fill(room, job, "H100", 5)
    assert (placed_count(placements), room.free[NodeName("n1")]) == (2, 8)
    room.hold(placements, 3)
    assert room.use(NodeName("n1")) == (2, 2, 0)
    with pytest.raises(AssertionError, match="2 free, 6 asked"):
        room.hold(placements, 3)


@pytest.mark.parametrize(
    ("is_flexible", "order"),
    [
        (False, ["training", "lent-base", "lent-free", "lent-flexible"]),
        (True, ["lent-flexible", "lent-free", "training", "lent-base"]),
    ],
)
def test_base_and_flexible_workers_keep_to_their_groups(
    is_flexible: bool, order: list[str]
) -> None:
    """Base: training nodes, the base group, a lent node that is free, the flexible group last.
    Flexible: the flexible group, a free lent node, training nodes, the base group last."""
    room = room_of(
        node_with("lent-base", base=4),
        make_node_view("lent-free", role=LENT),
        node_with("lent-flexible", flexible=4),
        node_with("training", base=4, role=HOME),
    )
    job = make_job_view("j", workers=(1, 9), gpus_per_worker=4)
    assert list(where(room, job, 9, is_flexible=is_flexible)) == order


def test_the_paper_puts_elastic_base_on_lent_nodes_first() -> None:
    """With the paper's rule lent nodes come before training ones for elastic jobs, never for
    inelastic ones; without it training comes first for both."""
    nodes = (make_node_view("lent", role=LENT), make_node_view("training"))
    elastic = make_job_view("elastic", workers=(1, 2), gpus_per_worker=8)
    inelastic = make_job_view("inelastic", gpus_per_worker=8)
    paper = room_of(*nodes, elastic_base_prefers_loan=True)
    assert list(where(paper, elastic, 2)) == ["lent", "training"]
    assert list(where(paper, inelastic, 2)) == ["training", "lent"]
    assert list(where(room_of(*nodes), elastic, 2)) == ["training", "lent"]


def test_a_lent_node_takes_the_group_of_its_first_worker() -> None:
    """Placing tags a free lent node, and the last worker that leaves takes the tag away."""
    room = room_of(make_node_view("n1", role=LENT), make_node_view("n2", role=LENT))
    base, wide = make_job_view("base"), make_job_view("wide", workers=(1, 2))
    room.hold(fill(room, base, "H100", 1), 1)
    assert where(room, wide, is_flexible=True) == {"n2": 1}
    room.hold(fill(room, wide, "H100", 1, is_flexible=True), 1)
    assert where(room, base) == {"n1": 1}
    assert [room.rank(wide, name, is_flexible=True) for name in room.nodes] == [5, 1]


def test_a_leaving_worker_tags_nothing() -> None:
    """A lent node whose base workers all leave is of no group any more."""
    leaving = make_worker_view("old", 0, "n1", gpus=8, is_leaving=True)
    room = room_of(make_node_view("n1", role=LENT, workers=[leaving]), node_with("n2", base=1))
    job = make_job_view("j", workers=(1, 2))
    assert room.is_empty(next(iter(room.nodes)))
    assert where(room, job, is_flexible=True) == {"n1": 1}


@pytest.mark.parametrize(
    ("kind", "base_may", "flexible_may"),
    [
        (Preemptibility.FULL, True, True),
        (Preemptibility.SEMI, False, True),
        (Preemptibility.NON, False, False),
    ],
)
def test_preemptibility_says_who_may_run_on_a_lent_node(
    kind: Preemptibility, base_may: bool, flexible_may: bool
) -> None:
    """`non` never, `semi` with flexible workers only, `full` with all; at home everybody may."""
    room = room_of(make_node_view("lent", role=LENT), make_node_view("training"))
    job = make_job_view("j", workers=(1, 2), preemptibility=kind, gpus_per_worker=8)
    assert ("lent" in where(room, job, 2)) == base_may
    assert ("lent" in where(room, job, 2, is_flexible=True)) == flexible_may
    assert "training" in where(room, job, 2)


def test_a_job_that_needs_more_grace_than_the_loan_allows_stays_away() -> None:
    """max_grace_s of the lending service is the limit, itself included; training has none."""
    service = make_service_view(max_grace_s=60.0)
    room = room_of(make_node_view("lent", role=LENT), make_node_view("training"), service=service)
    within = make_job_view("within", grace_s=60.0, gpus_per_worker=8)
    beyond = make_job_view("beyond", grace_s=60.5, gpus_per_worker=8)
    assert list(where(room, within, 2)) == ["training", "lent"]
    assert list(where(room, beyond, 2)) == ["training"]


def test_nodes_on_their_way_home_take_nobody() -> None:
    """Serving, draining, reclaimed, cordoned and recalled nodes, and those of a service that is
    not configured, are no room."""
    nodes = [
        make_node_view("serving", role=NodeRole.SERVING),
        make_node_view("draining", role=NodeRole.DRAINING),
        make_node_view("reclaimed", role=LENT, is_reclaimed=True),
        make_node_view("cordoned", is_drained_by_operator=True),
        make_node_view("recalled", role=LENT, service="search"),
        make_node_view("orphan", role=LENT, service="nobody"),
        make_node_view("good", role=LENT),
    ]
    services = [make_service_view(), make_service_view("search", is_recalled=True)]
    room = PlacementState(make_snapshot(nodes=nodes, services=services))
    assert list(room.nodes) == ["good"]


def test_an_attempt_has_one_gpu_type() -> None:
    """A gang is never spread over two types, though each has room for half of it."""
    room = room_of(make_node_view("h1", gpus=4), make_node_view("a1", gpus=4, gpu_type="A100"))
    job = make_job_view("j", workers=(2, 2), gpus_per_worker=4)
    assert {
        gpu_type: placed_count(fill(room, job, gpu_type, 2)) for gpu_type in room.gpu_types
    } == {
        "H100": 1,
        "A100": 1,
    }


def test_gpu_types_are_tried_in_the_order_of_the_job() -> None:
    """A job's own list is its preference; a fungible job tries types of training nodes first,
    then the one that needs fewer workers, then the name."""
    room = room_of(
        make_node_view("lent", role=LENT, gpu_type="A10"),
        make_node_view("n1", gpu_type="V100"),
        make_node_view("n2", gpu_type="H100"),
        make_node_view("n3", gpu_type="A100"),
    )
    picky = make_job_view("picky", types=("V100", "H100", "V100"))
    fungible = make_job_view("fungible", multiplier={"A100": 2})
    assert types_in_order(room, picky) == ["V100", "H100"]
    assert types_in_order(room, fungible) == ["H100", "V100", "A100", "A10"]


def test_the_worker_multiplier_makes_more_workers_of_a_smaller_type() -> None:
    """A fungible job keeps its global batch: twice the workers where a type counts half."""
    job = make_job_view("j", workers=(2, 3), multiplier={"T4": 2})
    on_t4, on_v100 = job.workers_on("T4"), job.workers_on("V100")
    assert [(span.min, span.max) for span in (on_t4, on_v100)] == [(4, 6), (2, 3)]


def test_flexible_workers_count_as_room_for_base_demand_only_where_they_may_go() -> None:
    """`available` adds the flexible workers of jobs that can be resized now, and no others."""
    nodes, jobs = make_cluster(
        {"n1": {"a": 2}}, flexible={"n1": {"a": 2, "b": 2}}, role=NodeRole.TRAINING
    )
    jobs = [
        job if job.job_id == "a" else make_job_view("b", state=JobState.RESIZING, placed=job.placed)
        for job in jobs
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    name = nodes[0].name
    assert (PlacementState(snapshot).free[name], PlacementState(snapshot).available(name)) == (2, 4)
    assert PlacementState(snapshot, has_flexible=False).available(name) == 2


def test_a_worker_that_is_released_and_kept_leaves_no_trace() -> None:
    """Release and keep are each other's undo, and so are save and restore."""
    nodes, jobs = make_cluster({"n1": {"a": 2}}, flexible={"n1": {"a": 2}})
    room = PlacementState(make_snapshot(nodes=nodes, jobs=jobs, services=[make_service_view()]))
    worker = room.flexible[nodes[0].name][0]
    before, saved = room.save(), room.save()
    room.release(worker)
    assert room.use(nodes[0].name) == (6, 1, 0)
    room.keep(worker)
    assert room.save() == before
    room.release(worker)
    room.restore(saved)
    assert room.save() == before


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 3)), max_size=12))
def test_merging_loses_no_worker(parts: list[tuple[bool, int, int]]) -> None:
    """One placement per node and kind, base first, as many workers as before."""
    placements = [
        Placement(node=make_node_view(f"n{node}").name, worker_count=count, is_flexible=kind)
        for kind, node, count in parts
    ]
    merged = merge(placements)
    keys = [(placement.is_flexible, placement.node) for placement in merged]
    assert keys == sorted(set(keys))
    for kind in (False, True):
        of_kind = [p.worker_count for p in placements if p.is_flexible == kind]
        assert sum(p.worker_count for p in merged if p.is_flexible == kind) == sum(of_kind)
