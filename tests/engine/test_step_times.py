"""Step times: what two words of a job measure, and what they do not."""

from __future__ import annotations

from coordinator.engine.step_times import StepTimes


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
