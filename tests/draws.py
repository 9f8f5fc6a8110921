"""Strategies of single choices, each made once. Knows nothing of clusters, and tests nothing.

Hypothesis checks a strategy and works out its label when it is first drawn from. A composite that
writes `draw(st.integers(0, 5))` makes a new one for every choice of every example, and half of
such a property's time goes into that. What is drawn is the same.
"""

from __future__ import annotations

from functools import cache, lru_cache
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
