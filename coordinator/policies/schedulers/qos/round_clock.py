"""The round clock: shares are settled at most once a round, except where a plan says so. Pure.

ElasticFlow's artefact settles every 60 s.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct


class Settled(Struct, frozen=True):
    """at_s: when shares were settled; again at that instant, because jobs stop and start.

    round_at_s: when they may be settled again. due_at_s: when a plan wants it in any case.
    """

    at_s: float = -inf
    round_at_s: float = 0.0
    due_at_s: float = inf

    def rests_until_s(self, now_s: float) -> float | None:
        """When they are settled next; None: now."""
        next_s = min(self.round_at_s, self.due_at_s)
        return next_s if self.at_s < now_s < next_s else None
