"""AFS, Gavel's rounds and the preemptive orders: what they rank by, one rule each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from common.model import JobId
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.afs.worker_shares import Share, share_by_throughput
from tests.builders import NOW_S, make_job_view, make_node_view, make_snapshot


def idle(jobs: Iterable[JobView], *, gpus: int = 8) -> ClusterSnapshot:
    """One idle node, and jobs that wait."""
    return make_snapshot(nodes=[make_node_view("n0", gpus=gpus)], jobs=jobs)


def started(name: str, snapshot: ClusterSnapshot) -> list[str]:
    """Who starts in a pass."""
    found = policy(name).allocate(snapshot, b"").decisions
    return [each.job_id for each in found if isinstance(each, Start)]


# --- AFS ----------------------------------------------------------------------------------------


def test_lyras_cut_of_afs_looks_at_throughput_per_gpu() -> None:
    """A worker of four GPUs that doubles its job is worth less than one GPU that does (7.4)."""
    wide, narrow = (
        Share(job=make_job_view(name, workers=(1, 8), gpus_per_worker=gpus), left_s=1.0, workers=1)
        for name, gpus in (("wide", 4), ("narrow", 1))
    )
    share_by_throughput([wide, narrow], 4)
    assert (wide.workers, narrow.workers) == (1, 5)


def test_lyras_cut_of_afs_measures_speed_in_base_gangs() -> None:
    """A worker more is all of a gang of one and a quarter of a gang of four."""
    large, small = (
        Share(job=make_job_view(name, workers=(least, 8)), left_s=1.0, workers=least)
        for name, least in (("large", 4), ("small", 1))
    )
    share_by_throughput([large, small], 1)
    assert (large.workers, small.workers) == (4, 2)


def test_afs_p_lets_who_started_first_go_on_before_who_never_did() -> None:
    """Of equal turns the first start counts, then the submission; whoever has none is behind."""
    jobs = [
        make_job_view("new", gpus_per_worker=8, submitted_at_s=0.0),
        replace(make_job_view("late", gpus_per_worker=8), first_started_at_s=NOW_S - 10.0),
        replace(
            make_job_view("early", gpus_per_worker=8, submitted_at_s=9.0),
            first_started_at_s=NOW_S - 90.0,
        ),
    ]
    assert started("afs-p", idle(jobs)) == ["early"]
    assert started("afs-p", idle(jobs[:2])) == ["late"]


# --- Gavel's rounds -----------------------------------------------------------------------------


def share_of(name: str, jobs: Iterable[JobView], job: str) -> str:
    """The part of the time that a job should run, as it is told."""
    snapshot = idle(jobs)
    made = policy(name)
    (said, *_) = made.standing(snapshot, made.allocate(snapshot, b"").memory, JobId(job))
    return said.partition("should run ")[2].partition(" of the time")[0]


def test_alone_is_an_equal_part_of_the_gpus_over_the_gang() -> None:
    """Of eight GPUs each of two has four: half of the time for a gang of eight, all for four.

    rho is then (left / x) / (2 left) and (left / y) / left: equal, and the least, at 1/2 and 1.
    """
    jobs = [
        make_job_view("wide", gpus_per_worker=8, submitted_at_s=NOW_S),
        make_job_view("half", gpus_per_worker=4, submitted_at_s=NOW_S),
    ]
    assert share_of("themis-lp", jobs, "wide") == "50%"
    assert share_of("themis-lp", jobs, "half") == "100%"


@pytest.mark.parametrize("name", ["las", "themis-lp"])
def test_in_a_round_priority_comes_first(name: str) -> None:
    """Whoever an operator ranks higher runs, though the other was owed more and came first."""
    low = make_job_view("a", gpus_per_worker=8, submitted_at_s=NOW_S - 900.0)
    high = make_job_view("b", gpus_per_worker=8, submitted_at_s=NOW_S, priority=1)
    assert started(name, idle([low, high])) == ["b"]


# --- remaining time -----------------------------------------------------------------------------


def test_remaining_time_is_work_over_the_base_gang() -> None:
    """Eight workers with 800 worker-seconds are done in 100 s, before one with 200."""
    gang = make_job_view("gang", workers=(8, 8), remaining_work_s=800.0)
    single = make_job_view("single", gpus_per_worker=8, remaining_work_s=200.0)
    assert started("srtf", idle([gang, single])) == ["gang"]
    # By service it is 800 GPU-seconds against 1,600; with one of 90 s on eight GPUs 720.
    less = make_job_view("single", gpus_per_worker=8, remaining_work_s=90.0)
    assert started("srsf", idle([gang, single])) == ["gang"]
    assert started("srsf", idle([gang, less])) == ["single"]
