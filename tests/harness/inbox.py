"""Handlers for tests of anything on a bus."""

from __future__ import annotations

import asyncio

from common import subjects
from common.bus import BusMessage

PATIENCE_S = 3.0
"""How long a test waits for what must come; nothing is measured by it."""


def asked(verb: str) -> str:
    """A subject on which somebody may ask."""
    return subjects.api("c", "t", "u", verb)


ECHO = asked("echo")


class Inbox:
    """A handler that keeps what it got."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def __call__(self, message: BusMessage) -> None:
        self.queue.put_nowait((message.subject, message.data))

    async def take(self, count: int) -> list[tuple[str, bytes]]:
        """The next messages."""
        async with asyncio.timeout(PATIENCE_S):
            return [await self.queue.get() for _ in range(count)]


async def echo(message: BusMessage) -> None:
    """Answer with what was asked."""
    await message.respond(b"re:" + message.data)
