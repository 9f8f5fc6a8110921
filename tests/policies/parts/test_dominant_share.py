"""Dominant shares over a tree: the examples of H-DRF (SoCC'13), and what parts count for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.parts.dominant_share import (
    AddedShares,
    DominantShares,
    Sibling,
    dominant,
    together,
)
from coordinator.policies.parts.resource_vectors import Vector, total_of
from tests.draws import pick, whole
from tests.harness.builders import make_job_view, make_node_view, make_snapshot
from tests.policies.machines import cell, job, machine

TEN = Vector(10.0, 10.0, 10.0)


def asks(name: str, tenant: str, *, gpus: int = 1, cpus: int = 0, memory_bytes: int = 0) -> JobView:
    """A job that waits, of one worker."""
    made = replace(make_job_view(name, gpus_per_worker=gpus), tenant=tenant)
    return replace(made, cpus_per_worker=cpus, memory_bytes_per_worker=memory_bytes)


def shared(jobs: list[JobView], tenants: list[TenantView]) -> ClusterSnapshot:
    """A cell of theirs; its nodes are those of the total that a test names."""
    return replace(make_snapshot(nodes=[make_node_view("n0")], jobs=jobs), tenants=tuple(tenants))


class Filling:
    """Progressive filling of one machine with tasks of one demand for each tenant.

    tasks: by tenant.
    """

    def __init__(
        self, demands: Mapping[str, Vector], tree: list[TenantView], total: Vector
    ) -> None:
        self._demands = demands
        self._jobs = {
            name: asks(
                name,
                name,
                gpus=int(each.gpus),
                cpus=int(each.cpus),
                memory_bytes=int(each.memory_bytes),
            )
            for name, each in demands.items()
        }
        self._shares = DominantShares(shared(list(self._jobs.values()), tree), total)
        self._left = total
        self.tasks: Counter[str] = Counter()
        self.fill()

    def fill(self) -> None:
        """One after the other, until nothing fits any more."""
        open_ = set(self._demands)
        while open_:
            name = self._shares.first_of(dict.fromkeys(open_, 0.0))
            if min(self._left.plus(self._demands[name], -1.0)) < 0:
                open_.discard(name)
            else:
                self._count(name, 1)

    def end(self, name: str) -> None:
        """One of its tasks is done."""
        self._count(name, -1)

    def _count(self, name: str, tasks: int) -> None:
        self._left = self._left.plus(self._demands[name], -tasks)
        self._shares.count(self._jobs[name], tasks)
        self.tasks[name] += tasks


# The examples have two resources, and tasks that want one of them. Ours are GPUs and CPUs, and a
# task wants a thousandth of the other one, as every job wants some of all that a machine has.
MUCH, LITTLE = 1000, 1


def of(gpus: int, cpus: int) -> Vector:
    """A task."""
    return Vector(float(gpus), float(cpus), 0.0)


def after_turnover(tree: list[TenantView]) -> dict[str, int]:
    """Tasks of each in the paper's first example, after those of `n1` and `n22`, who want the same
    resource, have ended and come anew many times."""
    demands = {"n1": of(LITTLE, MUCH), "n21": of(MUCH, LITTLE), "n22": of(LITTLE, MUCH)}
    made = Filling(demands, tree, of(100_200, 100_200))
    for _ in range(100):
        for name in ("n1", "n22"):
            made.end(name)
            made.fill()
    return made.tasks


def test_a_part_that_wants_another_resource_starves_nobody() -> None:
    """The paper's first example: `n1` wants one resource, `n2` has a part that wants that one and
    a part that wants the other, which nobody stands against. As tasks end and others take their
    place `n1` and the part that wants the same keep half of it each: by plain sums `n2` would look
    as rich as its other part, and `n1` would take whatever comes free."""
    tree = [
        TenantView(name="n1"),
        TenantView(name="n2"),
        TenantView(name="n21", parent="n2"),
        TenantView(name="n22", parent="n2"),
    ]
    assert after_turnover(tree) == {"n1": 50, "n21": 100, "n22": 50}


def test_a_part_of_a_part_that_wants_another_resource_starves_nobody() -> None:
    """The same example with one level more, where those that wait are two levels below `n2`: what
    lies between is as hungry as they are, and counts for `n2` as they do for it."""
    tree = [
        TenantView(name="n1"),
        TenantView(name="n2"),
        TenantView(name="n2x", parent="n2"),
        TenantView(name="n2y", parent="n2"),
        TenantView(name="n21", parent="n2x"),
        TenantView(name="n22", parent="n2y"),
    ]
    assert after_turnover(tree) == {"n1": 50, "n21": 100, "n22": 50}


def test_a_part_that_can_use_no_more_is_no_measure_for_its_siblings() -> None:
    """The paper's second example: of one resource three have a third each, and then nobody can use
    more. `n3` is one of them with one of its parts; its other part and `n4` get half each of the
    other resource, where two thirds would be its part if the first one were a measure."""
    tree = [
        *(TenantView(name=name) for name in ("n1", "n2", "n3", "n4")),
        TenantView(name="n31", parent="n3"),
        TenantView(name="n32", parent="n3"),
    ]
    cpus, gpus = of(LITTLE, MUCH), of(MUCH, LITTLE)
    demands = {"n1": cpus, "n2": cpus, "n31": cpus, "n32": gpus, "n4": gpus}
    tasks = Filling(demands, tree, of(300_400, 300_400)).tasks
    assert tasks["n32"] == pytest.approx(150, abs=1)
    for name in ("n1", "n2", "n31"):
        assert tasks[name] == pytest.approx(100, abs=1)
    assert tasks["n32"] + tasks["n4"] == 300


def test_one_level_is_drf() -> None:
    """Its own example: of 9 CPUs and 18 GB three tasks of A and two of B, each two thirds."""
    demands = {"A": Vector(1.0, 1.0, 4.0), "B": Vector(1.0, 3.0, 1.0)}
    assert Filling(demands, [], Vector(100.0, 9.0, 18.0)).tasks == {"A": 3, "B": 2}


def test_weights_of_parents_and_of_parts_both_count() -> None:
    """Three quarters of all are `b`'s, and of the rest two thirds its heavier team's."""
    tree = [
        TenantView(name="a"),
        TenantView(name="b", weight=3.0),
        TenantView(name="a1", parent="a", weight=2.0),
        TenantView(name="a2", parent="a"),
        TenantView(name="b1", parent="b"),
    ]
    one = Vector(1.0, 0.0, 0.0)
    tasks = Filling(dict.fromkeys(("a1", "a2", "b1"), one), tree, Vector(24.0, 0.0, 0.0)).tasks
    assert tasks == {"a1": 4, "a2": 2, "b1": 18}


@given(
    parts=st.lists(whole(0, 9), min_size=1, max_size=4),
    hungry=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_of_one_resource_the_whole_has_what_its_parts_have(
    parts: list[int], hungry: list[bool]
) -> None:
    """Whoever has many teams is not ahead for that, hungry or not."""
    siblings = [
        Sibling(Vector(float(gpus), gpus / 2, 0.0), 1.0, is_hungry)
        for gpus, is_hungry in zip(parts, hungry, strict=False)
    ]
    assert together(siblings, TEN).gpus == pytest.approx(sum(parts))


def test_hungry_parts_are_scaled_down_to_the_least_of_them() -> None:
    """Over their weights: 2 CPUs of weight 1 count 1 beside 2 GPUs of weight 2, and 8 of them 4."""
    gpus, cpus = Sibling(Vector(2.0, 0.0, 0.0), 2.0), Sibling(Vector(0.0, 2.0, 0.0), 1.0)
    assert together([gpus, cpus], TEN) == pytest.approx((2.0, 1.0, 0.0))
    more = Sibling(Vector(8.0, 0.0, 0.0), 2.0)
    assert together([more, cpus], TEN) == pytest.approx((4.0, 2.0, 0.0))


def test_what_can_use_no_more_counts_in_full() -> None:
    """It is scaled neither itself nor to it."""
    siblings = [
        Sibling(Vector(8.0, 0.0, 0.0), 1.0, is_hungry=False),
        Sibling(Vector(0.0, 2.0, 0.0), 1.0),
        Sibling(Vector(6.0, 0.0, 0.0), 1.0),
    ]
    assert together(siblings, TEN) == pytest.approx((10.0, 2.0, 0.0))
    assert together([], TEN) == Vector()


TREE = [
    TenantView(name="a"),
    TenantView(name="b", weight=3.0),
    TenantView(name="a1", parent="a"),
    TenantView(name="a2", parent="a"),
    TenantView(name="b1", parent="b"),
]


def test_who_loses_and_who_gets_are_compared_where_they_part() -> None:
    """`a1` has more than `b1`, over weights as well; but of their organisations `a` has less."""
    jobs = {name: asks(name, name) for name in ("a1", "a2", "b1")}
    shares = DominantShares(shared(list(jobs.values()), TREE), Vector(30.0, 0.0, 0.0))
    for name, workers in (("a1", 5), ("b1", 18)):
        shares.count(jobs[name], workers)
    a1, a2, b1 = jobs["a1"], jobs["a2"], jobs["b1"]
    assert shares.beside(b1, a1) == pytest.approx(18 / 30 / 3)
    assert shares.beside(a1, b1) == pytest.approx(5 / 30)
    assert not shares.keeps_more(b1, 1, a1, 1)  # 17 / 3 and 6
    assert shares.keeps_more(b1, 2, replace(a1, tenant="a2"), 0)  # 16 / 3 and 5
    assert shares.keeps_more(a1, 2, a2, 2)  # 3 and 2, in `a` alone
    assert not shares.keeps_more(a1, 2, a2, 3)


def test_a_stop_is_judged_by_what_the_two_really_have() -> None:
    """Nothing is scaled down for it: after the stop others wait, and it would be undone."""
    jobs = [
        asks("g", "a1", gpus=6, cpus=1),
        asks("c", "a2", gpus=1, cpus=1),
        asks("b", "b1", gpus=1, cpus=1),
    ]
    shares = DominantShares(shared(jobs, TREE), Vector(10.0, 10.0, 0.0))
    shares.count(jobs[0], 1)
    shares.count(jobs[2], 4)
    assert shares.first_of(dict.fromkeys(["a1", "a2", "b1"], 0.0)) == "b1"
    assert not shares.keeps_more(jobs[2], 1, jobs[1], 1)


def test_who_can_use_no_more_counts_in_full_from_then_on() -> None:
    """While `a1` has a job to try the little of `a2` is the measure of `a`, and then it is not."""
    jobs = {
        "a1": asks("a1", "a1", gpus=4, cpus=1),
        "a2": asks("a2", "a2", gpus=1, cpus=4),
        "b1": asks("b1", "b1", gpus=1, cpus=1),
    }
    shares = DominantShares(shared(list(jobs.values()), TREE), Vector(40.0, 40.0, 0.0))
    for name, workers in (("a1", 5), ("a2", 1), ("b1", 24)):
        shares.count(jobs[name], workers)
    assert (
        shares.first_of(dict.fromkeys(["a1", "a2", "b1"], 0.0)) == "a2"
    )  # a tenth and a bit, b three fifths over three
    assert shares.first_of(dict.fromkeys(["a2", "b1"], 0.0)) == "b1"  # more than a half


def test_what_is_added_counts_at_each_level() -> None:
    """And turns go by it: `b` gets three for each of `a`."""
    jobs = [asks(name, name) for name in ("a1", "a2", "b1")]
    shares = AddedShares(shared(jobs, TREE), Vector(16.0, 0.0, 0.0))
    order = ""
    for _ in range(8):
        name = min(("a1", "a2", "b1"), key=shares.turn)
        shares.add(name, Vector(1.0, 0.0, 0.0))
        order += name[0]
    assert order.count("b") == 6
    assert shares.of("a1") == shares.of("a2") == pytest.approx(1 / 16)
    assert shares.worst_off("a1") == pytest.approx((2 / 16, 1 / 16))


@given(
    counts=st.lists(whole(0, 6), min_size=3, max_size=3), hungry=pick("a1 a2 b1", "a1 b1", "a2 b1")
)
def test_turns_do_not_depend_on_what_was_asked_before(counts: list[int], hungry: str) -> None:
    """What is remembered between turns is forgotten with each change."""
    sizes = {"a1": (1, 4), "a2": (4, 1), "b1": (1, 1)}
    jobs = {name: asks(name, name, gpus=gpus, cpus=cpus) for name, (gpus, cpus) in sizes.items()}
    total = Vector(40.0, 40.0, 0.0)
    asked, fresh = (DominantShares(shared(list(jobs.values()), TREE), total) for _ in range(2))
    for name, count in zip(jobs, counts, strict=True):
        asked.first_of(dict.fromkeys(list(jobs), 0.0))
        asked.first_of(dict.fromkeys(["a1"], 0.0))
        for each in (asked, fresh):
            each.count(jobs[name], count)
    asked.first_of(dict.fromkeys(list(jobs), 0.0))
    asked.first_of(dict.fromkeys(["b1"], 0.0))
    assert asked.first_of(dict.fromkeys(hungry.split(), 0.0)) == fresh.first_of(
        dict.fromkeys(hungry.split(), 0.0)
    )


def test_a_dominant_share_is_the_largest_part() -> None:
    """Over a weight; of what there is none of, nobody has a part."""
    assert dominant(Vector(1.0, 5.0, 7.0), Vector(10.0, 10.0, 0.0), 2.0) == 0.25


def test_what_is_added_counts_by_its_own_dominant_share() -> None:
    """Half the GPUs and then half the CPUs are one whole, over a weight: no less than the share of
    both together; nobody else's changes."""
    node = machine("n0", gpus=8, cpus=64, memory_gb=64)
    runs = job("j", gpus=2, cpus=1, memory_gb=1, nodes=("n0",))
    snapshot = replace(cell(node, jobs=(runs,)), tenants=(TenantView(name="b", weight=2.0),))
    made = AddedShares(snapshot, total_of(snapshot.nodes))
    assert (made.of("a"), made.of("b")) == (0.25, 0.0)
    made.add("b", Vector(4.0, 0.0, 0.0))
    made.add("b", Vector(0.0, 32.0, 0.0))
    assert (made.of("a"), made.of("b")) == (0.25, 0.5)


def test_the_whole_is_all_that_nodes_have() -> None:
    """Free or not; of no nodes it is nothing."""
    nodes = [machine("n0", gpus=8, cpus=64, memory_gb=1), machine("n1", gpus=4, cpus=8)]
    assert total_of(nodes) == Vector(12.0, 72.0, 1e9)
    assert total_of([]) == Vector()
