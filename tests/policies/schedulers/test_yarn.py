"""YARN: one line, fair queues and capacity queues, and what capacities are down the tree of
tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Allocation, Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.schedulers.yarn import capacities
from coordinator.policies.tenants.tenancy import Tenancy, fair_split
from coordinator.policies.tenants.tree import WHOLE
from tests.draws import pick, whole
from tests.harness.builders import NOW_S, job_with
from tests.policies.machines import cell, decide, full, job, machine, started, stopped
from tests.policies.tenant_books import cell as shared_cell
from tests.policies.tenant_books import names, waits
from tests.tables import each_row

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


# --- YARN's fair queues -------------------------------------------------------------------------


def after_timeout(snapshot: ClusterSnapshot, knobs: str = "") -> list[str]:
    """Who is stopped by the fair queues a timeout later, in order of names."""
    name = f"yarn-fair:preempts=true{knobs}"
    memory = decide(name, snapshot).memory
    return sorted(stopped(name, replace(snapshot, now_s=snapshot.now_s + 60.0), memory))


def queue(name: str, gpus: int, begun: Mapping[str, float]) -> list[JobView]:
    """Jobs of a queue that run since then, each on so many GPUs."""
    return [
        job_with(job(each, name, gpus=gpus, nodes=("n0",)), started_at_s=at_s)
        for each, at_s in begun.items()
    ]


def test_a_queue_above_half_of_its_fair_share_is_not_starved() -> None:
    """Three of four GPUs are more than the threshold: it waits as long as it takes."""
    jobs = [
        *queue("A", 1, {f"a{n}": float(n) for n in range(5)}),
        *queue("B", 1, {f"b{n}": float(n) for n in range(3)}),
        job("wants", "B", gpus=1),
    ]
    assert after_timeout(full(*jobs)) == []
    assert after_timeout(full(*jobs), ":threshold=1") == ["a4"]


def test_the_newest_jobs_of_a_queue_above_its_share_go_and_only_down_to_it() -> None:
    """Of seven GPUs A keeps its fair four; the three that began last are stopped."""
    begun = {"a0": 50.0, "a1": 10.0, "a2": 70.0, "a3": 20.0, "a4": 60.0, "a5": 30.0, "a6": 40.0}
    jobs = [*queue("A", 1, begun), *queue("B", 1, {"b": 0.0}), job("wants", "B", gpus=3)]
    assert after_timeout(full(*jobs)) == ["a0", "a2", "a4"]


def test_a_job_is_not_stopped_where_its_queue_would_fall_below_its_share() -> None:
    """A has six of eight in jobs of three: without one of them it would have three of its four."""
    jobs = [*queue("A", 3, {"a0": 1.0, "a1": 2.0}), *queue("B", 1, {"b": 0.0})]
    assert after_timeout(full(*jobs, job("wants", "B", gpus=2))) == []


GPUS = 64


@st.composite
def trees(draw: st.DrawFn) -> tuple[TenantView, ...]:
    """Organisations and their teams; guarantees of siblings fit in what their parent is promised,
    and those of all in the cell."""
    found: list[TenantView] = []
    left = GPUS - 1
    for org in range(draw(whole(1, 3))):
        own = draw(whole(0, left))
        left -= own
        found.append(TenantView(name=f"o{org}", guarantee_gpus=own, weight=draw(weights())))
        for team in range(draw(whole(0, 3))):
            part = draw(whole(0, own))
            own -= part
            made = TenantView(name=f"o{org}t{team}", parent=f"o{org}", guarantee_gpus=part)
            found.append(replace(made, weight=draw(weights())))
    return tuple(found)


def weights() -> st.SearchStrategy[float]:
    """Of very different tenants, and of alike ones."""
    return pick(0.5, 1.0, 1.0, 3.0, 10.0)


def tenancy(tenants: tuple[TenantView, ...]) -> Tenancy:
    """On an idle cell."""
    return Tenancy(shared_cell(tenants=tenants, nodes=GPUS // 8))


@settings(deadline=None)
@given(tenants=trees())
def test_a_capacity_is_what_all_are_due_where_everybody_asks_for_everything(
    tenants: tuple[TenantView, ...],
) -> None:
    """So a queue without a guarantee is due its weight's part of what those of its siblings leave
    of their parent's capacity, or of one GPU where they leave less."""
    made = tenancy(tenants)
    found = capacities(made)
    assert found[WHOLE] == GPUS
    for parent, children in made.children.items():
        views = [made.views[name] for name in children]
        promised = sum(view.guarantee_gpus for view in views)
        there = max(found[parent], promised + 1.0)
        due = fair_split(there, views, dict.fromkeys(children, 100.0 * GPUS))
        assert {name: found[name] for name in children} == pytest.approx(due)


@settings(deadline=None)
@given(tenants=trees(), data=st.data())
def test_a_guarantee_never_lowers_a_capacity(
    tenants: tuple[TenantView, ...], data: st.DataObject
) -> None:
    """Nor does it raise that of any sibling: who is promised something is not the worse for it."""
    tops = [view for view in tenants if not view.parent]
    one = data.draw(pick(*tops))
    more = data.draw(whole(0, GPUS - 1 - sum(view.guarantee_gpus for view in tops)))
    after = replace(one, guarantee_gpus=one.guarantee_gpus + more)
    changed = tuple(after if view is one else view for view in tenants)
    old, new = capacities(tenancy(tenants)), capacities(tenancy(changed))
    assert new[one.name] >= old[one.name] - 1e-9
    assert all(new[view.name] <= old[view.name] + 1e-9 for view in tops if view is not one)


@each_row(
    ("guarantee_gpus", "weight", "got"),
    [(0, 1.0, 32), (16, 1.0, 40), (16, 3.0, 52), (48, 1.0, 56), (63, 1.0, 63)],
)
def test_what_a_guarantee_leaves_is_served_by_weight(
    guarantee_gpus: int, weight: float, got: int
) -> None:
    """Of 64 GPUs two queues with 64 jobs of one GPU each; the second one has no guarantee, and its
    first job came first."""
    tenants = (
        TenantView(name="a", guarantee_gpus=guarantee_gpus, weight=weight),
        TenantView(name="b"),
    )
    line = [waits(f"b{n:02d}", "b", 1, submitted_at_s=-50.0) for n in range(GPUS)]
    line += [waits(f"a{n:02d}", "a", 1) for n in range(GPUS)]
    snapshot = shared_cell(*line, tenants=tenants, nodes=GPUS // 8)
    started = names(POLICIES["yarn-capacity"].allocate(snapshot, b"").decisions, Start)
    assert Counter(name[0] for name in started) == {"a": got, "b": GPUS - got}


def test_a_queue_to_which_guarantees_leave_nothing_is_served_all_the_same() -> None:
    """All GPUs are promised to two, one of which is idle: the other one borrows most of its part,
    and the third some."""
    tenants = (
        TenantView(name="a", guarantee_gpus=32),
        TenantView(name="b", guarantee_gpus=32),
        TenantView(name="c"),
    )
    line = [waits(f"{name}{n:02d}", name, 1) for name in "ac" for n in range(GPUS)]
    snapshot = shared_cell(*line, tenants=tenants, nodes=GPUS // 8)
    started = names(POLICIES["yarn-capacity"].allocate(snapshot, b"").decisions, Start)
    assert Counter(name[0] for name in started) == {"a": 63, "c": 1}
