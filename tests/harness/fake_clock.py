"""Virtual time for tests: `common.clock.Clock` that a test moves.

Must not know what runs on it; `tests.harness.fakes` has the other fakes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


class FakeClock:
    """Virtual time: it stands still until a test moves it, or jumps when every task waits.

    Args:
        now_s: the boot clock's first value.
        wall_s: Unix time at that instant.
        is_autojump: whenever no task can run, go to the next deadline. Only for tests without
            real I/O: a socket that has not answered yet looks like a task that waits.
    """

    _settling_count = 0

    def __init__(
        self, *, now_s: float = 1000.0, wall_s: float = 1.8e9, is_autojump: bool = False
    ) -> None:
        self.boot = "boot"
        self._now_s = now_s
        self._offset_s = wall_s - now_s
        self._is_autojump = is_autojump
        self._deadlines: list[tuple[float, int]] = []
        self._alarms: dict[int, Callable[[], None]] = {}
        self._count = itertools.count()
        self._jumper: asyncio.Task[None] | None = None

    def now_s(self) -> float:
        """Virtual seconds since boot."""
        return self._now_s

    def boot_id(self) -> str:
        """What `boot` says: a test sets it for another machine, or for a reboot."""
        return self.boot

    def wall_s(self) -> float:
        """Virtual Unix time."""
        return self._now_s + self._offset_s

    def step_wall(self, delta_s: float) -> None:
        """Somebody sets the wall clock, or a time server does; the boot clock is as it was."""
        self._offset_s += delta_s

    def jump(self, delta_s: float) -> None:
        """Time passes in one turn of the event loop, as work takes it; no sleeper wakes in it."""
        self._now_s += delta_s

    async def sleep(self, delay_s: float) -> None:
        """Return when virtual time has passed."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        done = asyncio.get_running_loop().create_future()
        key = self._at(delay_s, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            self._alarms.pop(key, None)

    @asynccontextmanager
    async def timeout(self, delay_s: float | None) -> AsyncGenerator[object]:
        """A block that raises `TimeoutError` when virtual time runs past its deadline."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as inner:
            if delay_s is None:
                yield inner
                return
            if delay_s <= 0:
                inner.reschedule(loop.time() - 1)
                yield inner
                return
            key = self._at(delay_s, lambda: inner.reschedule(loop.time() - 1))
            try:
                yield inner
            finally:
                self._alarms.pop(key, None)

    @property
    def next_deadline_s(self) -> float | None:
        """When the next sleeper wakes or the next timeout ends; None if nobody waits."""
        while self._deadlines and self._deadlines[0][1] not in self._alarms:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    async def settle(self) -> None:
        """Let every task run until each one waits for time or for the outside world."""
        # Asking the loop is exact, where counting rounds of sleep(0) would be a guess; loops
        # that do not say (uvloop) get many rounds.
        ready = getattr(asyncio.get_running_loop(), "_ready", None)
        if ready is None:
            for _ in range(100):
                await asyncio.sleep(0)
            return
        FakeClock._settling_count += 1
        try:
            while True:
                await asyncio.sleep(0)
                # Others who settle at the same time are always ready, and wait for us too.
                if len(ready) < FakeClock._settling_count:
                    return
        finally:
            FakeClock._settling_count -= 1

    async def advance(self, delta_s: float) -> None:
        """Move time on, waking each sleeper at its own instant and letting its work be done."""
        await self.settle()
        end_s = self._now_s + delta_s
        while (next_s := self.next_deadline_s) is not None and next_s <= end_s:
            self._fire()
            await self.settle()
        self._now_s = max(self._now_s, end_s)
        await self.settle()

    async def sleep_through(self, delta_s: float) -> None:
        """Time passes and nobody runs, as when a machine sleeps: sleepers wake late, at once."""
        await self.settle()
        self._now_s += delta_s
        await self.advance(0.0)

    async def advance_until(self, condition: Callable[[], bool], *, limit_s: float) -> None:
        """Move time from deadline to deadline until `condition` holds.

        Raises:
            AssertionError: it does not hold within `limit_s` of virtual time.
        """
        end_s = self._now_s + limit_s
        await self.settle()
        while not condition():
            next_s = self.next_deadline_s
            if next_s is None or next_s > end_s:
                raise AssertionError(f"not so within {limit_s:g} s; next deadline: {next_s}")
            self._fire()
            await self.settle()

    def _at(self, delay_s: float, call: Callable[[], None]) -> int:
        key = next(self._count)
        self._alarms[key] = call
        heapq.heappush(self._deadlines, (self._now_s + delay_s, key))
        if self._is_autojump and (self._jumper is None or self._jumper.done()):
            self._jumper = asyncio.get_running_loop().create_task(self._jump(), name="autojump")
        return key

    def _fire(self) -> None:
        deadline_s, key = heapq.heappop(self._deadlines)
        self._now_s = max(self._now_s, deadline_s)
        self._alarms.pop(key)()

    async def _jump(self) -> None:
        await self.settle()
        while self.next_deadline_s is not None:
            self._fire()
            await self.settle()
