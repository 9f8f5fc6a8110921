"""The bound beside each row of docs/results.md, and the part of the gap from `sjf` that it closes.

Must not run anything, nor know the paper's figures: what is measured from what stands here, how in
`coordinator.sim.run.compare.with_gaps`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from coordinator.sim.run.compare import with_gaps
from coordinator.sim.run.play import Run, RunResult
from docs.research.play_results import DRAWN_DAYS, GOLDEN, ROWS, Kept

BOUNDS = (
    ("jct_bound_s", "JCT bound", "s"),
    ("gap_closed_ratio", "gap closed", "%"),
)
"""Figure, heading, unit: ours alone, behind the figures that the paper has too."""

_LIKE = {
    "naive-advanced": "advanced",
    "naive-ideal": "ideal",
    "elastic-pollux": "elastic-tuned",
}
"""Scenarios with the jobs and the speed-up of another one."""


class OtherJobsError(ValueError):
    """A row and the `sjf` row that it is measured from are not of the same jobs."""


def yardstick_of(row: str) -> str:
    """The `sjf` row on the very jobs of a row, under the same speed-up.

    Raises:
        KeyError: no row that can be played.
    """
    if row in GOLDEN:
        traces = {each.trace: name for name, each in GOLDEN.items() if each.policy == "sjf"}
        return traces[GOLDEN[row].trace]
    every = {**ROWS, **DRAWN_DAYS}
    scenario = every[row].scenario.replace("bootstrap-baseline", "bootstrap-basic")
    own = f"sjf-{_LIKE.get(scenario, scenario)}"
    return own if own in every else "sjf"


def with_gaps_closed(rows: Mapping[str, list[Kept]]) -> dict[str, list[Kept]]:
    """Each run with its part of the gap, seed by seed; without where its `sjf` is not kept.

    Raises:
        OtherJobsError: one of both is stale.
        KeyError: as `yardstick_of`.
    """
    results = {(row, run.result.seed): run.result for row, runs in rows.items() for run in runs}
    return {
        row: [_with_gap(run, results.get((yardstick_of(row), run.result.seed))) for run in runs]
        for row, runs in rows.items()
    }


def _with_gap(run: Kept, sjf: RunResult | None) -> Kept:
    if sjf is None:
        return run
    if (sjf.jobs, sjf.jct_bound_s) != (run.result.jobs, run.result.jct_bound_s):
        raise OtherJobsError(f"{run.row}: other jobs or another bound than sjf's; play both again")
    pair = [structs.replace(each, scenario="") for each in (sjf, run.result)]
    [_, found] = with_gaps([Run(result=each, rows=(), samples=()) for each in pair])
    closed = found.result.gap_closed_ratio
    return structs.replace(run, result=structs.replace(run.result, gap_closed_ratio=closed))
