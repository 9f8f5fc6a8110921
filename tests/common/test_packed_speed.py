"""What two jobs make on one GPU, by what Gandiva measured of equal pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.profile import NO_PROFILE, JobProfile, packed_speed_ratio
from tests.tables import each_row

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
