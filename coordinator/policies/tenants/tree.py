"""The tree of a cell's tenants, with tenants that only jobs name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from coordinator.policies.contract.snapshot import TenantView

WHOLE = ""
"""The parent of those that have none: the cell."""

ITSELF = " itself"
"""After the name of a tenant that has children: its own jobs. No tenant's name has a blank."""

NOBODY = "no tenant"
"""The tenant of jobs without a tenant."""


def tree_of(views: Sequence[TenantView], named: Iterable[str]) -> dict[str, TenantView]:
    """Tenants by name, parents before children, with those that only jobs name.

    A tenant without settings stands beside the others, with no guarantee and weight 1. A tenant
    that has children and jobs of its own has those as one child more, with what its children
    leave of its guarantee.
    """
    found = {view.name: view for view in views}
    inner = {view.parent for view in views if view.parent != WHOLE}
    for name in sorted(set(named)):
        if name not in found:
            found[name] = TenantView(name=name)
        if name in inner:
            of_children = sum(view.guarantee_gpus for view in views if view.parent == name)
            rest = max(0, found[name].guarantee_gpus - of_children)
            itself = TenantView(name=name + ITSELF, parent=name, guarantee_gpus=rest)
            found[itself.name] = itself
    depth = {name: len(path_in(found, name)) for name in found}
    return {name: found[name] for name in sorted(found, key=lambda name: (depth[name], name))}


def path_in(views: Mapping[str, TenantView], name: str) -> tuple[str, ...]:
    """A tenant, its parent, and so on."""
    path = [name]
    while views[path[-1]].parent != WHOLE:
        path.append(views[path[-1]].parent)
    return tuple(path)


class Tree(Struct, frozen=True):
    """The part that does not depend on use; tenancies share it, so it must not be changed.

    paths: of each tenant, its own name first. leaves: where the GPUs of its jobs are counted.
    keepers: tenants that do not lend all. below: results of `below_top` so far, by leaves.
    """

    views: dict[str, TenantView]
    children: dict[str, list[str]]
    paths: dict[str, tuple[str, ...]]
    leaves: dict[str, str]
    keepers: list[str]
    below: dict[tuple[str, str], tuple[str, ...]]


@lru_cache(maxsize=64)
def grown(tenants: tuple[TenantView, ...], named: frozenset[str]) -> Tree:
    """The tree of tenants and of those that jobs name; a pass looks at one many times."""
    views = tree_of(tenants, named)
    children: dict[str, list[str]] = {WHOLE: [], **{name: [] for name in views}}
    for name, view in views.items():
        children[view.parent].append(name)
    return Tree(
        views=views,
        children=children,
        paths={name: path_in(views, name) for name in views},
        leaves={name: name + ITSELF if name + ITSELF in views else name for name in views},
        keepers=[name for name, view in views.items() if view.lend_limit_gpus is not None],
        below={},
    )
