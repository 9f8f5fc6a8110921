"""Which lent nodes go back: the paper's costs and example, and the order of gentleness."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.model import JobId, NodeName, NodeRole
from coordinator.policies.aryl.reclaim.choose_nodes import Choice, choose_nodes
from coordinator.policies.aryl.reclaim.decisions import carry_out
from coordinator.policies.aryl.reclaim.greedy import greedy_victims, node_preemption_cost
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.contract.decisions import Preempt, Reclaim, Resize
from coordinator.policies.contract.snapshot import JobView, NodeView
from tests.harness.builders import (
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.policies.aryl.reclaim.test_rules import FIGURE_5


def occupancy_of(nodes: list[NodeView], jobs: list[JobView]) -> Occupancy:
    """Who sits where."""
    return Occupancy(make_snapshot(nodes=nodes, jobs=jobs))


def test_costs_of_table_1() -> None:
    """The preemption cost of a node is the sum of 1 / nodes of each job on it."""
    nodes, jobs = make_cluster(FIGURE_5)
    occupancy = occupancy_of(nodes, jobs)
    costs = [node_preemption_cost(occupancy, node.name) for node in nodes]
    assert costs == pytest.approx([0.5, 0.5, 1.0, 0.5, 1.0, 0.5])


def test_figure_5_preempts_one_job_for_two_nodes() -> None:
    """Two nodes cost one preemption: the second is empty once the first is taken (the tie rule)."""
    nodes, jobs = make_cluster(FIGURE_5)
    choice = choose_nodes(occupancy_of(nodes, jobs), nodes, 2)
    assert choice == Choice(nodes=(NodeName("s1"), NodeName("s2")), victims=(JobId("a"),))


def test_gentlest_nodes_first() -> None:
    """A loan that has not begun ends first, then idle nodes, then those with flexible workers."""
    nodes, jobs = make_cluster({"n1": {"base": 8}}, flexible={"n2": {"wide": 4}, "n3": {"wide": 2}})
    nodes += [
        make_node_view("n4", role=NodeRole.ON_LOAN),
        make_node_view("n5", role=NodeRole.DRAINING),
    ]
    occupancy = occupancy_of(nodes, jobs)
    order = [choose_nodes(occupancy, nodes, count).nodes[-1] for count in range(1, 6)]
    assert order == ["n5", "n4", "n3", "n2", "n1"]
    assert choose_nodes(occupancy, nodes, 4).victims == ()


def test_equal_damage_spares_the_work_that_would_be_lost() -> None:
    """Where cost and damage are equal the job that loses less is preempted."""
    nodes, jobs = make_cluster({"n1": {"old": 8}, "n2": {"new": 8}})
    jobs = [
        make_job_view(job.job_id, unsaved_gpu_s=9.0 if job.job_id == "old" else 1.0) for job in jobs
    ]
    assert choose_nodes(occupancy_of(nodes, jobs), nodes, 1).victims == ("new",)


def test_released_workers_make_no_node_cheaper() -> None:
    """Nodes that only flexible workers hold go home first; whoever had them spread over more
    nodes than others is no cheaper for it, and losing them is no damage of its preemption."""
    nodes, jobs = make_cluster(
        {"n1": {"wide": 8}, "n4": {"pair": 8}, "n5": {"pair": 8}},
        flexible={"n2": {"wide": 8}, "n3": {"wide": 8}},
    )
    occupancy = occupancy_of(nodes, jobs)
    taken = frozenset({NodeName("n2"), NodeName("n3")})
    assert node_preemption_cost(occupancy, NodeName("n1"), taken=taken) == 1.0
    choice = choose_nodes(occupancy, nodes, 3)
    assert (choice.nodes, choice.victims) == (("n2", "n3", "n4"), ("pair",))
    # with an equal cost, what is released in any case does not count as damage
    nodes, jobs = make_cluster({"n1": {"wide": 8}, "n4": {"lone": 8}}, flexible={"n2": {"wide": 8}})
    jobs = [
        make_job_view(job.job_id, unsaved_gpu_s=9.0 if job.job_id == "lone" else 1.0)
        for job in jobs
    ]
    assert choose_nodes(occupancy_of(nodes, jobs), nodes, 2).victims == ("wide",)


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 4), max_size=2), st.booleans()), min_size=1, max_size=6
    ),
    st.integers(0, 6),
)
def test_chosen_set_is_irreducible(layout: list[tuple[set[int], bool]], wanted: int) -> None:
    """The nodes asked for come back, no more; sparing any one victim would leave too few."""
    held = {f"n{i}": {f"j{j}": 2 for j in sorted(jobs)} for i, (jobs, _) in enumerate(layout)}
    extra = {f"n{i}": {f"f{i}": 2} for i, (_, has) in enumerate(layout) if has}
    nodes, jobs = make_cluster(held, flexible=extra)
    occupancy = occupancy_of(nodes, jobs)
    choice = choose_nodes(occupancy, nodes, wanted)
    assert len(choice.nodes) == len(set(choice.nodes)) == min(wanted, len(nodes))
    base = {node.name: set(occupancy.base_jobs(node.name)) for node in nodes}
    assert set().union(*(base[name] for name in choice.nodes)) == set(choice.victims)
    for victim in choice.victims:
        others = set(choice.victims) - {victim}
        assert sum(1 for on_node in base.values() if on_node <= others) < len(choice.nodes)
    free = sum(1 for on_node in base.values() if not on_node)
    assert bool(choice.victims) == (free < len(choice.nodes))


def test_a_victim_that_later_ones_make_needless_is_given_back() -> None:
    """Node n1 ties for the lowest cost and is taken first; the pair behind it frees two nodes at
    once, so that the job on n1 goes on."""
    nodes, jobs = make_cluster({"n1": {"c": 1}, "n2": {"a": 1, "b": 1}, "n3": {"a": 1, "b": 1}})
    occupancy = occupancy_of(nodes, jobs)
    base = {node.name: occupancy.base_jobs(node.name) for node in nodes}
    assert greedy_victims(occupancy, base, 2) == {"a", "b", "c"}
    choice = choose_nodes(occupancy, nodes, 2)
    assert (choice.nodes, choice.victims) == (("n2", "n3"), ("a", "b"))


def plain_greedy(occupancy: Occupancy, wanted: int, names: list[NodeName]) -> set[JobId]:
    """The paper's greedy as it is written, everything reckoned anew at each step."""
    base = {name: occupancy.base_jobs(name) for name in names}
    gone: set[JobId] = set()
    while True:
        taken = frozenset(name for name in names if gone.issuperset(base[name]))
        left = wanted - len(taken)
        if left <= 0:
            return gone
        rest = [name for name in names if name not in taken]

        def damage(name: NodeName, taken: frozenset[NodeName] = taken, left: int = left) -> int:
            stopped = gone.union(base[name])
            freed: dict[NodeName, int] = {}
            for job_id in set(base[name]) - gone:
                for host, gpus in occupancy.hosts(job_id).items():
                    if host != name and host not in taken:
                        freed[host] = freed.get(host, 0) + gpus
            useful = sorted(gpus for host, gpus in freed.items() if stopped.issuperset(base[host]))
            return sum(freed.values()) - sum(useful[::-1][: left - 1])

        cost = {
            name: round(node_preemption_cost(occupancy, name, frozenset(gone), taken), 9)
            for name in rest
        }
        name = min(rest, key=lambda name: (cost[name], damage(name), name))
        gone.update(base[name])


def test_the_greedy_is_the_paper_s_however_it_keeps_its_books() -> None:
    """Costs and damage that are kept up to date choose as if all were reckoned anew."""
    chance = random.Random(7)
    for _ in range(150):
        count = chance.randint(2, 12)
        base: dict[str, dict[str, int]] = {f"n{i:02}": {} for i in range(count)}
        extra: dict[str, dict[str, int]] = {f"n{i:02}": {} for i in range(count)}
        for job in range(chance.randint(1, 14)):
            for node in chance.sample(range(count), chance.randint(1, min(count, 4))):
                kind = extra if chance.random() < 0.3 else base
                kind[f"n{node:02}"][f"j{job}"] = chance.randint(1, 4)
        nodes, jobs = make_cluster(base, flexible=extra)
        occupancy = occupancy_of(nodes, jobs)
        held = {node.name: occupancy.base_jobs(node.name) for node in nodes}
        wanted = chance.randint(1, count)
        victims = greedy_victims(occupancy, held, wanted)
        assert victims == plain_greedy(occupancy, wanted, list(held))


def test_damage_falls_when_a_neighbour_could_be_emptied_as_well() -> None:
    """Once q has stopped, stopping p empties node h with its own: no damage any more, so that p
    goes before r, whose cost is the same and whose GPU elsewhere nobody wants."""
    held = {"a": {"q": 1}, "b": {"r": 1}, "h": {"p": 4, "q": 1}, "x": {"p": 4}}
    nodes, jobs = make_cluster({**held, "t": {"r": 1}})
    occupancy = occupancy_of(nodes, jobs)
    base = {NodeName(name): occupancy.base_jobs(NodeName(name)) for name in sorted(held)}
    assert greedy_victims(occupancy, base, 3) == {"p", "q"}


def test_one_node_is_always_chosen_optimally() -> None:
    """For one node the fewest victims are found, whatever the jobs on the nodes."""
    for sets in itertools.product(("", "a", "ab", "abc"), repeat=2):
        held = {f"n{i}": dict.fromkeys(names, 1) for i, names in enumerate(sets)}
        nodes, jobs = make_cluster(held)
        choice = choose_nodes(occupancy_of(nodes, jobs), nodes, 1)
        assert len(choice.victims) <= max(len(names) for names in sets)
        if "" in sets:
            assert choice.victims == ()


def test_reclaim_says_what_it_does() -> None:
    """Flexible workers are released, a victim names its beneficiary, each is counted once."""
    nodes, jobs = make_cluster({"n1": {"gang": 4}, "n2": {"gang": 4}}, flexible={"n1": {"wide": 2}})
    jobs = [
        make_job_view(
            job.job_id,
            state=job.state,
            workers=(2, 4),
            placed=job.placed,
            unsaved_gpu_s=70.0,
        )
        for job in jobs
    ]
    occupancy = occupancy_of(nodes, jobs)
    service = make_service_view()
    decisions = carry_out(occupancy, service, choose_nodes(occupancy, nodes, 2), "load rises")
    resize, preempt, *reclaims = decisions
    assert isinstance(resize, Resize)
    assert (resize.job_id, resize.removed_workers) == ("wide", (0,))
    assert isinstance(preempt, Preempt)
    assert (preempt.job_id, preempt.beneficiary, preempt.node) == ("gang", service.name, "n2")
    assert preempt.predicted_cost_gpu_s == 70.0
    assert all(isinstance(decision, Reclaim) for decision in reclaims)
    told = [
        (r.predicted_preemptions, r.predicted_cost_gpu_s, r.released_workers, r.deadline_s)
        for r in reclaims
        if isinstance(r, Reclaim)
    ]
    assert told == [(1, 70.0, 0, 300.0), (0, 0.0, 1, 300.0)]
    assert occupancy.base_jobs(NodeName("n2")) == ()
