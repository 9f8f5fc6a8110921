"""DRF, YARN and Mesos: the rules that their papers state, each by its name."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Allocation, Preempt, Resize
from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.parts.dominant_share import AddedShares
from coordinator.policies.parts.resource_vectors import Vector, total_of, wanted
from coordinator.policies.registry import policy
from tests.builders import NOW_S
from tests.policies.machines import cell, decide, job, machine, started

# --- DRF ----------------------------------------------------------------------------------------


def test_the_paper_s_example_of_dominant_shares() -> None:
    """9 CPUs and 18 GB; A wants (1, 4) and B (3, 1): three and two of them run, both at 2/3."""
    jobs = (
        *(job(f"a{n}", "A", cpus=1, memory_gb=4) for n in range(9)),
        *(job(f"b{n}", "B", cpus=3, memory_gb=1) for n in range(9)),
    )
    # GPUs are plenty: they bind nobody, as in the paper, where there are none.
    snapshot = cell(machine("n0", gpus=100, cpus=9, memory_gb=18), jobs=jobs)
    assert Counter(name[0] for name in started(decide("drf", snapshot))) == {"a": 3, "b": 2}


def test_the_share_that_counts_is_the_dominant_one() -> None:
    """Twelve CPUs, GPUs are plenty: who wants two CPUs a job has half as many, not equally many."""
    jobs = (
        *(job(f"a{n}", "A", cpus=1, memory_gb=1) for n in range(12)),
        *(job(f"b{n}", "B", cpus=2, memory_gb=1) for n in range(12)),
    )
    snapshot = cell(machine("n0", gpus=100, cpus=12, memory_gb=100), jobs=jobs)
    assert Counter(name[0] for name in started(decide("drf", snapshot))) == {"a": 6, "b": 3}


demands = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))


def filled(wants: list[tuple[int, int, int]], each: int) -> Counter[str]:
    """How many start of many equal small jobs of each tenant, on one large node."""
    jobs = tuple(
        job(f"j{number}-{n:03d}", f"t{number}", gpus=gpus, cpus=cpus, memory_gb=memory)
        for number, (gpus, cpus, memory) in enumerate(wants)
        for n in range(each)
    )
    snapshot = cell(machine("n0", gpus=96, cpus=96, memory_gb=96), jobs=jobs)
    tenants: dict[str, str] = {made.job_id: made.tenant for made in jobs}
    return Counter(tenants[name] for name in started(decide("drf", snapshot)))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(wants=st.lists(demands, min_size=2, max_size=3))
def test_drf_has_its_properties_but_for_whole_jobs(wants: list[tuple[int, int, int]]) -> None:
    """Sharing incentive, no envy and nothing left, up to the jobs that indivisibility cuts off."""
    got = filled(wants, 96)
    counts = [got[f"t{n}"] for n in range(len(wants))]
    total = [sum(c * want[r] for c, want in zip(counts, wants, strict=True)) for r in range(3)]
    # Pareto: no tenant's next job fits.
    assert all(any(total[r] + want[r] > 96 for r in range(3)) for want in wants)
    for count, mine in zip(counts, wants, strict=True):
        # Sharing incentive: whoever is blocked has the smallest share, and nobody else is ahead of
        # it by more than one job, so that its share is an equal one less its part of those.
        assert count * max(mine) * len(wants) > 96 - sum(max(want) for want in wants)
        for other, theirs in zip(counts, wants, strict=True):
            # No envy: the other was one job ahead of it when it was blocked, and then grew on no
            # more than one job of its leaves of what blocked it.
            runs = min(other * theirs[r] // mine[r] for r in range(3))
            ahead = max(theirs) + max(mine) * max(theirs) / min(theirs)
            assert runs * max(mine) <= count * max(mine) + ahead


def test_a_tenant_with_more_weight_gets_more() -> None:
    """Weight 3 against 1: of eight GPUs six and two."""
    jobs = tuple(job(f"{t}{n}", t) for t in "ab" for n in range(8))
    snapshot = replace(
        cell(machine("n0"), jobs=jobs),
        tenants=(TenantView(name="a", weight=3.0), TenantView(name="b")),
    )
    assert Counter(name[0] for name in started(decide("drf", snapshot))) == {"a": 6, "b": 2}


def test_a_job_that_can_never_run_blocks_nobody() -> None:
    """It wants more CPUs than any node has: the next of its tenant starts, and it is told why."""
    jobs = (job("huge", cpus=200), job("next", submitted_at_s=1.0))
    snapshot = cell(machine("n0", cpus=64, memory_gb=100), jobs=jobs)
    for name in ("drf", "tetris"):
        assert started(decide(name, snapshot)) == ["next"]
        (hold,) = policy(name).pending_reasons(snapshot, b"")
        assert hold.blockers[0].startswith("can never run here")


def test_a_job_that_tells_no_cpus_wants_its_gpus_part_of_a_node() -> None:
    """Half of the GPUs stand for half of the CPUs and of the memory."""
    whole = Vector(8.0, 64.0, 512.0)
    assert wanted(job("j", gpus=4), whole) == Vector(4.0, 32.0, 256.0)
    assert wanted(job("j", gpus=4, cpus=8), whole) == Vector(4.0, 8.0, 256.0)


@pytest.mark.parametrize(("name", "stops"), [("drf", set[str]()), ("drf:preempts=true", {"b1"})])
def test_drf_preempts_by_volcano_s_rule_where_it_is_told_to(name: str, stops: set[str]) -> None:
    """A goes to 2/8 and B comes from 6/8 to 4/8: A stays below. One more would not."""
    jobs = (
        *(job(f"b{n}", "B", gpus=2, nodes=("n0",)) for n in (1, 2, 3, 4)),
        job("a1", "A", gpus=2),
    )
    allocation = decide(name, cell(machine("n0", jobs=jobs), jobs=jobs))
    assert {d.job_id for d in allocation.decisions if isinstance(d, Preempt)} == stops
    assert bool(started(allocation)) == bool(stops)


def test_drf_does_not_swap_equals() -> None:
    """A preemption that turns the shares round would be taken back by the next pass."""
    jobs = (job("b1", "B", gpus=8, nodes=("n0",)), job("a1", "A", gpus=8))
    assert decide("drf:preempts=true", cell(machine("n0", jobs=jobs), jobs=jobs)).decisions == ()


def test_drf_takes_flexible_workers_for_a_gang_and_deals_the_rest() -> None:
    """B runs on all eight GPUs with one base worker: A's gang of two makes two of them go."""
    jobs = (
        job("b", "B", workers=(1, 8), nodes=("n0",) * 8),
        job("a", "A", gpus=2, workers=(1, 1)),
    )
    allocation = decide("drf", cell(machine("n0", jobs=jobs), jobs=jobs))
    (resize,) = (d for d in allocation.decisions if isinstance(d, Resize))
    assert resize.removed_workers == (6, 7)
    assert started(allocation) == ["a"]


def test_drf_grows_jobs_of_the_smallest_share_first() -> None:
    """Four GPUs are left: two elastic jobs of equal tenants get two more workers each."""
    jobs = (
        job("a", "A", workers=(2, 8), nodes=("n0",) * 2),
        job("b", "B", workers=(2, 8), nodes=("n0",) * 2),
    )
    allocation = decide("drf", cell(machine("n0", jobs=jobs), jobs=jobs))
    grown = {
        d.job_id: sum(placement.worker_count for placement in d.added)
        for d in allocation.decisions
        if isinstance(d, Resize)
    }
    assert grown == {"a": 2, "b": 2}


# --- YARN ---------------------------------------------------------------------------------------


def test_the_head_of_the_line_blocks_all_others() -> None:
    """`yarn`: eight GPUs are free for a job of two, but the first wants sixteen."""
    jobs = (
        job("r", gpus=8, nodes=("n0",)),
        job("head", gpus=8, workers=(2, 2)),
        job("small", gpus=2, submitted_at_s=1.0),
    )
    snapshot = cell(machine("n0", jobs=jobs), machine("n1"), jobs=jobs)
    assert started(decide("yarn", snapshot)) == []
    holds = policy("yarn").pending_reasons(snapshot, b"")
    assert [hold.job_id for hold in holds] == ["head", "small"]
    assert "behind head" in holds[1].blockers[0]


def test_yarn_waits_for_the_fewest_nodes() -> None:
    """Four workers would fit on two half-empty nodes: the job waits for one."""
    running = (job("r0", gpus=6, nodes=("n0",)), job("r1", gpus=6, nodes=("n1",)))
    jobs = (*running, job("gang", workers=(4, 4)))
    nodes = [machine(name, jobs=running) for name in ("n0", "n1")]
    assert started(decide("yarn", cell(*nodes, jobs=jobs))) == []
    assert started(decide("yarn", cell(nodes[0], machine("n1"), jobs=(running[0], jobs[2])))) == [
        "gang"
    ]


@pytest.mark.parametrize(("weight", "order"), [(1.0, "b0 b1 b2 b3"), (3.0, "b0 b1 a0 a1")])
def test_yarn_fair_serves_the_queue_that_has_least(weight: float, order: str) -> None:
    """A holds four GPUs: the next four are B's, or two of them if A weighs three times as much."""
    jobs = (
        job("a", "A", gpus=4, nodes=("n0",)),
        *(job(f"a{n}", "A", submitted_at_s=float(n)) for n in range(4)),
        *(job(f"b{n}", "B", submitted_at_s=10.0 + n) for n in range(4)),
    )
    snapshot = cell(machine("n0", jobs=jobs), jobs=jobs)
    snapshot = replace(snapshot, tenants=(TenantView(name="A", weight=weight),))
    assert started(decide("yarn-fair", snapshot)) == order.split()


def test_yarn_fair_stops_nobody_unless_told_to_and_then_after_its_timeout() -> None:
    """A queue below half of its fair share waits; with `preempts` it gets it after the timeout."""
    jobs = (
        *(job(f"b{n}", "B", gpus=4, nodes=("n0",)) for n in range(2)),
        job("a", "A", gpus=4),
    )
    snapshot = cell(machine("n0", jobs=jobs), jobs=jobs)
    assert decide("yarn-fair", snapshot) == Allocation(decisions=())
    first = decide("yarn-fair:preempts=true", snapshot)
    assert (first.decisions, first.wake_at_s) == ((), NOW_S + 60.0)
    later = replace(snapshot, now_s=NOW_S + 60.0)
    second = decide("yarn-fair:preempts=true", later, first.memory)
    assert started(second) == ["a"]
    assert len([d for d in second.decisions if isinstance(d, Preempt)]) == 1


def test_yarn_capacity_goes_down_the_tree() -> None:
    """The division that uses least of its capacity first, then its least served team."""
    tenants = (
        TenantView(name="p", guarantee_gpus=12),
        TenantView(name="p1", parent="p", guarantee_gpus=8),
        TenantView(name="p2", parent="p", guarantee_gpus=4),
        TenantView(name="q", guarantee_gpus=4),
    )
    jobs = (
        job("r", "q", gpus=2, nodes=("n0",)),
        job("r2", "p2", gpus=2, nodes=("n0",)),
        job("jp1", "p1"),
        job("jp2", "p2"),
        job("jq", "q"),
    )
    snapshot = replace(cell(machine("n0", jobs=jobs), jobs=jobs), tenants=tenants)
    assert started(decide("yarn-capacity", snapshot)) == ["jp1", "jp2", "jq"]


@pytest.mark.parametrize(("weight", "first"), [(1.0, "jp1"), (9.0, "jp2")])
def test_yarn_capacity_counts_a_weight_s_part_from_its_parent(weight: float, first: str) -> None:
    """A team is due its weight's part of what its division's capacity leaves, not of the cell's.

    The division is due its 4 GPUs and half of the 4 that nobody is guaranteed. Of the 4 that are
    not its first team's own the second is due 2 by equal weights, of which it uses 3, where the
    first uses 5 of 4; by nine times the weight it is due 3.6, and the first 2.4.
    """
    tenants = (
        TenantView(name="p", guarantee_gpus=4),
        TenantView(name="p1", parent="p", guarantee_gpus=2),
        TenantView(name="p2", parent="p", weight=weight),
        TenantView(name="q", guarantee_gpus=8),
    )
    jobs = (
        job("r1", "p1", gpus=5, nodes=("n0",)),
        job("r2", "p2", gpus=3, nodes=("n0",)),
        job("r", "q", gpus=7, nodes=("n0",)),
        job("jp1", "p1"),
        job("jp2", "p2"),
    )
    snapshot = replace(cell(machine("n0", gpus=16, jobs=jobs), jobs=jobs), tenants=tenants)
    assert started(decide("yarn-capacity", snapshot)) == [first]


# --- Mesos --------------------------------------------------------------------------------------


def test_offers_are_pessimistic() -> None:
    """A is offered all of the only node and hoards it for its gang: B's small job sees nothing."""
    running = job("r", "z", gpus=4, nodes=("n0",))
    jobs = (running, job("gang", "a", workers=(8, 8)), job("small", "b"))
    snapshot = cell(machine("n0", jobs=jobs), jobs=jobs)
    first = decide("mesos", snapshot)
    assert first.decisions == ()
    later = replace(snapshot, now_s=NOW_S + 10.0)
    assert decide("mesos", later, first.memory).decisions == ()


def test_a_hoard_is_given_back_after_its_time() -> None:
    """Then its framework refuses it for a while, and the other is offered it."""
    running = job("r", "z", gpus=4, nodes=("n0",))
    jobs = (running, job("gang", "a", workers=(8, 8)), job("small", "b"))
    snapshot = cell(machine("n0", jobs=jobs), jobs=jobs)
    memory = decide("mesos", snapshot).memory
    given_back = decide("mesos", replace(snapshot, now_s=NOW_S + 120.0), memory)
    assert given_back.decisions == ()
    after = decide("mesos", replace(snapshot, now_s=NOW_S + 121.0), given_back.memory)
    assert started(after) == ["small"]


def test_the_framework_with_the_smallest_share_is_offered_first() -> None:
    """B has four GPUs and A none: the free ones are A's."""
    jobs = (job("r", "b", gpus=4, nodes=("n0",)), job("b1", "b", gpus=4), job("a1", "a", gpus=4))
    assert started(decide("mesos", cell(machine("n0", jobs=jobs), jobs=jobs))) == ["a1"]


def test_offers_come_on_ticks_only() -> None:
    """A pass within a second of the last one changes nothing and asks for one at the tick."""
    snapshot = cell(machine("n0"), jobs=(job("j"),))
    first = decide("mesos", snapshot)
    assert started(first) == ["j"]
    second = decide("mesos", replace(snapshot, now_s=NOW_S + 0.5), first.memory)
    assert (second.decisions, second.wake_at_s) == ((), NOW_S + 1.0)


def test_gangs_that_hoard_halves_do_not_wait_for_ever() -> None:
    """Two frameworks want all of two nodes and get one each: after a time one of them starts."""
    jobs = (job("ja", "a", gpus=8, workers=(2, 2)), job("jb", "b", gpus=8, workers=(2, 2)))
    snapshot = cell(machine("n0"), machine("n1"), jobs=jobs)
    allocation = decide("mesos", snapshot)
    assert started(allocation) == []
    for _ in range(20):
        assert allocation.wake_at_s is not None
        snapshot = replace(snapshot, now_s=allocation.wake_at_s)
        allocation = decide("mesos", snapshot, allocation.memory)
        if started(allocation):
            break
    assert len(started(allocation)) == 1


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
