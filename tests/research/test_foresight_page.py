"""docs/foresight.md: what is worse than `aryl` beyond chance is marked, and only that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from coordinator.sim.report.statistics import estimate
from docs.research.foresight_page import (
    PAGE,
    by_seed,
    is_beyond,
    main,
    page,
    paired,
    worse_rows,
)
from docs.research.play_foresight import Kept, read_kept

KEPT_RUNS = {(run.workload, run.policy): run for run in read_kept()}
SEEDS = range(1, 6)


def runs(less: Sequence[int]) -> dict[tuple[str, str], Kept]:
    """Five seeds of the overload on which `foresight` is `aryl` but for its preemptions.

    less: by how much it has more of them, seed by seed.
    """
    found: dict[tuple[str, str], Kept] = {}
    for seed, more in zip(SEEDS, less, strict=True):
        name = f"paper-overload-{seed}"
        aryl = KEPT_RUNS[name, "aryl"]
        stopped = aryl.result.preemptions + more
        ours = structs.replace(
            aryl,
            policy="foresight",
            result=structs.replace(aryl.result, policy="foresight", preemptions=stopped),
        )
        found |= {(name, "sjf"): aryl, (name, "aryl"): aryl, (name, "foresight"): ours}
    return found


@pytest.mark.parametrize(
    ("less", "is_worse"),
    [((9, 10, 11, 10, 10), True), ((0, 0, 0, 0, 50), False), ((-9, -10, -11, -10, -10), False)],
)
def test_what_is_worse_by_more_than_its_interval_is_named(
    less: tuple[int, ...], *, is_worse: bool
) -> None:
    """A difference that every seed has is; one seed's bad luck is not, nor what is better."""
    told = paired(runs(less))
    assert ("preemptions on `paper-overload`" in told) == is_worse
    assert ("| preemptions | **" in told) == is_worse
    assert ("more than the interval: nothing." in told) != is_worse


def test_what_no_seed_changes_is_not_worse() -> None:
    """No difference has no interval either, and is no harm; a single seed says nothing."""
    assert not is_beyond(estimate([0.0] * 5))
    assert not is_beyond(estimate([7.0]))
    assert is_beyond(estimate([7.0] * 5))


KNOWN_WORSE = {
    ("rho max", "paper"),
    ("rho max", "paper-overload"),
    ("share of rho above 1", "paper-overload"),
}
"""Figure and family; docs/foresight.md says so, and why."""


def test_what_is_shipped_is_worse_than_aryl_in_no_row_but_those_known() -> None:
    """The kept runs, as the page shows them: any other row is harm, and one less is news."""
    assert set(worse_rows(KEPT_RUNS)) == KNOWN_WORSE
    told = paired(KEPT_RUNS).splitlines()[-1]
    assert told.count(" on `") == len(KNOWN_WORSE)
    assert "the highest rho on `paper-overload` (3.722±0.716)" in told


def test_the_worst_seed_of_a_real_trace_is_named_with_both_policies_waits() -> None:
    """What is shipped may be behind on a seed where the mean over seeds hides it."""
    told = by_seed(KEPT_RUNS)
    assert "`itp-cluster02-5` (11,062 s against 9,380 s, 18 % longer)" in told
    assert "`itp-cluster06-5` (17,961 s against 15,774 s, 14 % longer)" in told


def without_bounds(text: str) -> list[str]:
    """A page's lines, less the cells of what is possible at most, which the traces alone tell."""
    found: list[str] = []
    for line in text.splitlines():
        is_bounded = line.startswith(("| mean queueing | ", "| mean JCT | "))
        cells = line.split(" | ")
        found.append(" | ".join([*cells[:2], *cells[3:]]) if is_bounded else line)
    return found


@pytest.mark.slow
def test_without_the_traces_the_page_stays_and_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the variable that names where they are; no traceback."""
    monkeypatch.delenv("ARYL_TRACES", raising=False)
    before = PAGE.read_bytes()
    assert main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("foresight_page.py: trace elasticflow_itp/")
    assert "ARYL_TRACES may name the directory of traces" in line
    assert PAGE.read_bytes() == before


def test_the_page_is_what_its_tool_writes() -> None:
    """Every sentence and every figure but the bounds: who edits the page by hand edits the tool."""
    written = without_bounds(page(KEPT_RUNS, lambda runs, workload: (1.0, 1.0)))
    assert written == without_bounds(PAGE.read_text("utf-8"))
    assert sum("possible at most" in line for line in written) == 5
