"""Knobs as text: allowed values and meaning of each, as `NAME:KNOB=VALUE` takes them. Pure."""

from __future__ import annotations

from inspect import cleandoc
from math import inf
from re import escape, split
from typing import Any

from msgspec import Struct, inspect

from coordinator.policies.knobs import value_text
from coordinator.policies.policy import Policy, knobs_of


class Knob(Struct, frozen=True, kw_only=True):
    """One knob of a policy. values: its allowed values. default: its unchanged value.

    says: its description in the source; empty: none.
    """

    name: str
    values: str
    default: str
    says: str = ""


def knobs(made: Policy) -> tuple[Knob, ...]:
    """All knobs of a policy, in the order of its source."""
    known = knobs_of(made)
    notes = _notes(made.knobs, [*known, "order"])
    return tuple(
        Knob(
            name=name,
            values=values(inspect.type_info(kind)),
            default=value_text(getattr(made.knobs, name)),
            says=notes.get(name, ""),
        )
        for name, kind in known.items()
    )


def _notes(held: Struct, known: list[str]) -> dict[str, str]:
    """The descriptions of knobs in docstrings, those of base types first."""
    found: dict[str, str] = {}
    for kind in reversed(type(held).__mro__):
        if issubclass(kind, Struct):
            found |= _notes_in(cleandoc(kind.__doc__ or ""), known)
    return found


def _notes_in(text: str, known: list[str]) -> dict[str, str]:
    """A docstring's `name: text` and `name, name: text`, several of which may share a line."""
    names = "|".join(escape(name) for name in known)
    parts = split(rf"\b((?:{names})(?:,\s+(?:{names}))*): ", text)
    return {
        name.strip(): " ".join(text.split()).rstrip(".")
        for group, text in zip(parts[1::2], parts[2::2], strict=True)
        for name in group.split(",")
    }


def values(kind: inspect.Type) -> str:
    """The values that a type allows, as a person writes them."""
    match kind:
        case inspect.BoolType():
            return "true, false"
        case inspect.EnumType():
            members: Any = kind.cls
            return ", ".join(str(member.value) for member in members)
        case inspect.IntType() | inspect.FloatType():
            what = "whole number" if isinstance(kind, inspect.IntType) else "number"
            return f"{what}{_limits(kind)}"
        case inspect.VarTupleType():
            return f"{values(kind.item_type)}; several with / between"
        case inspect.NoneType():
            return "null"
        case inspect.UnionType():
            return ", ".join(values(each) for each in kind.types)
        case _:
            return "text"


def _limits(kind: inspect.IntType | inspect.FloatType) -> str:
    signs = {">": kind.gt, ">=": kind.ge, "<": kind.lt, "<=": kind.le}
    limits = [f"{sign} {at:g}" for sign, at in signs.items() if at is not None and at != inf]
    return " " + " and ".join(limits) if limits else ""
