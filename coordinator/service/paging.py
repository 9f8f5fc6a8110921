"""Lists in pages: as many rows as one message carries and a time slice builds.

Must not know what a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TypeVar

import msgspec

K = TypeVar("K", bound=str)
E = TypeVar("E")
Row = TypeVar("Row")

PAGE_BYTES = 800_000
"""Rows of one answer; below `MAX_MESSAGE_BYTES` by more than the largest row."""


def page(
    rows: Iterable[Row],
    *,
    is_over: Callable[[], bool] = lambda: False,
    most_bytes: int = PAGE_BYTES,
) -> tuple[tuple[Row, ...], bool]:
    """The first rows that one message carries, at least one, and whether there are more.

    is_over: whether the time for this page is over; the rows behind are for the next one.
    """
    taken: list[Row] = []
    size_bytes = 0
    for row in rows:
        size_bytes += len(msgspec.msgpack.encode(row))
        if taken and (size_bytes > most_bytes or is_over()):
            return tuple(taken), True
        taken.append(row)
    return tuple(taken), False


def after(entries: Mapping[K, E], name: str) -> Iterable[E]:
    """Entries behind the one of this name; from the first on where it is gone.

    Whoever asks for page after page then sees some again, and misses none.
    """
    names = list(map(str, entries))
    begin = names.index(name) + 1 if name in names else 0
    return islice(entries.values(), begin, None)
