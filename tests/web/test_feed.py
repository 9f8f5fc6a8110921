"""One poll of the coordinator for all browsers."""

from __future__ import annotations

import asyncio
import contextlib

from common.errors import ConfigError, Unavailable
from coordinator.web.board import Frame
from coordinator.web.feed import Link, Topic
from tests.cli.fake_cell import NOW_S, QuickClock


class Counted:
    """A look that counts how often it is asked; its answers, of which the last one stays."""

    def __init__(self, *answers: Frame | Exception) -> None:
        self.count = 0
        self._answers = answers or (Frame(texts={"a": "1"}),)

    async def look(self, *, now_s: float) -> Frame:
        """The next answer."""
        answer = self._answers[min(self.count, len(self._answers) - 1)]
        self.count += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


def topic_of(look: Counted) -> Topic:
    return Topic(look, clock=QuickClock(), show_link=lambda link: str(link.away_since_s))


async def test_ten_browsers_cost_as_much_as_one() -> None:
    """All of them wait for the same poll, and share the bytes of the update."""
    look = Counted()
    topic = topic_of(look)

    async def watch() -> bytes:
        async with topic.watched():
            await topic.polled()
            return topic.changes(0)

    updates = await asyncio.gather(*(watch() for _ in range(10)))
    assert look.count == 1
    assert len({id(update) for update in updates}) == 1


async def test_nothing_is_asked_while_no_browser_watches() -> None:
    """Before the first and after the last one; the next one is polled for again."""
    look = Counted()
    topic = topic_of(look)
    for _ in range(2):
        before = look.count
        async with topic.watched():
            was_fresh = topic.is_fresh
            await topic.polled()
            assert (was_fresh, topic.is_fresh) == (False, True)
        after = look.count
        assert after > before
        for _ in range(50):
            await asyncio.sleep(0)
        assert look.count == after


async def test_a_browser_that_comes_as_the_last_one_goes_is_polled_for() -> None:
    """The poll that is ending is not taken for its own."""
    topic = topic_of(Counted())
    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(topic.watched())
    await topic.polled()
    leaving = asyncio.create_task(stack.aclose())
    await asyncio.sleep(0)
    async with topic.watched():
        assert await topic.polled()
    await leaving


async def test_a_page_without_answers_keeps_its_contents() -> None:
    """It says since when; a refusal is no outage, and an answer ends both."""
    frame = Frame(texts={"a": "1"}, lists={"b": [("k", "2")]})
    look = Counted(frame, Unavailable("none"), Unavailable("none"), ConfigError("no"), frame)
    topic = topic_of(look)
    links: list[Link] = []
    for _ in range(5):
        await topic.poll()
        links.append(topic.link)
        assert b'"k":"2"' in topic.board.since(0)
    assert [link.away_since_s for link in links] == [None, NOW_S, NOW_S, None, None]
    assert [link.refusal for link in links] == ["", "", "", "no", ""]
    assert all(link.answered_at_s == NOW_S for link in links)


async def test_a_poll_that_breaks_lets_its_browsers_go() -> None:
    """They come back by themselves, and then it is tried again."""
    look = Counted(ZeroDivisionError(), Frame())
    topic = topic_of(look)
    async with topic.watched():
        assert not await topic.polled()
        async with topic.watched():
            assert await topic.polled()
