"""Somebody listens: from when to when nodes could be heard, and that a standby does its part.

Must not know who leads, nor what is heard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.clock import Clock
from coordinator.service.nodes.report_folding import Folder

log = logging.getLogger(__name__)


class Listening:
    """Looks at the clock for as long as a coordinator lives, whoever leads.

    Args:
        folder: told that somebody listens.
        period_s: time between two looks.
        looked: called after each look of `run`: the event loop turns.
    """

    def __init__(
        self, folder: Folder, *, clock: Clock, period_s: float, looked: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._period_s = period_s
        self._looked = looked

    async def run(self) -> None:
        """Know of all time whether nodes could be heard in it, also while somebody else leads."""
        while True:
            self.look()
            self._looked()
            await self._clock.sleep(self._period_s)

    def look(self) -> None:
        """Call it before silence is judged: this process may just have been asleep itself."""
        missed_s = self._folder.listened(now_s=self._clock.now_s(), period_s=self._period_s)
        if missed_s:
            log.warning("coordinator was paused for %.1f s; not counted as node silence", missed_s)
