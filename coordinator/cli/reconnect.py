"""Reconnect: warn once when the coordinator is away, and ask again until it answers."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from common.errors import Unavailable
from coordinator.cli.session import say

T = TypeVar("T")


class Patience:
    """Lets a watch survive a coordinator outage: warn once, keep retrying.

    Args:
        whom: the thing awaited, as text.
        is_first_awaited: also wait before its first answer; else a cell that is not there is an
            error at once.
    """

    def __init__(self, *, whom: str = "the coordinator", is_first_awaited: bool = False) -> None:
        self._whom = whom
        self._may_wait = is_first_awaited
        self._is_away = False

    async def answer(self, asked: Awaitable[T]) -> T | None:
        """The answer; None while there is none.

        Raises:
            Unavailable: there was no answer yet.
        """
        try:
            found = await asked
        except Unavailable as error:
            if not self._may_wait:
                raise
            if not self._is_away:
                say(f"waiting for {self._whom} ({error})")
            self._is_away = True
            return None
        self._may_wait, self._is_away = True, False
        return found
