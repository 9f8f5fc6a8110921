"""What policies stop jobs for lasts: no guarantee calls it back before anything has changed. What
it would undo of a pass by hand: each kind of decision, and the cell after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Preemptibility
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import (
    OTHERS_GUARANTEE,
    Allocation,
    Decision,
    PendingReason,
    Placement,
    Preempt,
    Resize,
    Start,
    Wait,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.tenants.attempts import CALLED_BACK as WOULD_BE_CALLED_BACK
from coordinator.policies.tenants.enforce import SHARES_AGAIN_S, allocated, held
from coordinator.policies.tenants.gpu_flow import Flow
from coordinator.policies.tenants.stability import after, short_lived
from coordinator.sim.run.cluster import Delays
from tests.draws import pick
from tests.harness.builders import make_job_view, make_worker_view
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import B8, cell, names, runs, shared_cells, start, stop, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

slow = pytest.mark.slow


DELAYS = Delays(report_s=1.0, ready_s=20.0, start_s=5.0, suspend_s=1.0, resume_s=1.0, stop_s=7.0)


TENANTS = (
    TenantSettings(name="a", guarantee_gpus=6),
    TenantSettings(name="b", guarantee_gpus=4),
    TenantSettings(name="c"),
)


CALLED_BACK = "borrows these GPUs"
"""In the reason of each stop that is for a guarantee."""


MOST_PASSES = 12
"""In one instant: who starts, stops and is due comes in turns."""


STOPPING = {"afs", "afs-p", "las", "srsf", "srtf", "tiresias", "tiresias-gittins", "yarn-fair"}
"""Policies that stop jobs for others."""


MOST_STOPS = 3
"""Of one job by the policy's order, while no job comes or ends."""


class Lasting(Cell):
    """A cell that notes who was started by a stop and called back while nothing had changed, and
    how often the policy stopped each job meanwhile.

    That is: no job came or ended in between.
    """

    def __init__(
        self,
        policy: str,
        tenants: Sequence[TenantSettings] = TENANTS,
        *,
        nodes: int,
        delays: Delays | None,
    ) -> None:
        super().__init__(policy, tenants, nodes=nodes, delays=delays, check=True)
        self.hear = self._heard
        self.brief: list[tuple[float, JobId]] = []
        self.stops: Counter[tuple[JobId, tuple[int, int]]] = Counter()
        self._began: dict[JobId, tuple[int, int]] = {}

    def _heard(self, decisions: Sequence[Decision]) -> None:
        counters = self.engine.state.counters
        change = len(self.engine.state.jobs), counters.jobs_finished
        called = {each.job_id for each in decisions if isinstance(each, Preempt) and _is_due(each)}
        self.brief += [
            (self.loop.now_s, job_id) for job_id in called if self._began.get(job_id) == change
        ]
        own = {each.job_id for each in decisions if isinstance(each, Preempt)} - called
        self.stops.update((job_id, change) for job_id in own)
        if own:
            starts = (each for each in decisions if isinstance(each, Start) and not _is_due(each))
            self._began |= {each.job_id: change for each in starts}


def _is_due(decision: Start | Preempt) -> bool:
    return CALLED_BACK in decision.reason or "is owed its guarantee" in decision.reason


# --- by hand --------------------------------------------------------------------------------------


@each_row("policy", FAMILIES)
def test_a_gang_of_the_whole_cell_and_jobs_within_guarantees_do_not_take_turns_for_ever(
    policy: str,
) -> None:
    """Whoever is stopped for the short gangs would be due their GPUs: so nobody is."""
    played = Lasting(policy, nodes=1, delays=None)
    played.ask(
        [
            Asked(tenant="b", gpus=1, work_s=7200.0),
            Asked(tenant="b", gpus=8, work_s=300.0, at_s=10.0),
            Asked(tenant="a", gpus=8, work_s=600.0, at_s=10.0),
            Asked(tenant="a", gpus=1, work_s=7200.0, at_s=10.0),
        ]
    )
    played.run(until_s=900.0)
    assert played.brief == []
    assert played.most_passes <= MOST_PASSES


def whole() -> tuple[ClusterSnapshot, tuple[Decision, ...]]:
    """A job of `b` is stopped for a larger one of `b`, and one of `a` waits; `b` has 2 of 8."""
    tenants = TenantView(name="a", guarantee_gpus=4), TenantView(name="b", guarantee_gpus=2)
    snapshot = cell(
        runs("small", "b", "n0", 1),
        waits("large", "b", 8),
        waits("owed", "a", 1),
        tenants=tenants,
        nodes=1,
    )
    return snapshot, (stop("small"), start("large", "n0"))


def test_what_would_be_called_back_for_one_that_waits_is_told() -> None:
    """And is not once nobody is left whom a guarantee covers."""
    snapshot, made = whole()
    assert short_lived(snapshot, made, made) == [made[1]]


def test_what_would_be_called_back_for_whom_the_pass_stops_is_told() -> None:
    """The stopped job itself is due as soon as it waits: its tenant has nothing then."""
    tenants = (TenantView(name="a", guarantee_gpus=4), TenantView(name="b", guarantee_gpus=4))
    snapshot = cell(runs("small", "a", "n0", 1), waits("large", "b", 8), tenants=tenants, nodes=1)
    made = stop("small"), start("large", "n0")
    assert short_lived(snapshot, made, made) == [made[1]]


def test_a_stop_among_jobs_of_one_tenant_within_its_guarantee_stands() -> None:
    """Nobody else has anything to lose or to claim by it."""
    tenants = (TenantView(name="a", guarantee_gpus=8), TenantView(name="b"))
    snapshot = cell(
        runs("long", "a", "n0", 8), waits("short", "a", 8), waits("other", "b", 8), tenants=tenants,
        nodes=1,
    )  # fmt: skip
    made = stop("long"), start("short", "n0")
    assert short_lived(snapshot, made, made) == []


def test_a_pass_that_stops_nobody_is_not_looked_at() -> None:
    """Whoever starts on free GPUs gives way in the pass itself."""
    snapshot, made = whole()
    assert short_lived(snapshot, made[1:], made[1:]) == []


def test_the_cell_after_a_pass_has_what_was_started_and_waits_for_what_was_stopped() -> None:
    """GPU by GPU."""
    snapshot, made = whole()
    found = after(snapshot, made, Flow(snapshot))
    jobs = {job.job_id: job for job in found.jobs}
    assert jobs[JobId("small")].state == JobState.PENDING
    assert jobs[JobId("small")].placed == ()
    assert jobs[JobId("large")].state == JobState.RUNNING
    assert [(w.node, w.gpus) for w in jobs[JobId("large")].placed] == [("n0", 8)]
    assert [node.free_gpus for node in found.nodes] == [0]
    assert [[worker.job_id for worker in node.workers] for node in found.nodes] == [["large"]]


@given(snapshot=shared_cells(), name=pick("afs", "drf", "fifo", "qos-elasticflow", "srtf"))
def test_nodes_and_jobs_of_the_cell_after_a_pass_tell_of_the_same_workers(
    snapshot: ClusterSnapshot, name: str
) -> None:
    """Whatever was started, grown, shrunk or stopped: a policy that looks at nodes goes by them."""
    made = policy(name).allocate(snapshot, b"").decisions
    found = after(snapshot, made, Flow(snapshot))
    of_jobs = {worker for job in found.jobs for worker in job.placed}
    assert {worker for node in found.nodes for worker in node.workers} == of_jobs


def elastic(name: str, tenant: str, gpus: int) -> JobView:
    """A job that runs on the first node with twice its base gang of one worker."""
    placed = [make_worker_view(name, n, "n0", gpus=gpus, is_flexible=n > 0) for n in range(2)]
    made = make_job_view(
        name, state=JobState.RUNNING, workers=(1, 2), gpus_per_worker=gpus, placed=placed
    )
    return replace(made, tenant=tenant)


def _all_that_start(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Stops whom it may for `large`, and starts `atiny` on what is free."""
    jobs = {job.job_id: job for job in snapshot.jobs}
    made: list[Decision] = []
    if JobId("large") in jobs and not jobs[JobId("mid")].is_resting:
        made += [stop("early"), stop("mid"), start("large", "n0")]
    if JobId("atiny") in jobs:
        made.append(start("atiny", "n1"))
    return Allocation(decisions=tuple(made), memory=memory)


def test_who_fits_on_free_gpus_starts_whatever_else_would_have_been_called_back() -> None:
    """`early` would be due what `atiny` has, and `mid` what `large` has; `atiny` needs no stop."""
    tenants = (
        TenantView(name="a", guarantee_gpus=1),
        TenantView(name="b"),
        TenantView(name="d", guarantee_gpus=2),
    )
    other = replace(runs("other", "b", "n1", 7), preemptibility=Preemptibility.NON)
    there = elastic("early", "a", 1), elastic("mid", "d", 2), other
    snapshot = cell(*there, waits("large", "b", 8), waits("atiny", "b", 1), tenants=tenants)
    made = allocated(_all_that_start, snapshot, b"")
    assert names(made.decisions, Start) == {"atiny"}
    assert names(made.decisions, Preempt) == set()


def test_a_pass_follows_where_workers_gave_way() -> None:
    """What a job that is due leaves of them is for the policy to give away."""
    tenants = (TenantView(name="a", guarantee_gpus=4), TenantView(name="b"))
    snapshot = cell(runs("grows", "b", "n0", 1), waits("owed", "a", 4), tenants=tenants, nodes=1)
    more = Placement(node=NodeName("n0"), worker_count=7, is_flexible=True)
    grow = Resize(job_id=JobId("grows"), added=(more,), reason="test")

    def decide(_: ClusterSnapshot, memory: bytes) -> Allocation:
        return Allocation(decisions=(grow,), memory=memory)

    made = allocated(decide, snapshot, b"")
    assert names(made.decisions, Start) == {"owed"}
    assert made.wake_at_s == snapshot.now_s + SHARES_AGAIN_S


def _for_large(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Stops `small` for `large`, and starts nobody else."""
    sees = any(job.job_id == "large" for job in snapshot.jobs)
    made = (stop("small"), start("large", "n0")) if sees else ()
    return Allocation(decisions=made, memory=memory)


def _nothing(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """It holds nobody."""
    return ()


def test_whoever_is_not_started_by_a_stop_is_told_why() -> None:
    """The policy itself would start it."""
    snapshot, _ = whole()
    made = allocated(_for_large, snapshot, b"")
    assert names(made.decisions, Preempt) == set()
    assert made.waits == (Wait(kind=OTHERS_GUARANTEE, jobs=(JobId("large"),)),)
    found = held(_for_large, _nothing, snapshot, b"")
    assert [hold for hold in found if hold.job_id == "large"] == [
        PendingReason(job_id=JobId("large"), blockers=(WOULD_BE_CALLED_BACK,))
    ]


# --- generated ------------------------------------------------------------------------------------


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """One job: from one GPU to the whole cell."""
    gpus, count = draw(pick((1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (4, 4), (4, 3)))
    most = count + draw(pick(0, 0, 3))
    return Asked(
        tenant=draw(pick(*"aabbc")),
        at_s=float(draw(pick(0, 0, 30, 90, 300))),
        workers=(count, most),
        gpus=gpus,
        work_s=count * float(draw(pick(60, 300, 900, 7200))),
        deadline_s=draw(pick(None, None, 3000.0)),
    )


LIMIT = pick(None, None, None, 0, 8, 16)


@st.composite
def trees(draw: st.DrawFn) -> tuple[TenantSettings, ...]:
    """Tenants of the 16 GPUs, with limits; teams in some of them."""
    found: list[TenantSettings] = []
    for name, most in (("a", 8), ("b", 8), ("c", 0)):
        promised = draw(pick(most // 2, most, most * 3 // 4))
        found.append(_tenant(draw, name, "", promised))
        if draw(pick(True, False)):
            first = draw(pick(0, promised // 2, promised))
            found.append(_tenant(draw, f"{name}x", name, first))
            found.append(_tenant(draw, f"{name}y", name, promised - first))
    return tuple(found)


def _tenant(draw: st.DrawFn, name: str, parent: str, promised: int) -> TenantSettings:
    return TenantSettings(
        name=name,
        parent=parent,
        guarantee_gpus=promised,
        borrow_limit_gpus=draw(LIMIT),
        lend_limit_gpus=draw(LIMIT),
    )


@st.composite
def of_teams(draw: st.DrawFn) -> Asked:
    """One job of a tenant or, where it has teams, of one of these."""
    gpus, count = draw(pick((2, 1), (2, 2), (4, 1), (8, 1), (4, 3), (8, 2), (8, 2)))
    return Asked(
        tenant=draw(pick(*"aabbc")) + draw(pick("", "x", "y")),
        at_s=float(draw(pick(0, 0, 30))),
        workers=(count, count),
        gpus=gpus,
        work_s=count * float(draw(pick(200, 600, 3000))),
        priority=draw(pick(0, 0, 1, 5)),
    )


LENDS_LESS = (
    TenantSettings(name="a", guarantee_gpus=8),
    TenantSettings(name="ax", parent="a"),
    TenantSettings(name="ay", parent="a", guarantee_gpus=8),
    TenantSettings(name="b", guarantee_gpus=8),
    TenantSettings(name="bx", parent="b", guarantee_gpus=4, lend_limit_gpus=8),
    TenantSettings(name="by", parent="b", guarantee_gpus=4),
)


IN_TURNS = [
    Asked(tenant="a", gpus=8, work_s=600.0),
    Asked(tenant="ax", gpus=2, workers=(2, 2), work_s=1800.0),
    Asked(tenant="bx", gpus=4, workers=(3, 3), work_s=600.0, at_s=30.0),
    Asked(tenant="a", gpus=8, workers=(2, 2), work_s=400.0, at_s=30.0, priority=1),
    Asked(tenant="by", gpus=8, workers=(2, 2), work_s=6225.0, at_s=30.0, priority=5),
]
"""The fourth was stopped for the last, the first was due its GPUs and was stopped for the third,
and that one was stopped for the fourth."""


@slow
@settings(max_examples=100, deadline=None)
@example(policy="srtf", tenants=LENDS_LESS, jobs=IN_TURNS, delays=None)
@example(policy="tiresias", tenants=LENDS_LESS, jobs=IN_TURNS, delays=None)
@given(
    policy=st.sampled_from(sorted(STOPPING)),
    tenants=trees(),
    jobs=st.lists(of_teams(), min_size=4, max_size=8),
    delays=st.sampled_from((None, DELAYS)),
)
def test_nobody_comes_and_goes_whatever_tenants_lend_and_borrow_at_any_level(
    policy: str, tenants: tuple[TenantSettings, ...], jobs: list[Asked], delays: Delays | None
) -> None:
    """Neither by guarantees nor, again and again, by the order of a policy that stops jobs."""
    played = Lasting(policy, tenants, nodes=2, delays=delays)
    played.ask(jobs)
    played.run(until_s=1500.0)
    assert played.brief == []
    assert played.most_passes <= MOST_PASSES
    assert max(played.stops.values(), default=0) <= MOST_STOPS


@slow
@settings(max_examples=70, deadline=None)
@given(
    policy=st.one_of(st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(STOPPING))),
    jobs=st.lists(asked(), min_size=3, max_size=9),
    delays=st.sampled_from((None, DELAYS)),
)
def test_what_a_policy_stops_jobs_for_is_not_called_back_while_nothing_has_changed(
    policy: str, jobs: list[Asked], delays: Delays | None
) -> None:
    """Under every policy, over any number of passes; and no instant has passes without end."""
    played = Lasting(policy, nodes=2, delays=delays)
    played.ask(jobs)
    played.run(until_s=1500.0)
    assert played.brief == []
    assert played.most_passes <= MOST_PASSES


A4, C = TenantView(name="a", guarantee_gpus=4), TenantView(name="c")


def elastic_on(name: str, workers: int) -> JobView:
    """A job of `c` of one or two workers of 4 GPUs, that runs with so many or waits with none."""
    there = [make_worker_view(name, n, "n0", gpus=4, is_flexible=n > 0) for n in range(workers)]
    state = JobState.RUNNING if workers else JobState.PENDING
    made = make_job_view(name, state=state, workers=(1, 2), gpus_per_worker=4, placed=there)
    return replace(made, tenant="c", is_resizable=bool(workers))


def of_one_node(*jobs: JobView) -> ClusterSnapshot:
    """Beside the jobs one of `a` waits for the 4 GPUs that are promised to it."""
    return cell(*jobs, waits("owed", "a", 4), tenants=(A4, C), nodes=1)


def test_what_starts_on_the_workers_of_a_job_that_shrinks_is_looked_at() -> None:
    """As what starts by a stop: the workers would not come back."""
    snapshot = of_one_node(elastic_on("grown", 2), waits("big", "c", 4))
    shrinks = Resize(job_id=JobId("grown"), removed_workers=(1,), reason="test")
    made = shrinks, start("big", "n0")
    assert short_lived(snapshot, made, made) == [made[1]]


def test_workers_that_a_job_would_have_to_give_back_are_told() -> None:
    """It grows on what a stop leaves."""
    snapshot = of_one_node(elastic_on("grows", 1), runs("gone", "c", "n0", 4))
    more = Placement(node=NodeName("n0"), worker_count=1, is_flexible=True)
    made = stop("gone"), Resize(job_id=JobId("grows"), added=(more,), reason="test")
    assert short_lived(snapshot, made, made) == [made[1]]


def test_a_stop_is_told_whose_job_would_be_due_others_gpus_while_a_guarantee_has_its_own() -> None:
    """What comes back in the pass itself lasts; the policy started nothing there."""
    snapshot = cell(
        runs("mine", "a", "n0", 4),
        runs("lent", "c", "n1", 8),
        waits("due", "b", 8),
        tenants=(A4, B8, C),
    )
    made = (stop("mine"),)
    assert short_lived(snapshot, made, (*made, start("due", "n0"))) == [made[0]]


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RESIZING])
def test_whoever_is_on_the_way_is_looked_at_as_one_that_runs(state: JobState) -> None:
    """What is called back from it then is called back soon."""
    snapshot = of_one_node(replace(runs("late", "c", "n0", 4), state=state))
    found = {job.job_id: job for job in after(snapshot, (), Flow(snapshot)).jobs}
    assert found[JobId("late")].state == JobState.RUNNING


def test_whoever_is_stopped_waits_from_then_on_and_whoever_starts_may_shrink_later() -> None:
    """As the engine would show them."""
    snapshot = of_one_node(
        runs("gone", "c", "n0", 8), elastic_on("wide", 0), waits("rigid", "c", 4)
    )
    made = stop("gone"), start("wide", "n0"), start("rigid", "n0")
    found = {job.job_id: job for job in after(snapshot, made, Flow(snapshot)).jobs}
    assert found[JobId("gone")].waiting_since_s == snapshot.now_s
    assert found[JobId("wide")].waiting_since_s is None
    assert found[JobId("wide")].is_resizable
    assert not found[JobId("rigid")].is_resizable
