"""Claims by themselves: who may claim, on which nodes, and when these are ready."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeRole
from coordinator.policies.aryl.aged_claims import Claim, Claims
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    WorkerView,
)
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)

LONG_AGO_S = 1e6
"""So long everybody waits here unless it is said otherwise: patience is no question."""


def aged(
    job_id: str,
    *,
    runtime_s: float = 600.0,
    workers: int = 1,
    gpus: int = 8,
    types: Sequence[str] = (),
    waited_s: float = LONG_AGO_S,
    priority: int = 0,
    multiplier: dict[str, int] | None = None,
) -> JobView:
    """A job that waits, of whole nodes unless it is said otherwise. runtime_s: on its gang."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=gpus,
        types=tuple(types),
        remaining_work_s=runtime_s * workers,
        submitted_at_s=NOW_S - waited_s,
        priority=priority,
        multiplier=multiplier,
    )


def busy(
    node: str,
    *left_s: float,
    kind: str = "H100",
    gpus: int = 8,
    service: bool = False,
) -> tuple[NodeView, list[JobView]]:
    """A node, and on it one job per running time that is left, of so many GPUs each."""
    workers = [make_worker_view(f"{node}-{n}", 0, node, gpus=gpus) for n in range(len(left_s))]
    jobs = [
        make_job_view(
            worker.job_id,
            state=JobState.RUNNING,
            gpus_per_worker=gpus,
            remaining_work_s=each_s,
            gpu_type=kind,
            placed=[worker],
        )
        for worker, each_s in zip(workers, left_s, strict=True)
    ]
    role = NodeRole.ON_LOAN if service else NodeRole.TRAINING
    return make_node_view(node, role=role, gpu_type=kind, workers=workers), jobs


def cell(there: Sequence[tuple[NodeView, list[JobView]]], *waiting: JobView) -> ClusterSnapshot:
    """Those nodes with their jobs, and whoever waits."""
    jobs = [job for _, running in there for job in running]
    return make_snapshot(
        nodes=[node for node, _ in there], jobs=[*jobs, *waiting], services=[make_service_view()]
    )


def claimed(snapshot: ClusterSnapshot, *, most: int = 1) -> dict[str, Claim]:
    """What is kept for whom once all that may have claimed; in the order in which they did."""
    room, claims = PlacementState(snapshot), Claims(snapshot, ratio=1.0, stretch=0.0, most=most)
    for job in claims.aged(room):
        claims.claim(room, job)
    return {claim.job.job_id: claim for claim in claims.made}


def ready_s(claim: Claim) -> float:
    """In how many seconds it could run there."""
    return claim.ready_at_s - NOW_S


# --- who ----------------------------------------------------------------------------------------


def test_the_most_important_claims_first_and_then_who_came_first() -> None:
    """By priority, then by submission, whatever they are called."""
    snapshot = cell(
        [busy("n1", 3600.0)],
        aged("a-late", waited_s=1000.0),
        aged("b-early", waited_s=2000.0),
        aged("c-urgent", waited_s=700.0, priority=1),
    )
    claims = Claims(snapshot, ratio=1.0, stretch=0.0, most=1)
    assert [job.job_id for job in claims.aged(PlacementState(snapshot))] == [
        "c-urgent",
        "b-early",
        "a-late",
    ]


def test_each_gpu_type_has_claims_of_its_own() -> None:
    """One at a time of each: who waits for another type is not in its way."""
    nodes = [busy("n1", 3600.0), busy("m1", 3600.0, kind="A100")]
    jobs = [aged("h", types=["H100"]), aged("a", types=["A100"]), aged("late", types=["H100"])]
    found = claimed(cell(nodes, *(replace(job, submitted_at_s=n) for n, job in enumerate(jobs))))
    assert {name: claim.gpu_type for name, claim in found.items()} == {"h": "H100", "a": "A100"}


def test_whoever_finds_all_claims_of_its_types_made_is_not_tried() -> None:
    """It takes its turn by the order alone, and not before all others."""
    jobs = [aged("first", waited_s=2000.0), aged("second", waited_s=1000.0)]
    snapshot = cell([busy("n1", 600.0)], *jobs)
    room, claims = PlacementState(snapshot), Claims(snapshot, ratio=1.0, stretch=0.0, most=1)
    tried: list[JobId] = []
    for job in claims.aged(room):
        tried.append(job.job_id)
        claims.claim(room, job)
    assert tried == ["first"]


# --- where and when -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["H100", "A100"])
def test_the_type_that_is_ready_first_is_claimed(first: str) -> None:
    """Whichever of those that a job accepts it names first."""
    other = "A100" if first == "H100" else "H100"
    nodes = [busy("n1", 3600.0), busy("m1", 600.0, kind="A100")]
    claim = claimed(cell(nodes, aged("j", types=[first, other])))["j"]
    assert (claim.gpu_type, claim.nodes, ready_s(claim)) == ("A100", ("m1",), 600.0)


def test_lent_nodes_are_nobodys_claim() -> None:
    """They go home when they are wanted; one that is ready sooner is left alone."""
    nodes = [busy("l1", 60.0, service=True), busy("n1", 3600.0)]
    assert claimed(cell(nodes, aged("j")))["j"].nodes == ("n1",)


def test_who_claims_after_another_waits_until_that_one_is_over() -> None:
    """Of the one node, free in 600 s and then taken for 1,000 s: free again in 1,600 s, and not
    when what runs there now ends."""
    jobs = [aged("first", runtime_s=1000.0, waited_s=LONG_AGO_S + 1.0), aged("second")]
    found = claimed(cell([busy("n1", 600.0)], *jobs), most=2)
    assert {name: ready_s(claim) for name, claim in found.items()} == {
        "first": 600.0,
        "second": 1600.0,
    }


def test_a_node_of_an_earlier_claim_is_not_free_now_either() -> None:
    """What is free there beside the jobs that run is the earlier claim's."""
    jobs = [
        aged("first", runtime_s=1000.0, workers=2, waited_s=LONG_AGO_S + 1.0),
        aged("second", gpus=4),
    ]
    nodes = [busy("n1", 600.0, gpus=4), busy("n2", 600.0)]
    found = claimed(cell(nodes, *jobs), most=2)
    assert ready_s(found["second"]) == 1600.0


def on_two(*placed: WorkerView) -> JobView:
    """An elastic job that has grown: two hours of work for one worker."""
    return make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 2),
        gpus_per_worker=8,
        remaining_work_s=7200.0,
        placed=placed,
    )


def test_flexible_workers_are_in_nobodys_way() -> None:
    """A node that only they are on is ready now, and one with a base worker when that ends."""
    base = make_worker_view("wide", 0, "n1", gpus=8)
    more = make_worker_view("wide", 1, "n2", gpus=8, is_flexible=True)
    wide = on_two(base, more)
    nodes = [make_node_view("n1", workers=[base]), make_node_view("n2", workers=[more])]
    gang = aged("gang", workers=2)
    claim = claimed(make_snapshot(nodes=nodes, jobs=[wide, gang]))["gang"]
    assert ready_s(claim) == 3600.0  # as two workers run
    alone = claimed(make_snapshot(nodes=nodes, jobs=[wide, aged("alone")]))["alone"]
    assert (alone.nodes, ready_s(alone)) == (("n2",), 0.0)


def test_a_worker_that_leaves_no_longer_speeds_its_job_up() -> None:
    """Of two workers one is told to go: what is left takes as long as with the other alone."""
    base = make_worker_view("wide", 0, "n1", gpus=8)
    gone = make_worker_view("wide", 1, "n2", gpus=8, is_flexible=True, is_leaving=True)
    wide = on_two(base, gone)
    nodes = [make_node_view("n1", workers=[base])]
    claim = claimed(make_snapshot(nodes=nodes, jobs=[wide, aged("j")]))["j"]
    assert ready_s(claim) == 7200.0


def test_room_for_a_worker_may_come_of_several_ends() -> None:
    """A worker of six GPUs fits a node of eight once three jobs of two have gone, not after one;
    and once, not once for each."""
    nodes = [busy("n1", 600.0, 1200.0, 1800.0, 2400.0, gpus=2), busy("n2", 9000.0)]
    claim = claimed(cell(nodes, aged("j", gpus=6)))["j"]
    assert (claim.nodes, ready_s(claim)) == (("n1",), 1800.0)
    pair = claimed(cell(nodes, aged("pair", gpus=6, workers=2)))["pair"]
    assert (pair.nodes, ready_s(pair)) == (("n1", "n2"), 9000.0)


def test_a_gang_is_as_large_as_its_gpu_type_needs() -> None:
    """Of a type that needs twice the workers it claims twice the nodes."""
    nodes = [busy("m1", 600.0, kind="A100"), busy("m2", 1200.0, kind="A100")]
    job = aged("j", types=["A100"], multiplier={"A100": 2})
    claim = claimed(cell(nodes, job))["j"]
    assert (claim.nodes, ready_s(claim)) == (("m1", "m2"), 1200.0)


def test_only_who_accepts_the_type_is_told_of_a_claim() -> None:
    """A job that runs on other nodes alone waits for something else."""
    snapshot = cell([busy("n1", 600.0), busy("m1", 600.0, kind="A100")], aged("j", types=["H100"]))
    room, claims = PlacementState(snapshot), Claims(snapshot, ratio=1.0, stretch=0.0, most=1)
    (job,) = claims.aged(room)
    claims.claim(room, job)
    assert "of type H100 are kept for j" in claims.why(aged("late", types=["H100"]))
    assert claims.why(aged("late", types=["A100"])) == ""
