"""Random numbers by seed, the same on every machine and Python."""

from __future__ import annotations

from random import Random
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Chance:
    """Uniform draws of one seed; only `Random.random`, whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def uniform(self, count: int) -> Floats:
        """Numbers in [0, 1)."""
        random = self._random.random
        return np.fromiter((random() for _ in range(count)), np.float64, count)

    def strata(self, count: int) -> Floats:
        """One number in each of `count` equal parts of [0, 1), in order."""
        return (np.arange(count) + self.uniform(count)) / count

    def shuffled(self, values: Floats) -> Floats:
        """The same numbers in random order."""
        return values[np.argsort(self.uniform(len(values)), kind="stable")]

    def normal(self, count: int) -> Floats:
        """Standard normal numbers (Box and Muller, 1958)."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(count)))
        return radius * np.cos(2.0 * np.pi * self.uniform(count))


def normal_quantile(share: Floats) -> Floats:
    """The inverse of the normal distribution, for numbers in [0, 1)."""
    standard = NormalDist()
    return np.array([standard.inv_cdf(min(max(u, 1e-12), 1 - 1e-12)) for u in share.tolist()])


def wander(chance: Chance, hours: int, tau_h: float) -> Floats:
    """An AR(1) of unit variance, a value per hour."""
    kept = float(np.exp(-1.0 / tau_h))
    noise = chance.normal(hours)
    z = noise.copy()
    for hour in range(1, hours):
        z[hour] = kept * z[hour - 1] + np.sqrt(1.0 - kept * kept) * noise[hour]
    return z


def at_rate(place: Floats, log_rate: Floats, length_s: float) -> Floats:
    """Instants of places in [0, 1) where the rate is exp(log_rate) by the hour."""
    passed = np.concatenate(([0.0], np.cumsum(np.exp(log_rate))))
    return np.interp(place, passed / passed[-1], np.linspace(0.0, length_s, len(passed)))


def dealt(chance: Chance, alike: Floats | Ints) -> Floats:
    """Places in [0, 1): of each hundred jobs that are next in `alike`, one in each hundredth."""
    place = np.empty(len(alike))
    order = np.argsort(alike, kind="stable")
    for start in range(0, len(order), 100):
        members = order[start : start + 100]
        place[members] = chance.shuffled(chance.strata(len(members)))
    return place


def exact_sizes(chance: Chance, sizes: Ints, weights: Floats, count: int) -> Ints:
    """Sizes in exact counts, in an order in which each has all running times in proportion."""
    edges = np.cumsum(weights) / weights.sum()
    picked = np.searchsorted(edges, _spread(chance, count), side="right")
    return sizes[np.minimum(picked, len(sizes) - 1)]


def _spread(chance: Chance, count: int) -> Floats:
    """Numbers in [0, 1) of which every stretch is spread evenly: the golden-ratio sequence."""
    offset = float(chance.uniform(1)[0])
    steps: Floats = np.mod(offset + np.arange(count) * ((np.sqrt(5.0) - 1.0) / 2.0), 1.0)
    return steps


def weights_for_mean(sizes: Ints, weights: Floats, mean: float) -> Floats:
    """The weights, tilted by a power of the size so that their mean is the one asked for.

    Raises:
        ValueError: no power up to 6 gives that mean.
    """
    low, high = -6.0, 6.0
    for _ in range(60):
        middle = (low + high) / 2.0
        is_below = _mean(sizes, tilted(sizes, weights, middle)) < mean
        low, high = (middle, high) if is_below else (low, middle)
    found = tilted(sizes, weights, low)
    if abs(_mean(sizes, found) - mean) > 0.01 * mean:
        raise ValueError(f"sizes {sizes.tolist()}: no weights have a mean of {mean:.2f} GPUs")
    return found


def tilted(sizes: Ints, weights: Floats, power: float) -> Floats:
    """Each weight times a power of its size."""
    found: Floats = weights * np.power(sizes.astype(np.float64), power)
    return found


def _mean(sizes: Ints, weights: Floats) -> float:
    return float((weights * sizes).sum() / weights.sum())
