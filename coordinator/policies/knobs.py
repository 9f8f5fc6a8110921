"""Knobs: their types, and the groups of them that only some policies have.

A policy is written with groups: the rules of a part stand together, and a policy without the part
has none. People write flat names: `aryl:is_scaling=true:resize_cost_s=0`. The functions here turn
one into the other.

Several policies share the types here: lengths and ratios with bounds. No knob is ever infinite or
NaN, whatever its type allows; see `policy.turned`. "Never" is `null`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args, get_origin

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

S = TypeVar("S", bound=Struct)

Idle = Mapping[str, tuple[str, ...]]
"""Each knob that decides nothing, and the knobs of which it needs one at another value."""


class KnobSet(Struct, frozen=True, kw_only=True):
    """The knobs of a policy. A plain struct will do where each knob always decides something."""

    def idle(self) -> Idle:
        """Its knobs that decide nothing beside its others."""
        return {}


class Group(KnobSet, frozen=True, kw_only=True):
    """The knobs of a part that a policy may be without.

    The field that holds a group is `GROUP | None`. Its encoded name is the knob that turns the part
    on: a knob of the group itself, or else a switch, true or false.
    """

    OFF: ClassVar[object] = False
    """The value of that knob in a policy without the part."""


class Known(Struct, frozen=True, kw_only=True):
    """A knob of a type of policy.

    kind: the type of its values.
    needs: the knob that turns its group on; empty: the policy always has it.
    owner, field: where the source has it.
    """

    kind: Any
    default: object
    needs: str
    owner: type[Struct]
    field: str


Fields = tuple[tuple[structs.FieldInfo, type[Group] | None], ...]


@cache
def _fields(of: type[Struct]) -> Fields:
    """The fields of a type, with the group that each may hold; functions are no knobs."""
    return tuple(
        (each, next(filter(_is_group, get_args(each.type)), None))
        for each in structs.fields(of)
        if get_origin(each.type) is not Callable
    )


def _is_group(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Group)


@cache
def known(of: type[Struct]) -> Mapping[str, Known]:
    """The knobs of a type of policy by name, with those of all groups."""
    found: dict[str, Known] = {}
    for each, group in _fields(of):
        name = each.encode_name
        if group is None:
            kind, default = each.type, each.default
            found[name] = Known(kind=kind, default=default, needs="", owner=of, field=each.name)
            continue
        found[name] = Known(kind=bool, default=group.OFF, needs="", owner=of, field=each.name)
        for key, knob in known(group).items():
            found[key] = structs.replace(knob, needs=knob.needs or name)
        if name in known(group):
            kind = found[name].kind | None if group.OFF is None else found[name].kind
            found[name] = structs.replace(found[name], kind=kind, default=group.OFF, needs="")
    return found


def values(knobs: Struct) -> dict[str, object]:
    """The knobs that a policy has, by name: none of groups that it is without."""
    found: dict[str, object] = {}
    for each, group in _fields(type(knobs)):
        value = getattr(knobs, each.name)
        if group is None:
            found[each.encode_name] = value
        elif value is None:
            found[each.encode_name] = group.OFF
        else:
            found |= {each.encode_name: True, **values(value)}
    return found


def replaced(knobs: S, changes: Mapping[str, object]) -> S:
    """The same with other values by name. Those of a group that is off then are dropped."""
    return structs.replace(knobs, **_changed(type(knobs), changes, knobs))


def _changed(
    of: type[Struct], changes: Mapping[str, object], before: Struct | None
) -> dict[str, object]:
    """The fields of a type that change; `before`: what has its values, unless it was off."""
    found: dict[str, object] = {}
    for each, group in _fields(of):
        name, now = each.encode_name, None if before is None else getattr(before, each.name)
        if group is None:
            found |= {each.name: changes[name]} if name in changes else {}
        elif changes.get(name, group.OFF if now is None else True) == group.OFF:
            found[each.name] = None
        else:
            inside = _changed(group, changes, now)
            found[each.name] = group(**inside) if now is None else structs.replace(now, **inside)
    return found


def idle(knobs: Struct) -> Idle:
    """As `KnobSet.idle`, also for the groups that a policy has, and for all knobs of the others."""
    found = dict(knobs.idle()) if isinstance(knobs, KnobSet) else {}
    for each, group in _fields(type(knobs)):
        name, part = each.encode_name, getattr(knobs, each.name)
        if part is not None and group is not None:
            found |= idle(part)
        elif group is not None:
            found |= dict.fromkeys(known(group).keys() - {name}, (name,))
    return found


def why_idle(knobs: Struct, key: str) -> str:
    """What a knob lacks to decide anything, whatever its own value is; empty: nothing."""
    now = values(knobs)
    others = [_other(name, now[name]) for name in idle(knobs).get(key, ())]
    return f"it needs {', or '.join(others)}" if others else ""


def _other(key: str, value: object) -> str:
    text = value_text(value)
    match value:
        case str():  # a choice is never off: another one is wanted
            return f"another {key} than {text}"
        case tuple() if value:
            return f"an empty {key}, which is {text}"
        case _:
            return f"{key}, which is {text or 'empty'}"


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
