"""Policies of other distributions, by entry point. Must not know what becomes of them.

Looking up installed policies is a driver's job, so that the decision core stays a function of its
input: every process that runs an engine or reads a policy's name calls `load` at its start.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from coordinator.policies import registry
from coordinator.policies.registry import Added, offered

GROUP = "aryl.policies"
"""`[project.entry-points."aryl.policies"]` of a distribution: `NAME = "MODULE:POLICY"`."""


@cache
def load() -> tuple[Added, ...]:
    """Let all installed policies in, once a process; what each distribution offers, by name.

    One that is broken or that clashes carries its problem and stops no other.
    """
    return registry.add(_offer(entry) for entry in entry_points(group=GROUP))


def problems() -> tuple[str, ...]:
    """Of what `load` found, a sentence for each that cannot be used."""
    return tuple(registry.unusable(each) for each in load() if each.problem)


def _offer(entry: EntryPoint) -> Added:
    origin = "a distribution without a name"
    if entry.dist is not None:
        origin = f"{entry.dist.name} {entry.dist.version}"
    try:
        value: object = entry.load()
    except (Exception, SystemExit) as error:  # it is somebody else's code: anything may come
        problem = f"{entry.value} cannot be loaded: {type(error).__name__}: {error}"
        return Added(name=entry.name, origin=origin, problem=problem)
    return offered(entry.name, origin, value)
