"""Our side of docs/results.md: the kept runs as figures by row, means over seeds, and gains.

Must not run anything. Of the paper it knows which figures a table has, and none of their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coordinator.sim.report.statistics import Estimate, estimate
from coordinator.sim.run.compare import flat
from docs.research.paper_figures import FIGURES_7
from docs.research.play_results import DRAWS, Kept
from docs.research.results_bounds import BOUNDS

Values = dict[str, Estimate]
"""Our figures of one row, by name."""


def by_row(kept: Mapping[str, Kept]) -> dict[str, list[Kept]]:
    """Runs by row, by seed."""
    rows: dict[str, list[Kept]] = {}
    for run in kept.values():
        rows.setdefault(run.row, []).append(run)
    return {row: sorted(runs, key=lambda run: run.result.seed) for row, runs in rows.items()}


def plain_figures(run: Kept) -> dict[str, float]:
    """All figures of a run, and preemptions over submissions."""
    found = flat(run.result)
    found["preemption_ratio"] = run.result.preemptions / run.result.jobs
    for name, tail in (("queueing_s", run.queueing_tail_s), ("jct_s", run.jct_tail_s)):
        if tail is not None:
            found[f"{name}.p75"], found[f"{name}.p99"] = tail
    return found


def values(rows: Sequence[dict[str, float]]) -> Values:
    """Means over seeds."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: estimate([row[name] for row in rows]) for name in names}


def all_values(rows: Mapping[str, list[Kept]]) -> dict[str, Values]:
    """Every row's figures."""
    return {row: values([plain_figures(run) for run in runs]) for row, runs in rows.items()}


def guests(rows: Mapping[str, list[Kept]]) -> dict[str, Values]:
    """Table 7: the jobs that ran on lent nodes, and what they had been under Baseline."""
    of_row = [flat(run.result) for run in rows.get("loan-aryl", [])]
    names = [name for name, _, _ in FIGURES_7]
    found = {"loan-aryl": [{n: row[f"on_loan_jobs.{n}"] for n in names} for row in of_row]}
    before: list[dict[str, float]] = []
    for run in rows.get("loan-aryl", []):
        if run.guests_before is not None:
            parts = {"queueing_s": run.guests_before.queueing_s, "jct_s": run.guests_before.jct_s}
            before.append({n: getattr(parts[n.split(".")[0]], n.split(".")[1]) for n in names})
    found["before"] = before
    return {row: values(each) for row, each in found.items() if each}


def gains(rows: Mapping[str, list[Kept]], names: Sequence[str]) -> dict[str, Values]:
    """Means of Baseline over means of a row, seed by seed, and the row's own bounds."""
    base = {run.result.seed: run for run in rows.get("baseline", [])}
    found: dict[str, Values] = {}
    for name in names:
        made = [
            gain(base[seed], run) for run in rows.get(name, []) if (seed := run.result.seed) in base
        ]
        if made:
            found[name] = values(made)
    return found


def gain(base: Kept, run: Kept) -> dict[str, float]:
    """Means of one run over those of another on the same submissions, and the other's bounds."""
    plain = plain_figures(run)
    return {
        "queueing gain": base.result.queueing_s.mean / run.result.queueing_s.mean,
        "JCT gain": base.result.jct_s.mean / run.result.jct_s.mean,
        **{name: plain[name] for name, _, _ in BOUNDS if name in plain},
    }


def drawn_gains(rows: Mapping[str, list[Kept]], names: Iterable[str]) -> dict[str, Values]:
    """Figure 12: gains over Baseline on the same drawn days, means over the draws."""
    found: dict[str, Values] = {}
    for row in names:
        made = [
            gain(base, run)
            for number in DRAWS
            for base in rows.get(f"bootstrap-baseline-{number}", [])
            for run in rows.get(f"{row}-{number}", [])
            if base.result.seed == run.result.seed
        ]
        if made:
            found[row] = values(made)
    return found
