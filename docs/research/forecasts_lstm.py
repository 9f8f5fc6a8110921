"""What an LSTM would have said of a series at each instant. Must not know what is done with it.

The net is the paper's as far as it is printed (Lyra, EuroSys'23, section 6): a window of the last
ten samples, two hidden layers, Adam, mean squared error. What is not printed is ours: the cells of
a layer, batches and steps. It is judged on the peak until a horizon's end, as every other forecast
is, and so it learns these peaks: one output per horizon, each as a rise over the last sample.
A net that learns sees windows whose peak is over, and never what comes after an instant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from docs.research.lstm import Adam, Array, Loss, Weights, gradients, made, pinball, said, squared

WINDOW = 10
LAYERS = 2
"""Of the paper."""

CELLS = 32
BATCH = 64
FIRST_STEPS = 1500
DAILY_STEPS = 150
SEED = 1
"""Ours. Steps before the first forecast, and each day from then on for a net that goes on."""


class Way(Struct, frozen=True, kw_only=True):
    """A net as it is compared.

    loss: what it learns to make small. learns_daily: goes on with what each day adds; else it stays
        as it was after the first days.
    cells: of a layer.
    """

    loss: Loss
    learns_daily: bool
    cells: int = CELLS


WAYS: dict[str, Way] = {
    "LSTM, first three days": Way(loss=squared, learns_daily=False),
    "LSTM, every day": Way(loss=squared, learns_daily=True),
    "LSTM, every day, quantile 0.9": Way(loss=pinball(0.9), learns_daily=True),
}
"""By the name of their row: the paper's, the same with what our own model has as well, and both."""


class Net:
    """A net that learns peaks of a series, and says them; all loads in the series' own unit."""

    def __init__(self, way: Way, *, horizons: Sequence[int], seed: int = SEED) -> None:
        """horizons: in samples ahead, each at least one."""
        self._horizons = tuple(horizons)
        self._loss = way.loss
        self._chance = np.random.default_rng(seed)
        self._weights: Weights = made(1, way.cells, LAYERS, len(self._horizons), self._chance)
        self._adam = Adam(self._weights)
        self._middle, self._spread = 0.0, 0.0

    def learn(self, values: Sequence[float], steps: int) -> None:
        """Steps on windows of what was seen, drawn by chance; the first call sets the scale.

        A horizon whose end was not seen yet is left out of its window's lesson.
        """
        seen = np.asarray(values, dtype=np.float64)
        if not self._spread:
            self._middle, self._spread = float(seen.mean()), float(seen.std()) or 1.0
        ends = np.arange(WINDOW - 1, len(seen) - min(self._horizons))
        if not len(ends):
            return
        windows = self._windows(seen, ends)
        wanted = self._rises(seen)[ends] / self._spread
        for _ in range(steps):
            drawn = self._chance.integers(len(ends), size=BATCH)
            _, found = gradients(self._weights, windows[drawn], wanted[drawn], self._loss)
            self._adam.step(found)

    def peaks(self, values: Sequence[float], ends: Sequence[int]) -> Array:
        """Highest load until each horizon's end, after windows that end with these samples.

        Never below the last sample, which counts in the peak; instants x horizons.
        """
        seen = np.asarray(values, dtype=np.float64)
        places = np.asarray(ends, dtype=np.int64)
        rises = said(self._weights, self._windows(seen, places)) * self._spread
        return np.asarray(seen[places, None] + np.maximum(0.0, rises))

    def _windows(self, seen: Array, ends: NDArray[np.int64]) -> Array:
        behind = np.arange(1 - WINDOW, 1)
        window: Array = (seen[ends[:, None] + behind] - self._middle) / self._spread
        return window[:, :, None]

    def _rises(self, seen: Array) -> Array:
        """How far the load will have risen by each horizon's end; NaN where that was not seen."""
        found = np.full((len(seen), len(self._horizons)), np.nan)
        for place, ahead in enumerate(self._horizons):
            if len(seen) > ahead:
                spans = np.lib.stride_tricks.sliding_window_view(seen, ahead + 1)
                found[: len(spans), place] = spans.max(axis=1) - seen[: len(spans)]
        return found


def forecasts(
    values: Sequence[float],
    way: Way,
    *,
    first: int,
    day: int,
    horizons: Sequence[int],
    first_steps: int = FIRST_STEPS,
    daily_steps: int = DAILY_STEPS,
) -> Array:
    """Peaks as a net would have said them at each sample from `first` on.

    Args:
        values: the series, sample by sample.
        first: the first sample that is followed by a forecast; all up to it may be learned.
        day: samples of a day.
        horizons: in samples ahead.
        first_steps, daily_steps: of learning before the first forecast, and each day from then on.

    Returns:
        (samples from `first` on) x horizons, in the series' unit.
    """
    net = Net(way, horizons=horizons)
    net.learn(values[: first + 1], first_steps)
    parts: list[Array] = []
    for begin in range(first, len(values), day):
        if begin > first and way.learns_daily:
            net.learn(values[: begin + 1], daily_steps)
        parts.append(net.peaks(values, range(begin, min(begin + day, len(values)))))
    return np.concatenate(parts)
