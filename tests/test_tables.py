"""Tables of one rule: every row is tried, and each that breaks the rule is named."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

from tests.tables import each_row

SQUARES = [(1, 1), (2, 5), (3, 9), (4, 15)]
"""The second and the last are none."""


def test_all_rows_are_tried_and_those_that_break_are_named() -> None:
    """By their values, or as the table calls them; a rule that holds for all raises nothing."""

    @each_row(("root", "square"), SQUARES)
    def is_square(root: int, square: int) -> None:
        tried.append(root)
        assert root * root == square

    @each_row("root, square", SQUARES, ids=["one", "two", "three", "four"])
    async def is_square_later(root: int, square: int) -> None:
        is_square_at_once(root, square)

    def is_square_at_once(root: int, square: int) -> None:
        assert root * root == square

    tried: list[int] = []
    with pytest.raises(ExceptionGroup, match="2 of 4 rows") as raised:
        is_square()  # type: ignore[call-arg]  # as pytest calls it: the table has the arguments
    assert tried == [1, 2, 3, 4]
    assert [each.__notes__[-1] for each in raised.value.exceptions] == [
        "in the row (2, 5)",
        "in the row (4, 15)",
    ]
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(is_square_later())  # type: ignore[call-arg]
    assert [each.__notes__[-1] for each in raised.value.exceptions] == [
        "in the row two",
        "in the row four",
    ]
    each_row(("root", "square"), SQUARES[::2])(is_square_at_once)()  # type: ignore[call-arg]


def test_what_no_row_gives_is_a_fixture_and_a_directory_is_a_row_s_own(tmp_path: Path) -> None:
    """Also where one table stands on another one."""
    seen: list[tuple[int, str, Path]] = []

    @each_row("number", [1, 2])
    @each_row("letter", "ab")
    def look(number: int, letter: str, tmp_path: Path) -> None:
        (tmp_path / "made").mkdir()
        seen.append((number, letter, tmp_path))

    assert list(inspect.signature(look).parameters) == ["tmp_path"]
    look(tmp_path=tmp_path)  # type: ignore[call-arg]
    assert [each[:2] for each in seen] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert len({each[2] for each in seen}) == 4


@pytest.mark.parametrize("table", [[], [(1,)], [(1, 2, 3)]])
def test_a_table_that_states_nothing_or_does_not_fit_its_names_is_a_mistake(
    table: list[tuple[int, ...]],
) -> None:
    """Found where it is written, before any test runs."""
    with pytest.raises(ValueError, match=r"states nothing|argument 2 is"):
        each_row(("one", "two"), table)
