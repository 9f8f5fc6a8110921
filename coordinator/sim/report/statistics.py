"""Means over seeds with 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, cos, pi, sin, sqrt

from msgspec import Struct

CONFIDENCE = 0.95


class Estimate(Struct, frozen=True, kw_only=True):
    """A mean; the true one is within `half_width` of it with 95 % confidence.

    half_width: None for a single value, which shows no variation.
    """

    mean: float
    half_width: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Student's interval: mean and t * s / sqrt(n).

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("no value to average")
    count = len(values)
    if count == 1:
        return Estimate(mean=values[0], half_width=None)
    if min(values) == max(values):
        return Estimate(mean=values[0], half_width=0.0)  # exactly, whatever sums are rounded to
    mean = sum(values) / count
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(mean=mean, half_width=student_t(count - 1) * deviation / sqrt(count))


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t that a Student variable stays within, in absolute value, with that probability."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        high *= 2.0
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom, a finite series.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    theta = atan(t / sqrt(degrees))
    is_odd = degrees % 2 == 1
    if degrees == 1:
        return 2.0 * theta / pi
    term = cos(theta) if is_odd else 1.0
    total = term
    for power in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cos(theta) ** 2 * (power - 1) / power
        total += term
    if is_odd:
        return 2.0 / pi * (theta + sin(theta) * total)
    return sin(theta) * total
