"""Rows of a comparison as HTML: policies in color, bars per measure, tables.

Each policy has a place, by which the style sheet knows it (`style.picked`). A tick in the list at
the top of the page colors it in every bar, line and row.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

from msgspec import Struct

from coordinator.sim.report.measures import Group, Shown, best, told
from coordinator.sim.report.plots import line_kind, swatch
from coordinator.sim.run.compare import Means, label

COLORED = 6
"""The number in color at first; with more, the first one asked for and the best ones per measure.
"""

SHORT_NAME = 12
"""Letters that stand beside a bar; longer names stand above it."""

FAR, CUT_AT = 12.0, 4.0
"""Times the median of a panel: where any is farther than the first, bars end at the second."""

NONE_TOGETHER = 4
"""From this number on, rows without a measure share one line of its panel."""


class Cast(Struct, frozen=True, kw_only=True):
    """The compared policies, in the order of the table.

    places: of each row, those that begin in color first. colored: the number of these.
    """

    rows: tuple[Means, ...]
    shown: tuple[Shown, ...]
    zero: tuple[str, ...]
    places: tuple[int, ...]
    colored: int

    def key(self, row: int) -> str:
        """The classes of whatever stands for a row."""
        return f"one p{self.places[row]}"

    def place_of(self, name: str) -> int:
        """The place of a row by its label."""
        return next(
            place for row, place in zip(self.rows, self.places, strict=True) if label(row) == name
        )


def cast(rows: Sequence[Means]) -> Cast:
    """Rows with their displayed values, and those that begin in color."""
    measures, zero = told(rows)
    chosen = list(range(len(rows))) if len(rows) <= COLORED else _notable(rows, measures)
    order = [*chosen, *(row for row in range(len(rows)) if row not in chosen)]
    return Cast(
        rows=tuple(rows),
        shown=tuple(measures),
        zero=tuple(zero),
        places=tuple(order.index(row) for row in range(len(rows))),
        colored=len(chosen),
    )


def _notable(rows: Sequence[Means], measures: Sequence[Shown]) -> list[int]:
    """The first row, then the best row of each measure in short."""
    chosen = [0]
    for each in measures:
        if each.measure.group == Group.SHORT:
            chosen += sorted(best(each, _values(rows, each)) - set(chosen))
    return chosen[:COLORED]


def _values(rows: Sequence[Means], each: Shown) -> dict[int, float]:
    figure = each.measure.figure
    return {
        place: row.figures[figure].mean for place, row in enumerate(rows) if figure in row.figures
    }


# --- the list -----------------------------------------------------------------------------------


def chips(who: Cast) -> str:
    """The list from which one picks who is in color; one alone needs none."""
    if len(who.rows) < 2:
        return '<input type="checkbox" id="k0" checked hidden>'
    parts: list[str] = []
    for place, row in sorted(zip(who.places, range(len(who.rows)), strict=True)):
        name = escape(label(who.rows[row]))
        ticked = " checked" if place < who.colored else ""
        line = swatch(line_kind(place, who.key(row)))
        parts.append(
            f'<label class="chip {who.key(row)}" title="{name}">'
            f'<input type="checkbox" id="k{place}"{ticked}>{line}{name}</label>'
        )
    every = '<label class="chip"><input type="checkbox" id="all">all in color</label>'
    if who.colored == len(who.rows):
        every = ""
    return f'<form class="list">{"".join(parts)}{every}</form>'


# --- bars ---------------------------------------------------------------------------------------


def bars(who: Cast) -> str:
    """A panel per measure: a bar for each row, the best first, its number beside it.

    Empty for one row, which has nothing to compare with.
    """
    if len(who.rows) < 2:
        return ""
    drawn = [_panel(who, each) for each in who.shown if each.measure.is_drawn]
    return f'<h2>Measure by measure</h2><div class="panels">{"".join(drawn)}</div>'


def _panel(who: Cast, each: Shown) -> str:
    values = _values(who.rows, each)
    tops = {row: value + (_half(who, each, row) or 0.0) for row, value in values.items()}
    whole = 1.0 if each.unit == "%" else _whole(list(tops.values()))
    order = sorted(values, key=lambda row: (-(each.measure.sign or 1) * values[row], row))
    first = best(each, values)
    none = [row for row in order if not values[row] and not _half(who, each, row)]
    if len(none) < NONE_TOGETHER:
        none = []
    cut = "long bars cut" if max(tops.values()) > whole else ""
    better = {1: "more is better", -1: "less is better"}.get(each.measure.sign, "")
    unit = ", ".join(filter(None, (each.unit, better, cut)))
    kinds = ""
    if any(len(label(who.rows[row])) > SHORT_NAME for row in values):
        kinds = " long"
    elif any(_half(who, each, row) is not None for row in values):
        kinds = " wide"
    rows = "".join(
        _bar(who, each, row, whole, f" best{kinds}" if row in first else kinds)
        for row in order
        if row not in none
    )
    if none:
        names = escape(", ".join(label(who.rows[row]) for row in sorted(none)))
        line = f'<p class="none"><strong>0</strong> of {names}</p>'
        rows = rows + line if each.measure.sign > 0 else line + rows
    return f"<figure><h3>{escape(each.measure.name)} <small>{unit}</small></h3>{rows}</figure>"


def _bar(who: Cast, each: Shown, row: int, whole: float, kinds: str) -> str:
    found = who.rows[row].figures[each.measure.figure]
    name = escape(label(who.rows[row]))
    number, spread = each.number(found.mean), ""
    kinds += " cut" if found.mean > whole else ""
    if found.half_width is not None:
        number += f" ± {each.number(found.half_width)}"
        low = max(0.0, found.mean - found.half_width)
        width = min(whole, found.mean + found.half_width) - low
        spread = f'<q style="left:{_part(low, whole)};width:{_part(width, whole)}"></q>'
    return (
        f'<label class="row {who.key(row)}{kinds}" for="k{who.places[row]}">'
        f'<b title="{name}">{name}</b>'
        f'<u><i style="width:{_part(found.mean, whole)}"></i>{spread}</u><s>{number}</s></label>'
    )


def _whole(tops: Sequence[float]) -> float:
    """Where the longest bar ends: one that is far beyond most would leave nothing of these."""
    middle, largest = median([top for top in tops if top] or [0.0]), max(tops)
    return largest if largest <= FAR * middle else CUT_AT * middle


def _half(who: Cast, each: Shown, row: int) -> float | None:
    return who.rows[row].figures[each.measure.figure].half_width


def _part(value: float, whole: float) -> str:
    return f"{min(100.0, 100.0 * value / whole):.2f}%" if whole > 0 else "0"


# --- tables -------------------------------------------------------------------------------------


def table(who: Cast, group: Group, *, has_caption: bool = True) -> str:
    """A row per policy, a column per measure of the group; empty where there is none."""
    columns = [each for each in who.shown if each.measure.group == group]
    if not columns:
        return ""
    head = "".join(
        f"<th scope=col>{escape(each.measure.name)}<small>{each.unit or '&nbsp;'}</small></th>"
        for each in columns
    )
    cells = [_column(who, each) for each in columns]
    body = "".join(
        f'<tr class="{who.key(row)}"><th scope=row title="{escape(label(means))}">'
        f"{escape(label(means))}</th>{''.join(column[row] for column in cells)}</tr>"
        for row, means in enumerate(who.rows)
    )
    caption = f"<caption>{escape(group)}</caption>" if has_caption else ""
    return (
        f'<div class="wrap"><table>{caption}<thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _column(who: Cast, each: Shown) -> list[str]:
    first = best(each, _values(who.rows, each))
    cells: list[str] = []
    for row, means in enumerate(who.rows):
        found = means.figures.get(each.measure.figure)
        if found is None:
            cells.append("<td>-</td>")
            continue
        spread = found.half_width
        below = "" if spread is None else f"<small>± {each.number(spread)}</small>"
        kind = ' class="best"' if row in first else ""
        cells.append(f"<td{kind}>{each.number(found.mean)}{below}</td>")
    return cells


def zeros(who: Cast) -> str:
    """The measures that are zero for all rows, in one sentence."""
    if not who.zero:
        return ""
    return f"<p>Zero throughout: {escape('; '.join(who.zero))}.</p>"
