"""docs/results.md has the bound and the part of the gap from sjf to it beside every row of ours."""

from __future__ import annotations

import pytest
from msgspec import structs

from coordinator.workloads.paper_runs import find_scene
from docs.research.play_results import DRAWN_DAYS, GOLDEN, ROWS, Kept, read_kept
from docs.research.results import page
from docs.research.results_bounds import OtherJobsError, with_gaps_closed, yardstick_of
from docs.research.results_ours import by_row
from docs.research.results_sentences import read_measured
from tests.sim.small import small

KEPT_RUNS = read_kept()
BASE = small(100, is_dense=False)
WITHOUT = "Table 7"
"""The section of rows that have none."""


def run_of(row: str, jct_s: float, *, seed: int = 1, bound_s: float = 100.0) -> Kept:
    """A run that is kept, as if it had these figures."""
    kept = KEPT_RUNS["baseline-1"]
    result = structs.replace(
        kept.result,
        policy="sjf" if row.startswith("sjf") else "aryl",
        seed=seed,
        scenario={**ROWS, **DRAWN_DAYS}[row].scenario,
        jct_s=structs.replace(kept.result.jct_s, mean=jct_s),
        jct_bound_s=bound_s,
    )
    return structs.replace(kept, row=row, result=result)


def closed(*runs: Kept) -> dict[str, list[float | None]]:
    """Parts of the gap by row."""
    found = with_gaps_closed(by_row({f"{run.row}-{run.result.seed}": run for run in runs}))
    return {row: [run.result.gap_closed_ratio for run in of_row] for row, of_row in found.items()}


@pytest.mark.parametrize("row", sorted({*ROWS, *DRAWN_DAYS}))
def test_a_row_is_measured_from_sjf_on_its_own_jobs(row: str) -> None:
    """The same jobs, sizes and estimates, at the same speed-up; an sjf row is its own measure."""
    every = {**ROWS, **DRAWN_DAYS}
    measure = yardstick_of(row)
    assert every[measure].policy == "sjf"
    assert every[row].policy != "sjf" or measure == row
    own, its = (find_scene(every[each].scenario) for each in (row, measure))
    assert own.shape(BASE, 1).jobs == its.shape(BASE, 1).jobs
    assert (own.speedup, own.tells_progress) == (its.speedup, its.tells_progress)


@pytest.mark.parametrize("row", sorted(GOLDEN))
def test_a_public_trace_is_measured_from_sjf_on_it(row: str) -> None:
    """As many GPUs, and a start takes as long."""
    measure = GOLDEN[yardstick_of(row)]
    assert measure == structs.replace(GOLDEN[row], policy="sjf")


def test_the_gap_closed_is_the_part_of_the_way_from_sjf_to_the_bound() -> None:
    """Seed by seed; worse than sjf is below 0, and without sjf there is none."""
    found = closed(
        run_of("sjf", 300.0),
        run_of("sjf", 500.0, seed=2),
        run_of("basic", 150.0),
        run_of("basic", 400.0, seed=2),
        run_of("baseline", 400.0),
        run_of("loan-aryl", 200.0, seed=3),
        run_of("ideal", 150.0),
    )
    assert found == {
        "sjf": [0.0, 0.0],
        "basic": [0.75, 0.25],
        "baseline": [-0.5],
        "loan-aryl": [None],
        "ideal": [None],  # `sjf` has other jobs than `sjf-ideal`
    }


def test_a_row_of_other_jobs_than_its_sjf_stops_the_page() -> None:
    """One of both was played before the trace or the bound changed."""
    with pytest.raises(OtherJobsError, match="basic: other jobs or another bound"):
        closed(run_of("sjf", 300.0), run_of("basic", 150.0, bound_s=101.0))


def test_every_row_on_the_page_has_its_bound_and_the_gap_that_it_closes() -> None:
    """Worked out here from the kept means, by hand."""
    results = {run.row: run.result for run in KEPT_RUNS.values() if run.result.seed == 1}
    seen = 0
    for section in page(KEPT_RUNS, read_measured()).split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        if not lines or "| row |" not in lines[0] or section.startswith(WITHOUT):
            continue
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        assert cells[0][-2:] == ["JCT bound", "gap closed"]
        if section.startswith("Figure 12"):  # means over the draws
            assert all(bound and gap for *_, bound, gap in cells[1:])
            continue
        for row, *_, bound, gap in cells[1:]:
            run, sjf = results[row], results[yardstick_of(row)]
            way_s = sjf.jct_s.mean - run.jct_bound_s
            part = 100 * (sjf.jct_s.mean - run.jct_s.mean) / way_s
            assert bound == f"{run.jct_bound_s:,.0f}"
            assert gap == (f"{part:.1f} %" if abs(part) >= 10 else f"{part:.2f} %")
            seen += 1
    assert seen > 40


def test_every_mean_jct_on_a_public_trace_has_its_bound() -> None:
    """And the gap closed."""
    [section] = [
        each
        for each in page(KEPT_RUNS, read_measured()).split("\n## ")
        if each.startswith("Known numbers")
    ]
    lines = [line for line in section.split("\n### ")[0].splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0][-2:] == ["JCT bound, s", "gap closed"]
    for row in cells[1:]:
        assert all(row[-2:])
    [of_sjf] = [row for row in cells if "PAI, SJF" in row[1]]
    assert of_sjf[-2:] == ["22,970", "0.00 %"]
