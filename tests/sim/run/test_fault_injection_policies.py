"""Whatever a policy does to jobs, the same ones fail, as often, for the same GPU time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from common.model import JobState, Pool
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.failure_table import Trouble
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.fault_injection import FailureFigures
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.sim.run.failing_jobs import FOR_GOOD, fail
from tests.tables import each_row

SLICE = Path(__file__).parents[2] / "data" / "sim" / "itp_slice.csv"
CUTTING = ("las", "tiresias", "srtf", "themis:lease_s=600", "gandiva")
"""Policies that preempt or suspend, with turns that are short beside the jobs."""


class Found(NamedTuple):
    """What failed in a run: figures, and the jobs that did not succeed."""

    figures: FailureFigures
    unsuccessful: tuple[str, ...]
    cuts: int


def found(stage: Stage) -> Found:
    """Play to the end."""
    stage.sim.run_jobs()
    jobs = stage.sim.engine.state.jobs.values()
    assert stage.sim.failing is not None
    assert all(job.state in (JobState.SUCCEEDED, JobState.FAILED) for job in jobs)
    failed = tuple(sorted(job.job_id for job in jobs if job.state == JobState.FAILED))
    cuts = sum(job.counts.preemptions + job.counts.suspensions for job in jobs)
    return Found(stage.sim.failing.figures(), failed, cuts)


def two_in_turns(policy: str, runs_s: float, after_s: float) -> Found:
    """Two jobs of all GPUs of a node that save on request; the first one fails for good."""
    jobs = tuple(
        TraceJob(job_id=f"j{number}", submit_s=float(number), duration_s=runs_s, gpus=8, user="u")
        for number in range(2)
    )
    nodes = (NodeGroup(count=1, gpus=8, gpu_type="V100", home_pool=Pool.TRAINING),)
    workload = Workload(name="w", jobs=jobs, nodes=nodes, loads=(), length_s=10.0)
    options = RunOptions(
        policy=policy,
        has_delays=False,
        saves=Saves.ON_REQUEST,
        failures=FailureSource.PHILLY,
        check=True,
    )
    stage = Stage(workload, options)
    first = stage.jobs[0].job_id
    trouble = Trouble(reason=FOR_GOOD, trials=None, times_s=(after_s,))
    fail(stage, {first: trouble}, {first: runs_s})
    return found(stage)


@each_row("policy", ["fifo", *CUTTING])
def test_turns_that_are_shorter_than_a_job_s_time_do_not_spare_it_its_failure(policy: str) -> None:
    """Whatever is saved between them: it has failed when it has computed for 1,500 s, once."""
    what = two_in_turns(policy, runs_s=4000.0, after_s=1500.0)
    assert (what.figures.trials, len(what.unsuccessful)) == (1, 1)
    assert what.figures.gpu_s == pytest.approx(8 * 1500.0, rel=1e-6)


@each_row("policy", ["fifo", *CUTTING])
def test_a_failure_after_the_end_does_not_come(policy: str) -> None:
    """However long a job waits suspended or preempted in between."""
    what = two_in_turns(policy, runs_s=1000.0, after_s=1500.0)
    assert (what.figures.trials, what.unsuccessful) == (0, ())


def real(policy: str, **options: object) -> Found:
    """The first jobs of a real trace, with the failures of the study's table."""
    workload = read_workload(str(SLICE), cluster="4x8")
    fitting = tuple(job for job in workload.jobs if job.gpus <= 32)[:60]
    base = RunOptions(policy=policy, saves=Saves.ON_REQUEST, failures=FailureSource.PHILLY, seed=2)
    return found(Stage(structs.replace(workload, jobs=fitting), structs.replace(base, **options)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": {"retry_by_failure_class": False}},
        {"failures": FailureSource.PHILLY_DRAWN, "restarts": 5},
        {"saves": Saves.PERIODIC},
        {"has_delays": False},
    ],
)
def test_a_seed_fails_the_same_jobs_as_often_under_every_policy(options: dict[str, object]) -> None:
    """Also those that are tried again, each by its own draws, and those that are cut in between."""
    plain = real("fifo", **options)
    trials = {reason: each.trials for reason, each in plain.figures.by_reason.items()}
    assert plain.figures.jobs > 5
    for policy in ("las", "gandiva", "srtf", "themis:lease_s=300"):
        other = real(policy, **options)
        assert other.cuts > 10
        assert other.unsuccessful == plain.unsuccessful
        assert {reason: n.trials for reason, n in other.figures.by_reason.items()} == trials
        assert other.figures.jobs == plain.figures.jobs
        if "has_delays" in options:  # what attempts more take, beyond work that was saved, is none
            assert other.figures.gpu_s == pytest.approx(plain.figures.gpu_s, rel=1e-6)


@pytest.mark.parametrize("prerun_s", [None, 600.0])
def test_the_warm_up_after_a_pre_run_makes_nobody_fail(prerun_s: float | None) -> None:
    """A gang of 18 s that would fail after 20 s ends well, with a pre-run as without one."""
    only = TraceJob(job_id="j", submit_s=0.0, duration_s=18.0, gpus=8, user="u")
    nodes = (NodeGroup(count=1, gpus=8, gpu_type="V100", home_pool=Pool.TRAINING),)
    workload = Workload(name="w", jobs=(only,), nodes=nodes, loads=(), length_s=10.0)
    options = RunOptions(policy="fifo", failures=FailureSource.PHILLY, prerun_s=prerun_s)
    stage = Stage(workload, options)
    [job] = stage.jobs
    trouble = Trouble(reason=FOR_GOOD, trials=None, times_s=(20.0,))
    fail(stage, {job.job_id: trouble}, {job.job_id: 18.0})
    assert found(stage).figures.trials == 0
    assert stage.sim.engine.state.jobs[job.job_id].attempt.number == (1 if prerun_s is None else 2)
