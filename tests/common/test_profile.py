"""What a job's profile says of its speed, and which profiles are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.jobspec import parse
from common.profile import NO_PROFILE, JobProfile, packed_speed_ratio
from tests.tables import each_row


def test_without_points_a_job_is_linear() -> None:
    """n workers do n workers' work; none do nothing."""
    profile = JobProfile()
    assert [profile.speed(workers) for workers in (0, 1, 7)] == [0.0, 1.0, 7.0]


def test_between_points_speed_is_on_the_line() -> None:
    """Measured at 2 and 4: 3 is between, 8 is no faster than 4, 1 is half of 2."""
    profile = JobProfile(speedup=((2, 10.0), (4, 16.0)))
    assert [profile.speed(workers) for workers in (1, 2, 3, 4, 8)] == [5.0, 10.0, 13.0, 16.0, 16.0]


@given(
    st.lists(st.floats(0.1, 100.0), min_size=1, max_size=6).map(sorted),
    st.integers(1, 20),
)
def test_more_workers_are_never_slower_where_the_points_say_so(
    rates: list[float], workers: int
) -> None:
    """SpeedIsMonotone: points that grow give a speed that grows."""
    profile = JobProfile(speedup=tuple(enumerate(rates, start=1)))
    assert profile.speed(workers) <= profile.speed(workers + 1) * (1 + 1e-12)


def test_a_gang_is_slower_the_farther_it_is_spread() -> None:
    """One node, one rack, several racks."""
    profile = JobProfile(rack_speed_ratio=0.8, far_speed_ratio=0.5)
    assert profile.locality_ratio(1, 1) == 1.0
    assert profile.locality_ratio(2, 1) == 0.8
    assert profile.locality_ratio(2, 2) == 0.5


@each_row(
    ("profile", "said"),
    [
        ({"speedup": [[2, 1.0], [2, 2.0]]}, "field profile: speedup: worker counts must grow"),
        ({"speedup": [[1, 0.0]]}, "profile.speedup"),
        ({"far_speed_ratio": 0.9, "rack_speed_ratio": 0.5}, "far_speed_ratio is 0.9, expected at"),
        ({"batch_size": 64, "max_batch_size": 32}, "max_batch_size is 32, expected at least"),
        ({"max_batch_size": 0}, "profile.max_batch_size"),
        ({"modell": "x"}, "unknown field profile.modell"),
    ],
)
def test_a_profile_that_no_job_can_have_is_refused(profile: dict[str, object], said: str) -> None:
    """The field is named, and what was expected."""
    job = {"name": "j", "command": ["x"], "workers": {"min": 1, "max": 1}, "profile": profile}
    with pytest.raises(ConfigError, match=said):
        parse(job, source="job.toml")


def test_the_base_gang_sets_the_unit_of_work() -> None:
    """Two workers do two workers' work a second, whatever unit the points are in."""
    profile = JobProfile(speedup=((2, 10.0), (4, 16.0)))
    assert profile.rate(2, base=2) == 2.0
    assert profile.rate(4, base=2) == pytest.approx(3.2)
    assert JobProfile().rate(4, base=2) == 4


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(0, 20),
)
def test_the_best_size_is_the_smallest_of_the_fastest(
    rates: list[int], least: int, more: int
) -> None:
    """Of every third count a speed was measured; no size of a range is faster, no smaller one as
    fast."""
    points = enumerate(map(float, rates), start=1)
    profile = JobProfile(speedup=tuple((3 * count, rate) for count, rate in points))
    best = profile.fastest(least, least + more)
    speeds = {size: profile.speed(size) for size in range(least, least + more + 1)}
    assert best == min(size for size, speed in speeds.items() if speed == max(speeds.values()))


def test_without_points_the_most_workers_are_the_best() -> None:
    """Linear has no end but that of the range."""
    assert JobProfile().fastest(2, 9) == 9


busy_ratios = st.floats(0.01, 1.0)


def busy(ratio: float) -> JobProfile:
    """A job that keeps a GPU so busy alone."""
    return JobProfile(gpu_busy_ratio=ratio)


@each_row(
    ("ratio", "together"),
    [(0.616, 1.46), (0.668, 1.39), (0.762, 1.17), (0.872, 0.84), (0.94, 0.87), (0.989, 0.89)],
)
def test_equal_pairs_make_what_was_measured(ratio: float, together: float) -> None:
    """RHN, SCRNN, MI-LSTM, LSTM, ResNet-50 and ResNeXt-50 (OSDI'18, section 4.2)."""
    assert 2 * packed_speed_ratio(busy(ratio), [busy(ratio)]) == pytest.approx(together)


def test_small_jobs_do_not_meet_and_unknown_ones_are_taken_for_full() -> None:
    """Up to half of a GPU each; whoever says nothing is not promised anything."""
    assert packed_speed_ratio(busy(0.087), [busy(0.141)]) == 1.0
    assert packed_speed_ratio(NO_PROFILE, [NO_PROFILE]) == pytest.approx(0.445)
    assert packed_speed_ratio(NO_PROFILE, []) == 1.0


@given(one=busy_ratios, other=busy_ratios, third=busy_ratios)
def test_company_never_speeds_a_job_up(one: float, other: float, third: float) -> None:
    """A pair is alike in both orders, more company is no better, and nobody stands still."""
    pair = packed_speed_ratio(busy(one), [busy(other)])
    assert pair == packed_speed_ratio(busy(other), [busy(one)])
    assert 0.0 < pair <= 1.0
    assert packed_speed_ratio(busy(one), [busy(one), busy(one)]) < 1.0
    assert packed_speed_ratio(busy(one), [busy(other), busy(third)]) <= 2.0 / 3.0 + 1e-9
