"""Knobs in groups, and their flat names: what one says the other does."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import field, structs

from coordinator.policies.knobs import Group, Idle, KnobSet, idle, known, replaced, values, why_idle
from tests.draws import pick, yes_or_no


class Inner(Group, frozen=True, kw_only=True):
    """Turned on by a knob of its own, off at null."""

    OFF: ClassVar[object] = None

    at: float = field(name="inner_at")
    wide: bool = False


class Outer(Group, frozen=True, kw_only=True):
    """Turned on by a switch."""

    cost: float = field(name="outer_cost", default=5.0)
    inner: Inner | None = field(name="inner_at", default=None)


class Ratios(Group, frozen=True, kw_only=True):
    """Turned on by a knob of its own, off at 0."""

    OFF: ClassVar[object] = 0.0

    ratio: float
    most: int = 1

    def idle(self) -> Idle:
        """None for nobody."""
        return {} if self.most else {"ratio": ("most",)}


class Toy(KnobSet, frozen=True, kw_only=True):
    """Groups of each kind."""

    strict: bool = False
    outer: Outer | None = field(name="has_outer", default=None)
    ratios: Ratios | None = field(name="ratio", default=None)


CHOICES = {
    "strict": yes_or_no(),
    "has_outer": yes_or_no(),
    "outer_cost": pick(0.0, 5.0, 7.0),
    "inner_at": pick(None, 0.0, 0.5),
    "wide": yes_or_no(),
    "ratio": pick(0.0, 0.5),
    "most": pick(0, 1, 2),
}
CHANGES = st.fixed_dictionaries({}, optional=CHOICES)
SWITCHES = {"outer_cost": "has_outer", "inner_at": "has_outer", "wide": "inner_at", "most": "ratio"}
OFF = {"has_outer": False, "inner_at": None, "ratio": 0.0}


def test_every_knob_is_known_by_its_flat_name() -> None:
    """With the type that a name may give it, and the knob that turns its part on."""
    found = known(Toy)
    assert found.keys() == CHOICES.keys()
    assert {name: each.needs for name, each in found.items() if each.needs} == SWITCHES
    assert (found["has_outer"].kind, found["ratio"].kind) == (bool, float)
    assert found["inner_at"].kind == float | None
    assert [found[name].default for name in ("has_outer", "ratio", "inner_at")] == [
        False,
        0.0,
        None,
    ]


@given(CHANGES, CHANGES)
def test_a_change_by_name_changes_what_it_names(
    first: dict[str, object], then: dict[str, object]
) -> None:
    """Nothing else that is still there; what is there no more is what cannot decide anything. A
    part that is turned on has its defaults."""
    before = replaced(Toy(), first)
    after = replaced(before, then)
    own, now = values(before), values(after)
    assert now.keys() == {name for name in known(Toy) if _is_on(now, name)}
    for name, value in now.items():
        assert value == then.get(name, own.get(name, known(Toy)[name].default))
    assert known(Toy).keys() - now.keys() <= idle(after).keys()
    assert replaced(after, now) == after


def _is_on(now: dict[str, object], name: str) -> bool:
    switch = SWITCHES.get(name)
    return switch is None or now.get(switch, OFF[switch]) != OFF[switch]


@pytest.mark.parametrize(
    ("changes", "knob", "needs"),
    [
        ({}, "outer_cost", "it needs has_outer, which is false"),
        ({}, "wide", "it needs has_outer, which is false"),
        ({"has_outer": True}, "wide", "it needs inner_at, which is null"),
        ({"has_outer": True, "inner_at": 0.0}, "wide", ""),
        ({}, "most", "it needs ratio, which is 0"),
        ({"ratio": 0.5, "most": 0}, "ratio", "it needs most, which is 0"),
        ({}, "ratio", ""),
        ({}, "has_outer", ""),
    ],
)
def test_a_knob_says_what_it_lacks(changes: dict[str, object], knob: str, needs: str) -> None:
    """The knob that turns on its part, by its present value; or the rule of the part itself."""
    assert why_idle(replaced(Toy(), changes), knob) == needs


def test_a_policy_s_own_values_outlast_other_changes() -> None:
    """A group is replaced field by field, not made again."""
    own = Toy(outer=Outer(cost=9.0, inner=Inner(at=0.5, wide=True)))
    assert replaced(own, {"inner_at": 0.9}) == structs.replace(
        own, outer=Outer(cost=9.0, inner=Inner(at=0.9, wide=True))
    )
    assert replaced(own, {"inner_at": None}) == Toy(outer=Outer(cost=9.0))
