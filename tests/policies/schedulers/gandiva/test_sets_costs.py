"""Gandiva in sets where stopping and starting take time: a turn is worth what it costs."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.clock import SystemClock
from coordinator.policies.contract.decisions import Start
from coordinator.policies.registry import policy
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.builders import NOW_S
from tests.served import cell, changed, served_job

HOUR_S = 3600.0


def played(name: str, *, has_delays: bool) -> Run:
    """Three jobs of an hour on one node that each of them fills."""
    jobs = tuple(
        TraceJob(job_id=f"j{at}", submit_s=10.0 * at, duration_s=HOUR_S, gpus=8) for at in range(3)
    )
    nodes = (NodeGroup(count=1, gpus=8, gpu_type="V100"),)
    workload = Workload(name="three", jobs=jobs, loads=(), nodes=nodes, length_s=100.0)
    options = RunOptions(policy=name, has_delays=has_delays, saves=Saves.ON_REQUEST, check=True)
    return play(workload, options, clock=SystemClock())


def test_turns_leave_most_of_the_time_to_computing() -> None:
    """With the delays of a real cell at most a fifth goes into stops and starts.

    A minute, which is the paper's turn, is what one stop costs there: nobody would ever be done.
    """
    result = played("gandiva-sets", has_delays=True).result
    assert result.makespan_s <= 1.2 * 3 * HOUR_S
    assert result.preemptions > 3


def test_turns_that_cost_nothing_last_a_slice() -> None:
    """Where nothing takes time a turn ends after a minute, whatever the ratio."""
    runs = [
        played(f"gandiva-sets:least_turn_ratio={ratio}", has_delays=False).result
        for ratio in (0, 20)
    ]
    assert runs[0].preemptions == runs[1].preemptions > 3 * HOUR_S / 60.0 - 10


@pytest.mark.parametrize(("after_s", "stops"), [(299.0, []), (301.0, ["new"])])
def test_a_turn_lasts_by_what_it_took_to_hand_it_over(after_s: float, stops: list[str]) -> None:
    """Running 15 s after it was given it goes on for twenty times that; priority need not wait."""
    new = served_job("new", 4)
    given = policy("gandiva-sets").allocate(cell([new], n0=4), b"")
    assert [each.job_id for each in given.decisions if isinstance(each, Start)] == ["new"]
    running = structs.replace(
        served_job("new", 4, node="n0"), gpu_type="H100", started_at_s=NOW_S + 15.0
    )
    jobs = [running, served_job("waits", 4, submitted_at_s=1.0)]
    memory = (
        policy("gandiva-sets").allocate(cell(jobs, n0=4, now_s=NOW_S + 20.0), given.memory).memory
    )
    later = cell(jobs, n0=4, now_s=NOW_S + 15.0 + after_s)
    assert changed(later, "gandiva-sets", memory)[0] == stops
    urgent = [running, structs.replace(jobs[1], priority=1)]
    later = cell(urgent, n0=4, now_s=NOW_S + 15.0 + after_s)
    assert changed(later, "gandiva-sets", memory)[0] == ["new"]
