"""Checks that every duty of an agent makes progress: each must end by the time that it announced.

An event loop that turns proves little: one duty may wait for ever while the others go on. Each duty
that waits for the outside world therefore sets a time limit first. An agent with an overdue duty
neither beats nor feeds its watchdog.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator

SPARE_S = 10.0
"""Added to the sum of the time limits inside a leg. The limits are what must end it. A leg that is
not over by then never ends, or the machine is so busy that further waiting is useless."""


class Duties:
    """The duties that an agent has begun and not ended.

    Args:
        now_s: seconds on a clock that stands still while the machine is suspended, as the time
            limits of an event loop do.
        progress: called when a duty made progress and nothing is overdue.
    """

    def __init__(
        self, now_s: Callable[[], float], *, progress: Callable[[], None] = lambda: None
    ) -> None:
        self._now_s = now_s
        self._progress = progress
        self._legs: dict[int, tuple[str, float]] = {}
        self._count = itertools.count()

    @contextlib.contextmanager
    def leg(self, name: str, *, within_s: float = 0.0) -> Generator[None]:
        """A block that ends within `within_s` and some spare time.

        Overdue from then until it ends.
        """
        key = next(self._count)
        self._legs[key] = (name, self._now_s() + within_s + SPARE_S)
        try:
            yield
        finally:
            del self._legs[key]

    def overdue(self) -> tuple[str, ...]:
        """Names of the overdue duties, in the order in which they began."""
        now_s = self._now_s()
        return tuple(name for name, by_s in self._legs.values() if now_s >= by_s)

    def progressed(self) -> None:
        """Record progress; it counts as long as nothing else is overdue."""
        if not self.overdue():
            self._progress()
