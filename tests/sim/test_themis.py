"""Themis and Gavel's rounds through the whole engine: with delays, crashes and lost messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.model import NodeName
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.play import RunResult, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import Workload

SLICE = Path(__file__).parents[1] / "data" / "sim" / "itp_slice.csv"

FAMILY = ("themis", "themis-simple", "themis-lp", "las")


def jobs(count: int, *, apps: int = 0) -> Workload:
    """The first jobs of the slice that fit one node, on 4 nodes of 8 in two racks.

    apps: so many jobs in turn are trials of one app; 0: each is its own.
    """
    workload = read_workload(str(SLICE), cluster="4x8/2")
    chosen = [job for job in workload.jobs if job.gpus <= 16][:count]
    if apps:
        chosen = [
            structs.replace(job, app=f"search-{number // apps}")
            for number, job in enumerate(chosen)
        ]
    return structs.replace(workload, jobs=tuple(chosen), length_s=chosen[-1].submit_s)


def played(workload: Workload, options: RunOptions) -> RunResult:
    """The figures of a run whose invariants held after every event."""
    checked = structs.replace(options, check=True)
    return play(workload, checked, clock=SystemClock()).result


@pytest.mark.slow
@pytest.mark.parametrize("policy", FAMILY)
def test_every_job_ends_through_crashes_and_lost_messages(policy: str) -> None:
    """With delays, a node that dies and every twentieth message lost, all jobs still end."""
    options = RunOptions(
        policy=policy,
        saves=Saves.ON_REQUEST,
        loss_ratio=0.05,
        crashes=(Crash(node=NodeName("t00001"), at_s=20_000.0, down_s=3_600.0),),
    )
    found = played(jobs(40), options)
    assert found.jobs == 40


@pytest.mark.slow
def test_trials_of_one_app_share_its_gpus() -> None:
    """Apps of several trials, placement that matters, both aims: all end, by auction."""
    for aim in ("all", "first"):
        options = RunOptions(
            policy=f"themis:aim={aim}",
            has_delays=False,
            has_locality=True,
            saves=Saves.ON_REQUEST,
        )
        assert played(jobs(60, apps=4), options).jobs == 60


@pytest.mark.slow
def test_the_worst_finish_is_better_than_under_fifo_and_attained_service() -> None:
    """On the slice max rho is a small part of that of strict order and of Tiresias."""
    workload = read_workload(str(SLICE), cluster="8x8")
    worst = {
        policy: play(
            workload,
            RunOptions(policy=policy, has_delays=False, saves=Saves.ON_REQUEST),
            clock=SystemClock(),
        ).result.finish_time_fairness.max
        for policy in ("fifo", "tiresias", "themis", "themis-lp")
    }
    assert worst["themis"] < worst["tiresias"] / 2.0
    assert worst["themis"] < worst["fifo"] / 2.0
    assert worst["themis-lp"] < worst["tiresias"] / 2.0
