"""The comparison of forecasts: its LSTM learns as it should, sees no future, and is on the page."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sin

import msgspec
import numpy as np
import pytest

from docs.research.forecasts import FIGURES, PAGE
from docs.research.forecasts_judged import HORIZONS_S, Score
from docs.research.forecasts_lstm import WAYS, WINDOW, Net, Way, forecasts
from docs.research.forecasts_text import page
from docs.research.lstm import RATE, Adam, Array, Loss, gradients, made, pinball, said, squared

LOSSES = pytest.mark.parametrize("loss", [squared, pinball(0.9)], ids=["squared", "pinball"])


def _loss_of(said_now: Array, wanted: Array, loss: Loss) -> float:
    errors = (wanted - said_now)[~np.isnan(wanted)]
    return float(loss(errors)[0].mean())


@LOSSES
def test_gradients_are_what_a_small_change_of_each_weight_does(loss: Loss) -> None:
    """Through two layers and five instants, with an output that is unknown for one window."""
    chance = np.random.default_rng(7)
    weights = made(3, 4, 2, 2, chance)
    windows, wanted = chance.normal(size=(6, 5, 3)), chance.normal(size=(6, 2))
    wanted[2, 1] = np.nan
    value, found = gradients(weights, windows, wanted, loss)
    assert value == pytest.approx(_loss_of(said(weights, windows), wanted, loss))
    step = 1e-6
    for array, slopes in zip(weights.arrays(), found, strict=True):
        assert array.shape == slopes.shape
        for place in np.ndindex(array.shape):
            kept = array[place]
            array[place] = kept + step
            above = _loss_of(said(weights, windows), wanted, loss)
            array[place] = kept - step
            below = _loss_of(said(weights, windows), wanted, loss)
            array[place] = kept
            assert slopes[place] == pytest.approx((above - below) / (2 * step), abs=1e-7)


def test_the_first_step_of_adam_is_as_long_for_every_weight_and_downhill() -> None:
    """Its means are corrected for their start at nothing, so size tells nothing in step one."""
    weights = made(1, 2, 1, 1, np.random.default_rng(1))
    before = [array.copy() for array in weights.arrays()]
    chance = np.random.default_rng(2)
    slopes = [chance.normal(size=array.shape) * 10.0 for array in before]
    Adam(weights).step(slopes)
    for old, new, slope in zip(before, weights.arrays(), slopes, strict=True):
        assert new - old == pytest.approx(-RATE * np.sign(slope), rel=1e-5)


def _taught(weights_seed: int, windows: Array, wanted: Array, loss: Loss, steps: int) -> Array:
    weights = made(1, 8, 2, 1, np.random.default_rng(weights_seed))
    adam = Adam(weights)
    for _ in range(steps):
        adam.step(gradients(weights, windows, wanted, loss)[1], rate=0.01)
    return said(weights, windows)


@pytest.mark.slow
def test_a_net_remembers_the_start_of_its_window() -> None:
    """What it is to say is the first of ten samples; the nine after it are noise."""
    chance = np.random.default_rng(3)
    windows = chance.choice([-1.0, 1.0], size=(64, WINDOW, 1))
    wanted = windows[:, 0]
    found = _taught(4, windows, wanted, squared, 250)
    assert float(((wanted - found) ** 2).mean()) < 0.05


@pytest.mark.slow
def test_the_pinball_loss_teaches_the_quantile() -> None:
    """Of noise that no window tells, 90 % is below what is said."""
    wanted = np.random.default_rng(5).normal(size=(200, 1))
    windows = np.zeros((200, 2, 1))
    found = _taught(6, windows, wanted, pinball(0.9), 400)
    assert float((wanted > found).mean()) == pytest.approx(0.1, abs=0.03)


SMALL = Way(loss=squared, learns_daily=False, cells=8)


def _days(samples: int) -> list[float]:
    """Days of 24 samples, each with a course of its own height."""
    return [
        0.5 + 0.3 * sin(2 * pi * at / 24) * (1 + (at // 24) % 3 / 4) + at / 1000
        for at in range(samples)
    ]


def _told(values: Sequence[float], way: Way) -> Array:
    return forecasts(
        values, way, first=72, day=24, horizons=(1, 6, 30), first_steps=6, daily_steps=3
    )


@pytest.mark.parametrize("is_daily", [False, True], ids=["once", "daily"])
def test_no_forecast_sees_what_comes_after_it(is_daily: bool) -> None:
    """Another future from an instant on leaves all forecasts up to there as they were."""
    way = Way(loss=squared, learns_daily=is_daily, cells=8)
    values = _days(24 * 7)
    here = 24 * 5 + 3
    other = [*values[: here + 1], *(9.0 - value for value in values[here + 1 :])]
    one, two = _told(values, way), _told(other, way)
    assert one.shape == two.shape == (len(values) - 72, 3)
    assert (one[: here + 1 - 72] == two[: here + 1 - 72]).all()
    assert (one[here + 1 - 72 :] != two[here + 1 - 72 :]).any()


def test_only_a_net_that_goes_on_changes_its_mind() -> None:
    """A window that comes again gets the same answer from the one, and another from the other."""
    values = [0.5 + 0.3 * sin(2 * pi * at / 24) for at in range(24 * 6)]
    once, daily = (
        _told(values, Way(loss=squared, learns_daily=is_daily, cells=8))
        for is_daily in (False, True)
    )
    assert once[:24] == pytest.approx(once[48:72])
    assert daily[:24] == pytest.approx(once[:24])
    assert daily[48:72] != pytest.approx(once[48:72])


def test_a_peak_is_never_below_the_last_sample() -> None:
    """That sample is part of it, and no window was ever taught otherwise."""
    values = [1.0 - at / 100 for at in range(50)]
    net = Net(SMALL, horizons=(2, 5))
    net.learn(values[:20], 0)
    ends = range(WINDOW - 1, 50)
    assert (net.peaks(values, ends) >= np.asarray(values)[WINDOW - 1 :, None]).all()


@pytest.mark.slow
def test_a_peak_whose_time_has_not_come_teaches_nothing() -> None:
    """Of 60 samples that rise evenly only the first windows tell what 45 more bring; those just
    after them do not say that it was nothing. Of what none tells there is an answer as well."""
    values = [at / 60 for at in range(60)]
    net = Net(SMALL, horizons=(1, 45, 1000))
    net.learn(values, 200)
    found = net.peaks(values, [20])[0] - values[20]
    assert found[1] == pytest.approx(45 / 60, rel=0.1)
    assert np.isfinite(found).all()


def test_the_page_is_what_the_tool_makes_of_its_figures() -> None:
    """Nobody edited a figure, and none came without the page; every net has its rows."""
    scores = msgspec.json.decode(FIGURES.read_bytes(), type=list[Score])
    assert PAGE.read_text("utf-8") == page(scores)
    series = {score.series for score in scores}
    rows = {(s.series, s.horizon_s, s.method) for s in scores}
    assert {(s, h, m) for s in series for h in HORIZONS_S for m in WAYS} <= rows
