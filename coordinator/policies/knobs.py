"""The types of knobs, and the knobs that have an effect only together with others.

Each policy lists these dependencies in one table next to its knobs. A person who turns a knob
without effect gets a message with the knob that it needs. A comparison turns each knob together
with the knobs that it needs.

Several policies share the types here: lengths and ratios with bounds. No knob is ever infinite or
NaN, whatever its type allows; see `policy.turned`. "Never" is `null`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, cast

from msgspec import Meta, Struct, structs

MAX_S = 1e9
"""Thirty years: longer than any job or cell, and exact to the microsecond as a float."""

MIN_PERIOD_S = 1e-3
"""As `--pass-period` has it: what comes again more often than that is nothing but passes."""

Period = Annotated[float, Meta(ge=MIN_PERIOD_S, le=MAX_S)]
"""Seconds after which something comes again, or ends."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_S)]
"""A length that may be none."""

Part = Annotated[float, Meta(gt=0, le=1)]
"""A part that is not nothing."""


class Off(Struct, frozen=True):
    """A knob, and the values at which it leaves another one nothing to decide.

    if_filled: a list that does so as soon as it holds anything, whatever `values` are.
    """

    knob: str
    values: tuple[object, ...] = ()
    if_filled: bool = False

    def is_at(self, value: object) -> bool:
        """Whether it is off at a value."""
        return bool(value) if self.if_filled else value in self.values


Needs = Mapping[str, tuple[tuple[Off, ...], ...]]
"""By knob: of each of these groups it needs one that is not off."""


def off(knob: str, *values: object) -> Off:
    """A knob that is off at any of these values."""
    return Off(knob, values)


def if_filled(knob: str) -> Off:
    """A list that is off unless it is empty."""
    return Off(knob, if_filled=True)


def needed(needs: Needs, key: str) -> frozenset[str]:
    """The knobs on which it depends whether this one decides anything."""
    return frozenset(each.knob for group in needs.get(key, ()) for each in group)


def unmet(needs: Needs, knobs: Struct, key: str) -> str:
    """The requirement that a knob lacks, whatever its own value is; empty: it has an effect."""
    for group in needs.get(key, ()):
        if all(each.is_at(getattr(knobs, each.knob)) for each in group):
            return f"it needs {', or '.join(_lacking(knobs, each) for each in group)}"
    return ""


def _lacking(knobs: Struct, lacks: Off) -> str:
    key, value = lacks.knob, getattr(knobs, lacks.knob)
    if lacks.if_filled:
        return f"an empty {key}, which is {value_text(value)}"
    if isinstance(value, str):  # a choice is never off: another one is wanted
        return f"another {key} than {value_text(value)}"
    return f"{key}, which is {value_text(value) or 'empty'}"


def is_unturned(knobs: Struct, key: str, *, shipped: Struct | None = None) -> bool:
    """True if a knob has its default, unless a policy or a user changed it.

    shipped: the knobs of a policy as it defines them: its own values count as unchanged too.
    """
    (unturned,) = (field.default for field in structs.fields(knobs) if field.name == key)
    own = unturned if shipped is None else getattr(shipped, key)
    return getattr(knobs, key) in (unturned, own)


def value_text(value: object) -> str:
    """A knob's value, as a name turns it."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return str(value)
        case None:
            return "null"
        case tuple():
            return "/".join(value_text(item) for item in cast("tuple[object, ...]", value))
        case float():
            return f"{value:g}"
        case _:
            return str(value)
