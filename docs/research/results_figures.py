"""The figures that sentences of docs/results.md are filled with, by name. Must not run anything.

A sentence holds names in braces, `{basic.reclaims}` or `{trace.short_ratio %}`, and no figure.
Names begin with what they are of: a row of the page (its kept run), `seen.RUN` or `trace` (what
`results_sentences.py` measured), `theirs` (the paper's), or what is computed here from these.
All ours are of `paper-1`, but those of `seen.overload`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil

from coordinator.sim.report.statistics import Estimate
from coordinator.workloads.paper import (
    ELASTIC_MEAN_S,
    ELASTIC_SHARE,
    FUNGIBLE_SHARE,
    GPUS_PER_NODE,
    INFERENCE_NODES,
    TRAINING_GPUS,
)
from coordinator.workloads.paper_runs import find_scene
from docs.research.paper_figures import (
    FIGURE_12_DRAWS,
    FIGURES_5,
    FIGURES_8,
    FIGURES_9,
    TABLE_5,
    TABLE_8,
    TABLE_9,
)
from docs.research.play_results import DRAWS
from docs.research.results_sentences import TRACE, Measured

Named = dict[str, float]
"""Figures by name; SI units, parts of 1."""

PLACE = re.compile(r"\{([A-Za-z0-9_.-]+)(?: ([a-z%]+))?\}")
"""A name in a sentence, and how it is to be read; see `text_of`."""

INFERENCE_USE = 0.65
"""Section 2.1: mean part of the inference GPUs that serve."""

LENT_USE = 0.958
"""Figure 9, digitized: part of the GPUs on loan that training holds, mean of the 15 days."""

STRICT = ("baseline", "elastic-gandiva")
IN_ROUNDS = ("elastic-pollux",)
"""Rows of Table 5 whose jobs wait for more than a pass, by their rules."""

SAME = "paper-1"
"""The trace of the page; ranges are over runs of it alone."""

SECONDS_PER_HOUR = 3600.0


class OppositeError(ValueError):
    """A figure that a sentence takes for positive is not: the sentence says the opposite."""


# --- as text ------------------------------------------------------------------------------------


def text_of(value: float, unit: str) -> str:
    """A figure as people read it: `%` of a part, `h` of seconds, `x` a factor, else whole."""
    match unit:
        case "%":
            return f"{100 * value:.2f} %" if abs(value) < 0.1 else f"{100 * value:.1f} %"
        case "x":
            return f"{value:.2f}"
        case "h":
            return f"{value / SECONDS_PER_HOUR:.1f} h"
        case _:
            return f"{value:,.0f}"


def filled(sentence: str, figures: Mapping[str, float]) -> str:
    """A sentence with its figures.

    Raises:
        KeyError: a name that no figure has.
        OppositeError: a negative figure.
    """

    def text(found: re.Match[str]) -> str:
        value = figures[found[1]]
        if value < 0:
            raise OppositeError(f"{found[1]} is {value:g}, in: {sentence}")
        return text_of(value, found[2] or "")

    return PLACE.sub(text, sentence)


# --- by name ------------------------------------------------------------------------------------


def sentence_figures(
    rows: Mapping[str, Mapping[str, Estimate]], seen: Mapping[str, Measured]
) -> Named:
    """All figures that a sentence may name.

    Args:
        rows: figures of the kept rows, by row and dotted name.
        seen: what was measured for sentences, by run.

    Raises:
        KeyError: a row or a run that sentences need is missing.
    """
    found = {
        f"{row}.{name}": each.mean
        for row, figures in rows.items()
        for name, each in figures.items()
    }
    for run, measured in seen.items():
        prefix = TRACE if run == TRACE else f"seen.{run}"
        found |= {f"{prefix}.{name}": value for name, value in measured.figures.items()}
    found |= _published()
    found |= _of_differences(found)
    found |= _of_theirs(found)
    return found | _of_ranges(found, seen) | _of_draws(found)


def _published() -> Named:
    """The paper's own figures, by row and the name that ours have."""
    found: Named = {}
    for figures, table in (
        (FIGURES_8, TABLE_8),
        (FIGURES_9, TABLE_9),
        (FIGURES_5, TABLE_5),
    ):
        for row, cells in table.items():
            names = (name.replace(" ", "_") for name, _, _ in figures)
            for name, value in zip(names, cells, strict=False):
                found[f"theirs.{row}.{name}"] = value
    return found


def _of_differences(f: Mapping[str, float]) -> Named:
    """What follows from our figures."""
    round_s = _round_s()
    p99_s = f["elastic-pollux.queueing_s.p99"]
    guests = f["loan-opportunistic.on_loan_jobs.jobs"]
    return {
        "basic.running_s": f["basic.jct_s.mean"] - f["basic.queueing_s.mean"],
        "naive-ideal.sooner_s": f["ideal.jct_s.mean"] - f["naive-ideal.jct_s.mean"],
        "checkpoints.sooner_s": f["ideal.jct_s.mean"] - f["seen.checkpoint-100.jct_s"],
        "loan-opportunistic.preemptions_each": f["loan-opportunistic.preemptions"] / guests,
        "pollux.round_s": round_s,
        "pollux.passes_s": ceil(round_s / f["trace.pass_s"]) * f["trace.pass_s"],
        # nobody of the other 99 % waits for longer than p99
        "pollux.last_hundredth_s": f["elastic-pollux.queueing_s.mean"] - 0.99 * p99_s,
    }


def _round_s() -> float:
    """Seconds between two rounds of Pollux, as its row is played."""
    found = re.search(r":round_s=(\d+)", find_scene("elastic-pollux").policy)
    assert found is not None
    return float(found[1])


def _of_theirs(f: Mapping[str, float]) -> Named:
    """What follows from the paper's figures."""
    training_use = f["theirs.baseline.training_gpu_ratio"]
    inference_gpus = INFERENCE_NODES * GPUS_PER_NODE
    held = TRAINING_GPUS * training_use + inference_gpus * INFERENCE_USE
    base_s, base_p99_s = f["theirs.baseline.jct_s.mean"], f["theirs.baseline.jct_s.p99"]
    waits_s = f["theirs.baseline.queueing_s.mean"]
    opportunistic = f["theirs.loan-opportunistic.preemption_ratio"]
    return {
        "theirs.basic.queueing_gain": waits_s / f["theirs.basic.queueing_s.mean"],
        "theirs.basic.running_s": f["theirs.basic.jct_s.mean"] - f["theirs.basic.queueing_s.mean"],
        "theirs.baseline.running_s": base_s - waits_s,
        # an elastic job takes half of its time where it always has twice its fewest workers
        "theirs.least_running_s": base_s - waits_s - ELASTIC_SHARE * ELASTIC_MEAN_S / 2,
        "theirs.inference_use": INFERENCE_USE,
        "theirs.lent_use": LENT_USE,
        "theirs.overall_use_by_parts": held / (TRAINING_GPUS + inference_gpus),
        "theirs.fungible_ratio": FUNGIBLE_SHARE,
        "theirs.loan-opportunistic.preemptions_each": opportunistic / FUNGIBLE_SHARE,
        "theirs.elastic-tuned.sooner_s": base_s - f["theirs.elastic-tuned.jct_s.mean"],
        "theirs.elastic-tuned.queueing_less_s": waits_s - f["theirs.elastic-tuned.queueing_s.mean"],
        "theirs.baseline.p99_over_ours": base_p99_s / f["baseline.jct_s.p99"],
        "theirs.elastic-tuned.p99_ratio": f["theirs.elastic-tuned.jct_s.p99"] / base_p99_s,
    }


def _of_ranges(f: Mapping[str, float], seen: Mapping[str, Measured]) -> Named:
    """The least and the most over rows, or over the runs that were measured on the same jobs."""
    same = [run for run, each in seen.items() if each.policy and each.workload == SAME]
    rare_s = [f[f"seen.{run}.rare_queueing_s"] for run in same]
    skipping = [row for row in TABLE_5 if row not in (*STRICT, *IN_ROUNDS)]
    ends_s = [f[f"{row}.jct_s.p99"] for row in TABLE_8]
    return {
        "least.rare_queueing_s": min(rare_s),
        "most.rare_queueing_s": max(rare_s),
        "most.queueing_p95_s": max(f[f"{row}.queueing_s.p95"] for row in skipping),
        "least.theirs_queueing_p95_s": min(f[f"theirs.{row}.queueing_s.p95"] for row in skipping),
        "least.jct_p99_s": min(ends_s),
        "most.jct_p99_s": max(ends_s),
    }


def _of_draws(f: Mapping[str, float]) -> Named:
    """The least and the most over the draws of days that were played, ours and theirs."""
    found: Named = {}
    for row in ("baseline", "basic", "ideal"):
        names = [f"bootstrap-{row}-{number}" for number in DRAWS]
        there = [name for name in names if f"{name}.queueing_s.mean" in f]
        waits_s = [f[f"{name}.queueing_s.mean"] for name in there]
        runs_s = [f[f"{name}.jct_s.mean"] - f[f"{name}.queueing_s.mean"] for name in there]
        for what, values_s in (("queueing", waits_s), ("running", runs_s)):
            found[f"least.drawn_{row}_{what}_s"] = min(values_s)
            found[f"most.drawn_{row}_{what}_s"] = max(values_s)
    for row, gains in FIGURE_12_DRAWS.items():
        found[f"least.theirs_{row}_gain"] = min(gains)
        found[f"most.theirs_{row}_gain"] = max(gains)
    return found
