"""The event loop: a heap of (time, priority, sequence, call).

The sequence makes ties deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import partial

URGENT = 0
NORMAL = 1
LATE = 2
"""After everything else of the same instant: passes see all facts of their moment."""
LAST = 3
"""After late calls: a scheduling pass sees the result of a loan pass of its instant."""


_Entry = tuple[float, int, int, Callable[[], None]]


class Loop:
    """Runs calls in order of simulated time, which begins at `now_s`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.events = 0
        self.is_halted = False
        """Whether `steps` returns after the present call; `step` and `run` go on all the same."""
        self._heap: list[_Entry] = []
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

    def plan(self, calls: Iterable[tuple[float, Callable[[], None]]]) -> None:
        """As `at` for each (instant, call), of which only the next one is in the heap: later calls
        do not slow down earlier ones.
        """
        planned: list[_Entry] = []
        for when_s, call in calls:
            self._sequence += 1
            planned.append((max(when_s, self.now_s), NORMAL, self._sequence, call))
        planned.sort()
        self._plan_next(iter(planned))

    def _plan_next(self, planned: Iterator[_Entry]) -> None:
        for when_s, priority, sequence, call in planned:
            run: Callable[[], None] = partial(self._run_planned, call, planned)
            heapq.heappush(self._heap, (when_s, priority, sequence, run))
            break

    def _run_planned(self, call: Callable[[], None], planned: Iterator[_Entry]) -> None:
        self._plan_next(planned)
        call()

    def next_s(self) -> float | None:
        """The instant of the next call; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> bool:
        """Run the next call; False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, _, call = heapq.heappop(self._heap)
        self.events += 1
        call()
        return True

    def steps(self, most: int) -> int:
        """Run up to a number of calls, none once it is halted or nothing is left; returns the
        count.
        """
        heap, pop, done = self._heap, heapq.heappop, 0
        while heap and done < most and not self.is_halted:
            self.now_s, _, _, call = pop(heap)
            done += 1
            call()
        self.events += done
        return done

    def run(self, until_s: float = float("inf")) -> None:
        """Run until nothing is left or the next call is later than `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            self.step()
        if until_s != float("inf"):
            self.now_s = max(self.now_s, until_s)
