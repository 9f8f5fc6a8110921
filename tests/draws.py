"""Strategies of single choices, each made once. Knows nothing of clusters, and tests nothing.

Hypothesis checks a strategy and works out its label when it is first drawn from. A composite that
writes `draw(st.integers(0, 5))` makes a new one for every choice of every example, and half of
such a property's time goes into that. What is drawn is the same. Each draw costs as well, so many
choices that belong together are one (`together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


@cache
def whole(least: int, most: int) -> st.SearchStrategy[int]:
    """A whole number of a range, both ends included."""
    return st.integers(least, most)


def pick(*values: T) -> st.SearchStrategy[T]:
    """One of these, which must be hashable; one that is named twice comes twice as often."""
    return _sampled(*values)


@lru_cache(maxsize=None, typed=True)  # typed: 1, 1.0 and True are three choices
def _sampled(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@cache
def yes_or_no() -> st.SearchStrategy[bool]:
    """Either."""
    return st.booleans()


@cache
def words(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """So many whole numbers below 2**24, by one choice for all of them.

    Where each step of a long story makes a few choices of its own, a story takes as long to draw as
    to play. A step takes what it needs out of one word; words of zeros are the simplest story.
    """
    return st.binary(min_size=3 * least, max_size=3 * most).map(_words)


def _words(drawn: bytes) -> list[int]:
    return [int.from_bytes(drawn[at : at + 3]) for at in range(0, len(drawn) - 2, 3)]


def together(*options: Sequence[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """One value of each of these, as a single draw; made once, where a module is loaded.

    The draw is of bytes: large numbers are not drawn evenly, and small ones are all that comes.
    """
    size = prod(map(len, options)).bit_length() // 8 + 2

    def split(drawn: bytes) -> tuple[Any, ...]:
        number = int.from_bytes(drawn, "big")
        found: list[Any] = []
        for values in options:
            number, at = divmod(number, len(values))
            found.append(values[at])
        return tuple(found)

    return st.binary(min_size=size, max_size=size).map(split)
