"""Builds read replies one at a time.

All requests that arrive before a build starts share its result.

A build blocks the event loop. So a list is built in pages, each within `BUILD_S`, and after a build
the loop rests for as long as the build took: reads never take more than half of the loop. A request
joins only a build that has not begun, so its answer includes all that was acknowledged before it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from msgspec import Struct

from common.clock import Clock
from common.errors import Unavailable
from common.messages import Message

MAX_BUILDS = 64
"""Different reads that wait; a caller with yet another is refused, and may ask again."""
BUILD_S = 0.02
"""A page of a list ends when its build has taken this long."""
MAX_WAIT_S = 8.0
"""A read that waited longer is refused, not built: most callers wait 10 s for an answer."""


class _Build(Struct, eq=False):
    """One read that waits to be built, or for the journal."""

    build: Callable[[], Message]
    answer: asyncio.Future[bytes]
    asked_at_s: float
    waiters: int = 0


class Reads:
    """The builds that wait.

    Args:
        finish: makes the bytes of an answer, once all that it reveals is in the journal.
    """

    def __init__(self, *, clock: Clock, finish: Callable[[Message], Awaitable[bytes]]) -> None:
        self._clock = clock
        self._finish = finish
        self._waiting: OrderedDict[bytes, _Build] = OrderedDict()
        self._building: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()

    async def answer(self, key: bytes, build: Callable[[], Message]) -> bytes:
        """The answer of `build`, which may run once for several callers with the same key.

        Raises:
            Unavailable: too many different reads wait, or this one waited too long.
            Exception: any error of `build`.
        """
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) >= MAX_BUILDS:
                raise Unavailable(f"{MAX_BUILDS} different reads wait here; ask again")
            answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(_look)
            waiting = self._waiting[key] = _Build(build, answer, self._clock.now_s())
            if self._building is None or self._building.done():
                self._building = asyncio.create_task(self._run(), name="reads")
        waiting.waiters += 1
        try:
            return await asyncio.shield(waiting.answer)
        finally:
            waiting.waiters -= 1

    async def _run(self) -> None:
        """Run the waiting builds until none is left."""
        while self._waiting:
            _, one = self._waiting.popitem(last=False)
            began_s = self._clock.now_s()
            if one.waiters and began_s - one.asked_at_s > MAX_WAIT_S:
                one.answer.set_exception(Unavailable("too many reads wait here; ask again"))
            elif one.waiters:
                self._build(one)
            await self._clock.sleep(self._clock.now_s() - began_s)

    def _build(self, one: _Build) -> None:
        try:
            reply = one.build()
        except Exception as error:
            one.answer.set_exception(error)
            return
        finishing = asyncio.create_task(self._answer(one, reply), name="read")
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finishing.discard)

    async def _answer(self, one: _Build, reply: Message) -> None:
        try:
            one.answer.set_result(await self._finish(reply))
        except Exception as error:
            one.answer.set_exception(error)


def _look(answer: asyncio.Future[bytes]) -> None:
    """Retrieve an exception that may have no waiter left, so that asyncio does not log it."""
    if not answer.cancelled():
        answer.exception()
