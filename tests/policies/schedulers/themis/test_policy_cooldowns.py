"""Themis: a job in the cooldown of a resize keeps what it has, and takes no GPUs from others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Allocation, Resize, placed_count
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from tests.harness.builders import NOW_S, job_with
from tests.policies.schedulers.themis.test_policy import cluster, running, started, waiting

COOLDOWN_S = 60.0
ENDS_S = NOW_S + COOLDOWN_S - 10.0
THEMIS = policy("themis")


def resized(workers: int, *, started_s_ago: float = 100.0) -> JobView:
    """An elastic job of up to eight workers that was resized ten seconds ago."""
    job = waiting("grower", workers=(1, 8), work_s=1e5, waited_s=started_s_ago)
    job = running(job, ["n1"] * workers, started_s_ago=started_s_ago)
    return job_with(job, resizes_latest_at_s=NOW_S - 10.0, priority=1)


def cell(jobs: Iterable[JobView], now_s: float = NOW_S) -> ClusterSnapshot:
    """A node of eight GPUs."""
    return replace(cluster({"n1": 8}, jobs, now_s), resize_cooldown_s=COOLDOWN_S)


def grown(allocation: Allocation) -> dict[str, int]:
    """Workers by which jobs grow; below zero: by which they shrink."""
    return {
        each.job_id: placed_count(each.added) - len(each.removed_workers)
        for each in allocation.decisions
        if isinstance(each, Resize)
    }


@pytest.mark.parametrize("name", ["themis", "themis-simple"])
@pytest.mark.parametrize("started_s_ago", [100.0, 9000.0])
def test_growth_that_has_to_wait_leaves_its_gpus_to_others(name: str, started_s_ago: float) -> None:
    """Whether its lease goes on or is over: jobs that wait start on the GPUs, and it keeps two."""
    jobs = [resized(2, started_s_ago=started_s_ago), waiting("late", gpus=6)]
    found = policy(name).allocate(cell(jobs), b"")
    assert (started(found), grown(found)) == ({"late": 1}, {})


def test_a_job_bids_for_growth_once_its_cooldown_is_over() -> None:
    """The pass in which it may not asks for one when it may, also beside leases that go on."""
    alone = THEMIS.allocate(cell([resized(2)]), b"")
    assert (alone.decisions, alone.wake_at_s) == ((), ENDS_S)
    later = THEMIS.allocate(cell([resized(2)], ENDS_S), alone.memory)
    assert grown(later) == {"grower": 6}
    wide = waiting("wide", gpus=8)
    assert THEMIS.allocate(cell([resized(2), wide]), b"").wake_at_s == ENDS_S


def test_a_job_wins_its_own_workers_back_in_its_cooldown() -> None:
    """They are auctioned at the end of its lease, and no resize gives them back."""
    job = job_with(resized(4, started_s_ago=9000.0), unsaved_gpu_s=36_000.0)
    too_wide = waiting("wide", gpus=8)
    assert THEMIS.allocate(cell([job, too_wide]), b"").decisions == ()


def test_the_fairness_of_a_job_is_the_same_in_its_cooldown() -> None:
    """rho counts what it holds and what it could use, whenever it was resized."""
    job = resized(2)
    rested = job_with(job, resizes_latest_at_s=None)
    said = [THEMIS.standing(cell([each]), b"", each.job_id) for each in (job, rested)]
    assert said[0] == said[1] != ()
