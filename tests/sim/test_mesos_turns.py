"""Mesos: however late passes come and however short refusals are, offers get round to everybody."""

from __future__ import annotations

from itertools import product

import pytest

from common.clock import SystemClock
from coordinator.sim.inputs import parse_cluster
from coordinator.sim.run import play
from coordinator.sim.stage import RunOptions
from coordinator.workloads.records import TraceJob, Workload

PERIODS_S = (0.1, 1.0, 5.0)
COALESCED_S = (0.0, 0.5, 5.0)


def job(name: str, tenant: str, at_s: float, gpus: int) -> TraceJob:
    """Fifty minutes of so many GPUs."""
    return TraceJob(job_id=name, submit_s=at_s, duration_s=3000.0, gpus=gpus, tenant=tenant)


def workload(*jobs: TraceJob) -> Workload:
    """On two nodes of 8 GPUs."""
    return Workload(
        name="turns", jobs=jobs, loads=(), nodes=parse_cluster("2x8"), length_s=jobs[-1].submit_s
    )


TWO = workload(
    job("1", "a", 0.0, 8), job("2", "b", 10.0, 16), job("3", "a", 20.0, 16), job("4", "b", 30.0, 4)
)
"""Both wait with a gang for the whole cluster: each must be given its turn to have all of it."""

FOUR = workload(
    job("1", "a", 0.0, 8),
    *(job(name, name, 10.0, 16) for name in "bcd"),
    *(job(f"{name}4", name, 30.0, 4) for name in "abcd"),
)
"""More frameworks than a refusal lasts ticks."""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [TWO, FOUR], ids=["two", "four"])
@pytest.mark.parametrize(
    ("refuse_s", "tick_s", "coalesce_s"), list(product(PERIODS_S, PERIODS_S, COALESCED_S))
)
def test_nobody_waits_for_ever_on_an_idle_cluster(
    jobs: Workload, refuse_s: float, tick_s: float, coalesce_s: float
) -> None:
    """Whatever ends first, a refusal or the time to the next pass: all jobs run, one after the
    other at worst, with time to hoard and to give back between them."""
    name = f"mesos:refuse_s={refuse_s}:tick_s={tick_s}"
    options = RunOptions(policy=name, coalesce_s=coalesce_s)
    rows = play(jobs, options, clock=SystemClock()).rows
    assert len(rows) == len(jobs.jobs)
    turns_s = (3000.0 + 120.0 + 10.0 * (refuse_s + tick_s + coalesce_s) + 60.0) * len(rows)
    assert max(row.finished_at_s for row in rows) <= turns_s


@pytest.mark.slow
@pytest.mark.parametrize("coalesce_s", COALESCED_S)
def test_hoards_that_end_before_the_next_pass_get_round_too(coalesce_s: float) -> None:
    """Turns are counted where they are shorter than the time between two passes."""
    name = "mesos:refuse_s=0.001:tick_s=0.001:hoard_s=0.001"
    options = RunOptions(policy=name, coalesce_s=coalesce_s)
    assert len(play(TWO, options, clock=SystemClock()).rows) == 4
