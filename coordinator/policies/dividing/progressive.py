"""Progressive filling: one at a time to the line that is next, until nobody takes any more.

Algorithm 1 of DRF (NSDI'11, section 4.2), for whatever comes in single pieces. Must not know what
is dealt, nor what puts one line before another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def deal(
    lines: Mapping[str, Iterable[T]],
    first: Callable[[Mapping[str, T]], str],
    give: Callable[[T], bool],
) -> None:
    """Each time one to the head of the line that is next.

    first: of the lines that are left, by their heads, as things stand. give: one more to somebody;
    False where it takes none, and the next of its line is the head from then on.
    """
    queues = {name: deque(line) for name, line in lines.items()}
    while heads := {name: queue[0] for name, queue in queues.items() if queue}:
        name = first(heads)
        if not give(heads[name]):
            queues[name].popleft()
