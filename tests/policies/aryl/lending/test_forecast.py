"""The load forecast: what it believes and what it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.aryl.lending.forecast import DAY_S, forecast_peak, slope_per_s
from coordinator.policies.contract.snapshot import LoadSample


def line(values: list[float], *, step_s: float = 60.0) -> list[LoadSample]:
    """Samples at equal distances from instant 0."""
    return [LoadSample(index * step_s, value) for index, value in enumerate(values)]


def test_unknown_is_not_zero() -> None:
    """Without a sample there is no forecast."""
    assert forecast_peak([], now_s=0.0, horizon_s=300.0) is None


def test_a_rise_is_prolonged() -> None:
    """A steady rise is carried on over the horizon, from the age of the last sample on."""
    samples = line([10.0, 16.0, 22.0])
    assert slope_per_s(samples) == pytest.approx(0.1)
    assert forecast_peak(samples, now_s=120.0, horizon_s=300.0) == pytest.approx(52.0)
    assert forecast_peak(samples, now_s=130.0, horizon_s=300.0) == pytest.approx(53.0)


def test_a_fall_is_not_prolonged() -> None:
    """A falling load is believed only once it has fallen."""
    assert forecast_peak(line([40.0, 30.0, 20.0]), now_s=120.0, horizon_s=600.0) == 20.0


def test_one_wild_sample_moves_nothing() -> None:
    """A single spike does not become a trend."""
    assert slope_per_s(line([5.0, 5.0, 5.0, 90.0, 5.0, 5.0, 5.0])) == 0.0


def test_yesterday_is_remembered() -> None:
    """The peak of the same span a day ago counts, and nothing of yesterday outside it does."""
    now_s = DAY_S + 1000.0
    inside = [LoadSample(1200.0, 77.0), LoadSample(now_s, 5.0)]
    outside = [LoadSample(1400.0, 77.0), LoadSample(now_s, 5.0)]
    assert forecast_peak(inside, now_s=now_s, horizon_s=300.0) == 77.0
    assert forecast_peak(outside, now_s=now_s, horizon_s=300.0) == 5.0


def test_old_samples_have_no_say_in_the_slope() -> None:
    """Only the recent window makes the slope."""
    samples = [LoadSample(0.0, 900.0), LoadSample(9000.0, 10.0), LoadSample(9100.0, 20.0)]
    assert slope_per_s(samples) == pytest.approx(0.1)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=80), st.floats(0, 7200))
def test_never_below_the_last_value(values: list[float], horizon_s: float) -> None:
    """Inference first: the forecast is at least what is measured now."""
    samples = line(values)
    forecast = forecast_peak(samples, now_s=samples[-1].at_s, horizon_s=horizon_s)
    assert forecast is not None
    assert forecast >= values[-1]
