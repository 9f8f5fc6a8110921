"""One poll of the coordinator for all browsers that watch the same page.

A topic polls only while a browser watches it. A browser that reads slowly gets fewer updates, each
with the latest state: nothing is queued for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from msgspec import Struct

from common.clock import Clock
from common.errors import ArylError, Unavailable
from coordinator.web.board import Board, Frame

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Between the beginnings of two polls; a poll that takes longer rests for as long as it took."""


class Link(Struct, frozen=True, kw_only=True):
    """Whether the coordinator answers, by the wall clock.

    answered_at_s: the latest answer; None: there was none yet.
    away_since_s: the first poll without an answer since then; None: it answers.
    refusal: why it answers, and does not show this page; empty: it does.
    """

    answered_at_s: float | None = None
    away_since_s: float | None = None
    refusal: str = ""

    def after(self, error: ArylError, *, now_s: float) -> Link:
        """The link after a poll that failed."""
        if not isinstance(error, Unavailable):
            return Link(answered_at_s=self.answered_at_s, refusal=str(error))
        since_s = now_s if self.away_since_s is None else self.away_since_s
        return Link(answered_at_s=self.answered_at_s, away_since_s=since_s)


class Look(Protocol):
    """Asks the coordinator for all that a page shows."""

    async def look(self, *, now_s: float) -> Frame:
        """The page of this instant, by the wall clock; errors as `Client.ask`."""
        ...


class Topic:
    """A page that browsers watch.

    Args:
        show_link: HTML of the place `link`.
    """

    def __init__(self, look: Look, *, clock: Clock, show_link: Callable[[Link], str]) -> None:
        self.board = Board()
        self.link = Link()
        self.polled_at_s = clock.wall_s()
        self.is_fresh = False
        """Polled since the first of the present browsers came."""
        self.watchers = 0
        self._look = look
        self._clock = clock
        self._show_link = show_link
        self._frame = Frame()
        self._polling: asyncio.Task[None] | None = None
        self._polled = asyncio.Event()
        self._encoded: dict[int, bytes] = {}

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Poll for as long as a block runs, of whichever browser."""
        self.watchers += 1
        if self._polling is None or self._polling.done():
            self.is_fresh, self.polled_at_s = False, self._clock.wall_s()
            self._polling = asyncio.create_task(self._poll(), name="dashboard poll")
            self._polling.add_done_callback(self._note_end)
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                await self._end_polling()

    async def _end_polling(self) -> None:
        # A browser that comes meanwhile begins another one.
        polling, self._polling = self._polling, None
        if polling is not None:
            polling.cancel()
            await asyncio.wait({polling})

    def _note_end(self, polling: asyncio.Task[None]) -> None:
        if not polling.cancelled() and (error := polling.exception()) is not None:
            log.error("the poll for a page broke", exc_info=error)
        self._wake()

    def changes(self, seen: int) -> bytes:
        """What changed since a version; encoded once for all browsers that are as far."""
        found = self._encoded.get(seen)
        if found is None:
            found = self._encoded[seen] = self.board.since(seen)
        return found

    async def polled(self) -> bool:
        """Return after the next poll, answered or not; False when there are no more polls."""
        await self._polled.wait()
        return self._polling is not None and not self._polling.done()

    async def _poll(self) -> None:
        while True:
            began_s = self._clock.now_s()
            await self.poll()
            took_s = self._clock.now_s() - began_s
            await self._clock.sleep(max(REFRESH_S - took_s, took_s))

    async def poll(self) -> None:
        """Ask the coordinator once, and wake the browsers.

        Without an answer the page keeps what it shows, and says since when.
        """
        now_s = self._clock.wall_s()
        try:
            self._frame = await self._look.look(now_s=now_s)
        except ArylError as error:
            self.link = self.link.after(error, now_s=now_s)
        else:
            self.link = Link(answered_at_s=now_s)
        texts = {**self._frame.texts, "link": self._show_link(self.link)}
        if self.board.show(Frame(texts=texts, lists=self._frame.lists)):
            self._encoded.clear()
        self.is_fresh, self.polled_at_s = True, self._clock.wall_s()
        self._wake()

    def _wake(self) -> None:
        # Each waiter holds the old event: setting it wakes them all, once.
        self._polled.set()
        self._polled = asyncio.Event()
