"""Schedules of faults."""

from __future__ import annotations

from tests.live.faults import DEFAULT_KINDS, RULES, FaultKind, draw


def test_a_seed_gives_one_schedule() -> None:
    """The same seed draws the same faults, another one others."""
    first = draw(1, duration_s=600, mean_pause_s=2)
    assert first == draw(1, duration_s=600, mean_pause_s=2)
    assert first != draw(2, duration_s=600, mean_pause_s=2)


def test_a_schedule_has_every_kind_and_keeps_its_times() -> None:
    """Each kind comes once before any comes again; each lasts as long as its rule says."""
    planned = draw(3, duration_s=3600, mean_pause_s=2.5)
    assert len(planned) >= 1000
    assert {each.kind for each in planned[: len(DEFAULT_KINDS)]} == set(DEFAULT_KINDS)
    assert list(planned) == sorted(planned, key=lambda each: each.at_s)
    for each in planned:
        shortest_s, longest_s = RULES[each.kind].for_s
        assert shortest_s <= each.for_s <= longest_s
        assert each.at_s < 3600


def test_kinds_can_be_chosen() -> None:
    """A schedule has no kind but those that were asked for; every kind has a rule."""
    kinds = (FaultKind.JOURNAL_FLIP, FaultKind.NATS_KILL)
    planned = draw(1, duration_s=100, mean_pause_s=1, kinds=kinds)
    assert {each.kind for each in planned} == set(kinds)
    assert set(RULES) == set(FaultKind)
