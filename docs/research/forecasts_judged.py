"""A forecast as a lender judges it: what it lets one lend, and how often that was too much.

Must not know how a forecast is made, nor nodes beyond their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from msgspec import Struct

from coordinator.policies.contract.seasonal_load import DAY_S

LEND_S = 460.0
"""A return (30 s TTL, 60 s grace, 10 s device, 60 s warm-up) and a loan period of 300 s."""

HORIZONS_S = (LEND_S, 3600.0, 4 * 3600.0, 12 * 3600.0, DAY_S)
NODES = 520
PEAK_RATIO = 0.95
HEADROOM_RATIO = 0.02
"""Nodes of a service, the part of them that its highest load needs, and what is never lent."""


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


def judged(
    series: str, horizon_s: float, method: str, pairs: Sequence[tuple[float, float]]
) -> Score:
    """The score of what was said, beside what came."""
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
