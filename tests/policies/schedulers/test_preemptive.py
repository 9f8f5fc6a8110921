"""The preemptive orders: who runs, who makes room, and what they never do."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings

from common.model import JobState, NodeName, NodeRole, Preemptibility
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.schedulers.preemptive import remaining_service, remaining_time
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.strategies import snapshots

often = settings(max_examples=200, deadline=None)


def cluster(
    held: dict[str, tuple[str, int, float]],
    waiting: dict[str, tuple[int, float]],
    *,
    nodes: tuple[str, ...] = ("n0",),
    state: JobState = JobState.RUNNING,
    preemptibility: Preemptibility = Preemptibility.FULL,
) -> ClusterSnapshot:
    """Nodes of 8 GPUs; jobs of one worker: (node, GPUs, seconds left), (GPUs, seconds left)."""
    workers = {
        name: make_worker_view(name, 0, node, gpus=gpus) for name, (node, gpus, _) in held.items()
    }
    jobs = [
        make_job_view(
            name,
            state=state,
            gpus_per_worker=gpus,
            remaining_work_s=left_s,
            placed=[workers[name]],
            preemptibility=preemptibility,
        )
        for name, (_, gpus, left_s) in held.items()
    ]
    jobs += [
        make_job_view(name, gpus_per_worker=gpus, remaining_work_s=left_s)
        for name, (gpus, left_s) in waiting.items()
    ]
    views = [
        make_node_view(name, workers=[w for w in workers.values() if w.node == name])
        for name in nodes
    ]
    return make_snapshot(nodes=views, jobs=jobs)


def stopped(snapshot: ClusterSnapshot, policy: str = "srtf") -> list[str]:
    """Jobs that a pass preempts."""
    decisions = POLICIES[policy].allocate(snapshot, b"").decisions
    return [decision.job_id for decision in decisions if isinstance(decision, Preempt)]


def started(snapshot: ClusterSnapshot, policy: str = "srtf") -> list[str]:
    """Jobs that a pass starts."""
    decisions = POLICIES[policy].allocate(snapshot, b"").decisions
    return [decision.job_id for decision in decisions if isinstance(decision, Start)]


def test_less_left_takes_the_gpus_of_more_left() -> None:
    """A waiting job with less left stops a running one and starts on its GPUs in one pass."""
    snapshot = cluster({"long": ("n0", 8, 1000.0)}, {"short": (8, 999.0)})
    assert (stopped(snapshot), started(snapshot)) == (["long"], ["short"])


def test_the_same_left_stops_nobody() -> None:
    """Equal jobs are in order of submission; a difference below a millisecond is rounding."""
    snapshot = cluster({"runs": ("n0", 8, 1000.0)}, {"waits": (8, 999.9999)})
    assert (stopped(snapshot), started(snapshot)) == ([], [])


def test_free_gpus_come_before_those_of_others() -> None:
    """Nobody is stopped while another node has room."""
    snapshot = cluster({"long": ("n0", 8, 1000.0)}, {"short": (8, 1.0)}, nodes=("n0", "n1"))
    assert (stopped(snapshot), started(snapshot)) == ([], ["short"])


def test_the_jobs_with_the_most_left_make_room() -> None:
    """Whoever is last in line goes, and no more of them than needed."""
    held = {"a": ("n0", 4, 100.0), "b": ("n0", 2, 200.0), "c": ("n0", 2, 300.0)}
    snapshot = cluster(held, {"w": (2, 50.0)})
    assert (stopped(snapshot), started(snapshot)) == (["c"], ["w"])


def test_what_a_victim_leaves_over_goes_to_the_next() -> None:
    """Room beyond the first beneficiary's need starts those behind it in the same pass."""
    snapshot = cluster({"long": ("n0", 8, 1000.0)}, {"w1": (2, 10.0), "w2": (4, 20.0)})
    assert (stopped(snapshot), started(snapshot)) == (["long"], ["w1", "w2"])


def test_gpus_weigh_in_srsf_and_not_in_srtf() -> None:
    """A wide job with a little less time left comes first in srtf, last in srsf."""
    snapshot = cluster({"narrow": ("n0", 1, 1000.0)}, {"wide": (8, 900.0)})
    assert stopped(snapshot, "srtf") == ["narrow"]
    assert stopped(snapshot, "srsf") == []
    wide = job_of(snapshot, "wide")
    assert remaining_time(wide, snapshot.now_s) == 900.0
    assert remaining_service(wide, snapshot.now_s) == 7200.0


def test_a_gang_that_still_starts_is_left_alone() -> None:
    """Its GPUs may still be somebody else's, so stopping it would free them for nobody."""
    snapshot = cluster({"long": ("n0", 8, 1000.0)}, {"short": (8, 1.0)}, state=JobState.STARTING)
    assert (stopped(snapshot), started(snapshot)) == ([], [])


@pytest.mark.parametrize("kind", [Preemptibility.NON, Preemptibility.SEMI])
def test_only_jobs_that_agreed_are_stopped(kind: Preemptibility) -> None:
    """A job that is not fully preemptible keeps its base gang."""
    snapshot = cluster({"long": ("n0", 8, 1000.0)}, {"short": (8, 1.0)}, preemptibility=kind)
    assert (stopped(snapshot), started(snapshot)) == ([], [])


def test_a_frozen_cell_decides_nothing() -> None:
    """Freeze stops every decision."""
    snapshot = cluster({"long": ("n0", 8, 1000.0)}, {"short": (8, 1.0)})
    frozen = make_snapshot(nodes=snapshot.nodes, jobs=snapshot.jobs, is_frozen=True)
    assert POLICIES["srtf"].allocate(frozen, b"").decisions == ()


def test_a_waiting_job_is_told_what_it_lacks() -> None:
    """Who asks why a job waits learns how much room those before it leave."""
    snapshot = cluster({"short": ("n0", 6, 1.0)}, {"long": (4, 1000.0)})
    [hold] = POLICIES["srtf"].pending_reasons(snapshot, b"")
    assert hold.job_id == "long"
    said = "needs 1 worker of 4 GPUs; jobs with less left leave room for at most 0"
    assert hold.blockers == (said,)


# --- over generated clusters --------------------------------------------------------------------


@often
@given(snapshot=snapshots())
def test_nobody_is_stopped_in_vain_and_gangs_are_whole_and_fit(snapshot: ClusterSnapshot) -> None:
    """Each victim had GPUs on a node where its named beneficiary starts in the same pass; starts
    are whole base gangs, on GPUs that are free or vacated in the same pass."""
    decisions = POLICIES["srtf"].allocate(snapshot, b"").decisions
    starts = {decision.job_id: decision for decision in decisions if isinstance(decision, Start)}
    for decision in decisions:
        if isinstance(decision, Preempt):
            held = {worker.node for worker in job_of(snapshot, decision.job_id).placed}
            for name in decision.beneficiary.split(", "):
                start = next(start for job_id, start in starts.items() if job_id == name)
                assert held & {placement.node for placement in start.placements}
    free: dict[NodeName, int] = {node.name: node.free_gpus for node in snapshot.nodes}
    training = {node.name for node in snapshot.nodes if node.role == NodeRole.TRAINING}
    for decision in decisions:
        job = job_of(snapshot, getattr(decision, "job_id", ""))
        if isinstance(decision, Preempt):
            for worker in job.placed:
                free[worker.node] += 0 if worker.is_leaving else worker.freed_gpus
        elif isinstance(decision, Start):
            count = sum(placement.worker_count for placement in decision.placements)
            assert count == job.workers_on(decision.gpu_type).min
            for placement in decision.placements:
                assert placement.node in training
                free[placement.node] -= placement.worker_count * job.gpus_per_worker
    assert min(free.values()) >= 0


@often
@given(snapshot=snapshots())
def test_victims_have_more_left_than_a_beneficiary(snapshot: ClusterSnapshot) -> None:
    """Who is stopped makes room for one of a higher priority, or of its own with no more left; who
    else takes what it leaves over may have more."""
    for decision in POLICIES["srsf"].allocate(snapshot, b"").decisions:
        if isinstance(decision, Preempt):
            victim = service_rank(snapshot, job_of(snapshot, decision.job_id))
            takers = (job_of(snapshot, name) for name in decision.beneficiary.split(", "))
            assert min(service_rank(snapshot, taker) for taker in takers) <= victim


def service_rank(snapshot: ClusterSnapshot, job: JobView) -> tuple[int, float]:
    """Where `srsf` sees a job."""
    return -job.priority, remaining_service(job, snapshot.now_s)


def test_what_a_victim_leaves_over_may_go_to_one_with_more_left() -> None:
    """A long job starts on what a shorter one was stopped for and does not need."""
    snapshot = cluster({"runs": ("n0", 8, 100.0)}, {"short": (2, 10.0), "long": (4, 1000.0)})
    assert (stopped(snapshot), started(snapshot)) == (["runs"], ["short", "long"])


def job_of(snapshot: ClusterSnapshot, name: str) -> JobView:
    """A job of the snapshot by id."""
    return next(job for job in snapshot.jobs if job.job_id == name)


def idle(jobs: Iterable[JobView], *, gpus: int = 8) -> ClusterSnapshot:
    """One idle node, and jobs that wait."""
    return make_snapshot(nodes=[make_node_view("n0", gpus=gpus)], jobs=jobs)


def started_under(name: str, snapshot: ClusterSnapshot) -> list[str]:
    """Who starts in a pass."""
    found = policy(name).allocate(snapshot, b"").decisions
    return [each.job_id for each in found if isinstance(each, Start)]


# --- remaining time -----------------------------------------------------------------------------


def test_remaining_time_is_work_over_the_base_gang() -> None:
    """Eight workers with 800 worker-seconds are done in 100 s, before one with 200."""
    gang = make_job_view("gang", workers=(8, 8), remaining_work_s=800.0)
    single = make_job_view("single", gpus_per_worker=8, remaining_work_s=200.0)
    assert started_under("srtf", idle([gang, single])) == ["gang"]
    # By service it is 800 GPU-seconds against 1,600; with one of 90 s on eight GPUs 720.
    less = make_job_view("single", gpus_per_worker=8, remaining_work_s=90.0)
    assert started_under("srsf", idle([gang, single])) == ["gang"]
    assert started_under("srsf", idle([gang, less])) == ["single"]
