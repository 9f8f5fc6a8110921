"""Deadlines over time: `qos` stops nobody that is in time for one that can wait."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.clock import SystemClock
from common.model import Pool
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.tables import each_row

GPUS = 8


Row = tuple[float, float, int, float]
"""Submission and running time in seconds, GPUs, and the deadline from submission."""


def run(rows: list[Row], text: str, *, has_delays: bool = False) -> Run:
    """One node of eight GPUs; nobody may have more or fewer GPUs than it asks for."""
    jobs = tuple(
        TraceJob(
            job_id=f"j{number}", submit_s=at_s, duration_s=length_s, gpus=gpus,
            deadline_s=deadline_s,
        )
        for number, (at_s, length_s, gpus, deadline_s) in enumerate(sorted(rows))
    )  # fmt: skip
    node = NodeGroup(count=1, gpus=GPUS, gpu_type="A100", home_pool=Pool.TRAINING)
    workload = Workload(name="few", jobs=jobs, loads=(), nodes=(node,), length_s=jobs[-1].submit_s)
    options = RunOptions(policy=text, has_delays=has_delays, saves=Saves.ON_REQUEST, check=True)
    return play(workload, options, clock=SystemClock())


def met(found: Run) -> int:
    """Jobs that met their deadline."""
    return round((found.result.deadlines_met_ratio or 0.0) * found.result.jobs)


THREE: list[Row] = [(0, 3600, 8, 4000), (100, 1800, 8, 6000), (200, 1800, 8, 8200)]


@each_row("text", ["qos", "qos:margin=1"])
@each_row("has_delays", [False, True])
def test_three_that_fit_one_after_the_other_are_all_in_time(text: str, has_delays: bool) -> None:
    """Two that can wait let the first one go on: nobody is stopped and all three are in time."""
    found = run(THREE, text, has_delays=has_delays)
    assert (met(found), found.result.preemptions) == (3, 0)


ONE_AFTER_THE_OTHER = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 400), st.integers(0, 200)),
    min_size=2,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(ONE_AFTER_THE_OTHER, st.sampled_from(["qos", "qos:margin=1", "qos:margin=1.5"]))
@example([(0, 400, 0), (1, 200, 0)], "qos")
def test_what_fits_in_order_of_submission_is_in_time(
    rows: list[tuple[int, int, int]], text: str
) -> None:
    """Jobs of the whole node whose deadlines hold one after the other: qos meets them all, as FIFO
    does, and stops none."""
    jobs: list[Row] = []
    free_s = 0.0
    for at_s, length_s, spare_s in sorted(rows):
        free_s = max(free_s, float(at_s)) + length_s
        jobs.append((float(at_s), float(length_s), GPUS, free_s - at_s + spare_s + 0.1))
    found = run(jobs, text)
    assert (met(found), found.result.preemptions) == (len(jobs), 0)


SIDE_BY_SIDE = st.lists(
    st.tuples(st.integers(0, 100), st.integers(1, 400), st.integers(1, GPUS), st.integers(0, 200)),
    min_size=2,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(SIDE_BY_SIDE)
def test_gangs_of_any_size_that_come_at_once_and_fit_are_in_time(
    rows: list[tuple[int, int, int, int]],
) -> None:
    """Of gangs that wait together, all whose deadlines FIFO with skipping and EDF both meet are met
    by qos too, and none is stopped."""
    jobs = [
        (0.0, float(length_s), gpus, float(spare_s) + length_s * 2.0)
        for _, length_s, gpus, spare_s in rows
    ]
    if any(met(run(jobs, other)) < len(jobs) for other in ("fifo-skip", "qos-edf")):
        return
    found = run(jobs, "qos")
    assert (met(found), found.result.preemptions) == (len(jobs), 0)


def test_one_that_would_be_in_time_is_not_stopped_for_one_other() -> None:
    """Either of the two can be in time, not both: who runs goes on, as no more are by a stop."""
    found = run([(0, 1000, 8, 1050), (10, 900, 8, 1000)], "qos")
    assert (met(found), found.result.preemptions) == (1, 0)
    assert found.rows[0].finished_at_s == 1000.0


def test_a_stop_that_lets_two_more_in_is_made() -> None:
    """One long job is in the way of two short ones: it is stopped, and two are in time."""
    found = run([(0, 1000, 8, 1050), (10, 300, 8, 400), (10, 300, 8, 700)], "qos")
    assert (met(found), found.result.preemptions) == (2, 1)


def test_one_with_time_to_spare_is_stopped_for_one_without() -> None:
    """Who runs and can wait makes way, goes on later from where it was, and both are in time."""
    found = run([(0, 1000, 8, 5000), (10, 300, 8, 400)], "qos")
    assert (met(found), found.result.preemptions) == (2, 1)
