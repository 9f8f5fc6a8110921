"""Counts as people read them."""

from __future__ import annotations

import pytest

from coordinator.policies.words import counted


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (-1, "-1 nodes")]
)
def test_one_thing_is_counted_as_one(count: int, said: str) -> None:
    """And any other number of it as several, none included."""
    assert counted(count, "node") == said


def test_words_whose_plural_is_irregular_are_given_both() -> None:
    """The verb, too, where one follows."""
    assert counted(1, "process", "processes") == "1 process"
    assert counted(2, "process", "processes") == "2 processes"
    assert counted(1, "worker runs", "workers run") == "1 worker runs"
