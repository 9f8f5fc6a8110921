"""Deadlines in whole runs: faults, messages that are lost, scarcity, and jobs that are refused."""

from __future__ import annotations

import pytest

from common.clock import SystemClock
from common.model import NodeName, Pool
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.sim.run.test_play import job
from tests.sim.run.test_play import workload as of_jobs

POLICIES = ("qos", "qos-elasticflow", "qos-edf")
JOBS = 24


def workload(*, tightness: float = 3.0, is_rigid: bool = False) -> Workload:
    """Jobs of 300 to 2100 s on two GPUs each, one every 100 s, on eight GPUs.

    tightness: deadlines as a multiple of the running time on two GPUs; every fourth job has none.
    """
    jobs = tuple(
        TraceJob(
            job_id=f"j{number:02d}",
            submit_s=100.0 * number,
            duration_s=300.0 * (1 + number * 5 % 7),
            gpus=2,
            gpus_per_worker=2 if is_rigid else 1,
            min_workers=1,
            max_workers=1 if is_rigid else 8,
            deadline_s=None if number % 4 == 3 else tightness * 300.0 * (1 + number * 5 % 7),
            has_checkpoints=True,
        )
        for number in range(JOBS)
    )
    nodes = (NodeGroup(count=2, gpus=4, gpu_type="V100", home_pool=Pool.TRAINING),)
    return Workload(name="d", jobs=jobs, loads=(), nodes=nodes, length_s=jobs[-1].submit_s)


def run(policy: str, found: Workload, **options: object) -> Run:
    """Invariants are looked at after every event."""
    chosen = RunOptions(policy=policy, check=True, **options)  # type: ignore[arg-type]  # as given
    return play(found, chosen, clock=SystemClock())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_ends_whatever_breaks(policy: str) -> None:
    """Nodes crash, one message in twenty is lost, all takes time: each job ends or was refused."""
    crashes = (
        Crash(node=NodeName("t00000"), at_s=700.0, down_s=900.0),
        Crash(node=NodeName("t00001"), at_s=2500.0, down_s=300.0),
    )
    found = run(policy, workload(), crashes=crashes, loss_ratio=0.05, seed=3)
    assert len(found.rows) + found.result.jobs_rejected == JOBS
    assert found.result.jobs == JOBS


@pytest.mark.parametrize("policy", POLICIES)
def test_learned_estimates_do_as_well_for_an_end(policy: str) -> None:
    """Without an oracle jobs are predicted by their progress, and each ends or was refused."""
    found = run(policy, workload(), is_oracle=False)
    assert len(found.rows) + found.result.jobs_rejected == JOBS


@pytest.mark.parametrize("policy", ("qos", "qos-elasticflow"))
def test_under_scarcity_more_jobs_are_in_time_than_under_fifo(policy: str) -> None:
    """Where deadlines are tight, those who know them meet a tenth of the jobs more."""
    free = {"has_delays": False, "saves": Saves.ON_REQUEST}
    fifo = run("fifo", workload(tightness=1.5, is_rigid=True), **free)
    ours = run(policy, workload(tightness=1.5), **free)
    assert fifo.result.deadlines_met_ratio is not None
    assert ours.result.deadlines_met_ratio is not None
    assert ours.result.deadlines_met_ratio > fifo.result.deadlines_met_ratio + 0.1


@pytest.mark.parametrize("policy", POLICIES)
def test_where_capacity_suffices_all_are_in_time(policy: str) -> None:
    """Deadlines of sixty times the running time are all met, with delays, and nobody is refused."""
    found = run(policy, workload(tightness=60.0))
    assert (found.result.deadlines_met_ratio, found.result.jobs_rejected) == (1.0, 0)


def test_refused_jobs_count_as_missed_and_in_no_time() -> None:
    """A run with refused jobs is a result: they are counted, and have missed their deadline."""
    found = run("qos-elasticflow", workload(tightness=0.2), has_delays=False)
    asked = sum(job.deadline_s is not None for job in workload().jobs)
    rejected = found.result.jobs_rejected
    assert rejected > 0
    assert len(found.rows) == JOBS - rejected
    assert found.result.deadlines_met_ratio == (asked - rejected) / asked


def test_no_run_beats_the_bound_of_the_jobs_that_it_finished() -> None:
    """The long ones among those that were refused bound nothing."""
    found = run("qos-elasticflow", workload(tightness=0.2, is_rigid=True), has_delays=False)
    assert found.result.jobs_rejected > 0
    ran = {row.job_id for row in found.rows}
    bounds = [job.duration_s for job in workload().jobs if job.job_id in ran]
    assert found.result.jct_bound_s == pytest.approx(sum(bounds) / len(bounds))
    assert found.result.jct_bound_s <= found.result.jct_s.mean


def test_the_same_run_twice_is_the_same() -> None:
    """Decisions follow from snapshot and memory alone: two runs are equal to the last digit."""
    for policy in POLICIES:
        first, second = (run(policy, workload(), loss_ratio=0.05) for _ in range(2))
        assert first.rows == second.rows


IN_PIECES = (
    job("a", 0.0, 5000.0, 2, deadline_s=20_000.0),
    job("x", 1.0, 100.0, 2, deadline_s=10_000.0),
    job("b", 2.0, 5000.0, 2, deadline_s=20_000.0),
    job("y", 3.0, 100.0, 2, deadline_s=10_000.0),
    job("whole", 1000.0, 600.0, 4, deadline_s=900.0),
)
"""Pairs on each of two nodes of four; half of both is free when a job of a whole node comes."""


def played(policy: str) -> Run:
    """With delays, and the invariants looked at after every event."""
    options = RunOptions(policy=policy, has_delays=True, saves=Saves.ON_REQUEST, check=True)
    nodes = (NodeGroup(count=2, gpus=4, gpu_type="V100"),)
    return play(of_jobs(*IN_PIECES, nodes=nodes), options, clock=SystemClock())


def test_a_promise_is_kept_as_another_job_moves() -> None:
    """It would wait for hours beside its GPUs; the one that moves is in time as well."""
    still = played("qos-elasticflow:migrates=false").result
    found = played("qos-elasticflow").result
    assert (still.promised, still.promises_missed, still.migrations) == (5, 1, 0)
    assert (found.promised, found.promises_missed, found.migrations) == (5, 0, 1)
    assert (found.preemptions, found.deadlines_met_ratio) == (0, 1.0)
