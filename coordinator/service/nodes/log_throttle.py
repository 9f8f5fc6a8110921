"""Combines the same mistake of many senders into one log line per period.

After an upgrade that stopped half-way, hundreds of agents send invalid messages each second: a line
for each of them would fill a disk and hide everything else.
"""

from __future__ import annotations

import logging

from common.clock import Clock
from common.log import REPEAT_PERIOD_S
from coordinator.policies.contract.text import some

log = logging.getLogger(__name__)

NAMED = 3
KEPT = 10_000
"""Senders and reasons of one period; a flood of made-up ones must not fill the memory instead."""
QUIET = 1.5
"""Periods without a new mistake, after which the unreported rest is logged."""


class Complaints:
    """Logs the first mistake at once, and after that a summary each period with counts and reasons.

    Args:
        what: the messages, in the plural, as `bad reports`.
        period_s: between two lines.
    """

    def __init__(self, clock: Clock, what: str, *, period_s: float = REPEAT_PERIOD_S) -> None:
        self._clock = clock
        self._what = what
        self._period_s = period_s
        self._count = 0
        self._told_count = 0
        self._told_at_s = float("-inf")
        self._senders: dict[str, None] = {}
        """Since the last line, in order."""
        self._reasons: dict[str, int] = {}
        self._latest: dict[str, tuple[float, str]] = {}
        """By sender, the oldest first."""

    def note(self, sender: str, why: str, *, said: str = "") -> None:
        """Note one more mistake.

        said: the line for a mistake that stands alone, if not `WHAT of SENDER: WHY`.
        """
        self._count += 1
        self._latest.pop(sender, None)
        self._latest[sender] = (self._clock.now_s(), why)
        if len(self._latest) > KEPT:
            del self._latest[next(iter(self._latest))]
        if sender in self._senders or len(self._senders) < KEPT:
            self._senders[sender] = None
        if why in self._reasons or len(self._reasons) < KEPT:
            self._reasons[why] = self._reasons.get(why, 0) + 1
        if self._clock.now_s() >= self._told_at_s + self._period_s:
            is_alone = self._count - self._told_count == 1
            alone = said or f"{self._what} of {sender}: {why} ({self._count})"
            self._tell(alone if is_alone else "")

    def cured(self, sender: str) -> None:
        """Record a valid message: the sender's earlier mistake is over."""
        self._latest.pop(sender, None)

    def of(self, sender: str) -> str:
        """A sender's last mistake; empty after a valid message, or after a period."""
        at_s, why = self._latest.get(sender, (float("-inf"), ""))
        return why if self._clock.now_s() < at_s + self._period_s else ""

    def look(self) -> None:
        """Log the rest of the mistakes when a period has passed."""
        is_quiet = self._clock.now_s() >= self._told_at_s + QUIET * self._period_s
        if is_quiet and self._count > self._told_count:
            self._tell("")

    def _tell(self, alone: str) -> None:
        now_s = self._clock.now_s()
        log.warning("%s", alone or self._of_many(now_s - self._told_at_s))
        self._told_count, self._told_at_s = self._count, now_s
        self._senders, self._reasons = {}, {}

    def _of_many(self, elapsed_s: float) -> str:
        names = list(self._senders)
        why = max(self._reasons, key=lambda reason: self._reasons[reason])
        others = len(self._reasons) - 1
        also = f", and {others} other reason{'s' if others > 1 else ''}" if others else ""
        times = f"{self._count - self._told_count} in {elapsed_s:.0f} s"
        who = f"{self._what} of {some(names, NAMED)}"
        return f"{who}, {times}: {why}{also} ({self._count})"
