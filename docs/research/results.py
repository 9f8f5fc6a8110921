"""Writes docs/results.md from the runs that are kept: ours beside the published figures.

    .venv/bin/python docs/research/results.py            write the page
    .venv/bin/python docs/research/results.py --check    fail when it would be another page

Must not run anything: `play_results.py` and `results_sentences.py` do. Every cell that
is off by more than 15 % has a sentence in `results_text.py`, or the page is not written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from coordinator.sim.report.statistics import Estimate
from docs.research.pages import rendered
from docs.research.paper_figures import (
    FIGURE_10,
    FIGURE_12,
    FIGURES_5,
    FIGURES_6,
    FIGURES_7,
    FIGURES_8,
    FIGURES_9,
    FIGURES_10,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TABLE_8,
    TABLE_9,
)
from docs.research.play_results import DRAWS, ROWS, Kept, read_kept
from docs.research.results_bounds import BOUNDS, with_gaps_closed
from docs.research.results_figures import Named, filled, sentence_figures, text_of
from docs.research.results_known import (
    elasticflow_text,
    fair_shares_text,
    golden_text,
    margins_text,
    read_bars,
)
from docs.research.results_ours import Values, all_values, by_row, drawn_gains, gains, guests
from docs.research.results_sentences import Measured, read_measured
from docs.research.results_text import LACKING, WHY, WHY_OF_ROW

PAGE = Path(__file__).parents[1] / "results.md"
TOLERANCE = 0.15

Figures = Sequence[tuple[str, str, str]]
"""Figure, heading, unit."""


class Table(Struct, frozen=True, kw_only=True):
    """One table of the paper and ours beside it.

    name: what it is found by. own: what ours alone have, behind the others.
    """

    name: str
    figures: Figures
    published: Mapping[str, Sequence[float]]
    ours: Mapping[str, Values]
    own: Figures = BOUNDS


def tables(rows: Mapping[str, list[Kept]]) -> list[Table]:
    """Every table of the paper that our rows cover."""
    ours = all_values(rows)
    every = gains(rows, sorted(rows))
    beyond_5 = [each for each in FIGURES_8 if each not in FIGURES_5]
    return [
        Table(name="5", figures=FIGURES_5, published=TABLE_5, ours=ours),
        Table(
            name="6",
            figures=FIGURES_6,
            published=TABLE_6,
            ours=ours,
        ),
        Table(
            name="7",
            figures=FIGURES_7,
            published=TABLE_7,
            ours=guests(rows),
            own=(),
        ),
        Table(
            name="8",
            figures=beyond_5,
            published={
                row: [cells[FIGURES_8.index(each)] for each in beyond_5]
                for row, cells in TABLE_8.items()
            },
            ours={row: made for row, made in ours.items() if "jct_s.p99" in made},
        ),
        Table(
            name="9",
            figures=FIGURES_9,
            published=TABLE_9,
            ours=every,
        ),
        Table(
            name="10",
            figures=FIGURES_10,
            published=FIGURE_10,
            ours=ours,
        ),
        Table(
            name="12",
            figures=FIGURES_9,
            published=FIGURE_12,
            ours=drawn_gains(rows, FIGURE_12),
        ),
    ]


# --- as text ------------------------------------------------------------------------------------


def is_off(ours: float, published: float) -> bool:
    """Whether two figures differ by more than the tolerance, of the published one."""
    return abs(ours - published) > TOLERANCE * abs(published)


def _ours(found: Estimate | None, unit: str) -> str:
    """One figure with its interval; nothing where a row has no such figure."""
    if found is None:
        return ""
    spread = "" if found.half_width is None else f" ± {text_of(found.half_width, unit)}"
    return f"{text_of(found.mean, unit)}{spread}"


def _cell(found: Estimate, published: float, unit: str) -> str:
    mark = "*" if is_off(found.mean, published) else ""
    return f"{_ours(found, unit).removesuffix(' %')}/{text_of(published, unit)}{mark}"


def table_text(table: Table) -> list[str]:
    """Ours / published, a star where they are more than the tolerance apart."""
    heads = [heading for _, heading, _ in (*table.figures, *table.own)]
    missing = [row for row in table.published if row not in table.ours]
    left = f"Not played yet: {', '.join(missing)}." if missing else ""
    if len(missing) == len(table.published):
        return [left]
    lines = ["| row | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row, published in table.published.items():
        found = table.ours.get(row)
        if found is None:
            continue
        cells = [
            _cell(found[figure], value, unit)
            for (figure, _, unit), value in zip(table.figures, published, strict=False)
        ]
        cells += [""] * (len(table.figures) - len(cells))
        cells += [_ours(found.get(figure), unit) for figure, _, unit in table.own]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return [*lines, "", left] if left else lines


class UnexplainedError(ValueError):
    """A cell is off and nobody says why."""


def sentences(table: Table, figures: Named, told: dict[str, str] | None = None) -> list[str]:
    """One line per reason: which figures are off, in which rows, and why.

    Args:
        figures: what sentences are filled with, by name.
        told: reasons of earlier tables and where they stand, which is enlarged; such a reason is
            not written again.

    Raises:
        UnexplainedError: no sentence for a figure that is off.
        KeyError, OppositeError: as `filled`.
    """
    reasons: dict[tuple[str, str], list[str]] = {}
    for place, (figure, heading, _) in enumerate(table.figures):
        off = [
            row
            for row, published in table.published.items()
            if place < len(published)
            and row in table.ours
            and is_off(table.ours[row][figure].mean, published[place])
        ]
        if off:
            for why, of_rows in _by_reason(table.name, heading, off).items():
                reasons.setdefault((", ".join(of_rows), why), []).append(heading)
    told = {} if told is None else told
    lines: list[str] = []
    for (rows, why), headings in reasons.items():
        said = ", ".join(headings)
        reason = f"as for {told[why]}." if why in told else filled(why, figures)
        told.setdefault(why, f"*{said}* of {_title(table.name)}")
        lines.append(f"- **{said}** ({rows}): {reason}")
    return lines


def _title(name: str) -> str:
    return f"{'Figure' if int(name) >= 10 else 'Table'} {name}"


def _by_reason(table: str, heading: str, off: Sequence[str]) -> dict[str, list[str]]:
    """Rows by the sentence that explains them: a row's own, else its column's."""
    found: dict[str, list[str]] = {}
    for row in off:
        why = WHY_OF_ROW.get((table, heading, row)) or WHY.get((table, heading))
        if why is None:
            raise UnexplainedError(f"table {table}, {heading}: off in {', '.join(off)}")
        found.setdefault(why, []).append(row)
    return found


class SeedsError(ValueError):
    """Rows of one page were played on other traces than its sentence on seeds says."""


def seeds_text(rows: Mapping[str, list[Kept]]) -> str:
    """Which of the named traces every row was played on.

    Raises:
        SeedsError: a row was played on others than the rest.
    """
    found = {tuple(run.result.seed for run in rows[row]) for row in ROWS if row in rows}
    if len(found) > 1:
        raise SeedsError(f"rows of different seeds: {sorted(found)}")
    return ", ".join(f"`paper-{seed}`" for seeds in found for seed in seeds)


def drawn_text(rows: Mapping[str, list[Kept]]) -> str:
    """Which draws of days every row of Figure 12 was played on.

    Raises:
        SeedsError: a row was played on others than the rest.
    """
    found = {tuple(n for n in DRAWS if f"{row}-{n}" in rows) for row in FIGURE_12}
    if len(found) > 1:
        raise SeedsError(f"rows of different draws: {sorted(found)}")
    return ", ".join(str(number) for numbers in found for number in numbers)


def lacking_text(rows: Mapping[str, list[Kept]]) -> list[str]:
    """Rows that the paper has not."""
    ours, every = all_values(rows), gains(rows, sorted(rows))
    figures = (FIGURES_5[0], FIGURES_5[3], *FIGURES_9, *BOUNDS)
    heads = [heading for _, heading, _ in figures]
    lines = ["| row | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in LACKING:
        if row in ours and row in every:
            found = {**ours[row], **every[row]}
            cells = [_ours(found.get(figure), unit) for figure, _, unit in figures]
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return lines


# --- the page -----------------------------------------------------------------------------------


def page(kept: Mapping[str, Kept], seen: Mapping[str, Measured]) -> str:
    """The whole page.

    Args:
        seen: what was measured for sentences, by run.

    Raises:
        UnexplainedError, KeyError, OppositeError: as `sentences`.
        OtherJobsError: as `with_gaps_closed`.
        SeedsError: as `seeds_text` and `drawn_text`.
    """
    rows = with_gaps_closed(by_row(kept))
    figures = sentence_figures(all_values(rows), seen)
    bars = read_bars()
    told: dict[str, str] = {}
    return rendered(
        "results.md",
        seeds=seeds_text(rows),
        draws=drawn_text(rows),
        tables={table.name: _with_reasons(table, figures, told) for table in tables(rows)},
        lacking="\n".join(lacking_text(rows)),
        golden="\n".join(golden_text(rows)),
        elasticflow="\n".join(elasticflow_text(bars)),
        margins=margins_text(bars),
        fair_shares="\n".join(fair_shares_text()),
    )


def _with_reasons(table: Table, figures: Named, told: dict[str, str]) -> str:
    """A table, and below it why figures are off."""
    lines = table_text(table)
    if said := sentences(table, figures, told):
        lines += ["", "More than 15 % apart:", "", *said]
    return "\n".join(lines).strip()


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    text = page(read_kept(), read_measured())
    if asked.check:
        is_same = PAGE.exists() and PAGE.read_text("utf-8") == text
        sys.stderr.write("" if is_same else f"stale: {PAGE.name}; run docs/research/results.py\n")
        return 0 if is_same else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
