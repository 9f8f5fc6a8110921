"""Gandiva in sets on a fleet of several GPU types: who goes where, and who moves on."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Start
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gandiva.node_sets import Class, Division, NodeSet
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

A100, H100, EIGHT = Class(4, "A100", 1), Class(4, "H100", 1), Class(8, "H100", 1)


def nodes(kind: Class, names: str, jobs: str = "") -> NodeSet:
    """A set; jobs have names of one letter."""
    return NodeSet(kind, tuple(map(NodeName, names.split())), [JobId(name) for name in jobs])


def two_types(*sets: NodeSet) -> Division:
    """A node of each type, h and a, with 4 GPUs."""
    return Division(
        sets,
        gpus={NodeName("h"): 4, NodeName("a"): 4},
        types={NodeName("h"): "H100", NodeName("a"): "A100"},
    )


def test_a_newcomer_takes_turns_nowhere_while_another_type_has_room() -> None:
    """The first class with an open set or loose nodes, in its order; then the least loaded set."""
    found = two_types(nodes(H100, "h", "a"))
    assert found.place(JobId("b"), [H100, A100], ())
    assert found.set_of()[JobId("b")].kind == A100
    full = two_types(nodes(H100, "h", "ab"), nodes(A100, "a", "c"))
    assert full.place(JobId("d"), [H100, A100], ())
    assert full.set_of()[JobId("d")].kind == A100
    assert not full.place(JobId("e"), [EIGHT], ())


@pytest.mark.parametrize(
    ("sets", "moves"),
    [
        pytest.param((("h", "ab"),), True, id="to nodes of the other type in no set"),
        pytest.param((("h", "ab"), ("a", "")), True, id="into a set there that has room"),
        pytest.param((("h", "ab"), ("a", "c")), False, id="not to wait for a turn there"),
        pytest.param((("h", "ba"),), False, id="not while it computes"),
    ],
)
def test_who_waits_for_a_turn_moves_on_to_room_on_another_type(
    sets: tuple[tuple[str, str], ...], moves: bool
) -> None:
    """It leaves its set for that; the set stays."""
    kinds = {"h": H100, "a": A100}
    found = two_types(*(nodes(kinds[name], name, jobs) for name, jobs in sets))
    before = found.set_of()[JobId("b")]
    found.move_on(JobId("b"), before, [H100, A100], ())
    after = found.set_of()[JobId("b")]
    assert (after.kind == A100) is moves
    assert (JobId("b") in before.jobs) is not moves
    assert JobId("a") in before.jobs


def test_nobody_leaves_a_set_for_nodes_of_its_own_class() -> None:
    """How many nodes a class has is for the shares of all classes to say."""
    names = {NodeName("h0"): 4, NodeName("h1"): 4}
    mine = nodes(H100, "h0", "ab")
    found = Division([mine], gpus=names, types=dict.fromkeys(names, "H100"))
    found.move_on(JobId("b"), mine, [H100, A100], ())
    assert found.sets == [mine]
    assert mine.jobs == ["a", "b"]


def test_nobody_moves_on_to_a_node_that_it_avoids() -> None:
    """It takes its turns where it is."""
    found = two_types(nodes(H100, "h", "ab"))
    mine = found.set_of()[JobId("b")]
    found.move_on(JobId("b"), mine, [H100, A100], (NodeName("a"),))
    assert found.set_of()[JobId("b")] is mine


def test_a_node_that_comes_free_takes_who_waits_longest_for_a_turn() -> None:
    """Of those that accept its type, in a later pass; whoever has a type goes on with that."""
    there = [make_node_view("h0"), make_node_view("a0", gpu_type="A100", free_gpus=0)]
    jobs = [
        make_job_view(name, gpus_per_worker=8, submitted_at_s=at_s, types=("H100", "A100"))
        for name, at_s in (("x", 0.0), ("z", 1.0), ("y", 2.0))
    ]
    full = make_snapshot(
        nodes=[there[0], structs.replace(there[1], is_schedulable=False)], jobs=jobs
    )
    first = policy("gandiva-sets").allocate(full, b"")
    assert {made.job_id for made in first.decisions if isinstance(made, Start)} == {"x"}
    runs = structs.replace(
        jobs[0],
        state=JobState.RUNNING,
        gpu_type="H100",
        placed=(make_worker_view("x", 0, "h0", gpus=8),),
    )
    back = [make_node_view("h0", workers=runs.placed), make_node_view("a0", gpu_type="A100")]
    snapshot = make_snapshot(nodes=back, jobs=[runs, *jobs[1:]], now_s=NOW_S + 1.0)
    again = policy("gandiva-sets").allocate(snapshot, first.memory)
    [start] = again.decisions
    assert isinstance(start, Start)
    assert (start.job_id, start.gpu_type) == ("z", "A100")
