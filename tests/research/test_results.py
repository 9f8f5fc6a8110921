"""docs/results.md is what its script makes of the runs that are kept, and explains what is off."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from coordinator.sim.run.play import JobRow
from coordinator.workloads.paper_runs import find_scene
from docs.research.golden_elasticflow import ROWS as BARS
from docs.research.paper_figures import (
    FIGURE_12,
    FIGURES_5,
    GOLDEN,
    TABLE_5,
    TABLE_6,
    TABLE_8,
    TABLE_9,
)
from docs.research.play_results import (
    DRAWN_DAYS,
    DRAWS,
    KEPT,
    ROWS,
    Kept,
    golden_task,
    guests_before,
    read_kept,
    scenario_task,
)
from docs.research.play_results import GOLDEN as PLAYED
from docs.research.results import PAGE, UnexplainedError, is_off, page, sentences, tables
from docs.research.results_known import (
    KAI_QUEUES,
    elasticflow_text,
    fair_shares_text,
    golden_text,
    read_bars,
)
from docs.research.results_ours import by_row, drawn_gains, gains
from docs.research.results_sentences import PAGE_FILE, read_measured
from docs.research.results_text import WHY_OF_ROW

RUNS = read_kept()
SEEN = read_measured()


def test_the_page_is_what_the_script_makes_of_the_runs() -> None:
    """Nobody edited a figure, and no run came without the page."""
    assert PAGE.read_text("utf-8") == page(RUNS, SEEN)


def test_every_run_is_kept_under_its_own_name_and_finished() -> None:
    """Row and seed are the file's name; a scenario's run is of the named trace of its seed."""
    for name, run in RUNS.items():
        if run.row in PLAYED:
            assert name == run.row
        else:
            assert name == f"{run.row}-{run.result.seed}"
            assert run.workload == f"paper-{run.result.seed}"
            assert run.row in DRAWN_DAYS or run.result.jobs == 50_390
            assert run.result.scenario == {**ROWS, **DRAWN_DAYS}[run.row].scenario


def test_each_row_runs_under_the_policy_that_it_is_kept_with() -> None:
    """Rules that change make kept runs stale: play them again."""
    for run in RUNS.values():
        task = golden_task(run.row) if run.row in PLAYED else scenario_task(run.row, 1)
        assert run.result.policy == task.options.policy, run.row


def test_every_row_of_the_paper_is_one_that_can_be_played() -> None:
    """Names in the paper's tables are names of rows, and of scenarios."""
    assert {*TABLE_5, *TABLE_6, *TABLE_8, *TABLE_9} <= ROWS.keys()
    assert {f"{row}-{number}" for row in FIGURE_12 for number in DRAWS} <= DRAWN_DAYS.keys()
    assert GOLDEN.keys() <= PLAYED.keys()
    assert all(PLAYED[row].policy == "sjf" for row in PLAYED.keys() - GOLDEN.keys())
    for row in (*TABLE_5, *TABLE_6, *TABLE_8, *TABLE_9):
        assert find_scene(row).name == row
    assert all(len(cells) <= len(FIGURES_5) for cells in TABLE_5.values())


def test_a_star_marks_what_is_off_by_more_than_the_tolerance() -> None:
    """Measured against the published figure; zero is met by zero only."""
    assert not is_off(115.0, 100.0)
    assert is_off(115.1, 100.0)
    assert is_off(84.9, 100.0)
    assert is_off(0.01, 0.0)
    assert not is_off(0.0, 0.0)


def baseline() -> Kept:
    """A run that is kept."""
    return next(run for run in RUNS.values() if run.row == "baseline")


def test_a_figure_that_is_off_without_a_sentence_stops_the_page() -> None:
    """No difference goes unexplained: one is made where there is no sentence."""
    run = baseline()
    changed = structs.replace(run, row="baseline", result=structs.replace(run.result, jobs=1))
    [table, *_] = tables({"baseline": [changed]})
    unexplained = structs.replace(table, name="no such table")
    with pytest.raises(UnexplainedError, match=r"table no such table, .*: off in baseline"):
        sentences(unexplained, {})


def test_every_star_on_the_page_has_its_sentence_below() -> None:
    """Rows with a star in a column are the rows that the column's sentence names."""
    for section in page(RUNS, SEEN).split("\n## ")[1:]:
        if "| row |" not in section or "More than 15 % apart" not in section:
            assert "* |" not in section
            continue
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        heads = [cell.strip() for cell in lines[0].split("|")[1:-1]]
        starred: dict[str, set[str]] = {}
        for line in lines[1:]:
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            for head, cell in zip(heads, cells, strict=True):
                if cell.endswith("*"):
                    starred.setdefault(head, set()).add(cells[0])
        said = re.findall(r"^- \*\*(.+?)\*\* \((.+?)\): \S", section, re.MULTILINE)
        found: dict[str, list[str]] = {}
        for heads_said, rows in said:
            for head in heads_said.split(", "):
                found.setdefault(head, []).extend(rows.split(", "))
        assert {head: sorted(rows) for head, rows in found.items()} == {
            head: sorted(rows) for head, rows in starred.items()
        }


def test_a_sentence_about_one_row_is_about_a_star() -> None:
    """A row that came nearer, or was renamed, leaves no sentence about it behind."""
    rows = by_row(RUNS)
    used = {
        (table.name, heading, row)
        for table in tables(rows)
        for place, (figure, heading, _) in enumerate(table.figures)
        for row, published in table.published.items()
        if place < len(published)
        and row in table.ours
        and is_off(table.ours[row][figure].mean, published[place])
    }
    assert WHY_OF_ROW.keys() <= used


def test_gains_are_of_the_same_seed() -> None:
    """A row's gain is over the Baseline of its own trace, and there is none without it."""
    run = baseline()
    twice = structs.replace(
        run.result,
        queueing_s=structs.replace(run.result.queueing_s, mean=run.result.queueing_s.mean / 2),
    )
    row = structs.replace(run, row="x", result=twice)
    other = structs.replace(row, result=structs.replace(twice, seed=99))
    found = gains({"baseline": [run], "x": [row, other]}, ["x"])
    assert found["x"]["queueing gain"].mean == pytest.approx(2.0)
    assert found["x"]["JCT gain"].mean == pytest.approx(1.0)
    assert gains({"x": [row]}, ["x"]) == {}


def test_gains_of_drawn_days_are_of_the_same_draw() -> None:
    """Compared with Baseline on its own days of its own trace; without one there is no gain."""
    run = baseline()

    def drawn(row: str, queueing_s: float) -> Kept:
        waits = structs.replace(run.result.queueing_s, mean=queueing_s)
        return structs.replace(run, row=row, result=structs.replace(run.result, queueing_s=waits))

    means = {
        "bootstrap-baseline-0": 300.0, "bootstrap-baseline-1": 80.0,
        "bootstrap-basic-0": 100.0, "bootstrap-basic-1": 20.0, "bootstrap-basic-2": 1.0,
    }  # fmt: skip
    rows = {row: [drawn(row, queueing_s)] for row, queueing_s in means.items()}
    other = drawn("bootstrap-baseline-0", 900.0)
    rows["bootstrap-baseline-0"].append(
        structs.replace(other, result=structs.replace(other.result, seed=2))
    )
    found = drawn_gains(rows, ["bootstrap-basic", "bootstrap-ideal"])
    assert found.keys() == {"bootstrap-basic"}
    assert found["bootstrap-basic"]["queueing gain"].mean == pytest.approx((3.0 + 4.0) / 2)
    assert found["bootstrap-basic"]["JCT gain"].mean == pytest.approx(1.0)
    assert found["bootstrap-basic"]["jct_bound_s"].mean == pytest.approx(run.result.jct_bound_s)


def test_guests_are_compared_with_themselves() -> None:
    """Table 7's Baseline is of the very jobs that were on lent nodes."""

    def row(name: str, queueing_s: float, *, was_on_loan: bool = False) -> JobRow:
        return JobRow(
            job_id=name, submitted_at_s=0, started_at_s=0, finished_at_s=0, jct_s=queueing_s + 10,
            queueing_s=queueing_s, gpus=1, min_workers=1, max_workers=1, preemptions=0, resizes=0,
            suspensions=0, suspended_s=0, migrations=0, app=name, rho=None,
            was_on_loan=was_on_loan,
        )  # fmt: skip

    before = {name: row(name, wait_s) for name, wait_s in (("a", 100.0), ("b", 7.0))}
    found = guests_before([row("a", 1.0, was_on_loan=True), row("b", 1.0)], before)
    assert found is not None
    assert (found.queueing_s.mean, found.jct_s.mean) == (100.0, 110.0)
    assert guests_before([row("a", 1.0)], before) is None


def test_known_numbers_are_met() -> None:
    """Near what other simulators printed, within 0.1 % where all is in the trace, in every run that
    is kept by their rules."""
    for name, published in GOLDEN.items():
        if name in RUNS and not published.has_our_rules:
            near = published.tolerance
            assert RUNS[name].result.jct_s.mean == pytest.approx(published.jct_s, rel=near)
            if published.makespan_s is not None:
                assert RUNS[name].makespan_s == pytest.approx(published.makespan_s, rel=near)


def test_known_numbers_stand_beside_the_gpus_that_they_are_of() -> None:
    """Under the heading that says so: whoever plays a row again needs their number."""
    lines = golden_text({name: [run] for name, run in RUNS.items()})
    assert lines[0].startswith("| trace, GPUs |")
    rows = [RUNS[name] for name in GOLDEN if name in RUNS]
    told = {cells[0] for cells in cells_of(lines)}
    assert told == {f"{run.workload}, {PLAYED[run.row].gpus}" for run in rows}
    assert "cluster06, 128" in told


def test_kept_runs_are_small() -> None:
    """Figures only: the repository is no store of traces."""
    assert max(map(len, KEPT.read_bytes().splitlines())) < 4096
    assert PAGE_FILE.stat().st_size < 8192  # all that sentences need


def cells_of(lines: list[str]) -> list[list[str]]:
    """A table's rows below its head."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_every_bar_of_figure_8a_that_can_be_played_is_on_the_page() -> None:
    """Each row as it is played today, with its knobs, both figures and both sides' time."""
    bars = read_bars()
    assert [bar.row for bar in bars] == list(BARS)
    assert [(bar.policy, bar.published) for bar in bars] == [
        (row.policy, row.published) for row in BARS.values()
    ]
    found = cells_of(elasticflow_text(bars))
    text = page(RUNS, SEEN)
    for bar, cells in zip(bars, found, strict=True):
        assert "| " + " | ".join(cells) + " |" in text
        assert cells[:2] == [bar.row, f"`{bar.policy}`"]
        assert cells[4:6] == [f"{bar.published:.4f}", f"{bar.deadlines_met_ratio:.4f}"]
        assert cells[7:9] == [str(bar.jobs_rejected), f"{bar.jct_s:,.0f}"]
        assert [float(cell) for cell in cells[-2:]] == [bar.published_cpu_s, bar.cpu_s]


def test_rows_in_the_authors_setting_come_near_their_figures() -> None:
    """Within two jobs of 195, where all of the artefact's rules are knobs."""
    for bar in read_bars():
        if BARS[bar.row].is_comparable:
            apart = bar.jobs * (bar.deadlines_met_ratio - bar.published)
            assert abs(apart) <= 2.05, bar.row


def test_fair_shares_are_those_of_kai_s_documentation() -> None:
    """70 and 30 of 100 GPUs, by the shipped rule."""
    found = cells_of(fair_shares_text())
    assert [cells[-2:] for cells in found] == [["70", "70"], ["30", "30"]]


def test_our_fair_shares_are_computed_and_not_copied() -> None:
    """Other weights give other shares of ours, whatever is said to be published."""
    [first, second] = KAI_QUEUES
    found = cells_of(fair_shares_text([structs.replace(first, weight=1.0), second]))
    assert [cells[-1] for cells in found] == ["50", "50"]
