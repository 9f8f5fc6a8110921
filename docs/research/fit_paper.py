"""Fits the generator's free parameters to the paper's FIFO row by random search.

    .venv/bin/python docs/research/fit_paper.py table      the frozen traces and the paper
    .venv/bin/python docs/research/fit_paper.py spread --last 60        how much seeds differ
    .venv/bin/python docs/research/fit_paper.py seeds --last 200        which seeds come near enough
    .venv/bin/python docs/research/fit_paper.py search --tries 200

Must not know the engine: it has a strict FIFO of its own (`fit_fifo.py`), so that a fault of
ours in the scheduler cannot be fitted away, and so that one trial takes half a second. A test holds
the two against each other, job by job. Looks at no other row of the paper.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from msgspec import Struct, structs

from coordinator.workloads.named import DRAW_SEEDS
from coordinator.workloads.paper import (
    LENGTH_S,
    TRAINING_GPUS,
    Drawn,
    PaperParameters,
    draw,
)
from docs.research.fit_fifo import fifo_starts


class Row(Struct, frozen=True, kw_only=True):
    """The figures of one run that the paper prints for its Baseline."""

    queue_mean: float
    queue_p50: float
    queue_p95: float
    jct_mean: float
    jct_p50: float
    jct_p95: float
    use: float
    queue_p75: float = math.nan
    queue_p99: float = math.nan
    jct_p75: float = math.nan
    jct_p99: float = math.nan


PAPER = Row(
    queue_mean=3072,
    queue_p50=55,
    queue_p95=8357,
    jct_mean=16610,
    jct_p50=791,
    jct_p95=82933,
    use=0.72,
    queue_p75=1892,
    queue_p99=14323,
    jct_p75=29163,
    jct_p99=376513,
)
"""Lyra, EuroSys'23: Table 5, row Baseline; p75 and p99 of Table 8."""

FITTED = ("queue_mean", "queue_p50", "queue_p95", "jct_mean", "jct_p50", "jct_p95", "use")
"""What the search looks at; p75 and p99 are shown and not fitted."""


def fifo_row(drawn: Drawn, parameters: PaperParameters) -> Row:
    """The Baseline's figures; use is over the 15 days of submissions."""
    starts_s = fifo_starts(drawn, parameters)
    queue_s = starts_s - drawn.submit_s
    jct_s = queue_s + drawn.duration_s
    held_s = np.clip(np.minimum(starts_s + drawn.duration_s, LENGTH_S) - starts_s, 0.0, None)
    quantiles = [0.5, 0.75, 0.95, 0.99]
    queue, jct = np.quantile(queue_s, quantiles), np.quantile(jct_s, quantiles)
    return Row(
        queue_mean=float(queue_s.mean()),
        queue_p50=float(queue[0]),
        queue_p75=float(queue[1]),
        queue_p95=float(queue[2]),
        queue_p99=float(queue[3]),
        jct_mean=float(jct_s.mean()),
        jct_p50=float(jct[0]),
        jct_p75=float(jct[1]),
        jct_p95=float(jct[2]),
        jct_p99=float(jct[3]),
        use=float((held_s * drawn.gpus).sum() / (TRAINING_GPUS * LENGTH_S)),
    )


def error(row: Row) -> float:
    """The largest distance of a fitted figure from the paper's, as a part of the paper's."""
    found, wanted = figures(row), figures(PAPER)
    return max(abs(found[name] / wanted[name] - 1.0) for name in FITTED)


def figures(row: Row) -> dict[str, float]:
    """By name."""
    return structs.asdict(row)


# --- search ---------------------------------------------------------------------------------------

RANGES: dict[str, tuple[float, float]] = {
    "load": (0.74, 0.98),
    "rate_sigma": (0.05, 1.0),
    "rate_tau_h": (1.0, 12.0),
    "batch": (1.0, 8.0),
    "long_sigma": (0.0, 0.5),
    "initial": (0.0, 1.0),
    "short_share": (0.66, 0.79),
    "short_s": (300.0, 800.0),
    "long_s": (6_000.0, 25_000.0),
    "q95_s": (50_000.0, 80_000.0),
    "q99_s": (120_000.0, 350_000.0),
    "short_tilt": (-0.3, 0.5),
    "gangs": (20, 300),
    "gang_gpus": (100.0, 1_000.0),
    "gang_sigma": (0.05, 0.8),
    "gang_s": (100.0, 2_000.0),
    "rare_load": (1.1, 1.4),
    "pass_period_s": (50, 110),
}

WHOLE = frozenset({"gangs", "pass_period_s"})
"""Counts, and the period: in whole seconds, as all times of a trace, so that passes are exact."""


def loss(parameters: PaperParameters, seeds: Sequence[int]) -> tuple[float, float]:
    """(mean over seeds of the summed squared log ratios, mean largest distance)."""
    total = worst = 0.0
    for seed in seeds:
        try:
            row = fifo_row(draw(parameters, seed), parameters)
        except ValueError:  # a mean that these quantiles cannot have
            return math.inf, math.inf
        for name in FITTED:
            ratio = max(getattr(row, name), 1e-9) / getattr(PAPER, name)
            total += math.log(ratio) ** 2
        worst += error(row)
    return total / len(seeds), worst / len(seeds)


def search(
    tries: int,
    seed: int,
    seeds: Sequence[int],
    start: PaperParameters,
    *,
    width: float = 0.25,
    say: Callable[[str], object] = sys.stderr.write,
) -> PaperParameters:
    """Random search: each try moves a few parameters of the best so far by a share of their range.

    width: standard deviation of the first moves, as part of the range; it shrinks to a tenth.
    """
    chance = Random(seed)
    best, (best_loss, best_worst) = start, loss(start, seeds)
    for number in range(tries):
        scale = width * 0.1 ** (number / max(1, tries))
        names = chance.sample(sorted(RANGES), k=chance.randint(1, 5))
        found = _moved(best, names, scale, chance)
        found_loss, found_worst = loss(found, seeds)
        if found_loss < best_loss:
            best, best_loss, best_worst = found, found_loss, found_worst
            say(f"{number}: loss {best_loss:.4f}, largest {best_worst:.1%}: {changes(best)}\n")
    return best


def _moved(
    parameters: PaperParameters, names: Sequence[str], scale: float, chance: Random
) -> PaperParameters:
    moved: dict[str, float | int] = {}
    for name in names:
        low, high = RANGES[name]
        value = getattr(parameters, name) + chance.gauss(0.0, scale) * (high - low)
        value = min(max(value, low), high)
        moved[name] = round(value) if name in WHOLE else float(f"{value:.4g}")
    return structs.replace(parameters, **moved)


def changes(parameters: PaperParameters) -> str:
    """What is searched for, as keyword arguments."""
    return ", ".join(f"{name}={getattr(parameters, name)!r}" for name in sorted(RANGES))


# --- what it prints -------------------------------------------------------------------------------


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Rows beside the paper's, in Markdown; names of figures that are not fitted in brackets."""
    shown = [*FITTED, "queue_p75", "queue_p99", "jct_p75", "jct_p99"]
    names = [name if name in FITTED else f"({name})" for name in shown]
    lines = [f"| trace | {' | '.join(names)} | largest |", "|---" * (len(shown) + 2) + "|"]
    for label, row in [("paper", PAPER), *rows]:
        figures = (f"{getattr(row, name):.{3 if name == 'use' else 0}f}" for name in shown)
        lines.append(f"| {label} | {' | '.join(figures)} | {error(row):.1%} |")
    return "\n".join(lines)


def found_seeds(first: int, last: int, parameters: PaperParameters, most: float) -> list[int]:
    """The draw seeds of a range whose row is within `most` of the paper on every fitted figure."""
    seeds = range(first, last + 1)
    return [seed for seed in seeds if error(fifo_row(draw(parameters, seed), parameters)) <= most]


def spread(first: int, last: int, parameters: PaperParameters) -> str:
    """Median and tenth parts of each fitted figure over a range of draw seeds, in Markdown."""
    rows = [fifo_row(draw(parameters, seed), parameters) for seed in range(first, last + 1)]
    lines = ["| figure | paper | 10 % | median | 90 % |", "|---|---|---|---|---|"]
    for name in FITTED:
        digits = 3 if name == "use" else 0
        values = np.quantile([getattr(row, name) for row in rows], [0.1, 0.5, 0.9])
        figures = " | ".join(f"{value:.{digits}f}" for value in values)
        lines.append(f"| {name} | {getattr(PAPER, name):.{digits}f} | {figures} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for to stdout; progress of a search to stderr."""
    parser = argparse.ArgumentParser(prog="docs/research/fit_paper.py", description=__doc__)
    parser.add_argument("what", choices=("table", "seeds", "spread", "search"))
    parser.add_argument("--first", type=int, default=1, help="draw seed to begin with")
    parser.add_argument("--last", type=int, default=60, help="draw seed to end with")
    parser.add_argument("--most", type=float, default=0.15, help="of seeds: largest distance")
    parser.add_argument("--tries", type=int, default=200, help="of a search")
    parser.add_argument("--seed", type=int, default=1, help="of a search")
    given = parser.parse_args(arguments)
    parameters = PaperParameters()
    match given.what:
        case "table":
            rows = [
                (f"paper-{seed}", fifo_row(draw(parameters, drawn), parameters))
                for seed, drawn in DRAW_SEEDS.items()
            ]
            text = table(rows)
        case "seeds":
            text = " ".join(map(str, found_seeds(given.first, given.last, parameters, given.most)))
        case "spread":
            text = spread(given.first, given.last, parameters)
        case _:
            seeds = range(given.first, min(given.last, given.first + 5) + 1)
            text = changes(search(given.tries, given.seed, seeds, parameters))
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
