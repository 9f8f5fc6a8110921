"""Compares load forecasts on real and generated series, and writes docs/forecasts.md from it.

    ARYL_TRACES=... .venv/bin/python tools/forecasts.py measure    figures to docs/results/
    .venv/bin/python tools/forecasts.py page                       the page from the figures

Must not know nodes beyond their number: a forecast is judged as a lender would, by what it lets one
lend and by how often that was too much. Every method sees the series up to an instant and no more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.policies.loans.forecast import forecast_peak, peak_between, slope_per_s
from coordinator.policies.loans.seasonal import DAY_S, Season
from coordinator.policies.snapshot import LoadSample
from coordinator.workloads.formats import find
from coordinator.workloads.load_formats import read_loads
from coordinator.workloads.named import inference_load
from coordinator.workloads.records import LoadSeries

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "results" / "forecasts.json"
PAGE = ROOT / "docs" / "forecasts.md"

SERVEGEN = "servegen/aggregate_rate_10min.csv.gz"
SERVEGEN_SERIES = ("m-small", "m-mid", "m-large")
PAPER_SEED = 55
"""That of paper-1."""

WARM_UP_S = 3 * DAY_S
"""Before that nothing is counted: all methods have seen three days."""

LEND_S = 460.0
"""A return (30 s TTL, 60 s grace, 10 s device, 60 s warm-up) and a loan period of 300 s."""

HORIZONS_S = (LEND_S, 3600.0, 4 * 3600.0, 12 * 3600.0, DAY_S)
QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99)
NODES = 520
PEAK_RATIO = 0.95
HEADROOM_RATIO = 0.02
"""Nodes of a service, the part of them that its highest load needs, and what is never lent."""


class View(Struct, frozen=True, kw_only=True):
    """What a method may see at an instant; `samples` are those of the last 25 hours."""

    now_s: float
    samples: Sequence[LoadSample]
    season: Season


class Score(Struct, frozen=True, kw_only=True):
    """One method on one series and horizon; loads are parts of the series' highest.

    mae, mse: of the forecast as a point. pinball: at 0.9, the loss of a 90 % quantile.
    exceeded: how often the load rose above the forecast.
    lent_ratio: nodes that it lets one lend, over those that perfect knowledge would.
    late_ratio: loan passes whose loans left fewer nodes than the load came to need.
    short_nodes: mean nodes missing in these.
    """

    series: str
    horizon_s: float
    method: str
    instants: int
    mae: float
    mse: float
    pinball: float
    exceeded: float
    lent_ratio: float
    late_ratio: float
    short_nodes: float


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


def measure() -> list[Score]:
    """Every method on every series and horizon."""
    scores: list[Score] = []
    for series in _series():
        said: dict[tuple[float, str], list[tuple[float, float]]] = {}
        highest = max(series.values)
        for place, view in _views(series):
            for horizon_s in HORIZONS_S:
                ahead = place + max(1, ceil(horizon_s / series.step_s))
                if ahead >= len(series.values):
                    continue
                came = max(series.values[place : ahead + 1]) / highest
                for name, method in METHODS.items():
                    pairs = said.setdefault((horizon_s, name), [])
                    pairs.append((method(view, horizon_s), came))
        scores += [_score(series.name, *key, pairs) for key, pairs in said.items()]
    return scores


def _score(
    series: str, horizon_s: float, method: str, pairs: Sequence[tuple[float, float]]
) -> Score:
    count = len(pairs)
    errors = [came - told for told, came in pairs]
    lent = [NODES - _needed(told, HEADROOM_RATIO) for told, _ in pairs]
    could = [NODES - _needed(came, 0.0) for _, came in pairs]
    short = [away - most for away, most in zip(lent, could, strict=True) if away > most]
    return Score(
        series=series,
        horizon_s=horizon_s,
        method=method,
        instants=count,
        mae=sum(map(abs, errors)) / count,
        mse=sum(error * error for error in errors) / count,
        pinball=sum(max(0.9 * error, -0.1 * error) for error in errors) / count,
        exceeded=sum(error > 1e-9 for error in errors) / count,
        lent_ratio=sum(lent) / max(1, sum(could)),
        late_ratio=len(short) / count,
        short_nodes=sum(short) / max(1, len(short)),
    )


def _needed(load: float, headroom_ratio: float) -> int:
    nodes = ceil(load * PEAK_RATIO * NODES - 1e-9) + ceil(headroom_ratio * NODES - 1e-9)
    return min(NODES, max(1, nodes))


# --- the page -----------------------------------------------------------------------------------

HEAD = f"""# Forecasts of load

How good our forecasts of inference load are, and what they are worth to a lender. Written by
`tools/forecasts.py` from `docs/results/forecasts.json`; nothing here is typed in but the sentences.

A lender needs no point but a bound: the *highest* load until a node that goes now could be home
again. Each method says that peak, at every step from the fourth day on, with what it has seen by
then. Loads are parts of the series' highest; the highest needs {PEAK_RATIO:.0%} of {NODES} nodes,
and {HEADROOM_RATIO:.0%} of them are never lent, as in the paper.

- **MAE**, **MSE**: of the forecast as a point. **pinball**: the loss of a 90 % quantile.
- **exceeded**: how often the load rose above what was said. A 90 % quantile should be exceeded in
  10 % of the cases.
- **lent**: node-hours that it lets one lend, over those that perfect knowledge would without any
  headroom. **late**: loan passes after which fewer nodes were left than the load came to need;
  **short**: the mean number of nodes missing then.

Methods: *last value*; *last value + slope* (Theil-Sen over 30 minutes); *seasonal naive*, the same
span of the day before; the largest of the three, which is what `aryl` uses
(`coordinator/policies/loans/forecast.py`); and quantiles of the seasonal model, which `foresight`
uses (`coordinator/policies/loans/seasonal.py`). Where the model knows too little, it says what
`aryl` says.

Series: `inference` is the paper's digitised week, repeated with a little noise of our own (that of
`paper-1`): it is as regular as our generator makes it, and so it flatters every seasonal method.
The others are real: request rates of three models over two weeks (ServeGen).

**The paper's LSTM.** It predicts the use of the next five minutes, with a mean squared error of
0.00048 on a private curve. That number and ours are not comparable, as the curves differ; on a
curve this smooth the last value alone is near it (MSE below). An LSTM would have to be trained per
service and looks five minutes ahead, which is less than a node's way home; we have built none. What
a forecast is worth here is decided further ahead, where the day's course counts and the last value
says nothing.
"""

NOTE = """
## What to read from it

Over the minutes of a node's way home the 90 % quantile lets one lend more than `aryl`'s rule does
and is late no more often; what is left are bursts, so when it is late more nodes may be missing:

{table}
From an hour on the last value and its slope are of no use, the day before is, and the quantile
model says as well how far to trust it. On the real series, which drift over their two weeks, the
90 % quantile is exceeded in {least:.0%} to {most:.0%} of the cases, by series and horizon:
it is calibrated for minutes, and too sure of itself for half a day and more.
"""


def _note(scores: Sequence[Score]) -> str:
    names = [name for name in METHODS if "aryl" in name or "0.9 " in name]
    rows = ["| series | method | lent | late | short |", "|---|---|---|---|---|"]
    rows += [
        f"| {score.series} | {score.method} | {score.lent_ratio:.1%} | {score.late_ratio:.2%} | "
        f"{score.short_nodes:.1f} |"
        for score in scores
        if score.horizon_s == LEND_S and score.method in names
    ]
    real = [s.exceeded for s in scores if s.series in SERVEGEN_SERIES and s.method == names[-1]]
    return NOTE.format(table="\n".join([*rows, ""]), least=min(real), most=max(real))


def page(scores: Sequence[Score]) -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for series in dict.fromkeys(score.series for score in scores):
        parts.append(f"\n## {series}\n")
        for horizon_s in HORIZONS_S:
            rows = [s for s in scores if s.series == series and s.horizon_s == horizon_s]
            if not rows:
                continue
            parts.append(
                f"\nThe next {_span(horizon_s)}, {rows[0].instants} instants:\n\n"
                "| method | MAE | MSE | pinball | exceeded | lent | late | short |\n"
                "|---|---|---|---|---|---|---|---|\n"
            )
            parts += [
                f"| {row.method} | {row.mae:.4f} | {row.mse:.5f} | {row.pinball:.4f} | "
                f"{row.exceeded:.1%} | {row.lent_ratio:.1%} | {row.late_ratio:.2%} | "
                f"{row.short_nodes:.1f} |\n"
                for row in rows
            ]
    return "".join([*parts, _note(scores)])


def _span(horizon_s: float) -> str:
    return f"{horizon_s:.0f} s" if horizon_s < 3600.0 else f"{horizon_s / 3600.0:.0f} h"


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
