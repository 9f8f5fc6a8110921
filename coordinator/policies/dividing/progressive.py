"""Progressive filling: one at a time to the line that is next, until nobody takes any more.

Algorithm 1 of DRF (NSDI'11, section 4.2), for whatever comes in single pieces. Must not know what
is dealt, nor what puts one line before another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from coordinator.policies.tenants.descent import First

T = TypeVar("T")


def deal(lines: Mapping[str, Iterable[T]], first: First, give: Callable[[T], bool]) -> None:
    """Each time one to the head of the line that is next.

    first: of the lines that are left, as things stand. give: one more to somebody; False where it
    takes none, and the next of its line is the head from then on.
    """
    queues = {name: deque(line) for name, line in lines.items()}
    while open_ := [name for name, queue in queues.items() if queue]:
        name = first(open_)
        if not give(queues[name][0]):
            queues[name].popleft()
