"""The measured cost of a job's resizes, in seconds without progress.

A resize restarts every rank of a gang. Its cost is the time in which the job made no progress: from
its last step before the change to its first step after it, plus the steps repeated since the last
save. One sum measures both: the time since the change, less the new steps at the new gang's step
time.

A gang may compute on for a while before it restarts; torchrun's agents poll for new members. A
measurement therefore ends `SETTLING_S` after the change at the earliest, and not before the last
gaps between progress reports show a steady step time.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import NamedTuple

from msgspec import Struct, field

SETTLING_S = 90.0
"""A gang restarts within this time after its last worker came or went."""
MEASURED_WITHIN_S = 300.0
"""A measurement that takes longer is given up: the words are too rare to tell a pause from pace."""
STEADY_GAPS = 3
"""Gaps in a row between progress reports of the new gang whose step times must be alike."""
STEADY_RATIO = 2.0
"""The slowest of them takes at most this many times the step time of the fastest."""
WORDS_KEPT = 64
"""Above it every other word of a measurement is dropped."""
RECENT_PRICES = 5
"""Number of resizes whose median is the cost; one slow disk or node does not change it."""
RECENT_PACES = 8
"""Number of gaps between progress reports whose median is the pace before a change."""


class Word(Struct, frozen=True, array_like=True):
    """A reported step, and when it was done."""

    step: int
    at_s: float


class Price(NamedTuple):
    """One measured resize: seconds without new work, and the GPU-seconds that this took.

    since_gpu_s: what the job had attained when the resize began, in GPU-seconds.
    """

    took_s: float
    gpu_s: float
    since_gpu_s: float = 0.0


class ResizeCosts(Struct, kw_only=True, omit_defaults=True):
    """The measured resizes of one job, and the one being measured.

    recent_s: seconds of the latest resizes, oldest first.
    lost_gpu_s: GPU-seconds of all resizes.
    attempt: of the last report; `paces_s`: seconds per step between reports of its present gang.
    since_s: when the present change began; None: no change is being measured.
    attained_gpu_s: what the job had attained by then.
    from_step: the step that it had reached then, by its pace.
    words: reports of the present gang while a change is being measured, else the last one.
    settled_at_s: the first report of the present gang; None: workers still come or go.
    """

    recent_s: list[float] = field(default_factory=list[float])
    lost_gpu_s: float = 0.0
    attempt: int = 0
    paces_s: list[float] = field(default_factory=list[float])
    since_s: float | None = None
    attained_gpu_s: float = 0.0
    from_step: float = 0.0
    words: list[Word] = field(default_factory=list[Word])
    settled_at_s: float | None = None

    @property
    def cost_s(self) -> float | None:
        """Seconds of running time that a resize of this job costs; None without a measurement."""
        return median(self.recent_s) if self.recent_s else None

    def changes(self, now_s: float, attained_gpu_s: float, *, attempt: int) -> Price | None:
        """The gang of an attempt is about to change.

        A change before the job's first report after the last change is part of that one. Otherwise
        the last one ends here.

        Returns the last one, if it was still being measured and its gang had a steady pace.
        """
        if attempt != self.attempt or not self.words:
            return None
        if self.since_s is not None and self.settled_at_s is None:
            return None
        ended = self._price(now_s, attained_gpu_s)
        self._note(ended)
        last = self.words[-1]
        pace_s = median(self.paces_s) if self.paces_s else None
        ran_s = max(0.0, now_s - last.at_s)
        self.words, self.paces_s, self.settled_at_s = [last], [], None
        self.since_s = now_s if pace_s else last.at_s
        self.from_step = last.step + ran_s / pace_s if pace_s else last.step
        self.attained_gpu_s = attained_gpu_s
        return ended

    def told(
        self,
        step: int,
        at_s: float,
        *,
        attempt: int,
        is_settled: bool,
        now_s: float,
        attained_gpu_s: float,
    ) -> Price | None:
        """The job reported a step that it had done at an instant, by now not later than `now_s`.

        is_settled: no worker of its gang comes or goes. Returns the resize that this measured.
        """
        if attempt != self.attempt:
            self.forget()
            self.attempt = attempt
        last = self.words[-1] if self.words else None
        if last is not None and at_s <= last.at_s:
            return None
        word = Word(step, at_s)
        if self.since_s is None:
            if last is not None and step > last.step:
                self.paces_s.append((at_s - last.at_s) / (step - last.step))
                del self.paces_s[:-RECENT_PACES]
            self.words = [word]
            return None
        if not is_settled or self.settled_at_s is None:
            self.words, self.settled_at_s = [word], at_s if is_settled else None
            return None
        self.words.append(word)
        if len(self.words) > WORDS_KEPT:
            del self.words[1:-1:2]
        passed_s = at_s - self.settled_at_s
        if passed_s < SETTLING_S:
            return None
        if passed_s > MEASURED_WITHIN_S:
            self._end()
            return None
        found = self._price(now_s, attained_gpu_s)
        if found is not None:
            self._note(found)
            self._end()
        return found

    def forget(self) -> None:
        """Drop the measurement under way, because its attempt or its gang was interrupted."""
        self.words, self.paces_s, self.since_s, self.settled_at_s = [], [], None, None

    def _end(self) -> None:
        self.paces_s = self._paces_s(RECENT_PACES)
        self.words, self.since_s, self.settled_at_s = self.words[-1:], None, None

    def _note(self, price: Price | None) -> None:
        if price is not None:
            self.recent_s.append(price.took_s)
            del self.recent_s[:-RECENT_PRICES]
            self.lost_gpu_s += price.gpu_s

    def _paces_s(self, latest: int) -> list[float]:
        """Seconds a step in each of the latest gaps between words, where steps were done."""
        return [
            (after.at_s - before.at_s) / (after.step - before.step)
            for before, after in pairwise(self.words[-1 - latest :])
            if after.step > before.step
        ]

    def _price(self, now_s: float, attained_gpu_s: float) -> Price | None:
        if self.since_s is None or len(self.words) <= STEADY_GAPS:
            return None
        paces_s = self._paces_s(STEADY_GAPS)
        if len(paces_s) < STEADY_GAPS or max(paces_s) > STEADY_RATIO * min(paces_s):
            return None
        last, first = self.words[-1], self.words[-1 - STEADY_GAPS]
        pace_s = (last.at_s - first.at_s) / (last.step - first.step)
        took_s = last.at_s - self.since_s - (last.step - self.from_step) * pace_s
        took_s = max(0.0, took_s)
        gpus = (attained_gpu_s - self.attained_gpu_s) / max(now_s - self.since_s, 1e-9)
        return Price(took_s, max(0.0, gpus) * took_s, self.attained_gpu_s)
