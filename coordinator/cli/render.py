"""Format values for people, and tables that fit a width. Pure.

Units are in names everywhere else; here they become text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from coordinator.plain_text import MISSING, plain

R = TypeVar("R")

_MIN_ELASTIC_WIDTH = 8
_GAP = "  "

STYLES = {
    "running": "green",
    "succeeded": "green",
    "training": "green",
    "serving": "green",
    "returned": "green",
    "starting": "cyan",
    "resizing": "cyan",
    "on_loan": "cyan",
    "on loan": "cyan",
    "warming": "cyan",
    "STALLED": "red",
    "pending": "yellow",
    "draining": "yellow",
    "vacating": "yellow",
    "preempting": "yellow",
    "coming home": "yellow",
    "failed": "red",
    "lost": "red",
    "quarantined": "red",
    "lapsed": "red",
}
"""Color of a state; others have none."""


class Column(msgspec.Struct, Generic[R], frozen=True):
    """One column of a table.

    is_wide: only in `-o wide`.
    is_elastic: may be cut, with an ellipsis, so that the rest fits.
    rank: when that is not enough, columns go in falling order of rank; 0 never goes.
    """

    heading: str
    value: Callable[[R], str]
    is_wide: bool = False
    is_elastic: bool = False
    is_number: bool = False
    rank: int = 0


def bar(ratio: float | None, width: int, *, is_ascii: bool = False) -> str:
    """A ratio of 0..1 as a bar of `width` cells; blank dots if it is unknown."""
    full, empty, none = ("#", "-", ".") if is_ascii else ("█", "░", "·")
    if ratio is None:
        return none * width
    cells = round(min(1.0, max(0.0, ratio)) * width)
    return full * cells + empty * (width - cells)


def table(
    rows: Sequence[R],
    columns: Sequence[Column[R]],
    *,
    width: int,
    is_wide: bool = False,
    has_headings: bool = True,
) -> Iterable[Text]:
    """The lines of a table, none longer than `width` unless only columns of rank 0 are left.

    is_wide: all columns, however long their lines get.
    """
    shown = [column for column in columns if is_wide or not column.is_wide]
    cells = {
        column.heading: [plain(column.value(row)) or MISSING for row in rows] for column in shown
    }
    while True:
        widths = _widths(shown, cells, has_headings=has_headings)
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        widths = _shrink(shown, widths, excess)
        fits = sum(widths) + len(_GAP) * (len(widths) - 1) <= width
        last = max(shown, key=lambda column: column.rank)
        if fits or is_wide or last.rank == 0:
            break
        shown.remove(last)
    if has_headings:
        headings = [column.heading for column in shown]
        yield Text(_line(shown, headings, widths), style="bold")
    for place in range(len(rows)):
        values = [cells[column.heading][place] for column in shown]
        yield _colored(_line(shown, values, widths), values)


def _widths(
    columns: Sequence[Column[R]], cells: dict[str, list[str]], *, has_headings: bool
) -> list[int]:
    widths: list[int] = []
    for column in columns:
        texts = [*cells[column.heading], column.heading] if has_headings else cells[column.heading]
        widths.append(max((cell_len(text) for text in texts), default=0))
    return widths


def _shrink(columns: Sequence[Column[R]], widths: list[int], excess: int) -> list[int]:
    """Take from the widest elastic column until it fits or none can give more."""
    widths = list(widths)
    elastic = [place for place, column in enumerate(columns) if column.is_elastic]
    while excess > 0 and elastic:
        widest = max(elastic, key=lambda place: widths[place])
        if widths[widest] <= _MIN_ELASTIC_WIDTH:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _line(columns: Sequence[Column[R]], values: Sequence[str], widths: Sequence[int]) -> str:
    parts: list[str] = []
    for column, value, width in zip(columns, values, widths, strict=True):
        cut = set_cell_size(value, width - 1) + "…" if cell_len(value) > width else value
        padding = " " * (width - cell_len(cut))
        parts.append(padding + cut if column.is_number else cut + padding)
    return _GAP.join(parts).rstrip()


def _colored(line: str, values: Sequence[str]) -> Text:
    text = Text(line)
    for value in values:
        style = STYLES.get(value)
        if style is not None:
            text.highlight_words([value], style)
    return text
