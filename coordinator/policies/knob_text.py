"""Knobs as text: allowed values and meaning of each, as `NAME:KNOB=VALUE` takes them. Pure."""

from __future__ import annotations

from functools import cache
from inspect import cleandoc
from math import inf
from re import escape, split
from typing import Any

from msgspec import Struct, inspect, structs

from coordinator.policies.knobs import Known, known, value_text
from coordinator.policies.knobs import values as values_of
from coordinator.policies.policy import Policy


class Knob(Struct, frozen=True, kw_only=True):
    """One knob of a policy. values: its allowed values. default: its unchanged value.

    says: its description in the source; empty: none.
    """

    name: str
    values: str
    default: str
    says: str = ""


def knobs(made: Policy) -> tuple[Knob, ...]:
    """The knobs that a policy has, in the order of its source."""
    own = values_of(made.knobs)
    return tuple(
        _text(name, each, own[name])
        for name, each in known(type(made.knobs)).items()
        if name in own
    )


def every(kind: type[Struct]) -> tuple[tuple[Knob, str], ...]:
    """All knobs of a type of policy, also of parts that one may be without, with their defaults,
    and the knob that turns that part on; empty: every policy has it."""
    return tuple(
        (_text(name, each, each.default), each.needs) for name, each in known(kind).items()
    )


def _text(name: str, of: Known, value: object) -> Knob:
    says = _notes(of.owner).get(of.field, "")
    kind = inspect.type_info(of.kind)
    return Knob(name=name, values=values(kind), default=value_text(value), says=says)


@cache
def _notes(owner: type[Struct]) -> dict[str, str]:
    """The descriptions of fields in docstrings, those of base types first."""
    names = [each.name for each in structs.fields(owner)]
    found: dict[str, str] = {}
    for kind in reversed(owner.__mro__):
        if issubclass(kind, Struct):
            found |= _notes_in(cleandoc(kind.__doc__ or ""), names)
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
