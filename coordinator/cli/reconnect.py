"""Reconnect: warn once when the coordinator is away, and ask again until it answers."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from common.errors import Unavailable
from coordinator.cli.session import say

T = TypeVar("T")


class Patience:
    """What somebody who watches needs, as what is watched goes on without a coordinator.

    Args:
        whom: what is waited for, in words.
        is_first_awaited: also before it has answered for the first time; else a cell that is not
            there is an error at once.
    """

    def __init__(self, *, whom: str = "the coordinator", is_first_awaited: bool = False) -> None:
        self._whom = whom
        self._may_wait = is_first_awaited
        self._is_away = False

    async def answer(self, asked: Awaitable[T]) -> T | None:
        """The answer; None while nobody gives one.

        Raises:
            Unavailable: nobody gave any answer yet.
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
