"""The earliest acceptable date, where a later date may be refused again. Pure arithmetic.

Bisection is wrong there: it finds an edge, not the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def spread(first: int, last: int, tries: int) -> list[int]:
    """Dates to try, growing: all from the first to the last, else a number of equal gaps."""
    span = last - first
    if span <= tries:
        return list(range(first, last + 1))
    return [first + span * step // tries for step in range(tries + 1)]


def earliest(dates: Iterable[int], accepts: Callable[[int], bool]) -> int | None:
    """An accepted date before which no other of these dates is; None: none is.

    Between two of them it may be earlier than both: the gap before it is searched by halves.
    """
    refused: int | None = None
    for date in dates:
        if accepts(date):
            return date if refused is None else _edge(refused, date, accepts)
        refused = date
    return None


def _edge(refused: int, accepted: int, accepts: Callable[[int], bool]) -> int:
    """An accepted date right after one that is refused, between two of these dates."""
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        if accepts(middle):
            accepted = middle
        else:
            refused = middle
    return accepted
