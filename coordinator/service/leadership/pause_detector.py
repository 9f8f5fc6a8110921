"""Detects pauses of the coordinator: the times in which it could receive reports from nodes.

Each look also shows that the event loop turns, which is a standby's part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.clock import Clock
from coordinator.service.nodes.report_folding import Folder

log = logging.getLogger(__name__)


class Listening:
    """Watches the clock for as long as a coordinator lives, whichever coordinator leads.

    Args:
        folder: gets each time span in which reports could arrive.
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
        """Track when reports could arrive, also while another coordinator leads."""
        while True:
            self.look()
            self._looked()
            await self._clock.sleep(self._period_s)

    def look(self) -> None:
        """Look at the clock now.

        Call it before silence is judged: this process may have been asleep.
        """
        missed_s = self._folder.listened(now_s=self._clock.now_s(), period_s=self._period_s)
        if missed_s:
            log.warning("coordinator was paused for %.1f s; not counted as node silence", missed_s)
