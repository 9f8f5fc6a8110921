"""The page on forecasts, made of its figures. Must not measure; its words are in the template."""

from __future__ import annotations

from collections.abc import Sequence

from docs.research.forecasts_judged import (
    HEADROOM_RATIO,
    HORIZONS_S,
    LEND_S,
    NODES,
    PEAK_RATIO,
    Score,
)
from docs.research.forecasts_lstm import WAYS
from docs.research.pages import rendered, table

OUR_BOUND = "quantile 0.9 (`foresight`)"
LAST = "last value"
OF_ARYL = "largest of the three (`aryl`)"
NET_ONCE, NET_MIDDLE, NET_BOUND = WAYS
"""Rows that stand beside each other below."""

GENERATED = "inference"

CHOSEN = (OF_ARYL, *(f"quantile {level} (`foresight`)" for level in (0.75, 0.9, 0.95)))
"""Forecasts that an operator may choose, for the table of longer spans."""

EXTREMES = ("quantile 0.5 (`foresight`)", "quantile 0.99 (`foresight`)")
"""Measured, and no choice: nodes come home late by the one, and few are lent by the other."""

FAR_S = 4 * 3600.0
"""From here on the day's course counts."""


def page(scores: Sequence[Score]) -> str:
    """The page as Markdown."""
    real = [s.exceeded for s in scores if s.series != GENERATED and s.method == OUR_BOUND]
    return rendered(
        "forecasts.md",
        peak_ratio=PEAK_RATIO,
        nodes=NODES,
        headroom_ratio=HEADROOM_RATIO,
        home=_home(scores),
        longer=_longer(scores),
        exceeded={"least": f"{min(real):.0%}", "most": f"{max(real):.0%}"},
        nets=_nets(scores),
    )


def _home(scores: Sequence[Score]) -> str:
    """Per method and series what it lets one lend over a way home, how often late, how short."""
    found = {(s.method, s.series): s for s in scores if s.horizon_s == LEND_S}
    every = tuple(dict.fromkeys(score.series for score in scores))
    rows = [
        [
            method,
            *(
                f"{one.lent_ratio:.1%} / {one.late_ratio:.2%} / {one.short_nodes:.1f}"
                for one in (found[method, series] for series in every)
            ),
        ]
        for method in dict.fromkeys(score.method for score in scores)
        if method not in EXTREMES
    ]
    return table(["lent / late / short", *every], rows)


def _longer(scores: Sequence[Score]) -> str:
    """Per series and longer horizon how often the load rose above each choice."""
    found = {(s.series, s.horizon_s, s.method): s.exceeded for s in scores}
    rows = [
        [f"{series}, {_span(horizon_s)}", *(f"{found[series, horizon_s, m]:.0%}" for m in CHOSEN)]
        for series in dict.fromkeys(score.series for score in scores)
        for horizon_s in HORIZONS_S
        if horizon_s > LEND_S
    ]
    return table(["exceeded", *(name.partition(" (")[0] for name in CHOSEN)], rows)


def _nets(scores: Sequence[Score]) -> dict[str, object]:
    """How the nets compare: with what a mean is worth, and quantile against quantile."""
    by = {(score.series, score.horizon_s, score.method): score for score in scores}
    every = tuple(dict.fromkeys(score.series for score in scores))
    at_home = {
        method: {series: by[series, LEND_S, method] for series in every}
        for method in (LAST, NET_ONCE, NET_MIDDLE)
    }
    exceeded = [
        at_home[net][series].exceeded
        for net in (NET_ONCE, NET_MIDDLE)
        for series in every
        if series != GENERATED
    ]
    is_ours = {
        (series, horizon_s): by[series, horizon_s, OUR_BOUND].pinball
        <= by[series, horizon_s, NET_BOUND].pinball
        for series in every
        for horizon_s in HORIZONS_S
    }
    far = [ours for (_, horizon_s), ours in is_ours.items() if horizon_s >= FAR_S]
    return {
        "home": _span(LEND_S),
        "count": len(every),
        "less": sum(at_home[NET_ONCE][s].mse < at_home[LAST][s].mse for s in every),
        "net_least": f"{min(exceeded):.0%}",
        "net_most": f"{max(exceeded):.0%}",
        "net_mse": f"{at_home[NET_ONCE][GENERATED].mse:.5f}",
        "near": sum(not is_ours[series, LEND_S] for series in every),
        "far": sum(far),
        "far_of": len(far),
    }


def _span(horizon_s: float) -> str:
    return f"{horizon_s:.0f} s" if horizon_s < 3600.0 else f"{horizon_s / 3600.0:.0f} h"
