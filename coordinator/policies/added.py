"""A policy of another distribution, as a driver found it. Must not know how it is looked for."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from itertools import groupby

from msgspec import Struct

from coordinator.policies.policy import Policy

RESERVED = frozenset({"all"})
"""Names that stand for something else where policies are named."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""What can stand between the commas and colons of `NAME:KNOB=VALUE,NAME`."""


class Added(Struct, frozen=True, kw_only=True):
    """A name that a distribution offers, and the policy behind it.

    origin: the distribution and its version.
    problem: why there is no policy; empty: there is.
    """

    name: str
    origin: str
    made: Policy | None = None
    problem: str = ""


def offered(name: str, origin: str, value: object) -> Added:
    """What an entry point holds, as a policy of its name, or why it is none."""
    problem = ""
    if not _NAME.fullmatch(name):
        problem = "its name has other marks than a-z, 0-9, - and _, which a policy's has not"
    elif name in RESERVED:
        problem = "its name stands for something else"
    elif not isinstance(value, Policy):
        problem = f"it is a {type(value).__name__}, expected a coordinator.policies.policy.Policy"
    elif value.name != name:
        problem = f"its policy calls itself {value.name!r}, expected the entry point's name"
    if problem or not isinstance(value, Policy):
        return Added(name=name, origin=origin, problem=problem)
    return Added(name=name, origin=origin, made=value)


def settled(found: Iterable[Added], taken: Container[str]) -> Iterator[Added]:
    """One of each name, by name.

    A name of the table stays the table's, and what two distributions offer is neither's: whoever
    installed them could not tell which one decides.
    """
    ordered = sorted(found, key=lambda each: (each.name, each.origin))
    for name, group in groupby(ordered, key=lambda each: each.name):
        offers = list(group)
        origin = " and ".join(each.origin for each in offers)
        if name in taken:
            problem = "the built-in policy of this name stays"
            yield Added(name=name, origin=origin, problem=problem)
        elif len(offers) > 1:
            yield Added(name=name, origin=origin, problem="they offer the same name; remove one")
        else:
            yield offers[0]
