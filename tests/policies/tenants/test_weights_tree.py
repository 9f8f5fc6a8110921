"""Weights over a tree of tenants under every policy: each level divides what it gets among its own.

An organisation's part does not depend on how many teams it has, what a team leaves goes to its
siblings first, and the shares are those that `aryl tenant list` shows.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, NodeName, Pool
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.tenants.fair_share import are_weighed
from coordinator.policies.tenants.tenancy import Tenancy, waiting_gpus
from coordinator.policies.tenants.tree import WHOLE
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.draws import pick
from tests.harness.builders import make_node_view, make_snapshot, make_spec
from tests.policies.tenant_books import runs, waits
from tests.tables import each_row

slow = pytest.mark.slow


EPSILON = 1e-9


GPUS = 24
"""One a node, so that offers of whole nodes are no larger than gangs."""


BY_THEMSELVES = ("drf", "mesos", "philly", "yarn-capacity", "yarn-fair")
"""Policies that divide by weights, whether or not they differ."""


BY_THE_RULE = sorted(POLICIES.keys() - {*BY_THEMSELVES, "qos-elasticflow"})
"""Policies that leave it to rule 5 of tenants, which is looked at where weights differ; not where
jobs are promised their deadlines."""


def cell(
    tenants: tuple[TenantView, ...], demand: dict[str, int], *running: JobView
) -> ClusterSnapshot:
    """GPUs, and so many jobs of one GPU of each tenant that wait, the first tenant's first."""
    jobs = [
        waits(f"{name}-{number:02d}", name, 1, submitted_at_s=100.0 * place + number)
        for place, (name, count) in enumerate(demand.items())
        for number in range(count)
    ]
    workers = {worker.node: worker for job in running for worker in job.placed}
    nodes = [
        make_node_view(name, gpus=1, workers=[workers[name]] if name in workers else ())
        for name in (NodeName(f"n{number:02d}") for number in range(GPUS))
    ]
    return replace(make_snapshot(nodes=nodes, jobs=(*running, *jobs)), tenants=tenants)


def after_a_pass(name: str, snapshot: ClusterSnapshot) -> Tenancy:
    """What each tenant uses once its jobs were started and stopped."""
    tenancy = Tenancy(snapshot)
    jobs = {job.job_id: job for job in snapshot.jobs}
    for each in policy(name).allocate(snapshot, b"").decisions:
        assert isinstance(each, Start | Preempt)
        tenancy.take(jobs[each.job_id], 1 if isinstance(each, Start) else -1)
    return tenancy


def check_roots(snapshot: ClusterSnapshot, after: Tenancy) -> None:
    """All GPUs are used, and organisations have their listed shares of them but for a gang.

    One that has more is ahead by part of a gang, so of two nobody is further behind than that.
    """
    assert after.used[WHOLE] == GPUS
    before = Tenancy(snapshot)
    shares = before.fair_shares(waiting_gpus(snapshot, before))
    roots = after.children[WHOLE]
    for name in roots:
        assert shares[name] - (len(roots) - 1) - EPSILON < after.used[name] < shares[name] + 1, name


def check_levels(after: Tenancy) -> None:
    """Nobody has a gang more than its weight's part of what its parent has."""
    for parent, siblings in after.children.items():
        weights = {name: after.views[name].weight for name in siblings}
        for name, weight in weights.items():
            part = float(after.used[parent]) * weight / sum(weights.values())
            assert after.used[name] < part + 1, name


def view(name: str, weight: float = 1.0) -> TenantView:
    """A tenant that is part of the one whose name is shorter by the last letter."""
    return TenantView(name=name, parent=name[:-1], weight=weight)


@st.composite
def hungry(draw: st.DrawFn) -> ClusterSnapshot:
    """Organisations of teams, of which some have teams themselves; everybody wants everything."""
    tenants, leaves = list[TenantView](), list[str]()

    def grow(name: str, levels: int) -> None:
        tenants.append(view(name, draw(pick(1.0, 1.0, 2.0, 3.0))))
        parts = draw(pick(1, 2, 4)) if levels > 2 else draw(pick(0, 0, 0, 2)) * (levels > 1)
        for number in range(parts):
            grow(f"{name}{number}", levels - 1)
        if not parts:
            leaves.append(name)

    for name in "abc"[: draw(pick(2, 2, 3))]:
        grow(name, 3)
    return cell(tuple(tenants), dict.fromkeys(draw(st.permutations(leaves)), GPUS))


@slow
@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(BY_THEMSELVES), snapshot=hungry())
def test_each_level_divides_what_it_gets(policy: str, snapshot: ClusterSnapshot) -> None:
    """By weight among siblings, whoever else there is: organisations, teams, and teams of teams."""
    after = after_a_pass(policy, snapshot)
    check_roots(snapshot, after)
    check_levels(after)


LOPSIDED = cell(
    (
        *(view("a", 3.0), view("b"), view("a0", 2.0), view("b0", 3.0)),
        *(view("a00", 2.0), view("a01", 2.0), view("b00", 2.0), view("b01")),
    ),
    dict.fromkeys(("b01", "a00", "b00", "a01"), GPUS),
)
"""Where turns inside `b` once gave it fifteen GPUs of its six, under `tetris`."""


@slow
@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(("aryl", "fifo", "las", "sjf", "tetris", "themis")), snapshot=hungry()
)
@example("tetris", LOPSIDED)
def test_turns_by_weight_divide_among_organisations_first(
    policy: str, snapshot: ClusterSnapshot
) -> None:
    """By rule 5 as well, where weights tell anybody apart: no turn inside an organisation takes
    from the share of another one."""
    assume(are_weighed(Tenancy(snapshot)))
    check_roots(snapshot, after_a_pass(policy, snapshot))


TWO_LEVELS = (view("a"), view("b", 3.0), *(view(f"a{n}") for n in range(4)), view("b0"))


THREE_LEVELS = (
    *(view("a"), view("b", 3.0), view("a0"), view("a1"), view("b0", 2.0), view("b1")),
    *(view("a00", 2.0), view("a01")),
)


@each_row("tenants", [TWO_LEVELS, THREE_LEVELS])
@each_row("policy", [*BY_THEMSELVES, *BY_THE_RULE])
def test_an_organisation_gets_its_part_whatever_teams_it_has(
    policy: str, tenants: tuple[TenantView, ...]
) -> None:
    """A quarter and three quarters under every policy; `a` has more teams and older jobs."""
    parents = {tenant.parent for tenant in tenants}
    leaves = [tenant.name for tenant in tenants if tenant.name not in parents]
    snapshot = cell(tenants, dict.fromkeys(leaves, GPUS))
    after = after_a_pass(policy, snapshot)
    assert (after.used["a"], after.used["b"]) == (6, 18)
    check_roots(snapshot, after)


@each_row("policy", BY_THEMSELVES)
def test_what_a_team_leaves_goes_to_its_siblings_first(policy: str) -> None:
    """Two of four teams have nothing to do: the others have all of their organisation's half."""
    tenants = (view("a"), view("b"), *(view(f"a{n}") for n in range(4)), view("b0"))
    snapshot = cell(tenants, {"a1": GPUS, "a3": GPUS, "b0": GPUS})
    after = after_a_pass(policy, snapshot)
    check_roots(snapshot, after)
    assert (after.used["a1"], after.used["a3"], after.used["b0"]) == (6, 6, 12)


@each_row("policy", [name for name in BY_THEMSELVES if name != "mesos"])
def test_what_a_team_cannot_use_goes_to_its_siblings_first(policy: str) -> None:
    """It has two jobs, and another team the rest of their organisation's half. Under `mesos` it is
    offered more, and what it declines goes to others at the next tick."""
    tenants = (view("a"), view("b"), view("a1"), view("a3"), view("b0"))
    alone = cell(tenants, {"a1": 2, "a3": GPUS, "b0": GPUS})
    after = after_a_pass(policy, alone)
    check_roots(alone, after)
    assert (after.used["a1"], after.used["a3"], after.used["b0"]) == (2, 10, 12)


@each_row("policy", BY_THEMSELVES)
def test_what_its_siblings_run_is_counted_for_a_newcomer(policy: str) -> None:
    """A team that has nothing yet waits for the other organisation's where its own has its part."""
    tenants = (view("a"), view("b"), view("a0"), view("a1"), view("b0"))
    running = [runs(f"r{number:02d}", "a0", f"n{number:02d}", 1) for number in range(12)]
    after = after_a_pass(policy, cell(tenants, {"a1": GPUS, "b0": GPUS}, *running))
    assert after.used["a"] <= 12
    assert after.used["b"] == 12


def test_drf_says_among_whom_a_share_is_the_smallest() -> None:
    """A team's is compared with its siblings' alone; without a tree with all others'."""
    nested = cell((view("a"), view("a0"), view("b")), {"a0": 12, "b": 12})
    reasons = {
        each.reason
        for each in policy("drf").allocate(nested, b"").decisions
        if isinstance(each, Start)
    }
    smallest = "has the smallest dominant share"
    assert reasons == {
        f"tenant a0 {smallest} at its level of the tree, 0.500 with it",
        f"tenant b {smallest}, 0.500 with it",
    }


def test_tetris_looks_at_organisations_before_their_teams() -> None:
    """Where the worst-off job alone is looked at, `fairness` near 1: by the dominant share of its
    organisation first, so that each gets its half."""
    tenants = (view("a"), view("b"), *(view(f"a{n}") for n in range(4)), view("b0"))
    snapshot = cell(tenants, {**{f"a{n}": GPUS for n in range(4)}, "b0": GPUS})
    check_levels(after_a_pass("tetris:fairness=0.999", snapshot))


# --- over time --------------------------------------------------------------------------------


def mean_use(policy: str, weight: float) -> tuple[float, int]:
    """GPUs of `b`, as a mean over a stretch in which all wait, and preemptions."""
    settings_ = tuple(
        TenantSettings(name=each.name, parent=each.parent, weight=each.weight)
        for each in (view("a"), view("b", weight), *(view(f"a{n}") for n in range(4)), view("b0"))
    )
    sim = Simulation(
        EngineSettings(policy=policy, tenants=settings_, min_runtime_s=0.0),
        [
            NodeSpec(name=NodeName(f"n{n}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=4)
            for n in range(2)
        ],
    )
    sim.submit(
        Submission(
            at_s=float(number % 3),
            job_id=JobId(f"{owner}-{number:02d}"),
            spec=make_spec(expected_runtime_s=40.0 + number),
            work_s=40.0 + number,
            tenant=owner,
        )
        for owner, count in (*((f"a{n}", 20) for n in range(4)), ("b0", 60))
        for number in range(count)
    )
    sim.run(150.0)
    used = 0.0
    for sample in range(20):
        sim.loop.run(150.0 + sample * 15.0)
        used += float(Tenancy(sim.engine.snapshot()).used["b"])
    left = {job.tenant[0] for job in sim.engine.state.live() if not job.workers}
    assert left == {"a", "b"}, "the backlog has run out"
    return used / 20, sum(job.counts.preemptions for job in sim.engine.state.jobs.values())


@slow
@each_row("weight", [1.0, 3.0])
@each_row("policy", ["drf", "mesos", "philly", "yarn-fair"])
def test_an_organisation_keeps_its_part_by_turnover(policy: str, weight: float) -> None:
    """Of eight GPUs the half, or three quarters, beside one that has four times as many teams."""
    used, _ = mean_use(policy, weight)
    assert used == pytest.approx(8 * weight / (1 + weight), abs=0.3)


@slow
def test_queues_that_are_served_by_their_tree_starve_nobody() -> None:
    """Who is served next and who has too little go by the same shares, so nobody is stopped for
    what the order itself withheld."""
    used, preemptions = mean_use("yarn-fair:preempts=true", 3.0)
    assert used == pytest.approx(6.0, abs=0.3)
    assert preemptions == 0
