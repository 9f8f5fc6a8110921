"""Values as people read them, and tables that fit."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from coordinator import plain_text
from coordinator.cli import render
from coordinator.cli.render import Column, table
from coordinator.cli.session import console
from tests.tables import each_row

NOW_S = 1_000_000.0


@each_row(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (0.25, "250ms"),
        (2.5, "2.5s"),
        (45, "45s"),
        (60, "1m"),
        (200, "3m 20s"),
        (3_600, "1h"),
        (7_500, "2h 5m"),
        (90_000, "1d 1h"),
        (-90, "-1m 30s"),
    ],
)
def test_a_length_of_time_has_at_most_two_units(seconds: float | None, text: str) -> None:
    """The largest unit and the next one, where that is not zero."""
    assert plain_text.duration(seconds) == text


@each_row(
    ("at_s", "text"),
    [
        (None, "-"),
        (NOW_S, "now"),
        (NOW_S + 5, "now"),
        (NOW_S - 3, "3s ago"),
        (NOW_S - 200, "3m ago"),
        (NOW_S - 100_000, "1d ago"),
    ],
)
def test_an_instant_is_told_relative_to_now(at_s: float | None, text: str) -> None:
    """One unit; a clock that is a little ahead shows now."""
    assert plain_text.ago(at_s, NOW_S) == text


def test_an_instant_is_rfc_3339_in_utc() -> None:
    """Whatever the local time zone is."""
    assert plain_text.instant(1_700_000_000.0) == "2023-11-14T22:13:20Z"
    assert plain_text.instant(None) == "-"


@given(st.one_of(st.none(), st.floats(-1, 2)), st.integers(1, 40))
def test_a_bar_has_its_width(ratio: float | None, width: int) -> None:
    """Whatever the ratio, in block characters and in ASCII."""
    assert len(render.bar(ratio, width)) == width
    assert render.bar(ratio, width, is_ascii=True).isascii()


class Row(msgspec.Struct):
    """A row of a test's table."""

    name: str
    why: str
    extra: str


COLUMNS = [
    Column[Row]("NAME", lambda row: row.name),
    Column[Row]("WHY", lambda row: row.why, is_elastic=True, rank=2),
    Column[Row]("EXTRA", lambda row: row.extra, rank=1),
]
TEXT = st.text(max_size=60)


@given(
    st.lists(st.builds(Row, name=st.text("abc", min_size=1, max_size=10), why=TEXT, extra=TEXT)),
    st.integers(12, 120),
)
def test_no_line_is_longer_than_the_width(rows: list[Row], width: int) -> None:
    """Any text, wide and combining characters too; one line per row; names stay whole."""
    lines = [str(line) for line in table(rows, COLUMNS, width=width)]
    assert len(lines) == len(rows) + 1
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)
    assert [line.split()[0] for line in lines[1:]] == [row.name for row in rows]


def test_elastic_columns_give_way_before_columns_go() -> None:
    """First text is cut with an ellipsis, then whole columns go, the highest rank first."""
    rows = [Row(name="a", why="w" * 30, extra="e" * 10)]
    assert [str(line) for line in table(rows, COLUMNS, width=40)][1] == (
        "a     " + "w" * 21 + "…" + "  " + "e" * 10
    )
    assert [str(line) for line in table(rows, COLUMNS, width=20)] == [
        "NAME  EXTRA",
        "a     eeeeeeeeee",
    ]


def test_a_wide_column_is_shown_on_request() -> None:
    """A wide column is left out of a plain table."""
    columns = [*COLUMNS, Column[Row]("MORE", lambda _: "x", is_wide=True)]
    rows = [Row(name="a", why="b", extra="c")]
    plain = [str(line) for line in table(rows, columns, width=80)]
    wide = [str(line) for line in table(rows, columns, width=80, is_wide=True)]
    assert not any("MORE" in line for line in plain)
    assert wide[0].split() == ["NAME", "WHY", "EXTRA", "MORE"]


def test_who_asks_for_all_columns_gets_them_in_a_narrow_terminal_too() -> None:
    """Its lines are longer then, and only elastic text gives way."""
    rows = [Row(name="a" * 20, why="w" * 30, extra="e" * 20)]
    heading = str(next(iter(table(rows, COLUMNS, width=20, is_wide=True))))
    assert heading.split() == ["NAME", "WHY", "EXTRA"]


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        """So that color would be shown."""
        return True


@pytest.mark.parametrize(
    ("environ", "is_colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)]
)
def test_no_color_is_respected(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], is_colored: bool
) -> None:
    """A terminal has color unless NO_COLOR is set and not empty."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    column = Column[Row]("STATE", lambda _: "failed")
    out = console({**environ, "COLUMNS": "80"})
    for line in table([Row(name="", why="", extra="")], [column], width=80, has_headings=False):
        out.print(line)
    assert ("\x1b[31m" in terminal.getvalue()) == is_colored
