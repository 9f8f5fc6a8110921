"""Quantiles of a future load: from its day, its week, and its past forecast errors. Pure.

The model is additive and learns as the load is measured: a level per quarter of an hour of the day,
an offset per hour of the week, and the present deviation from both, which decays. Its predictions
for the next quarters are kept and later compared with the load. The errors of each lead time go
into a histogram that forgets, and a quantile is the level plus that quantile of the errors. No
distribution is assumed, and untested lead times have no quantile. All levels are peaks of a
quarter: a lender must carry the peaks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf

from msgspec import Struct, structs

DAY_S = 86_400.0
BIN_S = 900.0
BINS = round(DAY_S / BIN_S)
BINS_PER_HOUR = round(3600.0 / BIN_S)
WEEK_HOURS = 7 * 24

LEADS = (1, 2, 4, 8, 16, 32, 64, 96, 192)
"""Lead times in quarters, from 15 minutes to two days, whose errors are counted."""

OPEN_PER_LEAD = 8
"""Forecasts of one lead time that wait for their time at once, about."""

DAY_WEIGHT = 0.3
"""Weight of the newest day in the level of a quarter; a new quarter takes its first value."""

WEEK_WEIGHT = 0.4
"""Weight of the newest week in the offset of an hour."""

WEEKS_MOST = 4
"""Weeks after which an hour's offset is believed as much as it ever will be."""

FADE_S = 3.0 * 3600.0
"""The present deviation from the level falls to 1/e in this time."""

GAP_BINS = BINS_PER_HOUR
"""Nothing measured for longer: open forecasts are forgotten, since their peak may be missing."""

FORGET = 1.0 / 500.0
"""Weight of the newest error among all; about five days of quarters."""

ERRORS_LEAST = 8
"""Fewer errors than this tell nothing of a lead time."""

CLIP = 0.5
"""A quarter moves its level as if it were off by this part of the highest level at most."""

_STEPS = tuple(0.002 * 1.22**k for k in range(30))
EDGES = (*(-step for step in reversed(_STEPS)), *_STEPS)
"""Bounds of the classes of errors, as fractions of the highest level: +-0.2 % to +-64 %, finer near
zero.
"""


class Test(Struct, frozen=True, array_like=True):
    """The predictions for the quarters from `first` on; compared when these are over.

    said, peak: loads. scale: the highest level at the time of the prediction.
    """

    lead: int
    first: int
    said: float
    scale: float
    peak: float = 0.0


class Season(Struct, frozen=True, kw_only=True):
    """All that is remembered of one load: some 10 kB, however long it is watched.

    day: level by quarter of the day; None where nothing was measured.
    week, weeks: offset by hour of the week, and how often it was seen.
    errors: per lead time the weight of each class of errors, 1 together. counted: how many.
    at_s, load: the last sample; None before the first. peak: highest of its quarter so far.
    """

    day: tuple[float | None, ...] = (None,) * BINS
    week: tuple[float, ...] = (0.0,) * WEEK_HOURS
    weeks: tuple[int, ...] = (0,) * WEEK_HOURS
    errors: tuple[tuple[float, ...], ...] = ((0.0,) * (len(EDGES) + 1),) * len(LEADS)
    counted: tuple[int, ...] = (0,) * len(LEADS)
    tests: tuple[Test, ...] = ()
    at_s: float | None = None
    load: float = 0.0
    peak: float = 0.0

    @property
    def scale(self) -> float:
        """The highest level known; 0 when none is."""
        return max((level for level in self.day if level is not None), default=0.0)

    @property
    def known_s(self) -> float:
        """The longest lead time that was tested, and so the longest horizon that has quantiles."""
        known = [lead for lead, n in zip(LEADS, self.counted, strict=True) if n >= ERRORS_LEAST]
        return known[-1] * BIN_S if known else 0.0

    #   --- predictions ------------------------------------------------------------------------

    def level(self, place: int) -> float | None:
        """Expected peak of a quarter (counted from instant 0); None when it was never measured."""
        level = self.day[place % BINS]
        hour = place // BINS_PER_HOUR % WEEK_HOURS
        weeks = self.weeks[hour]
        if level is None or not weeks:
            return level
        return max(0.0, level + self.week[hour] * weeks / (weeks + 1))

    def seen_ahead(self, place: int) -> float:
        """How many quarters from one on were seen on an earlier day; endless when all were."""
        for ahead in range(BINS):
            if self.day[(place + ahead) % BINS] is None:
                return ahead
        return inf

    def expected(self, *, now_s: float, horizon_s: float) -> float | None:
        """Highest load to expect from now on, never below the last; None when none was measured.

        A quarter of the day that was never seen is expected to be as now.
        """
        return self._expected(now_s, (horizon_s,))[0] if self.at_s is not None else None

    def _expected(self, now_s: float, horizons_s: Sequence[float]) -> list[float]:
        """The same for horizons in order, in one walk."""
        at_s = now_s if self.at_s is None else self.at_s
        here = self.level(int(at_s // BIN_S))
        away = 0.0 if here is None else self.peak - here
        found, highest = list[float](), self.load
        first = place = int(now_s // BIN_S)
        for horizon_s in horizons_s:
            final = min(int((now_s + horizon_s) // BIN_S), first + 7 * BINS)
            while place <= final:
                level = self.level(place)
                if level is not None:
                    ahead_s = max(0.0, place * BIN_S - at_s)
                    highest = max(highest, level + away * exp(-ahead_s / FADE_S))
                place += 1
            found.append(highest)
        return found

    def quantile(self, q: float, *, now_s: float, horizon_s: float) -> float | None:
        """Quantile `q` of the highest load from now until `horizon_s` later, in its own unit.

        Never below the last load; it does not fall when `q` or the horizon grows. None if the
        horizon is longer than the tested ones (`known_s`).
        """
        return self.quantiles(q, now_s=now_s, horizons_s=(horizon_s,))[0]

    def quantiles(
        self, q: float, *, now_s: float, horizons_s: Sequence[float]
    ) -> tuple[float | None, ...]:
        """`quantile` of several horizons, which come in order; cheaper than one by one."""
        if self.at_s is None:
            return (None,) * len(horizons_s)
        known_s, scale = self.known_s, max(self.scale, self.load)
        leads = [lead for lead in LEADS if lead * BIN_S <= known_s]
        errors = list(accumulate((_quantile(each, q) for each in self.errors[: len(leads)]), max))
        levels = self._expected(now_s, horizons_s)
        return tuple(
            max(self.load, level + scale * _between(leads, errors, horizon_s / BIN_S))
            if horizon_s <= known_s
            else None
            for horizon_s, level in zip(horizons_s, levels, strict=True)
        )

    # --- how it learns ----------------------------------------------------------------------

    def after(self, at_s: float, load: float) -> Season:
        """The model after one more sample; one that is not later than the last is ignored."""
        if self.at_s is None:
            return structs.replace(self, at_s=at_s, load=load, peak=load)
        if at_s <= self.at_s:
            return self
        before, place = int(self.at_s // BIN_S), int(at_s // BIN_S)
        if place == before:
            return structs.replace(self, at_s=at_s, load=load, peak=max(self.peak, load))
        known = _asked(_learned(_compared(self, before), before), before)
        if place - before > GAP_BINS:
            known = structs.replace(known, tests=())
        return structs.replace(known, at_s=at_s, load=load, peak=load)


def _learned(known: Season, place: int) -> Season:
    """The quarter is over: its peak moves its level and the offset of its hour."""
    at, hour = place % BINS, place // BINS_PER_HOUR % WEEK_HOURS
    most, old = CLIP * known.scale, known.day[at]
    day, week, weeks = list(known.day), list(known.week), list(known.weeks)
    if old is None:
        day[at] = min(known.peak, known.scale + most) if most else known.peak
        return structs.replace(known, day=tuple(day))
    away = min(most, max(-most, known.peak - old))
    day[at] = max(0.0, old + DAY_WEIGHT * away)
    is_new = weeks[hour] == 0
    week[hour] += (away - week[hour]) * (1.0 if is_new else WEEK_WEIGHT / BINS_PER_HOUR)
    if is_new or (place + 1) % BINS_PER_HOUR == 0:
        weeks[hour] = min(WEEKS_MOST, weeks[hour] + 1)
    return structs.replace(known, day=tuple(day), week=tuple(week), weeks=tuple(weeks))


def _compared(known: Season, place: int) -> Season:
    """Forecasts whose last quarter is over are held against the peak that came."""
    kept: list[Test] = []
    errors, counted = list(known.errors), list(known.counted)
    for old in known.tests:
        test = structs.replace(old, peak=max(old.peak, known.peak))
        if place < test.first + LEADS[test.lead] - 1:
            kept.append(test)
        elif test.scale > 0:
            where = bisect_left(EDGES, (test.peak - test.said) / test.scale)
            counted[test.lead] += 1
            errors[test.lead] = _counted(errors[test.lead], where, counted[test.lead])
    return structs.replace(known, tests=tuple(kept), errors=tuple(errors), counted=tuple(counted))


def _counted(weights: Sequence[float], where: int, count: int) -> tuple[float, ...]:
    """One more error in a class: the first ones count alike, later the old ones fade."""
    newest = max(FORGET, 1.0 / count)
    kept = [weight * (1.0 - newest) for weight in weights]
    kept[where] += newest
    return tuple(kept)


def _asked(known: Season, place: int) -> Season:
    """After a quarter, record the next predictions, to be tested; long lead times less often.

    Only for quarters that were seen before: errors on others are no measure of the model.
    """
    ahead = known.seen_ahead(place + 1)
    asked: list[Test] = []
    scale = max(known.scale, known.peak)
    for lead, bins in enumerate(LEADS):
        if bins <= ahead and place % max(1, bins // OPEN_PER_LEAD) == 0:
            said = known.expected(now_s=(place + 1) * BIN_S, horizon_s=(bins - 0.5) * BIN_S)
            if said is not None:
                asked.append(Test(lead, place + 1, said, scale))
    return structs.replace(known, tests=(*known.tests, *asked))


def _between(leads: Sequence[int], errors: Sequence[float], bins: float) -> float:
    """The error at a number of quarters, linear between lead times; as the first one before it."""
    after = bisect_left(leads, bins)
    if after == 0:
        return errors[0]
    share = (bins - leads[after - 1]) / (leads[after] - leads[after - 1])
    return errors[after - 1] + share * (errors[after] - errors[after - 1])


def _quantile(weights: Sequence[float], q: float) -> float:
    """Quantile of the errors in classes, linear within a class; beyond the last edge that edge."""
    total, below = q * sum(weights), 0.0
    for index, weight in enumerate(weights):
        if weight > 0.0 and below + weight >= total:
            low = EDGES[index - 1] if index else EDGES[0]
            high = EDGES[index] if index < len(EDGES) else EDGES[-1]
            return low + (high - low) * max(0.0, total - below) / weight
        below += weight
    return EDGES[-1]
