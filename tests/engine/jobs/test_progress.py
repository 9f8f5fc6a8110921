"""What is remembered of a job's words: its saves, and its step times."""

from __future__ import annotations

import pytest

from coordinator.engine.jobs.progress import SAVES_KEPT
from coordinator.engine.state.tables import StepTimes
from coordinator.service.api.rows import save_rows
from tests.engine.stopped_jobs import SLOW, running, says
from tests.harness.cluster.engine import EngineHarness


def test_the_latest_saves_of_a_job_are_remembered_once_each() -> None:
    """By when the job claimed them; one that is verified later is the same save."""
    harness = EngineHarness(delays=SLOW)
    job = running(harness, "t0")
    began_s = harness.sim.loop.now_s
    says(harness, job, 10, is_verified=False)
    harness.wait(1.0)
    says(harness, job, 10)
    harness.wait(1.0)
    says(harness, job, 20, saved_ago_s=0.5)
    says(harness, job, 20)
    rows = [(row.at_s - began_s, row.step, row.is_verified) for row in save_rows(job)]
    assert rows == [(0.0, 10, True), (1.5, 20, True)]
    for step in range(30, 30 + 2 * SAVES_KEPT):
        says(harness, job, step)
    assert [row.step for row in save_rows(job)] == list(range(30 + SAVES_KEPT, 30 + 2 * SAVES_KEPT))


def test_step_times_are_measured_within_one_worker_count() -> None:
    """Two words of one count make a measurement; a resize begins a new one."""
    times = StepTimes()
    times.told(100, 10.0, of=(1, 0), workers=2)
    assert times.step_time_s is None
    times.told(140, 30.0, of=(1, 0), workers=2)
    assert [times.step_time_s, times.workers] == [0.5, 2]
    times.told(150, 40.0, of=(1, 1), workers=4)
    assert [times.step_time_s, times.workers] == [0.5, 2]
    times.told(190, 48.0, of=(1, 1), workers=4)
    assert [times.step_time_s, times.workers] == [0.2, 4]


def test_a_word_during_a_resize_measures_nothing() -> None:
    """While the number of workers changes, the pace is of neither count."""
    times = StepTimes()
    times.told(100, 10.0, of=(1, 0), workers=2)
    times.told(140, 30.0, of=(1, 0), workers=0)
    times.told(150, 35.0, of=(1, 0), workers=2)
    assert [times.step_time_s, times.anchor_step] == [0.5, 140]


def test_a_measurement_names_the_gpus_of_its_attempt() -> None:
    """An attempt on another type keeps what was measured, under its type, until its second word."""
    times = StepTimes()
    times.told(100, 10.0, of=(1, 0), workers=2, gpu_type="V100")
    times.told(140, 30.0, of=(1, 0), workers=2, gpu_type="V100")
    times.told(140, 90.0, of=(2, 0), workers=2, gpu_type="T4")
    assert (times.step_time_s, times.gpu_type) == (0.5, "V100")
    times.told(150, 100.0, of=(2, 0), workers=2, gpu_type="T4")
    assert (times.step_time_s, times.gpu_type) == (1.0, "T4")


def test_a_snapshot_says_where_a_step_time_was_measured() -> None:
    """Policies learn by GPU type, so they are told the type with the seconds and the workers."""
    harness = EngineHarness(training=1, inference=0)
    job = harness.submit("a", work_s=1e6)
    harness.start(job, "t0")
    for step in (100, 300):
        harness.wait(50.0)
        says(harness, job, step, total_steps=1000)
    [seen] = harness.engine.snapshot().jobs
    assert seen.steps.step_time_s == pytest.approx(0.25)
    assert (seen.steps.workers, seen.steps.gpu_type) == (1, "H100")
