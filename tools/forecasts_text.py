"""The page on forecasts, made of its figures. Must not measure; only its sentences are typed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.forecasts_judged import HEADROOM_RATIO, HORIZONS_S, LEND_S, NODES, PEAK_RATIO, Score
from tools.forecasts_lstm import BATCH, CELLS, DAILY_STEPS, FIRST_STEPS, WAYS

OUR_BOUND = "quantile 0.9 (`foresight`)"
LAST = "last value"
OF_ARYL = "largest of the three (`aryl`)"
NET_ONCE, NET_MIDDLE, NET_BOUND = WAYS
"""Rows that stand beside each other below."""

GENERATED = "inference"

FAR_S = 4 * 3600.0
"""From here on the day's course counts."""

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
(`coordinator/policies/aryl/lending/forecast.py`); quantiles of the seasonal model, which
`foresight` uses (`coordinator/policies/contract/seasonal_load.py`); and the paper's LSTM. Where the
seasonal model knows too little, it says what `aryl` says.

Series: `inference` is the paper's digitised week, repeated with a little noise of our own: it is as
regular as our generator makes it, and so it flatters every seasonal method. The others are real:
request rates of three models over two weeks (ServeGen).

**The LSTM** (`tools/lstm.py`, numpy alone; nothing that ships uses it) is the paper's as far as it
is printed: a window of the last 10 samples, two hidden layers, Adam, mean squared error. Ours are
{CELLS} cells a layer, batches of {BATCH}, {FIRST_STEPS:,} steps on the first three days and, where
it goes on learning, {DAILY_STEPS} each day. It learns what it is judged by, the peak until the end
of each horizon, as a rise over the last sample. In its second row it goes on learning every day, as
our model does; in its third it learns the 90 % quantile as well (pinball loss in place of the
square). One start by chance each, no search for better settings; 5 to 21 s of one core per net and
series.
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

NETS = """
## Would an LSTM be better?

For the minutes of a way home a little; for the hours of a loan's life it is worse.

The paper's net says a mean, and a mean is no bound. At {home} its squared error is below the last
value's on {less} of {count} series. Yet on the real ones the load rises above it in
{net_least:.0%} to {net_most:.0%} of the cases, and it is late in {late_least:.0%} to
{late_most:.0%} of the passes; the rule of `aryl` is late in {aryl_least:.0%} to {aryl_most:.0%},
and lends less. (The paper prints an MSE of 0.00048 on its own private curve. On our copy of its
printed week the last value alone has {last_mse:.5f}, the net {net_mse:.5f}.)

Taught the 90 % quantile it is of our model's kind. Pinball loss, *our 90 % quantile / that of the
LSTM*, the lower one in bold:

{nets}
At {home} the LSTM's is lower on {near} of {count} series; from 4 h on ours is in {far} of {far_of}
cases. The net knows the last ten samples: it sees where the load is heading, but not what time of
the day it is. Our model knows the day and the week, and of the last minutes only how far off it
was. `foresight` asks one model for both, one that learns online, sample by sample, and repeats byte
for byte on any machine; a net would have to be trained and kept per service. So none is shipped,
and the first column is what that costs.
"""


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


def _note(scores: Sequence[Score]) -> str:
    names = (OF_ARYL, OUR_BOUND, *WAYS)
    rows = ["| series | method | lent | late | short |", "|---|---|---|---|---|"]
    rows += [
        f"| {score.series} | {score.method} | {score.lent_ratio:.1%} | {score.late_ratio:.2%} | "
        f"{score.short_nodes:.1f} |"
        for score in scores
        if score.horizon_s == LEND_S and score.method in names
    ]
    real = [s.exceeded for s in scores if s.series != GENERATED and s.method == OUR_BOUND]
    note = NOTE.format(table="\n".join([*rows, ""]), least=min(real), most=max(real))
    return note + _nets(scores)


def _nets(scores: Sequence[Score]) -> str:
    """How the nets compare: with what a mean is worth, and quantile against quantile."""
    by = {(score.series, score.horizon_s, score.method): score for score in scores}
    every = tuple(dict.fromkeys(score.series for score in scores))
    at_home = {
        method: {series: by[series, LEND_S, method] for series in every}
        for method in (LAST, OF_ARYL, NET_ONCE, NET_MIDDLE)
    }

    def real(methods: Sequence[str], figure: Callable[[Score], float]) -> list[float]:
        return [
            figure(at_home[m][series]) for m in methods for series in every if series != GENERATED
        ]

    means = (NET_ONCE, NET_MIDDLE)
    exceeded = real(means, lambda score: score.exceeded)
    late = real(means, lambda score: score.late_ratio)
    late_of_aryl = real((OF_ARYL,), lambda score: score.late_ratio)
    is_ours = {
        (series, horizon_s): by[series, horizon_s, OUR_BOUND].pinball
        <= by[series, horizon_s, NET_BOUND].pinball
        for series in every
        for horizon_s in HORIZONS_S
    }
    far = [ours for (_, horizon_s), ours in is_ours.items() if horizon_s >= FAR_S]
    lines = [
        f"| series | {' | '.join(_span(horizon_s) for horizon_s in HORIZONS_S)} |",
        "|---" * (1 + len(HORIZONS_S)) + "|",
    ]
    for series in every:
        cells: list[str] = []
        for horizon_s in HORIZONS_S:
            pair = [f"{by[series, horizon_s, name].pinball:.4f}" for name in (OUR_BOUND, NET_BOUND)]
            lower = 0 if is_ours[series, horizon_s] else 1
            pair[lower] = f"**{pair[lower]}**"
            cells.append(" / ".join(pair))
        lines.append(f"| {series} | {' | '.join(cells)} |")
    return NETS.format(
        home=_span(LEND_S),
        count=len(every),
        less=sum(at_home[NET_ONCE][s].mse < at_home[LAST][s].mse for s in every),
        net_least=min(exceeded),
        net_most=max(exceeded),
        late_least=min(late),
        late_most=max(late),
        aryl_least=min(late_of_aryl),
        aryl_most=max(late_of_aryl),
        last_mse=at_home[LAST][GENERATED].mse,
        net_mse=at_home[NET_ONCE][GENERATED].mse,
        nets="\n".join([*lines, ""]),
        near=sum(not is_ours[series, LEND_S] for series in every),
        far=sum(far),
        far_of=len(far),
    )


def _span(horizon_s: float) -> str:
    return f"{horizon_s:.0f} s" if horizon_s < 3600.0 else f"{horizon_s / 3600.0:.0f} h"
