"""Copies the fields that a table entry has in common with its view for policies, or its row for
people.

A copied field is declared in both structs, by one name and one type, and no line copies it. All
other fields of a view are computed by its maker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Any, get_type_hints

from msgspec import Struct


def copier(
    target: type[Struct],
    source: type[Struct],
    *,
    groups: Collection[str] = (),
    computed: Collection[str] = (),
) -> Callable[[Any], dict[str, Any]]:
    """A function from an entry to those fields of `target` that it has.

    Args:
        groups: structs inside an entry whose fields count as its own, by their paths, such as
            `spec.checkpoint`.
        computed: fields of `target` that the entry has by name but that mean something else there.
            Any other field of one name has one type and one place, or the module of the caller
            cannot be imported.

    Raises:
        TypeError: a field has another type in `target`, or two places in the entry.
    """
    paths: dict[str, str] = {}
    wanted = get_type_hints(target)
    for path, kind in _fields(source, groups):
        name = path.rpartition(".")[2]
        if name in computed or name not in wanted:
            continue
        if wanted[name] not in (kind, getattr(kind, "__supertype__", None)):
            raise TypeError(f"{target.__name__}.{name}: {wanted[name]}, {path} is {kind}")
        if name in paths:
            raise TypeError(f"{target.__name__}.{name}: {paths[name]} or {path}?")
        paths[name] = path
    names, values = tuple(paths), _getter(tuple(paths.values()))

    def copied(entry: Any) -> dict[str, Any]:
        return dict(zip(names, values(entry), strict=True))

    return copied


def _getter(paths: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """The values at some paths; an `attrgetter` of one path returns no tuple."""
    if len(paths) > 1:
        return attrgetter(*paths)
    return lambda entry: tuple(attrgetter(path)(entry) for path in paths)


def _fields(source: type[Struct], groups: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Each field of a struct and of its groups: its path and its type."""
    yield from get_type_hints(source).items()
    for group in groups:
        kind: Any = source
        for step in group.split("."):
            kind = get_type_hints(kind)[step]
        for name, of in get_type_hints(kind).items():
            yield f"{group}.{name}", of
