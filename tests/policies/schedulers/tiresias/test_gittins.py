"""Gittins indices: the reference's values, the definition by brute force, and what they order."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.policies.schedulers.tiresias.gittins import gittins_table
from tests.tables import each_row

often = settings(max_examples=300, deadline=None)
few = settings(max_examples=60, deadline=None)
"""Where a formula of one or two numbers is all there is to see."""

histories = st.lists(st.integers(1, 40).map(float), min_size=1, max_size=30).map(tuple)
ages = st.integers(0, 45 * 8).map(lambda eighths: eighths / 8)


def by_definition(services: tuple[float, ...], age: float) -> float:
    """Every look-ahead that ends with a sample, one by one."""
    left = [service - age for service in services if service > age]
    return max(
        (
            sum(each <= ahead for each in left) / sum(min(each, ahead) for each in left)
            for ahead in left
        ),
        default=0.0,
    )


VECTORS = {0: 0.125, 1: 1 / 7, 2: 1 / 6, 3: 1 / 3, 4: 1 / 6, 8: 0.25, 11: 1.0}
"""Service in {4, 8, 12}, each as likely: age and index, from the sup formula."""


@each_row("age", sorted(VECTORS))
def test_the_index_has_the_values_of_the_formula(age: int) -> None:
    """With three equiprobable services the supremum is what one gets by hand."""
    found = gittins_table((12.0, 4.0, 8.0)).index(float(age))
    assert found == pytest.approx(VECTORS[age], rel=1e-12)


@often
@given(services=histories, age=ages)
def test_the_index_is_the_supremum_of_its_definition(
    services: tuple[float, ...], age: float
) -> None:
    """The tangent to the hull finds what trying every look-ahead finds."""
    expected = by_definition(services, age)
    assert gittins_table(services).index(age) == pytest.approx(expected, rel=1e-6)


@few
@given(services=histories)
def test_nothing_is_expected_beyond_all_that_was_seen(services: tuple[float, ...]) -> None:
    """A job older than every sample is last."""
    assert gittins_table(services).index(max(services)) == 0.0
    assert gittins_table(services).static_index(max(services), 10.0) == 0.0


@few
@given(service=st.floats(1.0, 1e6), age=st.floats(0.0, 0.99))
def test_with_one_service_the_index_is_one_over_what_is_left(service: float, age: float) -> None:
    """If all jobs are alike the index is shortest-remaining-first."""
    found = gittins_table((service,)).index(age * service)
    assert found == pytest.approx(1.0 / (service - age * service), rel=1e-6)


def test_the_estimate_of_the_public_simulator_does_not_subtract_the_age() -> None:
    """At age 4 with look-ahead 4: one of two ends, for 8 and 4 instead of 4 and 4 GPU-seconds."""
    table = gittins_table((4.0, 8.0, 12.0))
    assert table.static_index(4.0, 4.0) == pytest.approx(1 / (8.0 + 4.0))
    assert table.index(4.0) == pytest.approx(2 / (4.0 + 8.0))
    assert table.static_index(0.0, 3.0) == 0.0, "nobody ends within the look-ahead"


@few
@given(services=histories, age=ages)
def test_with_no_age_and_no_limit_both_estimates_are_the_mean(
    services: tuple[float, ...], age: float
) -> None:
    """An endless look-ahead of a new job: all end, at the mean; the supremum is no less."""
    table = gittins_table(services)
    mean = len(services) / sum(services)
    assert table.static_index(0.0, 1e9) == pytest.approx(mean, rel=1e-9)
    assert table.index(0.0) >= mean * (1 - 1e-9)
    assert 0.0 <= table.index(age) < inf
