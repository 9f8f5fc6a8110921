"""Who is stopped for others has the lowest priority: under guarantees, reclaims and policies."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, NodeRole
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.aryl.reclaim.choose_nodes import Reclaiming, choose_nodes
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.aryl.reclaim.preemption_cost import CostModel, Costs
from coordinator.policies.aryl.reclaim.problem import by_priority
from coordinator.policies.contract.decisions import Preempt, Reclaim, Start
from coordinator.policies.contract.snapshot import JobView, NodeView, TenantView
from coordinator.policies.registry import policy
from coordinator.policies.tenants.reclaim import given_back
from tests.draws import pick, whole
from tests.harness.builders import (
    job_with,
    make_cluster,
    make_job_view,
    make_service_view,
    make_snapshot,
)
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, names, runs, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

ROUNDS = ("las", "pollux", "themis", "themis-lp", "themis-simple")
"""They stop jobs for their own turns as well."""


# --- guarantees ---------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(pick(-5, 0, 500), pick(0, 60, 900)), min_size=8, max_size=8),
    whole(1, 4),
)
def test_borrowers_of_the_lowest_priority_give_back_and_of_these_the_cheapest(
    jobs: list[tuple[int, int]], gpus: int
) -> None:
    """One GPU each on one node: nobody of a higher priority is stopped, whatever it would lose."""
    there = [
        replace(runs(f"j{n}", "b", "n0", 1, lost_gpu_s=lost_gpu_s), priority=priority)
        for n, (priority, lost_gpu_s) in enumerate(jobs)
    ]
    tenants = (TenantView(name="a", guarantee_gpus=8), TenantView(name="b"))
    found = given_back(cell(*there, waits("owed", "a", gpus), tenants=tenants, nodes=1), ())
    assert names(found.decisions, Start) == {"owed"}
    stopped = sorted(jobs[int(name[1:])] for name in names(found.decisions, Preempt))
    assert stopped == sorted(jobs)[:gpus]


def test_of_nodes_that_would_do_the_one_with_lower_priorities_is_cleared() -> None:
    """The one with the fewest of the highest priority, where the cheapest jobs lie apart."""
    jobs = [
        replace(runs("high0", "b", "n0", 4), priority=9),
        replace(runs("high1", "b", "n0", 4), priority=9),
        replace(runs("high2", "b", "n1", 4, lost_gpu_s=900.0), priority=9),
        runs("low", "b", "n1", 4, lost_gpu_s=900.0),
    ]
    tenants = (TenantView(name="a", guarantee_gpus=16), TenantView(name="b"))
    found = given_back(cell(*jobs, waits("owed", "a", 8), tenants=tenants), ())
    assert names(found.decisions, Preempt) == {"high2", "low"}


@each_row("name", FAMILIES)
def test_under_every_policy_the_lesser_jobs_of_a_borrower_give_way(name: str) -> None:
    """Five jobs of priority 0 and three of 500, one GPU each, and four GPUs are due."""
    tenants = [
        TenantSettings(name="a", guarantee_gpus=5),
        TenantSettings(name="b", guarantee_gpus=3),
    ]
    played = Cell(name, tenants, nodes=1, check=True)
    asked = [Asked(tenant="b", work_s=9000.0, at_s=1.0) for _ in range(5)]
    asked += [Asked(tenant="b", work_s=9000.0, at_s=11.0, priority=500) for _ in range(3)]
    played.ask([*asked, Asked(tenant="a", gpus=4, work_s=1000.0, at_s=1000.0, priority=1000)])
    played.run(until_s=2000.0)
    jobs = played.engine.state.jobs
    counts = [jobs[JobId(f"b{n}")].counts.preemptions for n in range(8)]
    assert jobs[JobId("a8")].started_at_s is not None
    assert counts[5:] == [0, 0, 0]
    assert name in ROUNDS or sum(counts) == 4


# --- reclaims -----------------------------------------------------------------------------------


@each_row(
    "name",
    [
        "aryl",
        "foresight",
        "aryl-scf",
        "aryl-random",
        "aryl:reclaim=near-optimum",
        "aryl:reclaim=near-optimum:reclaim_cost=lost-gpu-s",
    ],
)
@each_row("high", ["j1", "j2"])
def test_the_lent_node_with_the_lower_priority_goes_home(name: str, high: str) -> None:
    """Of two nodes with a job each, though the other one would lose less by a stop."""
    nodes, jobs = make_cluster({"n1": {"j1": 8}, "n2": {"j2": 8}})
    jobs = [
        replace(job, priority=1000) if job.job_id == high else job_with(job, unsaved_gpu_s=9000.0)
        for job in jobs
    ]
    service = make_service_view(load=5.0, min_serving=1)
    decisions = policy(name).lend(make_snapshot(nodes=nodes, jobs=jobs, services=[service]))
    stopped = {each.job_id for each in decisions if isinstance(each, Preempt)}
    assert stopped == {"j1", "j2"} - {high}
    assert {each.node for each in decisions if isinstance(each, Reclaim)} == {
        "n1" if high == "j2" else "n2"
    }


@st.composite
def ranked(draw: st.DrawFn) -> tuple[list[NodeView], list[JobView], int]:
    """Lent nodes with up to seven jobs of several priorities, and how many are wanted."""
    count = draw(whole(1, 7))
    held = draw(st.lists(st.sets(st.integers(0, 6), max_size=3), min_size=count, max_size=count))
    nodes, jobs = make_cluster(
        {f"n{i}": {f"j{j}": 2 for j in sorted(here)} for i, here in enumerate(held)}
    )
    views = [
        job_with(
            job,
            priority=draw(pick(-1_000_000, 0, 7, 1_000_000)),
            unsaved_gpu_s=float(draw(whole(0, 500))),
        )
        for job in jobs
    ]
    return nodes, views, draw(whole(1, count))


@settings(max_examples=150, deadline=None)
@given(ranked(), st.sampled_from(CostModel))
def test_no_choice_stops_fewer_of_the_highest_priorities(
    cluster: tuple[list[NodeView], list[JobView], int], model: CostModel
) -> None:
    """Against all sets of jobs: near the optimum is the optimum here, by priority and then by
    price; the greedy takes the best single node."""
    nodes, jobs, wanted = cluster
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    occupancy, costs = Occupancy(snapshot), Costs(snapshot)
    base = [set(occupancy.base_jobs(node.name)) for node in nodes]

    def price(stopped: tuple[JobId, ...]) -> tuple[list[int], int]:
        level = {job.job_id: job.priority for job in jobs}
        lost = [max(1, round(costs.expected_lost_gpu_s(job))) for job in stopped]
        least = min(level.values(), default=0)
        ranks = sorted((level[job] for job in stopped if level[job] > least), reverse=True)
        return ranks, len(stopped) if model == CostModel.JOBS else sum(lost)

    def best(count: int) -> tuple[list[int], int]:
        everyone = [job.job_id for job in jobs]
        return min(
            price(some)
            for size in range(len(everyone) + 1)
            for some in combinations(everyone, size)
            if sum(here <= set(some) for here in base) >= count
        )

    searching = Reclaiming(costs=costs, model=model, is_searching=True)
    found = choose_nodes(occupancy, nodes, wanted, searching)
    assert price(found.victims) == best(wanted)
    greedy = choose_nodes(occupancy, nodes, 1, replace(searching, is_searching=False))
    assert price(greedy.victims)[0] == best(1)[0]


@given(
    st.lists(st.tuples(whole(1, 1 << 40), whole(-1_000_000, 1_000_000)), min_size=1, max_size=60)
)
def test_priorities_fit_beside_prices_however_many_there_are(jobs: list[tuple[int, int]]) -> None:
    """The sum stays in bounds, a higher priority is never less, and the dearest of the least
    priority is less than anybody of the highest."""
    weights = by_priority([price for price, _ in jobs], [level for _, level in jobs])
    levels = [level for _, level in jobs]
    if len(set(levels)) == 1:
        assert weights == [price for price, _ in jobs]
        return
    assert sum(weights) < 1 << 53
    lowest = [w for w, level in zip(weights, levels, strict=True) if level == min(levels)]
    highest = [w for w, level in zip(weights, levels, strict=True) if level == max(levels)]
    assert sum(lowest) < min(highest)


# --- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aryl", "foresight"])
def test_flexible_workers_of_the_lowest_priority_make_room_first(name: str) -> None:
    """A gang that starts on flexible workers takes those of the lesser job, though these are worth
    more running time."""
    nodes, jobs = make_cluster(
        {"n1": {"high": 4}, "n2": {"low": 4}},
        flexible={"n1": {"high": 4}, "n2": {"low": 4}},
        role=NodeRole.TRAINING,
    )
    left_s = {"high": 100.0, "low": 90_000.0}
    jobs = [
        job_with(
            job,
            priority=5 if job.job_id == "high" else 0,
            remaining_work_s=left_s[job.job_id],
            is_resizable=True,
        )
        for job in jobs
    ]
    waiting = replace(make_job_view("new", gpus_per_worker=4), priority=9)
    found = policy(name).allocate(make_snapshot(nodes=nodes, jobs=[*jobs, waiting]), b"")
    (start,) = (each for each in found.decisions if isinstance(each, Start))
    assert [placement.node for placement in start.placements] == ["n2"]
