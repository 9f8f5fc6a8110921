"""Mesos: however late passes come and however short refusals are, offers get round to everybody."""

from __future__ import annotations

from itertools import product

import pytest

from common.clock import SystemClock
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
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


def ended(text: str, cluster: str, policy: str) -> float:
    """When the last of these jobs ended; each line has submission, duration, GPUs, GPUs per worker
    and tenant."""
    jobs: list[TraceJob] = []
    for number, line in enumerate(text.split()):
        at_s, duration_s, gpus, each, tenant = line.split(",")
        jobs.append(
            TraceJob(
                job_id=str(number),
                submit_s=float(at_s),
                duration_s=float(duration_s),
                gpus=int(gpus),
                gpus_per_worker=int(each),
                tenant=tenant,
            )
        )
    last_s = jobs[-1].submit_s
    nodes = parse_cluster(cluster)
    made = Workload(name="turns", jobs=tuple(jobs), loads=(), nodes=nodes, length_s=last_s)
    rows = play(made, RunOptions(policy=policy), clock=SystemClock()).rows
    assert len(rows) == len(jobs)
    return max(row.finished_at_s for row in rows)


@pytest.mark.parametrize("refuse_s", [300.0, 3600.0])
def test_nodes_given_back_at_different_times_come_together_for_a_gang(refuse_s: float) -> None:
    """However long refusals are, who hoards has all that its gang can use: here six GPUs are given
    back again and again before the rest of the cluster becomes free."""
    jobs = "1193,3593,26,1,a 1193,10,26,1,a 1725,10,32,8,a"
    assert ended(jobs, "4x8", f"mesos:refuse_s={refuse_s}") < 1193.0 + 3593.0 + 10.0 + 180.0


@pytest.mark.parametrize("refuse_s", [300.0, 3600.0])
def test_long_refusals_of_two_frameworks_come_together_too(refuse_s: float) -> None:
    """Each gives back what it hoards while the other runs; in the end both have run."""
    jobs = "161,30,14,1,e 162,1,21,1,b 163,1,16,4,b"
    assert ended(jobs, "4x8", f"mesos:refuse_s={refuse_s}") < 4.0 * (refuse_s + 120.0)


IDLE = """
458,1,10,2,a 458,0,14,2,b 1018,4395,8,8,c 1019,1,8,8,a 1019,0,14,1,c 1112,30,16,8,a
1112,3238,8,4,a 1113,0,9,1,b 1148,1,9,1,b 1148,1,4,2,c 1148,4173,12,2,c 1148,0,15,1,b
1148,30,14,2,a 1149,30,3,1,c 1150,30,12,4,b 1150,30,8,8,c 1151,30,8,8,b 1152,0,4,4,a
1201,30,16,8,b 1580,30,16,2,c 1580,1,5,1,c 1580,0,14,1,c 1580,0,9,1,a 1580,30,16,8,b
"""
"""Three frameworks, all of whose lines have gangs for the whole cluster."""


def test_hoards_shorter_than_refusals_get_round() -> None:
    """No job waits for ever where a hoard ends before the refusal that gave back the rest."""
    work_s = 4395.0 + 3238.0 + 4173.0 + 13 * 30.0
    assert ended(IDLE, "2x8", "mesos:hoard_s=1") < 1580.0 + work_s + 24 * 60.0
