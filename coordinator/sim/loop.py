"""The heap of (time, priority, sequence, call): simulated time and nothing else.

Must not know what the calls do. The sequence makes ties deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

URGENT = 0
NORMAL = 1
LATE = 2
"""After everything else of the same instant: passes see all facts of their moment."""
LAST = 3
"""After what is late: a scheduling pass sees what a loan pass of its instant did."""


class Loop:
    """Runs calls in order of simulated time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, when_s: float, call: Callable[[], None], *, priority: int = NORMAL) -> None:
        """Run `call` at an instant; one in the past runs now."""
        self._sequence += 1
        if when_s < self.now_s:
            when_s = self.now_s
        heapq.heappush(self._heap, (when_s, priority, self._sequence, call))

    def after(self, delay_s: float, call: Callable[[], None], *, priority: int = NORMAL) -> None:
        """Run `call` after a delay; one below zero is none."""
        self._sequence += 1
        when_s = self.now_s + (delay_s if delay_s > 0.0 else 0.0)
        heapq.heappush(self._heap, (when_s, priority, self._sequence, call))

    def step(self) -> bool:
        """Run the next call; False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, _, call = heapq.heappop(self._heap)
        self.events += 1
        call()
        return True

    def run(self, until_s: float = float("inf")) -> None:
        """Run until nothing is left or the next call is later than `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            self.step()
        if until_s != float("inf"):
            self.now_s = max(self.now_s, until_s)
