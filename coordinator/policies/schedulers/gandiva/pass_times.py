"""When a policy with turns decides: each slice, or once no job arrived for a while.

The steps of ElasticFlow's artefact (pkusys/ElasticFlow), whose Gandiva shares GPUs out again when a
job arrives, and each slice only while none does. Pure.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

from coordinator.policies.knobs import Period, Seconds

EARLY_S = 1e-6
"""A look is due despite rounding."""


class Pace(Struct, frozen=True, kw_only=True):
    """slice_s: length of a turn; each turn divides the nodes again (section 3.1: a minute).

    quiet_s: decide at the instants of the artefact: when a job comes, and each slice once no job
        came for this long; GPUs that become free stay idle until then. 0: decide at every event.
    """

    slice_s: Period = 60.0
    quiet_s: Seconds = 0.0


class Looked(Struct, frozen=True, kw_only=True):
    """at_s: the instant of the last look. came_at_s: that of the last look that saw a new job."""

    at_s: float = -inf
    came_at_s: float = -inf


class Look:
    """Whether one pass looks. has_new: a job is there that was not at the last look.

    is_one: it does. is_awaited: a new job has to wait for one. after: the memory.
    """

    def __init__(self, pace: Pace, before: Looked, now_s: float, *, has_new: bool) -> None:
        self._pace = pace
        is_due = now_s >= before.at_s + pace.slice_s - EARLY_S
        is_quiet = now_s >= before.came_at_s + pace.quiet_s - EARLY_S
        self.is_one = is_due and (has_new or is_quiet)
        self.is_awaited = has_new and not self.is_one
        self.after = before
        if self.is_one:
            self.after = Looked(at_s=now_s, came_at_s=now_s if has_new else before.came_at_s)

    @property
    def next_s(self) -> float:
        """When the next one is due, if no job arrives."""
        next_s = self.after.at_s + self._pace.slice_s
        if self.is_awaited or not self._pace.quiet_s:
            return next_s
        return max(next_s, self.after.came_at_s + self._pace.quiet_s)
