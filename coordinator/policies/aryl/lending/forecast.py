"""The forecast of a service's load at the time when a lent node would be home.

The paper forecasts with an LSTM over the next five minutes (Lyra, EuroSys'23, section 6). Here the
last value with a robust slope, and the same time of the day before, are used. They need no
training, explain themselves, and look as far ahead as the return of a node takes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import combinations
from operator import attrgetter
from statistics import median

from coordinator.policies.contract.snapshot import LoadSample

SLOPE_WINDOW_S = 1800.0
SLOPE_SAMPLES_MAX = 32
DAY_S = 86_400.0

_AT_S = attrgetter("at_s")


def slope_per_s(samples: Sequence[LoadSample], *, window_s: float = SLOPE_WINDOW_S) -> float:
    """Median of all pairwise slopes over the last `window_s` (Theil-Sen), in load per second.

    Up to 29 % of the samples may be wild without moving it far. 0 with fewer than two instants.
    """
    if not samples:
        return 0.0
    recent = samples[_first_at(samples, samples[-1].at_s - window_s) :]
    step = -(-len(recent) // SLOPE_SAMPLES_MAX)
    thinned = recent[::-1][::step]  # from the newest, which must be among them
    slopes = [
        (a.load - b.load) / (a.at_s - b.at_s)
        for a, b in combinations(thinned, 2)
        if a.at_s != b.at_s
    ]
    return median(slopes) if slopes else 0.0


def peak_between(samples: Sequence[LoadSample], from_s: float, to_s: float) -> float | None:
    """Highest load measured in a closed span; None when nothing was measured in it."""
    found = samples[_first_at(samples, from_s) : bisect_right(samples, to_s, key=_AT_S)]
    return max([sample.load for sample in found], default=None)


def _first_at(samples: Sequence[LoadSample], at_s: float) -> int:
    """Number of the first sample of an instant or later; they come in order of time."""
    return bisect_left(samples, at_s, key=_AT_S)


def forecast_peak(samples: Sequence[LoadSample], *, now_s: float, horizon_s: float) -> float | None:
    """Highest load to expect from now until `horizon_s` later, in the unit of the samples.

    The largest of: the last value, its line prolonged, and what the same span of the day before
    brought. It never falls below the last value: a falling load is believed when it has fallen.
    None when nothing was ever measured: unknown is not zero.
    """
    if not samples:
        return None
    last = samples[-1].load
    ahead_s = horizon_s + max(0.0, now_s - samples[-1].at_s)
    candidates = [last, last + slope_per_s(samples) * ahead_s]
    yesterday = peak_between(samples, now_s - DAY_S, now_s - DAY_S + horizon_s)
    if yesterday is not None:
        candidates.append(yesterday)
    return max(candidates)
