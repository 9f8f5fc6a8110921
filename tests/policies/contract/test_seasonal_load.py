"""The seasonal forecast: what it knows, what it does not claim to know, and what cannot fool it."""

from __future__ import annotations

from collections.abc import Iterable
from math import pi, sin
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.contract.seasonal_load import (
    BIN_S,
    CLIP,
    DAY_S,
    DAY_WEIGHT,
    LEADS,
    Season,
)

STEP_S = 300.0


def day_curve(at_s: float) -> float:
    """A load with one peak a day, from 20 to 100."""
    return 60.0 - 40.0 * sin(2.0 * pi * at_s / DAY_S)


def watched(loads: Iterable[tuple[float, float]]) -> Season:
    """What is known after samples of (seconds, load)."""
    season = Season()
    for at_s, load in loads:
        season = season.after(at_s, load)
    return season


def days(count: float, *, noise: float = 0.0, seed: int = 1) -> list[tuple[float, float]]:
    """Days of the curve; a level of noise per day and some per sample."""
    chance = Random(seed)
    of_day = [noise * chance.gauss(0.0, 1.0) for _ in range(int(count) + 1)]
    return [
        (at_s, day_curve(at_s) + of_day[int(at_s // DAY_S)] + 0.3 * noise * chance.gauss(0.0, 1.0))
        for at_s in (step * STEP_S for step in range(int(count * DAY_S / STEP_S)))
    ]


def test_nothing_is_made_of_nothing() -> None:
    """Without a sample, and of a day that was never seen, there is no quantile and no horizon."""
    assert Season().quantile(0.9, now_s=0.0, horizon_s=600.0) is None
    assert Season().expected(now_s=0.0, horizon_s=600.0) is None
    first_day = watched(days(0.9))
    assert first_day.quantile(0.9, now_s=0.9 * DAY_S, horizon_s=600.0) is None
    assert first_day.known_s == 0.0


def test_lead_times_become_known_one_after_the_other() -> None:
    """Short horizons have quantiles a few hours after the first day, long ones days later."""
    known = [watched(days(count)).known_s for count in (1.0, 1.3, 2.5, 5.0)]
    assert known == sorted(known)
    assert known[0] == 0.0
    assert 0.0 < known[1] < DAY_S
    assert known[3] >= 2 * DAY_S


def test_a_repeated_day_is_foreseen() -> None:
    """The peak of hours ahead is told before it comes, where last value and slope see nothing."""
    season = watched(days(6.0))
    for hour, horizon_h in ((0, 6), (6, 12), (12, 8), (20, 24)):
        now_s = 6.0 * DAY_S + hour * 3600.0
        seen = season
        for step in range(hour * 12 + 1):
            at_s = 6.0 * DAY_S + step * STEP_S
            seen = seen.after(at_s, day_curve(at_s))
        horizon_s = horizon_h * 3600.0
        comes = max(day_curve(now_s + step * 60.0) for step in range(horizon_h * 60 + 1))
        told = seen.quantile(0.9, now_s=now_s, horizon_s=horizon_s)
        assert told is not None
        assert abs(told - comes) < 4.0


def test_quantiles_are_met_as_often_as_they_say() -> None:
    """Over days that differ by chance, the 90 % quantile of the next 4 hours holds about 90 %."""
    loads = days(20.0, noise=3.0)
    season, met, asked = Season(), 0, 0
    for place, (at_s, load) in enumerate(loads[:-48]):
        season = season.after(at_s, load)
        if at_s > 5 * DAY_S and place % 12 == 0:
            told = season.quantile(0.9, now_s=at_s, horizon_s=4 * 3600.0)
            assert told is not None
            met += max(load for _, load in loads[place : place + 49]) <= told
            asked += 1
    assert 0.8 < met / asked < 0.98


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gap_days=st.floats(0.0, 3.0),
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 1.0),
    near_s=st.floats(0.0, 3 * DAY_S),
    far_s=st.floats(0.0, 3 * DAY_S),
)
def test_a_quantile_grows_with_risk_and_horizon(
    seed: int, gap_days: float, low: float, high: float, near_s: float, far_s: float
) -> None:
    """A higher quantile or a longer look is never told lower, and none below the last load."""
    chance = Random(seed)
    loads = [
        (at_s if at_s < 2 * DAY_S else at_s + gap_days * DAY_S, load * chance.choice((1, 1, 1, 5)))
        for at_s, load in days(4.0, noise=10.0, seed=seed)[::3]
    ]
    season, now_s = watched(loads), loads[-1][0]
    (low, high), (near_s, far_s) = sorted((low, high)), sorted((near_s, far_s))
    less = season.quantile(low, now_s=now_s, horizon_s=near_s)
    more = season.quantile(high, now_s=now_s, horizon_s=near_s)
    longer = season.quantile(low, now_s=now_s, horizon_s=far_s)
    if less is not None:
        assert more is not None
        assert loads[-1][1] <= less <= more + 1e-9
    if longer is not None:
        assert less is not None
        assert less <= longer + 1e-9


def test_a_longer_look_is_never_told_lower() -> None:
    """Even if short lead times were off by more than long ones, as they may be by chance."""
    season = watched(days(6.0, noise=3.0))
    odd = replace(season, errors=tuple(reversed(season.errors)))
    spans_s = [lead * BIN_S for lead in LEADS]
    told = odd.quantiles(0.95, now_s=6.0 * DAY_S, horizons_s=spans_s)
    known = [quantile for quantile in told if quantile is not None]
    assert len(known) == len(spans_s)
    assert known == sorted(known)
    assert known == [odd.quantile(0.95, now_s=6.0 * DAY_S, horizon_s=span_s) for span_s in spans_s]


def test_a_wild_sample_moves_its_quarter_a_little_and_no_other() -> None:
    """One sample of a hundred times the load changes one level, by a bounded part of the peak."""
    loads = days(5.0)
    wild_at = 4 * 288 + 100
    wild = [*loads]
    wild[wild_at] = (loads[wild_at][0], 100.0 * loads[wild_at][1])
    calm, shaken = watched(loads), watched(wild)
    differs = [
        abs(a - b) for a, b in zip(calm.day, shaken.day, strict=True) if a is not None and b != a
        if b is not None
    ]  # fmt: skip
    assert len(differs) == 1
    assert differs[0] <= DAY_WEIGHT * CLIP * calm.scale + 1e-9


def test_a_gap_is_no_peak() -> None:
    """Forecasts that were open when measuring stopped are not held against what was not seen."""
    season = watched(days(3.0))
    counted = season.counted
    after_gap = season.after(3.5 * DAY_S, 1.0)
    assert sum(after_gap.counted) - sum(counted) <= len(counted)
    assert after_gap.tests == ()


def test_samples_from_the_past_are_left_out() -> None:
    """A sample that is not later than the last changes nothing."""
    season = watched(days(1.0))
    assert season.at_s is not None
    assert season.after(season.at_s, 9e9) == season
    assert season.after(season.at_s - BIN_S, 9e9) == season


def test_a_weekend_is_learned_apart() -> None:
    """Where two days of seven are lower, their level falls below that of the other days."""
    loads = [
        (at_s, load * (0.5 if int(at_s // DAY_S) % 7 >= 5 else 1.0)) for at_s, load in days(28.0)
    ]
    season = watched(loads)
    noon = int(12 * 3600 / BIN_S)
    quarters = int(DAY_S / BIN_S)
    workday, weekend = season.level(28 * quarters + noon), season.level(33 * quarters + noon)
    assert workday is not None
    assert weekend is not None
    assert weekend < 0.8 * workday


def test_what_is_remembered_is_bounded_and_survives_a_restart() -> None:
    """After weeks it is no larger than after days, and comes back equal from its bytes."""
    few, many = watched(days(7.0, noise=2.0)), watched(days(28.0, noise=2.0))
    assert len(msgspec.msgpack.encode(many)) < 1.1 * len(msgspec.msgpack.encode(few)) < 15_000
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(many), type=Season) == many


def test_old_errors_fade_over_five_hundred() -> None:
    """The first errors count alike; with five hundred seen, each new one is a five-hundredth."""
    season = Season()
    for at_s, load in days(8.0, noise=3.0):
        before, season = season, season.after(at_s, load)
        if season.counted[0] == before.counted[0] + 1:
            old, new = before.errors[0], season.errors[0]
            newest = max(1.0 / 500.0, 1.0 / season.counted[0])
            kept = [a * (1.0 - newest) for a in old]
            [gained] = [b - a for a, b in zip(kept, new, strict=True) if abs(b - a) > 1e-9]
            assert abs(gained - newest) < 1e-9
    assert season.counted[0] > 550


def quarter_after_two_even_days(load: float) -> float:
    """Level of the first quarter of the day after two days of 100 and a third that begins so."""
    even = [(step * STEP_S, 100.0) for step in range(round(2 * DAY_S / STEP_S))]
    begun = [(2 * DAY_S, load), (2 * DAY_S + BIN_S, 100.0)]
    level = watched([*even, *begun]).day[0]
    assert level is not None
    return level


def test_a_new_day_has_three_tenths_of_the_say() -> None:
    """A quarter that was at 100 and is at 120 is expected at 106."""
    assert abs(quarter_after_two_even_days(120.0) - 106.0) < 1e-9


def test_one_wild_quarter_moves_its_level_no_more_than_half_of_the_peak_would() -> None:
    """At ten times the peak it is taken for 150, up, and at nothing for 50, down."""
    assert abs(quarter_after_two_even_days(1000.0) - 115.0) < 1e-9
    assert abs(quarter_after_two_even_days(0.0) - 85.0) < 1e-9
