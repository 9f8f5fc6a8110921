"""A job's usual gap between progress reports, and the silence that counts as a stall."""

from __future__ import annotations

from statistics import median

from msgspec import Struct, field

STALL_GAPS = 10.0
"""A stall is silence longer than this many usual gaps."""
STALL_PAUSES = 2.0
"""And longer than this many times the longest pause, for example of a save or an evaluation."""
RECENT_GAPS = 15
"""Number of gaps whose median is the usual one."""


class StepGaps(Struct, kw_only=True, omit_defaults=True):
    """The gaps between the progress reports of one job.

    attempt: of the last report; 0 before the first.
    told_at_s: when that step was done.
    since_s: when the gang became what it is: it started, was resized, or was resumed.
    recent_s: the latest gaps; longest_s: the longest. Gaps in which the gang changed are left out.
    start_up_s: the longest time from the start of an attempt to its first report.
    stalled_since_s: when a STALLED job reported its last step; None: it is not STALLED.
    """

    attempt: int = 0
    told_at_s: float = 0.0
    since_s: float = 0.0
    recent_s: list[float] = field(default_factory=list[float])
    longest_s: float = 0.0
    start_up_s: float = 0.0
    stalled_since_s: float | None = None

    def told(self, at_s: float, *, attempt: int) -> None:
        """A running attempt reported a new step, or a new save, of an instant."""
        if attempt != self.attempt:
            self.attempt = attempt
            self.start_up_s = max(self.start_up_s, at_s - self.since_s)
        elif self.since_s <= self.told_at_s < at_s:
            gap_s = at_s - self.told_at_s
            self.recent_s.append(gap_s)
            del self.recent_s[:-RECENT_GAPS]
            self.longest_s = max(self.longest_s, gap_s)
        self.told_at_s = at_s

    def changed(self, now_s: float) -> None:
        """The gang is another one, or goes on after a pause: silence counts from here."""
        self.since_s = now_s

    @property
    def usual_s(self) -> float | None:
        """The median gap; None before two reports of one attempt."""
        return median(self.recent_s) if self.recent_s else None

    def stall_after_s(
        self, attempt: int, *, floor_s: float, resize_s: float, start_s: float
    ) -> float | None:
        """Seconds of silence after which a job is STALLED; None while no gap is known.

        attempt: the present one.
        floor_s: the least silence that counts.
        resize_s, start_s: the duration of a resize and of a start of this job; the one with which
            the silence began is added.
        """
        usual_s = self.usual_s
        if usual_s is None:
            return None
        found_s = max(floor_s, STALL_GAPS * usual_s, STALL_PAUSES * self.longest_s)
        if attempt != self.attempt:
            return found_s + max(start_s, STALL_PAUSES * self.start_up_s)
        return found_s + resize_s if self.since_s > self.told_at_s else found_s
