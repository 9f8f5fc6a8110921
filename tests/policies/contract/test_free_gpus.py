"""From who gets how many workers to decisions on nodes: whole gangs, nobody stopped in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, JobState, NodeName, NodeRole, Preemptibility
from coordinator.policies.contract.decisions import Placement, Preempt, Resize, Start
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    best_fit,
    consolidated,
    is_movable,
    present_workers,
    spare_workers,
    takers,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.parts.grants import Grant, carry_out
from tests.draws import whole
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.properties.safety import Ledger
from tests.strategies import snapshots


def cluster(
    *waiting: JobView, running: dict[str, tuple[str, int]], nodes: int = 2, gpus: int = 8
) -> ClusterSnapshot:
    """Nodes n0, n1, ..; running jobs have one-GPU workers on one of them."""
    jobs = list(waiting)
    on: dict[str, list[WorkerView]] = {f"n{number}": [] for number in range(nodes)}
    for name, (node, count) in running.items():
        workers = [make_worker_view(name, index, node) for index in range(count)]
        on[node] += workers
        jobs.append(
            make_job_view(name, state=JobState.RUNNING, workers=(count, count), placed=workers)
        )
    return make_snapshot(
        nodes=[make_node_view(name, gpus=gpus, workers=held) for name, held in on.items()],
        jobs=jobs,
    )


def grants(snapshot: ClusterSnapshot, *names: str) -> list[Grant]:
    """The named jobs in this order, each with its base gang."""
    by_name = {job.job_id: job for job in snapshot.jobs}
    return [
        Grant(job=by_name[name], workers=by_name[name].workers.min, reason="its turn")  # type: ignore[index]
        for name in names
    ]


def test_a_waiting_job_takes_the_place_of_a_running_one_that_was_granted_nothing() -> None:
    """The stop comes first, names who gets the GPUs, and the start is on what it leaves."""
    waiting = make_job_view("new", workers=(10, 10))
    snapshot = cluster(waiting, running={"old": ("n0", 4), "stays": ("n1", 4)})
    plan = carry_out(snapshot, grants(snapshot, "stays", "new"))
    assert [type(decision) for decision in plan.decisions] == [Preempt, Start]
    preempt, start = plan.decisions
    assert isinstance(preempt, Preempt)
    assert (preempt.job_id, preempt.beneficiary) == ("old", "new")
    assert isinstance(start, Start)
    assert {placement.node for placement in start.placements} <= {"n0", "n1"}


def test_nobody_is_stopped_in_vain() -> None:
    """A running job that was granted nothing goes on where nobody needs its GPUs."""
    waiting = make_job_view("new", workers=(4, 4))
    snapshot = cluster(waiting, running={"old": ("n0", 8)})
    plan = carry_out(snapshot, grants(snapshot, "new"))
    assert [type(decision) for decision in plan.decisions] == [Start]
    told = carry_out(snapshot, grants(snapshot, "new"), stops_in_vain=True)
    assert [type(decision) for decision in told.decisions] == [Preempt, Start]


def test_a_gang_that_does_not_fit_stops_nobody_and_says_what_it_lacks() -> None:
    """Of 20 workers 16 could be placed even if all others went."""
    waiting = make_job_view("huge", workers=(20, 20))
    snapshot = cluster(waiting, running={"old": ("n0", 4)})
    plan = carry_out(snapshot, grants(snapshot, "huge"))
    assert plan.decisions == ()
    [hold] = plan.holds
    assert hold.job_id == "huge"
    assert "only 16 can be placed" in hold.blockers[0]


def test_jobs_in_flight_or_that_did_not_agree_keep_what_they_have() -> None:
    """A gang that starts, and one that may not be preempted, are not touched."""
    workers = [make_worker_view("starts", index, "n0") for index in range(4)]
    agreed = [make_worker_view("non", index, "n0") for index in range(4)]
    starts = make_job_view("starts", state=JobState.STARTING, workers=(4, 4), placed=workers)
    non = make_job_view(
        "non",
        state=JobState.RUNNING,
        workers=(4, 4),
        placed=agreed,
        preemptibility=Preemptibility.NON,
    )
    waiting = make_job_view("new", workers=(8, 8))
    node = make_node_view("n0", workers=[*workers, *agreed])
    snapshot = make_snapshot(nodes=[node], jobs=[starts, non, waiting])
    assert not is_movable(starts)
    assert not is_movable(non)
    assert carry_out(snapshot, grants(snapshot, "new")).decisions == ()


def elastic(name: str, node: str, flexible: int, **more: float) -> JobView:
    """A running job of one base worker and some flexible ones, of at most 8."""
    placed = [
        make_worker_view(name, index, node, is_flexible=index > 0) for index in range(1 + flexible)
    ]
    return make_job_view(name, state=JobState.RUNNING, workers=(1, 8), placed=placed, **more)  # type: ignore[arg-type]


def test_one_shrinks_so_that_another_can_grow_in_the_same_pass() -> None:
    """The newest flexible workers go first, and the other one's come on their GPUs."""
    wide, thin = elastic("wide", "n0", 6), elastic("thin", "n0", 0)
    node = make_node_view("n0", workers=[*wide.placed, *thin.placed])
    snapshot = make_snapshot(nodes=[node], jobs=[wide, thin])
    plan = carry_out(
        snapshot,
        [
            Grant(job=wide, workers=3, reason="less"),
            Grant(job=thin, workers=5, reason="more"),
        ],
    )
    shrink, grow = plan.decisions
    assert isinstance(shrink, Resize)
    assert isinstance(grow, Resize)
    assert (shrink.job_id, shrink.removed_workers) == ("wide", (3, 4, 5, 6))
    assert grow.job_id == "thin"
    assert [(p.node, p.worker_count, p.is_flexible) for p in grow.added] == [("n0", 4, True)]


def test_a_job_that_rests_after_a_resize_grows_when_it_has_rested() -> None:
    """Growth waits for the cooldown, and the plan says until when; shrinking does not wait."""
    thin = elastic("thin", "n0", 1, resizes_latest_at_s=NOW_S - 10)
    node = make_node_view("n0", workers=thin.placed)
    snapshot = make_snapshot(nodes=[node], jobs=[thin], resize_cooldown_s=60.0)
    plan = carry_out(snapshot, [Grant(job=thin, workers=4, reason="more")])
    assert (plan.decisions, plan.wake_at_s) == ((), NOW_S + 50)
    assert len(carry_out(snapshot, [Grant(job=thin, workers=1, reason="less")]).decisions) == 1


def test_a_start_beyond_the_base_gang_has_flexible_workers() -> None:
    """Of five workers two are the gang, three can be given back one by one."""
    job = make_job_view("new", workers=(2, 6))
    snapshot = make_snapshot(nodes=[make_node_view("n0")], jobs=[job])
    [start] = carry_out(snapshot, [Grant(job=job, workers=5, reason="turn")]).decisions
    assert isinstance(start, Start)
    counts = Counter[bool]()
    for placement in start.placements:
        counts[placement.is_flexible] += placement.worker_count
    assert counts == {False: 2, True: 3}


def test_best_fit_fills_and_consolidation_keeps_together() -> None:
    """Free are 2, 3 and 8 GPUs: best fit fills the small holes, consolidation takes one node."""
    job = make_job_view("new", workers=(4, 4))
    snapshot = make_snapshot(
        nodes=[make_node_view(f"n{free}", free_gpus=free) for free in (2, 3, 8)], jobs=[job]
    )
    floor = FreeGpus(snapshot)
    assert [(p.node, p.worker_count) for p in best_fit(floor, job, "H100", 4)] == [
        ("n2", 2),
        ("n3", 2),
    ]
    assert [p.node for p in consolidated(floor, job, "H100", 4)] == ["n8"]
    assert [p.node for p in consolidated(floor, job, "H100", 3)] == ["n3"]
    assert [p.node for p in consolidated(floor, job, "H100", 10)] == ["n8", "n2"]


def test_an_exact_place_is_taken_as_it_is_or_not_at_all() -> None:
    """Whoever holds GPUs there makes room; where that is not enough nobody starts."""
    job = make_job_view("new", workers=(6, 6))
    snapshot = cluster(job, running={"old": ("n0", 4)})
    there = Grant(
        job=job,
        workers=6,
        reason="turn",
        gpu_type="H100",
        placements=(Placement(node=NodeName("n0"), worker_count=6),),
    )
    preempt, start = carry_out(snapshot, [there]).decisions
    assert isinstance(preempt, Preempt)
    assert isinstance(start, Start)
    assert start.placements == there.placements
    stays = grants(snapshot, "old")
    assert carry_out(snapshot, [*stays, there]).decisions == ()


def test_lent_nodes_are_left_alone_unless_asked_for() -> None:
    """Whoever lent them fills and empties them."""
    lent = make_node_view("i0", role=NodeRole.ON_LOAN)
    snapshot = make_snapshot(nodes=[lent])
    assert FreeGpus(snapshot).total_gpus() == 0
    assert FreeGpus(snapshot, takes_lent=True).free_gpus("H100") == 8


@st.composite
def cases(draw: st.DrawFn) -> tuple[ClusterSnapshot, Sequence[Grant]]:
    """A cluster, and some of its jobs in any order with any worker count of their range."""
    snapshot = draw(snapshots())
    order = draw(st.permutations(snapshot.jobs))
    chosen = order[: draw(whole(0, len(order)))]
    return snapshot, [
        Grant(
            job=job,
            workers=draw(whole(job.workers.min, job.workers.max)),
            reason="its turn",
        )
        for job in chosen
    ]


@given(cases())
def test_every_plan_can_be_carried_out(case: tuple[ClusterSnapshot, Sequence[Grant]]) -> None:
    """GpusAreThere, WholeGangs, OnlyGranted: in order, on a plain count of GPUs."""
    snapshot, given_ = case
    granted = {grant.job.job_id: grant for grant in given_}
    ledger = Ledger(snapshot)
    for decision in carry_out(snapshot, given_).decisions:
        ledger.carry_out(decision)
        match decision:
            case Start():
                job = granted[decision.job_id].job
                base = sum(p.worker_count for p in decision.placements if not p.is_flexible)
                count = sum(p.worker_count for p in decision.placements)
                gang = job.workers_on(decision.gpu_type)
                assert base == gang.min
                assert count <= gang.max
            case Preempt():
                assert decision.job_id not in granted
            case Resize():
                grant = granted[decision.job_id]
                added = sum(p.worker_count for p in decision.added)
                after = present_workers(grant.job) + added - len(decision.removed_workers)
                before = present_workers(grant.job)
                assert min(before, grant.workers) <= after <= max(before, grant.workers)
            case _:
                raise AssertionError(decision)


@given(cases())
def test_a_stop_is_for_somebody(case: tuple[ClusterSnapshot, Sequence[Grant]]) -> None:
    """NoStopInVain: with nobody preempted, some start or growth would lack its GPUs."""
    snapshot, given_ = case
    decisions = carry_out(snapshot, given_).decisions
    for victim in [decision for decision in decisions if isinstance(decision, Preempt)]:
        ledger = Ledger(snapshot)
        try:
            for decision in decisions:
                if decision is not victim:
                    ledger.carry_out(decision)
        except AssertionError as lacks:
            assert "has not" in str(lacks)
        else:
            raise AssertionError(f"{victim.job_id} was stopped for nobody")


def test_who_can_take_a_worker_has_the_type_the_gpus_and_is_not_avoided() -> None:
    """By the GPUs that are asked about, not by those that are free there."""
    nodes = [make_node_view(f"n{number}") for number in range(3)]
    nodes.append(make_node_view("t4", gpu_type="T4"))
    job = make_job_view("j", gpus_per_worker=4, types=("H100",))
    job = job_with(job, nodes_avoided=(NodeName("n1"),))
    gpus = {NodeName(name): count for name, count in (("n0", 4), ("n1", 8), ("n2", 3), ("t4", 8))}
    floor = FreeGpus(make_snapshot(nodes=nodes))
    assert takers(floor, job, gpus) == {"n0"}
    assert takers(floor, replace(job, gpu=GpuRequest()), gpus) == {"n0", "t4"}


def test_what_a_job_can_spare_are_its_flexible_workers_the_newest_first() -> None:
    """None that is leaving, and none of a job that may not be resized now."""
    placed = [
        make_worker_view("j", index, "n0", is_flexible=index > 0, is_leaving=index == 2)
        for index in range(4)
    ]
    job = make_job_view("j", state=JobState.RUNNING, workers=(1, 4), placed=placed)
    assert [worker.worker_index for worker in spare_workers(job)] == [3, 1]
    assert spare_workers(replace(job, is_resizable=False)) == ()
