"""What a view says of a job whose estimate is used up at this instant, whenever it was made."""

from __future__ import annotations

from msgspec.structs import replace

from coordinator.policies.contract.snapshot import JobView
from tests.builders import NOW_S, make_job_view
from tests.tables import each_row

RATE = 4.0


def view(left_s: float, as_of_s: float, least_work_s: float = 8.0) -> JobView:
    """A running job with so much left by its estimate at an instant."""
    return replace(
        make_job_view("a", workers=(4, 4)),
        as_of_s=as_of_s,
        work_rate=RATE,
        remaining_work_s=max(abs(left_s), least_work_s),
        estimated_left_s=left_s,
        least_work_s=least_work_s,
    )


@each_row("rounding", [-4e-15, 0.0, 4e-15, 1e-9])
def test_views_of_different_instants_agree_where_an_estimate_is_used_up(rounding: float) -> None:
    """An older view comes there by arithmetic and a fresh one exactly: both have outlived it."""
    ran_s = 4.5
    older = view(RATE * ran_s * (1.0 + rounding), NOW_S - ran_s)
    fresh = view(0.0, NOW_S)
    assert older.estimate_left_s(NOW_S) == fresh.estimate_left_s(NOW_S) == 8.0


def test_until_then_it_is_the_estimate_alone() -> None:
    """However little: a millisecond is no rounding, though less than the least that counts."""
    assert view(0.001, NOW_S).estimate_left_s(NOW_S) == 0.001
    assert view(18.0, NOW_S - 4.0).estimate_left_s(NOW_S) == 2.0
