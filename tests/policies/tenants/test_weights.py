"""Weights of tenants under every policy: whose turn it is, also where shares are equal or less than
one job, and that nothing idles for it."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Pool, Preemptibility
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import (
    FAIR_SHARE,
    Allocation,
    Preempt,
    Resize,
    Start,
    Wait,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.registry import policy as find_policy
from coordinator.policies.registry import policy as named
from coordinator.policies.tenants.enforce import SHARES_AGAIN_S, allocated
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.draws import pick, whole
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_spec,
    make_worker_view,
)
from tests.policies.tenant_books import cell, check, names, runs, start, waits
from tests.strategies import snapshots
from tests.tables import each_row

slow = pytest.mark.slow


often = settings(max_examples=100, deadline=None)


A3 = TenantView(name="a", weight=3.0)


B1 = TenantView(name="b", weight=1.0)


STAYING = ("fifo-skip", "sjf", "aryl", "foresight", "tiresias", "themis", "gandiva", "philly")
"""Policies that start whatever fits, and stop nobody for a job like the others."""


# --- one pass ---------------------------------------------------------------------------------


def full_but_for(gpus: int, *waiting: JobView, tenants: tuple[TenantView, ...]) -> ClusterSnapshot:
    """Sixteen GPUs, so many of them free: four by four and more they are `b`'s."""
    running = [runs(f"r{n}", "b", f"n{n // 2}", 4) for n in range((16 - gpus) // 4)]
    return cell(*running, *waiting, tenants=tenants)


@each_row("policy", ["fifo", *STAYING])
def test_who_has_its_share_waits_for_who_has_not(policy: str) -> None:
    """`b` has twelve of sixteen GPUs and its job is older and shorter; `a` has none: `a` starts."""
    own = job_with(waits("b1", "b", 4, submitted_at_s=-50.0), remaining_work_s=60.0)
    snapshot = full_but_for(4, own, waits("a1", "a", 4), tenants=(A3, B1))
    assert names(POLICIES[policy].allocate(snapshot, b"").decisions, Start) == {"a1"}


@each_row("policy", ["fifo", *(name for name in STAYING if name != "philly")])
def test_what_nobody_below_its_share_can_use_goes_to_the_others(policy: str) -> None:
    """The job of `a` needs a whole node and there is none: the four GPUs do not wait for it.

    Under `philly` they do, as its gangs hold what they find.
    """
    snapshot = full_but_for(
        4, waits("b1", "b", 4, submitted_at_s=-50.0), waits("a1", "a", 8), tenants=(A3, B1)
    )
    assert names(POLICIES[policy].allocate(snapshot, b"").decisions, Start) == {"b1"}


@each_row("policy", ["fifo", "sjf", "aryl:reservation_after_s=1e9", "tiresias"])
def test_what_is_left_after_turns_is_used_in_the_same_pass(policy: str) -> None:
    """Of eight GPUs `a` gets four, as its other job needs a node, and the first of `b` the rest.

    Under `aryl` that other job has waited for so long that the node would be reserved for it.
    """
    own = [waits(f"b{n}", "b", 4, submitted_at_s=-50.0 + n) for n in range(3)]
    others = [waits("a1", "a", 4), waits("a2", "a", 8, submitted_at_s=10.0)]
    snapshot = full_but_for(8, *own, *others, tenants=(A3, B1))
    decisions = find_policy(policy).allocate(snapshot, b"").decisions
    assert names(decisions, Start) == {"a1", "b0"}


@each_row("policy", ["fifo", "sjf", "aryl", "tiresias", "gandiva", "philly"])
def test_guarantees_come_first_and_the_rest_by_weight(policy: str) -> None:
    """64 GPUs, 8 guaranteed to each, weights 3 : 1, the lighter one first in line: 44 and 20."""
    line = [waits(f"b{n:02d}", "b", 1, submitted_at_s=-50.0) for n in range(64)]
    line += [waits(f"c{n:02d}", "a", 1) for n in range(64)]
    tenants = (replace(A3, guarantee_gpus=8), replace(B1, guarantee_gpus=8))
    snapshot = cell(*line, tenants=tenants, nodes=8)
    books = check(snapshot, POLICIES[policy].allocate(snapshot, b"").decisions)
    assert (books.used["a"], books.used["b"]) == (44, 20)


def test_who_waits_for_its_turn_is_told_so() -> None:
    """It counts as waiting for its fair share, and `explain` names tenant, use and share."""
    snapshot = full_but_for(
        4, waits("b1", "b", 4, submitted_at_s=-50.0), waits("a1", "a", 4), tenants=(A3, B1)
    )
    found = POLICIES["fifo"].allocate(snapshot, b"")
    assert found.waits == (Wait(kind=FAIR_SHARE, jobs=(JobId("b1"),)),)
    [told] = POLICIES["fifo"].pending_reasons(snapshot, b"")
    assert told.job_id == "b1"
    assert told.blockers[0].endswith("jobs of tenants below theirs go first")
    full = full_but_for(0, waits("b1", "b", 4), waits("a1", "a", 4), tenants=(A3, B1))
    why = {hold.job_id: hold.blockers for hold in POLICIES["fifo"].pending_reasons(full, b"")}
    turn = (
        "tenant b uses 16 GPUs, and its share by weight is 12.0: jobs of tenants below theirs "
        "go first"
    )
    assert turn in why[JobId("b1")]
    assert turn not in why[JobId("a1")]


@each_row("policy", ["fifo", *STAYING])
def test_siblings_share_alike_where_no_weight_is_set(policy: str) -> None:
    """`b` has twelve of the sixteen GPUs of their parent, and its job is older and shorter."""
    own = job_with(waits("b1", "b", 4, submitted_at_s=-50.0), remaining_work_s=60.0)
    tenants = (TenantView(name="p"), TenantView(name="a", parent="p"))
    snapshot = full_but_for(
        4, own, waits("a1", "a", 4), tenants=(*tenants, TenantView(name="b", parent="p"))
    )
    assert names(POLICIES[policy].allocate(snapshot, b"").decisions, Start) == {"a1"}


def test_a_tenant_alone_shares_with_nobody() -> None:
    """The order is the policy's alone."""
    snapshot = full_but_for(
        4,
        waits("b1", "b", 4, submitted_at_s=-50.0),
        waits("b2", "b", 4),
        tenants=(TenantView(name="b"),),
    )
    assert names(POLICIES["fifo"].allocate(snapshot, b"").decisions, Start) == {"b1"}


def test_a_policy_that_divides_by_weight_itself_is_left_alone() -> None:
    """DRF's own measure: `b` has most of the GPUs and `a` most of the CPUs, so `b` goes first."""
    greedy = [replace(runs(f"a{n}", "a", f"n{n}", 1), cpus_per_worker=12) for n in range(2)]
    running = [runs("r1", "b", "n0", 4), runs("r2", "b", "n0", 3), runs("r3", "b", "n1", 4)]
    waiting = [waits("b1", "b", 3, submitted_at_s=-50.0), waits("a9", "a", 3)]
    small = [replace(job, cpus_per_worker=1) for job in (*running, *waiting)]
    shared = cell(*greedy, *small, tenants=(replace(A3, weight=1.05), B1))
    nodes = tuple(replace(node, cpus=16) for node in shared.nodes)
    snapshot = replace(shared, nodes=nodes, index=None)
    assert names(POLICIES["drf"].allocate(snapshot, b"").decisions, Start) == {"b1"}
    assert names(POLICIES["sjf"].allocate(snapshot, b"").decisions, Start) == {"a9"}


@each_row("name", ["drf", "mesos", "yarn-fair", "yarn-capacity"])
def test_nobody_waits_for_a_turn_that_its_policy_does_not_give(name: str) -> None:
    """Those policies name their own reasons, and none of them is the shared rule."""
    full = full_but_for(0, waits("b1", "b", 4), waits("a1", "a", 4), tenants=(A3, B1))
    holds = POLICIES[name].pending_reasons(full, b"")
    assert {hold.job_id for hold in holds} == {"a1", "b1"}
    assert not [why for hold in holds for why in hold.blockers if "share by weight" in why]


def test_a_promise_waits_for_no_turn() -> None:
    """Under ElasticFlow deadlines are promised: its own order decides, whoever has its share."""
    snapshot = full_but_for(
        4, waits("b1", "b", 4, submitted_at_s=-50.0), waits("z1", "a", 4), tenants=(A3, B1)
    )
    fixed = tuple(replace(job, preemptibility=Preemptibility.NON) for job in snapshot.jobs)
    decisions = POLICIES["qos-elasticflow"].allocate(replace(snapshot, jobs=fixed), b"").decisions
    assert names(decisions, Start) == {"b1"}


def test_a_policy_that_cannot_use_what_is_left_at_once_is_asked_again_soon() -> None:
    """One that starts a single job a pass: it is the one whose turn it is, and the next follows."""

    def one_at_a_time(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        waiting = [job for job in snapshot.jobs if not job.placed]
        last = max(waiting, key=lambda job: job.job_id)
        return Allocation(decisions=(start(last.job_id, "n1"),), memory=memory)

    waiting = [waits(name, name[0], 4) for name in ("a1", "a2", "b1")]
    snapshot = full_but_for(8, *waiting, tenants=(A3, B1))
    found = allocated(one_at_a_time, snapshot, b"")
    assert names(found.decisions, Start) == {"a2"}
    assert found.wake_at_s == snapshot.now_s + SHARES_AGAIN_S


def test_teams_share_by_weight_within_their_division() -> None:
    """The heavier team's job goes first, though its division has more than its share."""
    tenants = (
        TenantView(name="p"),
        TenantView(name="q"),
        TenantView(name="a", parent="p", weight=3.0),
        TenantView(name="b", parent="p"),
    )
    snapshot = full_but_for(
        4, waits("b1", "b", 4, submitted_at_s=-50.0), waits("a1", "a", 4), tenants=tenants
    )
    assert names(POLICIES["fifo"].allocate(snapshot, b"").decisions, Start) == {"a1"}
    with_q = replace(snapshot, jobs=(*snapshot.jobs, waits("q1", "q", 4)))
    assert names(POLICIES["fifo"].allocate(with_q, b"").decisions, Start) == {"q1"}


@st.composite
def contested(draw: st.DrawFn) -> ClusterSnapshot:
    """Jobs of one size of two tenants, some running, enough of them waiting to fill the cell."""
    size = draw(pick(1, 2, 4))
    places = [f"n{n}" for n in range(2) for _ in range(8 // size)]
    running = [
        runs(f"r{number:02d}", owner, node, size)
        for number, node in enumerate(places)
        if (owner := draw(pick("", "a", "b")))
    ]
    waiting = [
        job_with(
            waits(f"w{number:02d}", draw(pick(*"ab")), size, submitted_at_s=-number),
            remaining_work_s=draw(pick(60.0, 600.0, 6000.0)),
        )
        for number in range(draw(whole(0, 20)))
    ]
    weights = draw(pick((3.0, 1.0), (1.0, 2.0), (5.0, 1.0)))
    tenants = tuple(TenantView(name=n, weight=w) for n, w in zip("ab", weights, strict=True))
    return cell(*running, *waiting, tenants=tenants)


@slow
@often
@given(policy=st.sampled_from(("fifo", "srtf", "srsf", *STAYING)), snapshot=contested())
def test_turns_go_by_share_and_nothing_idles_for_them(
    policy: str, snapshot: ClusterSnapshot
) -> None:
    """Jobs of one size: no GPU is free while one waits, and who waits although it is below its
    share waits for nobody that started beyond its own."""
    decisions = POLICIES[policy].allocate(snapshot, b"").decisions
    books = check(snapshot, decisions)
    started = {JobId(name) for name in names(decisions, Start)}
    left = [j for j in snapshot.jobs if not j.placed and j.job_id not in started]
    if left:
        assert all(free < left[0].gpus_per_worker for free in books.free.values())
    asked = dict.fromkeys("ab", 0)
    for job in snapshot.jobs:
        asked[job.tenant] += job.gpus_per_worker
    weights = {tenant.name: tenant.weight for tenant in snapshot.tenants}
    whole = 16.0
    for mine, other in ("ab", "ba"):
        part = whole * weights[mine] / sum(weights.values())
        due = min(asked[mine], max(part, whole - asked[other]))
        if books.used[mine] < due and any(job.tenant == mine for job in left):
            grew = any(books.jobs[name].tenant == other for name in started)
            size = left[0].gpus_per_worker
            assert not grew or books.used[other] < whole - due + size


@slow
@often
@given(policy=st.sampled_from(("fifo", "fifo-skip", "sjf", "aryl")), snapshot=snapshots())
def test_no_job_is_stopped_for_weights(policy: str, snapshot: ClusterSnapshot) -> None:
    """Under policies that stop nobody for a turn, weights stop nobody either."""
    tenants = (A3, B1)
    jobs = tuple(replace(job, tenant="ab"[number % 2]) for number, job in enumerate(snapshot.jobs))
    shared = replace(snapshot, jobs=jobs, tenants=tenants, index=None)
    assert not names(POLICIES[policy].allocate(shared, b"").decisions, Preempt)


# --- in the long run --------------------------------------------------------------------------

GPUS = 8


SAMPLES, STEP_S, SETTLED_S = 30, 15.0, 150.0


def backlog(seed: int) -> list[Submission]:
    """Jobs of one GPU of both tenants in any order, all there from the first seconds on; three
    to one, so that of both enough wait to the end."""
    random = Random(seed)
    made: list[Submission] = []
    for number in range(110):
        work_s = random.uniform(20.0, 100.0)
        spec = make_spec(f"j{number}", expected_runtime_s=work_s)
        made.append(
            Submission(
                at_s=random.uniform(0.0, 10.0),
                job_id=JobId(f"{number:04d}"),
                spec=spec,
                work_s=work_s,
                tenant=random.choice("aaab"),
            )
        )
    return made


def mean_use(policy: str, tenants: tuple[TenantSettings, ...], seed: int) -> dict[str, float]:
    """GPUs by tenant, as a mean over a stretch in which jobs of both wait."""
    sim = Simulation(
        EngineSettings(policy=policy, tenants=tenants, min_runtime_s=0.0),
        [
            NodeSpec(name=NodeName(f"n{n}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=4)
            for n in range(GPUS // 4)
        ],
    )
    sim.submit(backlog(seed))
    sim.run(SETTLED_S)
    sums = dict.fromkeys("ab", 0.0)
    for sample in range(SAMPLES):
        sim.loop.run(SETTLED_S + sample * STEP_S)
        used = Tenancy(sim.engine.snapshot()).used
        for name in sums:
            sums[name] += used[name]
    left = {job.tenant for job in sim.engine.state.live() if not job.workers}
    assert left == {"a", "b"}, "the backlog has run out"
    return {name: total / SAMPLES for name, total in sums.items()}


@slow
@each_row(
    "policy", ["fifo", "sjf", "srtf", "aryl", "tiresias", "themis", "gandiva", "philly", "qos"]
)
def test_a_backlog_settles_at_the_weights(policy: str) -> None:
    """Three to one of eight GPUs while both tenants wait, by turnover alone, and all are used."""
    tenants = (TenantSettings(name="a", weight=3.0), TenantSettings(name="b"))
    use = mean_use(policy, tenants, seed=1)
    assert use == {"a": pytest.approx(6.0, abs=0.2), "b": pytest.approx(2.0, abs=0.2)}


BY_THE_TREE = ("drf", "mesos", "philly", "yarn-capacity", "yarn-fair")
"""Policies that serve the tenant that has least."""


FLAT = tuple(TenantSettings(name=name) for name in ("t0", "t1", "t2"))


NESTED = (
    TenantSettings(name="a", weight=7.0),
    TenantSettings(name="a0", parent="a"),
    TenantSettings(name="t"),
    *(TenantSettings(name=f"t{number}", parent="t") for number in range(3)),
)


def started(policy: str, tenants: tuple[TenantSettings, ...]) -> Counter[str]:
    """Jobs by tenant that got their turn within an hour, on two GPUs that all want all the time.

    Each minute there is one job more of each tenant, and each takes about five.
    """
    sim = Simulation(
        EngineSettings(policy=policy, tenants=tenants),
        [
            NodeSpec(name=NodeName(f"n{n}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=1)
            for n in range(2)
        ],
        check=True,
    )
    inner = {each.parent for each in tenants}
    leaves = [each.name for each in tenants if each.name not in inner]
    sim.submit(
        Submission(
            at_s=60.0 * number,
            job_id=JobId(f"{number:02d}-{owner}"),
            spec=make_spec(expected_runtime_s=300.0 + 7.0 * number),
            work_s=300.0 + 7.0 * number,
            tenant=owner,
        )
        for number in range(24)
        for owner in leaves
    )
    sim.run(3600.0)
    jobs = sim.engine.state.jobs.values()
    waiting = Counter(job.tenant for job in jobs if job.state == JobState.PENDING)
    assert set(waiting) == set(leaves), "the backlog has run out"
    return Counter(job.tenant for job in jobs if job.state != JobState.PENDING)


@pytest.mark.slow
@each_row("policy", BY_THE_TREE)
def test_equals_take_turns(policy: str) -> None:
    """Three tenants on two GPUs: where all have none of a GPU that comes free the one whose job
    waits for longest has it, so that nobody stands behind the same two for ever."""
    found = started(policy, FLAT)
    assert sum(found.values()) > 15
    assert max(found.values()) - min(found[each.name] for each in FLAT) <= 1


@pytest.mark.slow
@each_row("policy", BY_THE_TREE)
def test_teams_of_a_small_organisation_take_turns(policy: str) -> None:
    """Its part is less than a GPU for each of its three teams, and its sibling weighs far more."""
    found = started(policy, NESTED)
    teams = [found[f"t{number}"] for number in range(3)]
    assert sum(teams) > 5
    assert max(teams) - min(teams) <= 1


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_equals_the_one_whose_job_came_first_grows(first: str) -> None:
    """Under `drf` a single GPU that both could use is nobody's by name."""
    running = [
        replace(
            make_job_view(
                name,
                state=JobState.RUNNING,
                workers=(1, 2),
                placed=(make_worker_view(name, 0, "n0"),),
                submitted_at_s=0.0 if name == first else 1.0,
            ),
            tenant=name,
        )
        for name in ("a", "b")
    ]
    there = [make_node_view("n0", gpus=3, workers=[each.placed[0] for each in running])]
    [grown] = named("drf").allocate(make_snapshot(nodes=there, jobs=running), b"").decisions
    assert isinstance(grown, Resize) and grown.job_id == first
