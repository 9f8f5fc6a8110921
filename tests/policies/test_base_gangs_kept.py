"""Elastic jobs that may not be stopped: policies that size jobs leave them their base gangs."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from common.model import JobState, Preemptibility
from coordinator.policies.contract.decisions import Decision, Resize, Start, placed_count
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.pooling import Pool, chosen_types
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.pollux.genetic_search import Problem, SearchKnobs
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

every_policy = pytest.mark.parametrize(
    "name", ["afs", "afs-p", "afs-lyra", "pollux", "qos", "qos-edf", "themis-simple"]
)


def held(workers: int, *, base: int = 1, node: str = "n", gpu_type: str = "H100") -> JobView:
    """A long job that nobody may stop, on one node of eight GPUs."""
    placed = [make_worker_view("held", at, node, is_flexible=at >= base) for at in range(workers)]
    return make_job_view(
        "held",
        state=JobState.RUNNING,
        workers=(base, 8),
        remaining_work_s=1e6,
        preemptibility=Preemptibility.NON,
        placed=placed,
        gpu_type=gpu_type,
    )


def due(job: JobView, in_s: float) -> JobView:
    """The same job, to be done so soon."""
    return replace(job, deadline_at_s=NOW_S + in_s)


def decided(name: str, *jobs: JobView) -> tuple[Decision, ...]:
    """What a pass does with these on that node."""
    node = make_node_view("n", workers=[worker for job in jobs for worker in job.placed])
    return policy(name).allocate(make_snapshot(nodes=[node], jobs=jobs), b"").decisions


@every_policy
def test_it_grows_on_idle_gpus(name: str) -> None:
    """It has one worker of eight, and nobody else is there."""
    [grown] = decided(name, held(1))
    assert isinstance(grown, Resize)
    assert grown.added


@every_policy
def test_its_flexible_workers_make_room(name: str) -> None:
    """It has all eight GPUs and needs one of them."""
    waits = due(make_job_view("waits", gpus_per_worker=2), 1e6)
    decisions = decided(name, held(8), waits)
    [shrunk] = [made for made in decisions if isinstance(made, Resize)]
    assert len(shrunk.removed_workers) >= 2
    assert [made.job_id for made in decisions if isinstance(made, Start)] == ["waits"]


@every_policy
def test_it_keeps_its_base_gang(name: str) -> None:
    """Half of the node is all that a shorter job could have, which needs more."""
    waits = make_job_view("waits", gpus_per_worker=5, remaining_work_s=1.0)
    assert decided(name, held(8, base=4), waits) == ()


@pytest.mark.parametrize("name", ["qos-edf", "themis-simple"])
def test_who_comes_first_gets_all_but_its_base_gang(name: str) -> None:
    """Of eight GPUs it needs four; the other one could use all of them."""
    waits = due(make_job_view("waits", workers=(1, 8), remaining_work_s=1e3), 1e5)
    decisions = decided(name, held(8, base=4), waits)
    [shrunk] = [made for made in decisions if isinstance(made, Resize)]
    [start] = [made for made in decisions if isinstance(made, Start)]
    assert (len(shrunk.removed_workers), placed_count(start.placements)) == (4, 4)


def test_its_base_gang_is_not_left_to_later_deadlines() -> None:
    """Four of eight GPUs are its own, and whose deadline is first takes the other four."""
    first = due(make_job_view("first", workers=(1, 4), remaining_work_s=1e6), 1e5)
    second = due(make_job_view("second", remaining_work_s=1e6), 2e5)
    jobs = (held(8, base=4), first, second)
    node = make_node_view("n", workers=jobs[0].placed)
    [hold] = policy("qos-edf").pending_reasons(make_snapshot(nodes=[node], jobs=jobs), b"")
    assert hold.job_id == "second"
    assert hold.blockers == ("jobs with earlier deadlines leave 0 GPUs, its base gang needs 1",)


@pytest.mark.parametrize("name", ["qos", "qos-edf"])
def test_it_grows_to_be_in_time_before_later_deadlines(name: str) -> None:
    """Alone on its node it is done after its deadline by far; with four workers it is in time."""
    late = due(job_with(held(1), remaining_work_s=4_000.0), 1_200.0)
    other = due(make_job_view("other", workers=(4, 8), remaining_work_s=4_000.0), 9_000.0)
    decisions = decided(name, late, other)
    [grown] = [made for made in decisions if isinstance(made, Resize)]
    assert placed_count(grown.added) >= 3
    if name == "qos":
        assert [made.job_id for made in decisions if isinstance(made, Start)] == ["other"]


def test_it_shrinks_while_it_is_early_and_others_wait() -> None:
    """With one worker it is done in a tenth of its time, and a gang of six waits for a day."""
    early = due(job_with(held(8), remaining_work_s=1_000.0), 10_000.0)
    waits = due(make_job_view("waits", workers=(6, 6)), 2e6)
    decisions = decided("qos", early, waits)
    [shrunk] = [made for made in decisions if isinstance(made, Resize)]
    assert len(shrunk.removed_workers) >= 6
    assert [made.job_id for made in decisions if isinstance(made, Start)] == ["waits"]


def test_a_gang_that_only_it_keeps_out_is_planned_behind_it() -> None:
    """It needs all eight until its deadline; the one that can wait for them does, and has what its
    base gang keeps out of every plan."""
    late = due(job_with(held(1), remaining_work_s=8_000.0), 1_150.0)
    later = due(make_job_view("later", workers=(7, 7), remaining_work_s=7_000.0), 9_000.0)
    [grown] = decided("qos", late, later)
    assert isinstance(grown, Resize)
    assert placed_count(grown.added) == 7


def test_who_can_be_in_time_later_begins_on_what_it_keeps_for_no_deadline() -> None:
    """Four go to the one that is due first. The next one needs four as well and begins with two of
    the three that are left: who was resized a moment ago and has no deadline keeps none of them."""
    rests = job_with(held(8), resizes_latest_at_s=NOW_S - 1.0)
    first = due(make_job_view("first", workers=(4, 4), remaining_work_s=4_000.0), 1_200.0)
    later = due(make_job_view("later", workers=(2, 7), remaining_work_s=12_000.0), 3_300.0)
    starts = [made for made in decided("qos", rests, first, later) if isinstance(made, Start)]
    assert {made.job_id: placed_count(made.placements) for made in starts} == {
        "first": 4,
        "later": 2,
    }


def test_a_job_chooses_the_type_on_which_it_has_spare_workers() -> None:
    """Of two full nodes one is held by a job without spare workers."""
    rigid = make_job_view(
        "rigid",
        state=JobState.RUNNING,
        gpus_per_worker=8,
        placed=[make_worker_view("rigid", 0, "a", gpus=8)],
        gpu_type="A100",
    )
    elastic = held(8)
    waits = make_job_view("waits", types=("A100", "H100"))
    nodes = [
        make_node_view("a", gpu_type="A100", workers=rigid.placed),
        make_node_view("n", workers=elastic.placed),
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=[rigid, elastic, waits])
    assert chosen_types(snapshot, FreeGpus(snapshot), resizes=True) == {"waits": "H100"}


def test_a_search_leaves_base_gangs_alone() -> None:
    """Whatever is drawn, those of two such jobs are whole, within the GPUs that are there."""
    jobs = (held(3, base=3), replace(held(4, base=2), job_id="other"), make_job_view("waits"))
    problem = Problem(SearchKnobs(), Pool(gpu_type="H100", gpus=8, jobs=jobs), NOW_S)
    random = np.random.default_rng(0)
    wild = random.integers(0, problem.most + 1, size=(200, 3))
    legal = problem.repaired(wild, random)
    assert (legal[:, 0] >= 3).all()
    assert (legal[:, 1] >= 2).all()
    assert (legal.sum(axis=1) <= 8).all()
    assert all((seed[:2] >= (3, 2)).all() for seed in problem.seeds())
