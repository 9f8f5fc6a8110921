"""What a job's profile says of its speed, and which profiles are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.jobspec import parse
from common.profile import JobProfile
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
