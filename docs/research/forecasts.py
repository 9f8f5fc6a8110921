"""Compares load forecasts on real and generated series, and writes docs/forecasts.md from it.

    ARYL_TRACES=... .venv/bin/python docs/research/forecasts.py measure    figures to docs/results/
    .venv/bin/python docs/research/forecasts.py page                       the page from the figures

Must not judge: `forecasts_judged.py` does, and `forecasts_text.py` writes. Every method
sees the series up to an instant and no more. With OPENBLAS_NUM_THREADS=1 nets learn faster, and do
not wait for whoever else is busy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import ceil

import msgspec
from msgspec import Struct

from coordinator.policies.aryl.lending.forecast import (
    forecast_peak,
    peak_between,
    slope_per_s,
)
from coordinator.policies.contract.seasonal_load import DAY_S, Season
from coordinator.policies.contract.snapshot import LoadSample
from coordinator.workloads.formats import find
from coordinator.workloads.load_formats import read_loads
from coordinator.workloads.named import inference_load
from coordinator.workloads.records import LoadSeries
from docs.research.forecasts_judged import HORIZONS_S, Score, judged
from docs.research.forecasts_lstm import WAYS, forecasts
from docs.research.forecasts_text import page
from docs.research.kept import RESULTS

FIGURES = RESULTS / "forecasts.json"
PAGE = RESULTS.parent / "forecasts.md"

SERVEGEN = "servegen/aggregate_rate_10min.csv.gz"
SERVEGEN_SERIES = ("m-small", "m-mid", "m-large")
PAPER_SEED = 55
"""Of the noise on the paper's week."""

WARM_UP_S = 3 * DAY_S
"""Before that nothing is counted: all methods have seen three days."""

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99)


class View(Struct, frozen=True, kw_only=True):
    """What a method may see at an instant; `samples` are those of the last 25 hours."""

    now_s: float
    samples: Sequence[LoadSample]
    season: Season


Method = Callable[[View, float], float]


def _last(view: View, horizon_s: float) -> float:
    return view.samples[-1].load


def _slope(view: View, horizon_s: float) -> float:
    return max(0.0, _last(view, horizon_s) + slope_per_s(view.samples) * horizon_s)


def _aryl(view: View, horizon_s: float) -> float:
    found = forecast_peak(view.samples, now_s=view.now_s, horizon_s=horizon_s)
    assert found is not None
    return found


def _yesterday(view: View, horizon_s: float) -> float:
    begin_s = view.now_s - DAY_S
    found = peak_between(view.samples, begin_s, begin_s + horizon_s)
    return _last(view, horizon_s) if found is None else found


def _quantile(q: float) -> Method:
    def method(view: View, horizon_s: float) -> float:
        found = view.season.quantile(q, now_s=view.now_s, horizon_s=horizon_s)
        return _aryl(view, horizon_s) if found is None else found

    return method


METHODS: dict[str, Method] = {
    "last value": _last,
    "last value + slope": _slope,
    "seasonal naive": _yesterday,
    "largest of the three (`aryl`)": _aryl,
    **{f"quantile {q:g} (`foresight`)": _quantile(q) for q in QUANTILES},
}


# --- measuring ----------------------------------------------------------------------------------


def _series() -> Iterator[LoadSeries]:
    yield inference_load(PAPER_SEED)
    found = read_loads(find(SERVEGEN))
    for name in SERVEGEN_SERIES:
        yield found[name]


def _views(series: LoadSeries) -> Iterator[tuple[int, View]]:
    """Each instant after the warm-up, with what was seen by then; loads over the highest."""
    highest = max(series.values)
    season, samples = Season(), list[LoadSample]()
    kept = ceil(25 * 3600.0 / series.step_s)
    for place, value in enumerate(series.values):
        at_s = place * series.step_s
        season = season.after(at_s, value / highest)
        samples.append(LoadSample(at_s, value / highest))
        del samples[:-kept]
        if at_s >= WARM_UP_S:
            yield place, View(now_s=at_s, samples=tuple(samples), season=season)


Told = dict[tuple[float, str], list[tuple[float, float]]]
"""Per horizon and method: what it said, and what came."""


def measure() -> list[Score]:
    """Every method on every series and horizon."""
    scores: list[Score] = []
    for series in _series():
        told: Told = {}
        highest = max(series.values)
        learned = _learned(series, highest)
        for place, view in _views(series):
            for column, horizon_s in enumerate(HORIZONS_S):
                ahead = place + _samples(horizon_s, series)
                if ahead >= len(series.values):
                    continue
                came = max(series.values[place : ahead + 1]) / highest
                found = {name: method(view, horizon_s) for name, method in METHODS.items()}
                found |= {name: peaks[place][column] for name, peaks in learned.items()}
                for name, said in found.items():
                    told.setdefault((horizon_s, name), []).append((said, came))
        scores += [judged(series.name, *key, pairs) for key, pairs in told.items()]
    return scores


def _samples(span_s: float, series: LoadSeries) -> int:
    return max(1, ceil(span_s / series.step_s))


def _learned(series: LoadSeries, highest: float) -> dict[str, dict[int, list[float]]]:
    """What each net says of all horizons, by sample; it learns from the samples up to there."""
    first = ceil(WARM_UP_S / series.step_s)
    loads = [value / highest for value in series.values]
    found: dict[str, dict[int, list[float]]] = {}
    for name, way in WAYS.items():
        rows = forecasts(
            loads,
            way,
            first=first,
            day=_samples(DAY_S, series),
            horizons=[_samples(horizon_s, series) for horizon_s in HORIZONS_S],
        )
        found[name] = {
            first + place: [float(peak) for peak in row] for place, row in enumerate(rows)
        }
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure, or write the page."""
    match list(arguments):
        case ["measure"]:
            scores = [msgspec.to_builtins(score) for score in measure()]
            rounded = [
                {key: round(v, 6) if isinstance(v, float) else v for key, v in score.items()}
                for score in scores
            ]
            FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode(rounded), indent=1) + b"\n")
        case ["page"]:
            PAGE.write_text(page(msgspec.json.decode(FIGURES.read_bytes(), type=list[Score])))
        case _:
            sys.stderr.write("usage: forecasts.py measure|page\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
