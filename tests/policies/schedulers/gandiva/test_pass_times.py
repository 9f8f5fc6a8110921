"""When a policy that takes turns looks: each slice, at somebody new, or once nobody came."""

from __future__ import annotations

import pytest

from coordinator.policies.schedulers.gandiva.pass_times import Look, Looked, Pace
from tests.tables import each_row

BEFORE = Looked(at_s=100.0, came_at_s=40.0)


def look(now_s: float, *, has_new: bool = False, quiet_s: float = 0.0) -> Look:
    """A pass after a look at 100 s, with slices of 60 s; at 40 s the last one came."""
    return Look(Pace(quiet_s=quiet_s), BEFORE, now_s, has_new=has_new)


def test_the_first_pass_looks() -> None:
    """Nothing was looked at before, whoever is there."""
    first = Look(Pace(), Looked(), 5.0, has_new=True)
    assert first.is_one
    assert first.after == Looked(at_s=5.0, came_at_s=5.0)
    assert first.next_s == 65.0


@pytest.mark.parametrize("has_new", [True, False])
def test_no_look_is_less_than_a_slice_after_another(has_new: bool) -> None:
    """Whoever comes meanwhile waits for the next one, and nothing else is remembered."""
    early, due = look(159.9, has_new=has_new), look(160.0, has_new=has_new)
    assert (early.is_one, early.is_awaited, early.after) == (False, has_new, BEFORE)
    assert (due.is_one, due.is_awaited) == (True, False)
    assert due.after == Looked(at_s=160.0, came_at_s=160.0 if has_new else 40.0)


def test_a_look_is_due_despite_rounding() -> None:
    """A sum of slices is less than it should be by a last digit."""
    assert look(160.0 - 1e-9).is_one


def test_where_only_newcomers_count_it_waits_until_nobody_came_for_long() -> None:
    """Without one the look of 100 s is followed by one at 240 s, 200 s after the last came."""
    assert not look(239.0, quiet_s=200.0).is_one
    assert look(240.0, quiet_s=200.0).is_one
    assert look(160.0, has_new=True, quiet_s=200.0).is_one


@pytest.mark.parametrize(
    ("has_new", "quiet_s", "next_s"),
    [(False, 0.0, 160.0), (False, 200.0, 240.0), (True, 200.0, 160.0)],
)
def test_the_next_look_is_due_when_it_would_be_one(
    has_new: bool, quiet_s: float, next_s: float
) -> None:
    """After a slice, and where only newcomers count after the quiet, unless one waits."""
    assert look(130.0, has_new=has_new, quiet_s=quiet_s).next_s == next_s
    assert look(next_s, has_new=has_new, quiet_s=quiet_s).is_one


@each_row("now_s", [100.5, 101.0, 500.0])
@each_row("quiet_s", [0.0, 30.0, 1000.0])
@each_row("has_new", [True, False])
def test_the_next_look_is_still_to_come(now_s: float, quiet_s: float, has_new: bool) -> None:
    """However late a pass is: what was due by then it is itself."""
    pace = Pace(slice_s=1.0, quiet_s=quiet_s)
    assert Look(pace, BEFORE, now_s, has_new=has_new).next_s > now_s
