"""A clock that stands still until a test moves it. Must not read real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

SETTLE_TURNS = 50
"""Turns of the loop after which every callback that needs no time has run, in these tests."""


async def settle() -> None:
    """Let every task run as far as it gets without time passing."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)


class ManualClock:
    """`common.clock.Clock` whose time is moved by `advance` alone."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s
        self._alarms: dict[int, tuple[float, Callable[[], None]]] = {}
        self._ids = count()

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + 1_700_000_000

    async def sleep(self, delay_s: float) -> None:
        future = asyncio.get_running_loop().create_future()
        alarm = self._set_alarm(delay_s, lambda: future.set_result(None))
        try:
            await future
        finally:
            self._alarms.pop(alarm, None)

    @asynccontextmanager
    async def timeout(self, delay_s: float | None) -> AsyncIterator[object]:
        async with asyncio.timeout(None) as scope:
            if delay_s is None:
                yield scope
                return
            # An instant that is past on the loop's own clock: it cancels at once.
            alarm = self._set_alarm(delay_s, lambda: scope.reschedule(0.0))
            try:
                yield scope
            finally:
                self._alarms.pop(alarm, None)

    async def advance(self, delay_s: float) -> None:
        """Move on, and run everything that falls due on the way in its order."""
        await settle()
        end_s = self._now_s + delay_s
        while due := [item for item in self._alarms.items() if item[1][0] <= end_s]:
            alarm, (at_s, ring) = min(due, key=lambda item: (item[1][0], item[0]))
            del self._alarms[alarm]
            self._now_s = max(self._now_s, at_s)
            ring()
            await settle()
        self._now_s = end_s

    def _set_alarm(self, delay_s: float, ring: Callable[[], None]) -> int:
        alarm = next(self._ids)
        self._alarms[alarm] = (self._now_s + delay_s, ring)
        return alarm
